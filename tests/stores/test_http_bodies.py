"""Bodies of answers. Internal: a real server cannot be made to break off at each byte, nor to hang in a head.

They are received where they belong: connections are kept, answers that do not fit and early ends are told.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from dcp.storage.stores.handles import Views
from dcp.storage.stores.objects.bucket import _delivered, _tls
from dcp.storage.stores.objects.failures import Failure, RequestError
from dcp.storage.stores.objects.transport import HttpAnswer, Transport
from tests.support.receivers import CERTIFICATES

_HANG_SECONDS = 60.0
_LOOPBACK = CERTIFICATES / "loopback.pem"
_BODY = bytes(range(256)) * 1000

Reply = Callable[[socket.socket, int], None]


@dataclass
class _Server:
    """Listens on loopback; ``reply`` gets the connection and the number of the request, from 0 on."""

    reply: Reply
    tls: bool = False
    host: str = "127.0.0.1"
    heads: list[bytes] = field(default_factory=list)
    connections: int = 0
    let_go: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> _Server:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self._listener = socket.create_server((self.host, 0), family=family)
        scheme = "https" if self.tls else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.url = f"{scheme}://{host}:{self._listener.getsockname()[1]}/bucket/key?X-Amz-Signature=secret"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.let_go.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(_HANG_SECONDS)
            assert not thread.is_alive()

    def _accept(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(_LOOPBACK)
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(connection, context), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, connection: socket.socket, context: ssl.SSLContext) -> None:
        with contextlib.suppress(OSError), connection:
            if self.tls:
                connection = context.wrap_socket(connection, server_side=True)
            connection.settimeout(_HANG_SECONDS)
            while head := self._head(connection):
                self.heads.append(head)
                self.reply(connection, len(self.heads) - 1)

    def _head(self, connection: socket.socket) -> bytes:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            got = connection.recv(1)
            if not got:
                return b""
            head += got
        return head


def _whole(body: bytes = _BODY, status: str = "206 Partial Content", told: int | None = None) -> bytes:
    length = len(body) if told is None else told
    return f'HTTP/1.1 {status}\r\nContent-Length: {length}\r\nETag: "x"\r\n\r\n'.encode() + body


@contextlib.contextmanager
def _transport(**settings: object) -> Iterator[Transport]:
    defaults: dict[str, object] = {
        "threads": 4,
        "connect_seconds": _HANG_SECONDS,
        "read_seconds": _HANG_SECONDS,
        "tls": lambda: _tls(str(_LOOPBACK), None),
    }
    transport = Transport(**(defaults | settings))  # type: ignore[arg-type]
    try:
        yield transport
    finally:
        transport.close()


def _memory(size: int = len(_BODY), parts: int = 3) -> tuple[bytearray, Views]:
    data = bytearray(size)
    step = -(-size // parts)
    views = [memoryview(data)[begin : begin + step] for begin in range(0, size, step)]
    return data, Views(views)


def _get(
    transport: Transport, url: str, inflow: Views, limit_seconds: float = _HANG_SECONDS, **headers: str
) -> HttpAnswer:
    return transport.attempt(
        lambda: transport.send("GET", url, headers, inflow=inflow), limit_seconds=limit_seconds
    )


def test_bodies_fill_buffers_over_one_connection() -> None:
    """Several buffers are filled in order, headers come in lower case, and the connection is used again."""
    with _Server(lambda connection, _: connection.sendall(_whole())) as server, _transport() as transport:
        for _ in range(3):
            data, inflow = _memory()
            answer = _get(transport, server.url, inflow, Range="bytes=0-9")
            assert (answer.status, answer.headers["etag"], answer.body) == (206, '"x"', b"")
            assert answer.is_filled and data == _BODY
        assert server.connections == 1
        first, *lines = server.heads[0].decode().split("\r\n")
        assert first == "GET /bucket/key?X-Amz-Signature=secret HTTP/1.1"
        assert "Range: bytes=0-9" in lines


def test_a_body_that_ends_too_early_is_an_error() -> None:
    """A connection that breaks in the body fails the attempt, at whatever byte."""
    for size in (0, 1, len(_BODY) - 1):

        def reply(connection: socket.socket, _: int, size: int = size) -> None:
            connection.sendall(_whole(_BODY[:size], told=len(_BODY)))
            connection.shutdown(socket.SHUT_RDWR)

        with (
            _Server(reply) as server,
            _transport() as transport,
            pytest.raises((http.client.HTTPException, OSError)),
        ):
            _get(transport, server.url, _memory()[1])


@pytest.mark.parametrize("sent_bytes", [1, 128 << 10])
def test_a_slow_line_is_waited_for_and_a_trickle_is_not(sent_bytes: int) -> None:
    """Who has sent much may take longer than the limit."""

    def reply(connection: socket.socket, _: int) -> None:
        connection.sendall(_whole()[:sent_bytes])
        server.let_go.wait(1.0)
        connection.sendall(_whole()[sent_bytes:])

    ends = pytest.raises(TimeoutError) if sent_bytes == 1 else contextlib.nullcontext()
    with _Server(reply) as server, _transport() as transport, ends:
        assert _get(transport, server.url, _memory()[1], 0.4).is_filled


def test_an_address_of_ipv6_is_asked() -> None:
    """In brackets, as URLs have it."""
    with (
        _Server(lambda connection, _: connection.sendall(_whole()), host="::1") as server,
        _transport() as transport,
    ):
        data, inflow = _memory()
        assert _get(transport, server.url, inflow).is_filled and data == _BODY


def test_tls_is_verified_unless_switched_off() -> None:
    """Trusted by its authority, refused without, taken as it is with verify=False."""
    with _Server(lambda connection, _: connection.sendall(_whole()), tls=True) as server:
        for verify, good in ((str(_LOOPBACK), True), (True, False), (False, True)):
            with _transport(tls=lambda verify=verify: _tls(verify, None)) as transport:
                data, inflow = _memory()
                if not good:
                    with pytest.raises(ssl.SSLCertVerificationError):
                        _get(transport, server.url, inflow)
                    continue
                assert _get(transport, server.url, inflow).is_filled and data == _BODY


@pytest.mark.parametrize("told", ["bytes 0-9/100", "bytes 50-59/100"])
def test_other_bytes_than_those_asked_for_are_an_error(told: str) -> None:
    """A cache on the way that answers with another range: nothing else would tell where nothing is hashed."""
    answer = _whole(b"0123456789").replace(b"ETag", f"Content-Range: {told}\r\nETag".encode())
    with _Server(lambda connection, _: connection.sendall(answer)) as server, _transport() as transport:
        data, inflow = _memory(10)
        got = _get(transport, server.url, inflow)
        if told.startswith("bytes 50"):
            info = _delivered("key", got, 50, 10)
            assert (info.size_bytes, bytes(data)) == (100, b"0123456789")
            return
        with pytest.raises(RequestError, match="from 0 on came instead of 50") as other:
            _delivered("key", got, 50, 10)
        assert other.value.kind is Failure.PASSING
