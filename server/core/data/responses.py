"""Streamed answers: ranges, entity tags, and termination from both sides.

A body has a known Content-Length and is read front to back in parts. Checksums are compared before the last
part is sent. A read error after the head closes the connection before the last byte, so no client mistakes a
part for the whole. Reading stops if the client disconnects or stays below a minimum rate.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dcp.server.core.data.sharing import NotAllowedError, Share, Streams
from dcp.server.core.problems import (
    BrokenBodyError,
    PreconditionFailedError,
    ProblemError,
    RangeError,
    UnavailableError,
)
from dcp.server.core.roots import storage_problem
from dcp.storage.errors import CheckpointError, CorruptCheckpointError
from dcp.storage.stores.base import Store

NOT_MODIFIED: Final[dict[int | str, dict[str, Any]]] = {304: {"description": "Not modified (If-None-Match)."}}
"""``responses=`` of routes that call `Ask.tag`."""

CACHE: Final = "private, no-cache"
"""Cache header: clients keep the answer and revalidate it by entity tag."""

STALL_SECONDS: Final = 60.0
"""Maximum time by which a client may lag behind the minimum rate."""

KEY_SECONDS: Final = 2.0
"""Interval of key checks during a download."""

PART_BYTES: Final = 2 << 20
"""Bytes read, checked and sent at a time; three parts are in memory."""

_REMOTE_PART_BYTES: Final = 8 << 20
"""Part size for storage with expensive requests: pieces are fetched concurrently."""

SMALL_BYTES: Final = 4 << 20
"""Maximum size of bodies that do not count as downloads."""

_TINY_BYTES: Final = 64 << 10
"""The same limit under a rate limit, since waiting bodies hold memory."""

_RANGE: Final = re.compile(r"\s*bytes\s*=\s*([0-9]{0,19})\s*-\s*([0-9]{0,19})\s*", re.IGNORECASE)
_log = structlog.get_logger(__name__)


def binary(description: str) -> dict[int | str, dict[str, Any]]:
    """Return ``responses=`` of a route that answers bytes: complete, a range, or not modified."""
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {
        200: {"description": description, "content": content},
        206: {"description": "The requested range.", "content": content},
        **NOT_MODIFIED,
    }


class NotModifiedError(Exception):
    """The client already has the answer with this entity tag."""

    def __init__(self, etag: str) -> None:
        super().__init__(etag)
        self.etag = etag


class Body(ABC):
    """``size_bytes`` bytes. Each call of `parts` reads again, so requests can share a body."""

    size_bytes: int

    @abstractmethod
    def parts(self, begin: int, end: int) -> Generator[memoryview]:
        """Yield bytes ``begin`` to ``end`` in order; close the iterator to stop early. Raises errors of the
        storage.

        Parts belong to the caller; their memory is not reused.
        """


def empty_part(size: int) -> memoryview:
    """Return memory for a part, from numpy: not zeroed and reused, since new pages would cost a tenth of the
    time."""
    import numpy as np  # imported late for a fast start

    return np.empty(size, np.uint8).data


def part_bytes_of(store: Store) -> int:
    """Return the size of parts read from ``store``."""
    return _REMOTE_PART_BYTES if store.read_profile.scatter else PART_BYTES


class FileBody(Body):
    """A file of a store, unchanged."""

    def __init__(self, store: Store, name: str, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._store = store
        self._name = name
        self._part_bytes = part_bytes_of(store)

    def parts(self, begin: int, end: int) -> Generator[memoryview]:
        """Read the parts in order. Raises CorruptCheckpointError for a shortened file."""
        with self._store.open_read(self._name, expected_bytes=self.size_bytes) as handle:
            for at in range(begin, end, self._part_bytes):
                part = empty_part(min(self._part_bytes, end - at))
                handle.preadv([part], at)
                yield part


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``begin`` to ``end`` of ``size``; ``is_part``: requested as a range, even if complete."""

    begin: int
    end: int
    size: int
    is_part: bool = False


