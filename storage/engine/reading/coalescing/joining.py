"""Which pieces of a file are read by one request, where a request costs far more than a buffer.

Pure: no I/O, no memory is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from dcp.storage.engine.reading.coalescing.clusters import Cluster
from dcp.storage.formats.checksums import BLOCK_BYTES
from dcp.storage.stores.base import ReadProfile

__all__ = [
    "CHEAP_GAP_BYTES",
    "COPIED_BELOW_BYTES",
    "NO_CHUNK",
    "Copy",
    "JoinedRequest",
    "Put",
    "RequestPiece",
    "join",
]

NO_CHUNK = -1
"""The chunk of bytes that belong to none, and have no checksum here."""

COPIED_BELOW_BYTES = 64 << 10
"""Pieces from here on are read where they belong. For smaller ones a copy is cheaper than a buffer of their
own, and a request stays far below the number of buffers that one call takes."""

CHEAP_GAP_BYTES = 16 << 10
_CHEAP_JUNK_BYTES = 1 << 20
"""Gaps such as the headers between small tensors are read over up to this much in a request: that takes less
time than another request."""

_JUNK_BYTES = 64 << 10
_JUNK_SHARE = 32
"""Larger gaps, which are mostly tensors that are not wanted, only up to this, or this share of what is."""

_SLACK_SHARE = 8
"""Of a request, left free so that it ends with a block."""

_LEAST_CUT_BYTES = 256 << 10
"""Less of a piece than this is not worth to be read before the rest of it."""

Put = Callable[[memoryview], None]
"""Takes a piece out of scratch memory, which is used again afterwards."""


class RequestPiece(NamedTuple):
    """``size_bytes`` of a file, from ``position`` of a chunk's payload on.

    They go to ``address``, or with ``put`` wherever that copies them; a piece with ``put`` is never divided.
    A cluster has bytes of many chunks, and checks them itself.
    """

    file: int
    offset: int
    size_bytes: int
    chunk: int
    position: int
    address: int
    put: Put | Cluster | None


class Copy(NamedTuple):
    """Bytes wanted a second time: to be copied from where they were read to."""

    source: int
    target: int
    size_bytes: int


@dataclass(slots=True)
class JoinedRequest:
    """Bytes ``begin`` to ``end`` of a file, in one read.

    ``direct`` pieces are read where they belong; all between them goes to scratch memory, from where
    ``copied`` pieces are taken. Both in the order of the file.
    """

    file: int
    begin: int
    end: int
    direct: list[RequestPiece] = field(default_factory=list)
    copied: list[RequestPiece] = field(default_factory=list)


def join(
    pieces: Iterable[RequestPiece], profile: ReadProfile, request_bytes: int
) -> tuple[list[JoinedRequest], list[Copy]]:
    """Requests of up to ``request_bytes`` for ``pieces``, which come in the order of file and offset.

    Parts of boxes, and pieces that have bytes in common, join them up to ``join_below_bytes``: such a request
    may have to be in scratch memory as a whole. Only a piece that cannot be divided may make one larger.
    Pieces are divided where a block of their payload ends, if that leaves the request nearly full; else the
    block's checksum is to be combined from two.
    """
    joiner = _RequestJoiner(profile, request_bytes)
    for piece in pieces:
        joiner.add(piece)
    return joiner.requests, joiner.copies


class _RequestJoiner:
    """Grows one request at a time."""

    def __init__(self, profile: ReadProfile, limit_bytes: int) -> None:
        self.requests: list[JoinedRequest] = []
        self.copies: list[Copy] = []
        self._profile = profile
        self._limit_bytes = limit_bytes
        self._last: RequestPiece | None = None
        self._open: JoinedRequest | None = None
        self._copied_from = 0
        """Where, in the file, the scratch memory at the end of the open request begins."""
        self._wanted_bytes = self._junk_bytes = 0
        self._overlaps = False

    def add(self, piece: RequestPiece) -> None:
        """Take one piece; they come in the order of the file."""
        if not piece.size_bytes:
            return
        last = self._last
        if last is not None and piece[:3] == last[:3] and piece.put is None and last.put is None:
            self.copies.append(Copy(last.address, piece.address, piece.size_bytes))
            return
        self._last = rest = piece
        while True:
            room = self._room(rest)
            if rest.size_bytes > room and (cut := self._cut(rest, room)):
                self._append(_front(rest, cut))
                rest = _behind(rest, cut)
                self._open = None
            elif rest.size_bytes > room and self._open is not None:
                self._open = None
            else:
                self._append(rest)
                return

    def _room(self, piece: RequestPiece) -> int:
        """How many bytes of ``piece`` the open request, or a new one, can take."""
        request, profile, limit_bytes = self._open, self._profile, self._limit_bytes
        if request is None:
            return limit_bytes
        if piece.file != request.file:
            return 0
        gap = piece.offset - request.end
        if gap < 0 or self._overlaps or not (piece.put is None or isinstance(piece.put, Cluster)):
            limit_bytes = min(limit_bytes, profile.join_below_bytes)
        if gap < 0:  # also wanted by another one: that must be in scratch memory still
            return max(0, limit_bytes - (piece.offset - request.begin)) if self._is_copied(piece) else 0
        junk = self._junk_bytes + gap
        if gap > profile.gap_bytes or junk > self._bearable_bytes(gap, piece.size_bytes):
            return 0
        return max(0, limit_bytes - (piece.offset - request.begin))

    def _cut(self, piece: RequestPiece, room: int) -> int:
        """How many bytes of ``piece`` go into ``room``; 0 if none."""
        if piece.put is not None or (room < _LEAST_CUT_BYTES and self._open is not None):
            return 0
        aligned = (piece.position + room) // BLOCK_BYTES * BLOCK_BYTES - piece.position
        return aligned if aligned > 0 and room - aligned <= self._limit_bytes // _SLACK_SHARE else room

    def _is_copied(self, piece: RequestPiece) -> bool:
        return piece.offset >= self._copied_from

    def _bearable_bytes(self, gap: int, size_bytes: int) -> int:
        share = (self._wanted_bytes + min(size_bytes, self._limit_bytes)) // _JUNK_SHARE
        return max(share, _CHEAP_JUNK_BYTES if gap <= CHEAP_GAP_BYTES else _JUNK_BYTES)

    def _append(self, piece: RequestPiece) -> None:
        request, end = self._open, piece.offset + piece.size_bytes
        if request is None:
            request = self._open = JoinedRequest(piece.file, piece.offset, piece.offset)
            self.requests.append(request)
            self._copied_from = piece.offset
            self._wanted_bytes = self._junk_bytes = 0
            self._overlaps = False
        self._overlaps |= piece.offset < request.end
        self._wanted_bytes += piece.size_bytes
        self._junk_bytes += max(0, piece.offset - request.end)
        if piece.put is None and piece.size_bytes >= COPIED_BELOW_BYTES and piece.offset >= request.end:
            request.direct.append(piece)
            self._copied_from = end
        else:
            request.copied.append(piece)
        request.end = max(request.end, end)


def _front(piece: RequestPiece, size_bytes: int) -> RequestPiece:
    return piece._replace(size_bytes=size_bytes)


def _behind(piece: RequestPiece, size_bytes: int) -> RequestPiece:
    return RequestPiece(
        piece.file,
        piece.offset + size_bytes,
        piece.size_bytes - size_bytes,
        piece.chunk,
        piece.position + size_bytes,
        piece.address + size_bytes,
        None,
    )
