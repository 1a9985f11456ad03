"""Answers whose bodies are read while they are sent: ranges, entity tags, and what happens if one side stops.

A body has a known Content-Length. If reading fails after the head has gone out, the connection is closed
before the last byte, so that nobody takes a part for the whole. If the client goes away, or takes nothing for
a long time, reading stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dcp.server.data.sending.bodies import Body
from dcp.server.problems import PreconditionFailedError, ProblemError, RangeError, UnavailableError
from dcp.server.roots import storage_problem
from dcp.storage.errors import CheckpointError, CorruptCheckpointError

__all__ = [
    "SMALL_BYTES",
    "BodyResponse",
    "BrokenBodyError",
    "ByteRange",
    "PlannedResponse",
    "Streams",
    "choose_range",
    "disposition",
    "is_unchanged",
    "not_modified",
]

CACHE: Final = "private, no-cache"
"""To be kept by whoever asked, and asked for again each time: there are entity tags."""

STALL_SECONDS: Final = 120.0
"""A client that has taken nothing for so long is gone, or means to hold the place of another."""

KEY_SECONDS: Final = 2.0
"""Between two looks at whether a key still is one, while a body is sent."""

SMALL_BYTES: Final = 4 << 20
"""So little is no download: it holds no place, and waits for no more than a thread."""

_RANGE: Final = re.compile(r"\s*bytes\s*=\s*([0-9]{0,19})\s*-\s*([0-9]{0,19})\s*", re.IGNORECASE)
_log = structlog.get_logger(__name__)


class _NotAllowedError(Exception):
    """Whoever asked may not any more."""


class BrokenBodyError(ConnectionError):
    """Ends a request whose answer cannot be completed: the server closes the connection."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``begin`` to ``end`` of ``size``; ``is_part`` if they were asked for, even if that is all."""

    begin: int
    end: int
    size: int
    is_part: bool = False


def choose_range(headers: Mapping[str, str], size: int, etag: str) -> ByteRange:
    """What a GET asks for by ``Range`` and ``If-Range`` (RFC 9110, section 14).

    Several ranges at once, and what is no range of bytes, are answered by the whole. Raises RangeError.
    """
    text = headers.get("range")
    if text is None or headers.get("if-range", etag).strip() != etag:
        return ByteRange(0, size, size)
    match = _RANGE.fullmatch(text)
    if match is None or not (match[1] or match[2]):
        return ByteRange(0, size, size)
    if not match[1]:
        begin, end = max(0, size - int(match[2])), size
    else:
        begin = int(match[1])
        end = min(size, int(match[2]) + 1) if match[2] else size
        if match[2] and int(match[2]) < begin:
            return ByteRange(0, size, size)
    if begin >= size or begin >= end:
        raise RangeError(
            f"the range begins at byte {begin} of {size}", headers={"Content-Range": f"bytes */{size}"}
        )
    return ByteRange(begin, end, size, is_part=True)


def is_unchanged(headers: Mapping[str, str], etag: str) -> bool:
    """Whether ``If-None-Match`` names ``etag``; PreconditionFailedError if ``If-Match`` does not."""
    wanted = headers.get("if-match")
    if wanted is not None and not _names(wanted, etag, is_weak=False):
        raise PreconditionFailedError("it is not any more what If-Match names")
    known = headers.get("if-none-match")
    return known is not None and _names(known, etag, is_weak=True)


def not_modified(etag: str) -> Response:
    """304: what the client has is still what it is."""
    return Response(None, 304, {"ETag": etag, "Cache-Control": CACHE})


def _names(text: str, etag: str, *, is_weak: bool) -> bool:
    tags = [tag.strip() for tag in text.split(",")]
    if is_weak:
        tags = [tag.removeprefix("W/") for tag in tags]
    return "*" in tags or etag in tags


