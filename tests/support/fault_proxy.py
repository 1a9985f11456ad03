"""A loopback HTTP proxy in front of an S3 server: logs requests and injects faults.

Clients take the proxy for the server. Heads are forwarded unchanged except for ``Expect``, so that signatures
stay valid (they cover the Host header). Supports HTTP/1.1: kept connections, Content-Length and chunked
bodies both ways, answers without a body, 100-continue. Bodies of requests are held in memory until they are
complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self, TypeVar

from dcp.demo.s3_server import S3Server
from tests.support.fault_plan import PASSING, Fault, FaultPlan, Kind, RandomFaults, Request, Rule

__all__ = ["FaultProxy"]

_PIECE_BYTES: Final = 256 << 10
_NO_BODY: Final = (204, 304)
_NO_LINGER: Final = struct.pack("ii", 1, 0)
_STOP_SECONDS: Final = 30.0

_Result = TypeVar("_Result")


class _ClosedError(Exception):
    """The other side closed the connection."""


@dataclass
class _Head:
    """First line and headers of a request or an answer."""

    raw: bytes
    first: list[str]
    headers: dict[str, str]

    @classmethod
    async def read(cls, reader: asyncio.StreamReader) -> _Head:
        try:
            raw = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise _ClosedError from error
        lines = raw.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines[1:] if line)
        return cls(raw, lines[0].split(" ", 2), {name.lower(): value.strip() for name, _, value in pairs})

    @property
    def is_chunked(self) -> bool:
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def length_bytes(self) -> int | None:
        value = self.headers.get("content-length")
        return None if value is None else int(value)

    @property
    def closes(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"


@dataclass
class _Connection:
    """A client's connection, and the matching connection to the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        self.writer.close()
        self.drop_server()

    def drop_server(self) -> None:
        if self.server is not None:
            self.server[1].close()
            self.server = None

    def reset(self) -> None:
        """Close the connection so that the client sees a reset instead of an orderly end."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.writer.transport.abort()


@dataclass
class FaultProxy:
    """A proxy for ``server`` with a port and a thread of its own; a context manager.

    `spoil` adds rules for faults, and `spoil_at_random` random faults; without faults the proxy only logs
    requests, in order of arrival.
    """

    server: S3Server
    plan: FaultPlan = field(default_factory=FaultPlan)
    log: list[Request] = field(default_factory=list)
    endpoint_url: str = ""

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._listener: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []
        self._came = threading.Condition()

    @property
    def bucket(self) -> str:
        """The server's bucket."""
        return self.server.bucket

    @property
    def storage_options(self) -> dict[str, Any]:
        """The server's storage options, with the proxy as endpoint."""
        return {**self.server.storage_options, "endpoint_url": self.endpoint_url}

    def spoil(
        self,
        fault: Fault,
        *,
        operation: str | None = None,
        key: str | None = None,
        nth: int = 1,
        times: int | None = 1,
    ) -> Rule:
        """Add a rule, and return it; its ``seen`` counts the matching requests. See `Rule`."""
        rule = Rule(fault, operation, key, nth, times)
        self.plan.rules.append(rule)
        return rule

    def spoil_at_random(self, seed: int, probability: float, faults: Sequence[Fault] = PASSING) -> None:
        """Begin random faults; see `RandomFaults`."""
        self.plan.random = RandomFaults(seed, probability, faults)

    def heal(self) -> None:
        """Stop all faults."""
        self.plan.rules, self.plan.random = [], None

    def requests(self, operation: str | None = None, key: str | None = None) -> list[Request]:
        """Return the requests of an operation (``GetObject``, ...) on keys that match the pattern."""
        return [request for request in list(self.log) if request.matches(operation, key)]

    def counts(self) -> Counter[str]:
        """Count requests by operation."""
        return Counter(request.operation for request in list(self.log))

    def wait_for_request(self, seconds: float) -> None:
        """Wait for another request, at most ``seconds``."""
        with self._came:
            self._came.wait(seconds)

    def start(self) -> Self:
        """Start the proxy; returns when the port accepts connections."""
        self._thread.start()
        self._run(self._listen())
        return self

    def stop(self) -> None:
        """End all connections and the thread. AssertionError if the proxy could not follow an exchange."""
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_SECONDS)
        assert not self._thread.is_alive(), "the proxy does not end"
        self._loop.close()
        if self._failures:
            raise AssertionError("the proxy itself failed") from self._failures[0]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_STOP_SECONDS)

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(
            self._accept, "127.0.0.1", 0, limit=4 * _PIECE_BYTES, backlog=512
        )
        self.endpoint_url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def _end(self) -> None:
        assert self._listener is not None
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(_Connection(reader, writer)))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(error)

    async def _serve(self, connection: _Connection) -> None:
        try:
            while await self._exchange(connection):
                pass
        except (_ClosedError, ConnectionError):
            pass  # the client or the server closed the connection; the client sees the end of its own
        finally:
            connection.close()

    async def _exchange(self, connection: _Connection) -> bool:
        """Forward a request and its answer; return True if the connection can be reused."""
        head = await _Head.read(connection.reader)
        method, target, _ = head.first
        request = Request.parse(method, target, head.headers)
        request.fault = fault = self.plan.next(request)
        self.log.append(request)
        with self._came:
            self._came.notify_all()
        waits = "100-continue" in head.headers.get("expect", "").lower()
        if fault is not None and fault.kind is Kind.ANSWER and waits:
            # The client may or may not send the body, so the connection ends after the answer.
            await _answer(connection, request, fault, closes=True)
            return False
        if waits:
            connection.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await _read_body(connection.reader, head, until_close=False)
        request.request_bytes = len(body)
        if fault is not None:
            match fault.kind:
                case Kind.RESET:
                    connection.reset()
                    return False
                case Kind.HANG:
                    await _until_client_leaves(connection)
                    return False
                case Kind.ANSWER:
                    await _answer(connection, request, fault)
                    return True
                case Kind.DELAY:
                    await asyncio.sleep(fault.seconds)
                case Kind.LOST_ANSWER | Kind.TRUNCATED | Kind.STALLED:
                    pass  # the server has answered
        return await self._forward(connection, request, head, body) and not head.closes

    async def _forward(self, connection: _Connection, request: Request, head: _Head, body: bytes) -> bool:
        reader, writer = await self._server_of(connection)
        writer.write(re.sub(rb"(?im)^expect:.*\r\n", b"", head.raw) + body)
        await writer.drain()
        answer = await _Head.read(reader)
        while answer.first[1].startswith("1"):
            answer = await _Head.read(reader)
        status = int(answer.first[1])
        has_body = request.method != "HEAD" and status not in _NO_BODY
        if request.fault is not None and request.fault.kind is not Kind.DELAY:
            await _spoil_answer(connection, request, request.fault, reader, answer, has_body=has_body)
            return False
        request.status = status
        connection.writer.write(answer.raw)
        if has_body:
            await _relay_body(reader, connection.writer, request, answer)
        await connection.writer.drain()
        if answer.closes:
            connection.drop_server()
        until_close = has_body and not answer.is_chunked and answer.length_bytes is None
        return not (answer.closes or until_close)

    async def _server_of(self, connection: _Connection) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if connection.server is not None and connection.server[0].at_eof():
            connection.drop_server()
        if connection.server is None:
            host, _, port = self.server.endpoint_url.removeprefix("http://").partition(":")
            connection.server = await asyncio.open_connection(host, int(port), limit=4 * _PIECE_BYTES)
        return connection.server