def choose_range(headers: Mapping[str, str], size: int, etag: str) -> ByteRange:
    """Return the range of a GET by ``Range`` and ``If-Range`` (RFC 9110, section 14).

    Multiple and invalid ranges select the whole. Raises RangeError.
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
            f"the range begins at byte {begin}, but the content has {size} bytes",
            headers={"Content-Range": f"bytes */{size}"},
        )
    return ByteRange(begin, end, size, is_part=True)


def is_unchanged(headers: Mapping[str, str], etag: str) -> bool:
    """Return True if ``If-None-Match`` names ``etag``. Raises PreconditionFailedError if ``If-Match``
    differs."""
    wanted = headers.get("if-match")
    if wanted is not None and not _names(wanted, etag, is_weak=False):
        raise PreconditionFailedError("If-Match does not match: the content has changed")
    known = headers.get("if-none-match")
    return known is not None and _names(known, etag, is_weak=True)


def not_modified(etag: str) -> Response:
    """Return the answer 304."""
    return Response(None, 304, {"ETag": etag, "Cache-Control": CACHE})


def _names(text: str, etag: str, *, is_weak: bool) -> bool:
    tags = [tag.strip() for tag in text.split(",")]
    if is_weak:
        tags = [tag.removeprefix("W/") for tag in tags]
    return "*" in tags or etag in tags


def disposition(name: str) -> str:
    """Return the ``Content-Disposition`` of a file called ``name`` (RFC 6266), with any characters."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[-128:] or "download"
    return (
        f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name[-512:], safe='', errors='replace')}"
    )