def disposition(name: str) -> str:
    """``Content-Disposition`` of a file to be kept as ``name`` (RFC 6266), whatever characters it has."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[-128:] or "download"
    return (
        f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name[-512:], safe='', errors='replace')}"
    )


class Streams:
    """What all bodies of a process share: the threads that read, and how many downloads there may be."""

    def __init__(self, max_downloads: int) -> None:
        self.max_downloads = max_downloads
        self._slots = threading.Semaphore(max_downloads)
        self._threads = max_downloads + 2
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0
        self._lock = threading.Lock()
        self.running = 0

    @property
    def pool(self) -> ThreadPoolExecutor:
        """Made when it is first needed, in each process."""
        with self._lock:
            if self._pool is None or self._pid != os.getpid():
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="dcp-body")
                self._pid = os.getpid()
            return self._pool

    @contextlib.contextmanager
    def slot(self) -> Generator[None]:
        """One of the downloads; UnavailableError if there are as many as there may be."""
        if not self._slots.acquire(blocking=False):
            raise UnavailableError(
                f"{self.max_downloads} downloads are under way, and no more at a time are allowed",
                retry_seconds=10,
            )
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
            self._slots.release()

    def close(self) -> None:
        """End the threads that are idle; those that read end with their part."""
        with self._lock:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)
                self._pool = None


class BodyResponse(Response):
    """``chosen`` bytes of ``body``, read by a thread one part ahead of what is sent.

    ``is_allowed`` is asked now and then by that thread: reading ends when whoever asked may not any more.
    """

    def __init__(
        self,
        body: Body,
        chosen: ByteRange,
        streams: Streams,
        *,
        headers: Mapping[str, str],
        problem: Callable[[BaseException], ProblemError] = storage_problem,
        media_type: str = "application/octet-stream",
        is_allowed: Callable[[], bool] = lambda: True,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        length = chosen.end - chosen.begin
        every = {"Cache-Control": CACHE, **headers, "Accept-Ranges": "bytes", "Content-Length": str(length)}
        if chosen.is_part:
            every["Content-Range"] = f"bytes {chosen.begin}-{chosen.end - 1}/{chosen.size}"
        super().__init__(None, 206 if chosen.is_part else 200, every, media_type)
        self._source = body
        self._chosen = chosen
        self._streams = streams
        self._problem = problem
        self._is_allowed = is_allowed
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises a ProblemError while nothing has been sent, later `BrokenBodyError`."""
        if scope["method"] == "HEAD":
            await self._send_head(send)
            return
        with contextlib.nullcontext() if self.is_small else self._streams.slot():
            gone = asyncio.ensure_future(_departure(receive))
            try:
                await self._send_body(scope, send, gone)
            finally:
                gone.cancel()

    @property
    def is_small(self) -> bool:
        """Whether it is too little to hold the place of a download."""
        return self._chosen.end - self._chosen.begin <= SMALL_BYTES

    async def answer(self, scope: Scope, send: Send, gone: asyncio.Future[None]) -> None:
        """As ASGI, for who has a place if it needs one, and waits for ``gone``, the client's departure."""
        if scope["method"] == "HEAD":
            await self._send_head(send)
        else:
            await self._send_body(scope, send, gone)

    async def _send_head(self, send: Send) -> None:
        await self._start(send)
        await send({"type": "http.response.body", "body": b""})

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

    async def _send_body(self, scope: Scope, send: Send, gone: asyncio.Future[None]) -> None:
        parts = _while_allowed(self._source.parts(self._chosen.begin, self._chosen.end), self._is_allowed)
        reader = _PartsReader(parts, self._streams.pool)
        left = self._chosen.end - self._chosen.begin
        has_begun = False
        try:
            reader.read_ahead()
            while left > 0:
                part = await reader.part()
                if not has_begun:  # what fails at once is an answer of its own
                    has_begun = True
                    await self._start(send)
                left -= len(part)
                if left > 0:
                    reader.read_ahead()
                async with asyncio.timeout(self._stall_seconds):
                    await send({"type": "http.response.body", "body": part, "more_body": left > 0})
                if gone.done():
                    _log.info("client went away", path=scope["path"], left_bytes=left)
                    return
            if not has_begun:
                await self._start(send)
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            raise BrokenBodyError("the client takes nothing") from None
        except _NotAllowedError:
            _log.info("answer broken off", path=scope["path"], left_bytes=left, error="the key has ended")
            raise BrokenBodyError("the key has ended") from None
        except (CheckpointError, OSError) as error:
            if not has_begun:
                raise self._problem(error) from error
            _log.warning("answer broken off", path=scope["path"], left_bytes=left, error=str(error))
            raise BrokenBodyError("the source cannot be read any further") from error
        finally:
            reader.close()


class PlannedResponse(Response):
    """An answer that is planned first: by one that has a place among the downloads, where ``is_costly``.

    ``plan`` is cancelled if the client goes away.
    """

    def __init__(
        self,
        plan: Callable[[], Coroutine[Any, Any, BodyResponse]],
        streams: Streams,
        is_costly: Callable[[], bool],
    ) -> None:
        super().__init__(None)
        self._plan = plan
        self._streams = streams
        self._is_costly = is_costly

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises a ProblemError while nothing has been sent, later `BrokenBodyError`."""
        with contextlib.ExitStack() as place:
            has_place = self._is_costly()
            if has_place:
                place.enter_context(self._streams.slot())
            gone = asyncio.ensure_future(_departure(receive))
            try:
                response = await _unless(gone, self._plan())
                if response.is_small or scope["method"] == "HEAD":
                    place.close()
                elif not has_place:
                    place.enter_context(self._streams.slot())
                await response.answer(scope, send, gone)
            finally:
                gone.cancel()


async def _unless(gone: asyncio.Future[None], plan: Coroutine[Any, Any, BodyResponse]) -> BodyResponse:
    planning = asyncio.ensure_future(plan)
    try:
        await asyncio.wait((planning, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not planning.done():
            planning.cancel()
    if not planning.done():
        raise UnavailableError("the client has gone away")
    return planning.result()


def _while_allowed(parts: Generator[memoryview], is_allowed: Callable[[], bool]) -> Generator[memoryview]:
    """``parts``, until they are not allowed any more: then raises `_NotAllowedError`."""
    asked = time.monotonic()
    with contextlib.closing(parts):
        for part in parts:
            yield part
            if time.monotonic() - asked >= KEY_SECONDS:
                if not is_allowed():
                    raise _NotAllowedError
                asked = time.monotonic()


class _PartsReader:
    """Has a thread ask for the parts of a body, one at a time."""

    def __init__(self, parts: Generator[memoryview], pool: ThreadPoolExecutor) -> None:
        self._parts = parts
        self._pool = pool
        self._ahead: Future[memoryview | None] | None = None

    def read_ahead(self) -> None:
        """Begin to read the next part."""
        self._ahead = self._pool.submit(next, self._parts, None)

    async def part(self) -> memoryview:
        """The part that is being read. Raises what reading raises, and CorruptCheckpointError at the end."""
        if self._ahead is None:
            raise RuntimeError("nothing is being read")
        part = await asyncio.wrap_future(self._ahead)
        if part is None:
            raise CorruptCheckpointError("the source is shorter than it was")
        return part

    def close(self) -> None:
        """Stop reading: at once, or when the part that is under way has been read."""
        if self._ahead is None:
            self._parts.close()
        else:
            self._ahead.cancel()
            self._ahead.add_done_callback(lambda _: self._parts.close())


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