async def _answer(connection: _Connection, request: Request, fault: Fault, *, closes: bool = False) -> None:
    """Send an error like S3; if ``closes``, announce the end of the connection, so that no client reuses
    it."""
    body = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{fault.code}</Code><Message>Made by the test: {fault.code}</Message>"
        f"<Resource>/{request.bucket}</Resource><RequestId>0123456789ABCDEF</RequestId></Error>"
    ).encode()
    headers = {"Content-Type": "application/xml", "Content-Length": str(len(body)), **dict(fault.headers)}
    if closes:
        headers["Connection"] = "close"
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    sent = b"" if request.method == "HEAD" else body
    request.status, request.response_bytes = fault.status, len(sent)
    connection.writer.write(f"HTTP/1.1 {fault.status} {fault.code}\r\n{lines}\r\n".encode() + sent)
    await connection.writer.drain()


async def _spoil_answer(
    connection: _Connection,
    request: Request,
    fault: Fault,
    reader: asyncio.StreamReader,
    answer: _Head,
    *,
    has_body: bool,
) -> None:
    # Read to the end in any case, so that the server has carried the request out.
    body = await _read_body(reader, answer, until_close=True) if has_body else b""
    if fault.kind is Kind.LOST_ANSWER:
        connection.reset()
        return
    # some clients accept a head that ends among its headers as complete
    kept = answer.raw + body[: len(body) // 2] if body else answer.raw[: len("HTTP/")]
    if body:
        request.status, request.response_bytes = int(answer.first[1]), len(body) // 2
    connection.writer.write(kept)
    await connection.writer.drain()
    if fault.kind is Kind.STALLED:
        await _until_client_leaves(connection)


async def _until_client_leaves(connection: _Connection) -> None:
    with contextlib.suppress(ConnectionError):
        while await connection.reader.read(_PIECE_BYTES):
            pass


async def _read_body(reader: asyncio.StreamReader, head: _Head, *, until_close: bool) -> bytes:
    """Read a body with the frames of its chunks; ``until_close`` (answers only) if neither length nor chunks
    are given."""
    try:
        if head.is_chunked:
            return b"".join([piece async for piece in _chunks(reader)])
        if head.length_bytes is not None:
            return await reader.readexactly(head.length_bytes)
        return await reader.read() if until_close else b""
    except asyncio.IncompleteReadError as error:
        raise _ClosedError from error


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield raw frames with size line, data and line end; the last one with the trailers."""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        if size:
            yield line + await reader.readexactly(size + 2)
            continue
        end = line
        while (trailer := await reader.readuntil(b"\r\n")) != b"\r\n":
            end += trailer
        yield end + trailer
        return


async def _relay_body(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: Request, answer: _Head
) -> None:
    if answer.is_chunked:
        async for piece in _chunks(reader):
            request.response_bytes += len(piece)
            writer.write(piece)
            await writer.drain()
        return
    left = answer.length_bytes
    while left is None or left > 0:
        piece = await reader.read(_PIECE_BYTES if left is None else min(left, _PIECE_BYTES))
        if not piece:
            if left is None:
                return
            raise _ClosedError
        left = None if left is None else left - len(piece)
        request.response_bytes += len(piece)
        writer.write(piece)
        await writer.drain()