class BodyResponse(Response):
    """The ``chosen`` bytes of ``body``, read by a thread one part ahead.

    The rate follows ``share``, which is refreshed every other second. The answer ends with its key.
    """

    def __init__(
        self,
        body: Body,
        chosen: ByteRange,
        streams: Streams,
        *,
        headers: Mapping[str, str],
        problem: Callable[[BaseException], ProblemError] = storage_problem,
        share: Share | None = None,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        length = chosen.end - chosen.begin
        every = {"Cache-Control": CACHE, **headers, "Accept-Ranges": "bytes", "Content-Length": str(length)}
        if chosen.is_part:
            every["Content-Range"] = f"bytes {chosen.begin}-{chosen.end - 1}/{chosen.size}"
        super().__init__(None, 206 if chosen.is_part else 200, every, "application/octet-stream")
        self._source = body
        self._chosen = chosen
        self._streams = streams
        self._problem = problem
        self._share = share or Share()
        self._stall_seconds = stall_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer (ASGI). Raises a ProblemError before the first byte, later `BrokenBodyError`."""
        await PlannedResponse(self._itself, self._streams, self._share, lambda: False)(scope, receive, send)

    async def _itself(self) -> BodyResponse:
        return self

    @property
    def is_small(self) -> bool:
        """Return True if the answer does not count as a download."""
        most = SMALL_BYTES if self._share.rate is None else _TINY_BYTES
        return self._chosen.end - self._chosen.begin <= most

    async def answer(self, scope: Scope, send: Send, gone: asyncio.Future[None]) -> None:
        """Send the answer with a download place if needed; ``gone`` completes when the client disconnects."""
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
        reader = _PartsReader(self._source.parts(self._chosen.begin, self._chosen.end), self._streams.pool)
        left = self._chosen.end - self._chosen.begin
        has_begun = False
        sender = _Sender(send, self._streams, self._share, self._stall_seconds, gone)
        try:
            reader.read_ahead()
            while left > 0:
                part = await reader.part()
                if not has_begun:  # earlier errors become a normal answer
                    has_begun = True
                    await self._start(send)
                left -= len(part)
                if left > 0:
                    reader.read_ahead()
                await sender.send_part(part, more=left > 0)
                if gone.done():
                    _log.info("client disconnected", path=scope["path"], left_bytes=left)
                    return
            if not has_begun:
                await self._start(send)
                await send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            _log.info(
                "answer broken off", path=scope["path"], left_bytes=left, error="the client is too slow"
            )
            raise BrokenBodyError("the client is too slow") from None
        except NotAllowedError:
            _log.info("answer broken off", path=scope["path"], left_bytes=left, error="the key has ended")
            raise BrokenBodyError("the key has ended") from None
        except (CheckpointError, OSError) as error:
            if not has_begun:
                raise self._problem(error) from error
            _log.warning("answer broken off", path=scope["path"], left_bytes=left, error=str(error))
            raise BrokenBodyError("the source cannot be read") from error
        finally:
            reader.close()


class _Sender:
    """Sends parts at the rate of a share while the client receives and the key is valid."""

    def __init__(
        self, send: Send, streams: Streams, share: Share, stall_seconds: float, gone: asyncio.Future[None]
    ) -> None:
        self._send = send
        self._streams = streams
        self._share = share
        self._stall_seconds = self._patience_seconds = stall_seconds
        self._gone = gone
        self._asked = time.monotonic()

    async def send_part(self, part: memoryview, *, more: bool) -> None:
        """Send a part unless the client disconnects. Raises `NotAllowedError`, and TimeoutError for a slow
        client."""
        at = 0
        while at < len(part) and not self._gone.done():
            piece = part[at : at + self._share.piece_bytes(len(part))]
            at += len(piece)
            wait_seconds = self._streams.wait_seconds(self._share.allowances, len(piece))
            if wait_seconds:
                await asyncio.wait((self._gone,), timeout=wait_seconds)
            await self._send_piece(piece, more or at < len(part))
            if time.monotonic() - self._asked >= KEY_SECONDS:
                await asyncio.get_running_loop().run_in_executor(self._streams.pool, self._share.renew)
                self._asked = time.monotonic()

    async def _send_piece(self, piece: memoryview, more: bool) -> None:
        due_seconds = len(piece) * self._streams.seconds_per_byte
        begun = time.monotonic()
        async with asyncio.timeout(self._patience_seconds + due_seconds):
            await self._send({"type": "http.response.body", "body": piece, "more_body": more})
        if due_seconds:
            late_seconds = time.monotonic() - begun - due_seconds
            self._patience_seconds = min(self._stall_seconds, self._patience_seconds - late_seconds)


class PlannedResponse(Response):
    """An answer planned before sending; if ``is_costly``, with a download place.

    ``plan`` is cancelled if the client disconnects.
    """

    def __init__(
        self,
        plan: Callable[[], Coroutine[Any, Any, BodyResponse]],
        streams: Streams,
        share: Share,
        is_costly: Callable[[], bool],
    ) -> None:
        super().__init__(None)
        self._plan = plan
        self._streams = streams
        self._share = share
        self._is_costly = is_costly

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Plan and send the answer (ASGI). Raises a ProblemError before the first byte, later
        `BrokenBodyError`."""
        with contextlib.ExitStack() as place:
            has_place = self._is_costly()
            if has_place:
                place.enter_context(self._streams.slot(self._share.allowances))
            gone = asyncio.ensure_future(_departure(receive))
            try:
                response = await _unless(gone, self._plan())
                if response.is_small or scope["method"] == "HEAD":
                    place.close()
                elif not has_place:
                    place.enter_context(self._streams.slot(self._share.allowances))
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
        raise UnavailableError("the client disconnected")
    return planning.result()


class _PartsReader:
    """Reads the parts of a body in a thread, one at a time."""

    def __init__(self, parts: Generator[memoryview], pool: ThreadPoolExecutor) -> None:
        self._parts = parts
        self._pool = pool
        self._ahead: Future[memoryview | None] | None = None

    def read_ahead(self) -> None:
        """Start reading the next part."""
        self._ahead = self._pool.submit(next, self._parts, None)

    async def part(self) -> memoryview:
        """Return the part being read. Raises read errors, and CorruptCheckpointError at the end."""
        if self._ahead is None:
            raise RuntimeError("no read is in progress")
        part = await asyncio.wrap_future(self._ahead)
        if part is None:
            raise CorruptCheckpointError("the source file was truncated during the read")
        return part

    def close(self) -> None:
        """Stop reading, after the current part if one is being read."""
        if self._ahead is None:
            self._parts.close()
        else:
            self._ahead.cancel()
            self._ahead.add_done_callback(lambda _: self._parts.close())


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
