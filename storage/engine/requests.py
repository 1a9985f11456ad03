"""Read requests: join wanted ranges into requests, without I/O.

Small runs are handled as arrays, because a checkpoint may have many thousands. Other pieces are joined one
by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from dcp.storage.engine.memory import GATHERED_BYTES, array_at, copy_small, gather_small, scatter_small
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32, crc32_rows
from dcp.storage.geometry.strides import Int64
from dcp.storage.stores.base import ReadProfile

Verify = Literal["blocks", "full", "none"]
"""Checksum policy. ``blocks``: check every block that is read whole. ``full``: also read and check the rest
of partly needed blocks. ``none``: check nothing.
"""


@dataclass(frozen=True, eq=False)
class Pieces:
    """Parts of stored chunks and their destinations.

    Row i copies the box at ``storage_offsets`` with extent ``lengths`` of chunk ``chunks[i]`` (an index
    row) to ``dest_offsets`` of local tensor ``dests[i]``, for the wanted box ``boxes[i]``. Boxes are
    ragged, sliced by ``box_start``.
    """

    chunks: Int64
    boxes: Int64
    dests: Int64
    box_start: Int64
    storage_offsets: Int64
    dest_offsets: Int64
    lengths: Int64


@dataclass(frozen=True, eq=False)
class ByteRuns:
    """Contiguous pieces: ``size_bytes`` from ``payload_positions`` of a chunk's payload to ``addresses``."""

    chunks: Int64
    payload_positions: Int64
    sizes_bytes: Int64
    addresses: Int64

    @classmethod
    def joined(cls, several: Sequence[ByteRuns]) -> ByteRuns:
        """Return the concatenation of ``several`` (at least one)."""
        if len(several) == 1:
            return several[0]
        columns = zip(
            *((r.chunks, r.payload_positions, r.sizes_bytes, r.addresses) for r in several), strict=True
        )
        return cls(*map(np.concatenate, columns))

    @classmethod
    def none(cls) -> ByteRuns:
        """Return empty runs."""
        return cls(*np.zeros((4, 0), np.int64))


class Elements(NamedTuple):
    """Regularly spaced elements of chunk ``chunk``: a box, or the part of a reshaped box.

    ``lengths`` are by axis, slowest in the payload first. The first element is at byte ``begin`` of the
    payload; ``strides`` are in bytes, descending.
    """

    chunk: int
    begin: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]


PutBox: TypeAlias = Callable[[tuple[int, ...], "npt.NDArray[Any]"], None]
"""Callback for a part of elements: the offsets by axis, and an array of unsigned integers (complex128 for
16 bytes), unaligned and strided, in memory that is reused afterwards. Called from any thread, once per
part.
"""


class BoxRequest(NamedTuple):
    """``elements`` delivered in parts."""

    elements: Elements
    put: PutBox


def put_at(address: int, itemsize: int, strides: Sequence[int]) -> PutBox:
    """Return a callback that stores elements at ``address``; ``strides`` in bytes by axis."""
    steps = tuple(strides)

    def put(offsets: tuple[int, ...], elements: npt.NDArray[np.generic]) -> None:
        first = address + sum(i * step for i, step in zip(offsets, steps, strict=True))
        np.copyto(array_at(first, itemsize, elements.shape, steps), elements)

    return put


@dataclass
class ReadStats:
    """Statistics of a read: bytes requested, bytes fetched, blocks checked and unchecked, and conversion
    losses by tensor.
    """

    bytes_needed: int = 0
    bytes_read: int = 0
    blocks_verified: int = 0
    blocks_unverified: int = 0
    lossy: dict[str, str] = field(default_factory=dict)

    def add(self, other: ReadStats) -> None:
        """Add the statistics of another thread."""
        self.bytes_needed += other.bytes_needed
        self.bytes_read += other.bytes_read
        self.blocks_verified += other.blocks_verified
        self.blocks_unverified += other.blocks_unverified
        self.lossy |= other.lossy


NO_CHUNK = -1
"""Chunk number of bytes without a chunk or checksum."""

COPIED_BELOW_BYTES = 64 << 10
"""Minimum size of pieces read into their destination. Smaller pieces are copied, which limits the buffers
per call.
"""

CHEAP_GAP_BYTES = 16 << 10
_CHEAP_JUNK_BYTES = 1 << 20
"""Maximum gap to read over, such as headers between small tensors, cheaper than another request."""

_JUNK_BYTES = 64 << 10
_JUNK_SHARE = 32
"""Maximum size of larger gaps as a share of the wanted bytes."""

_SLACK_SHARE = 8
"""Share of a request left free to end at a block."""

_LEAST_CUT_BYTES = 256 << 10
"""Minimum size of a divided piece."""

Put = Callable[[memoryview], None]
"""Callback that copies a piece out of scratch memory."""

_ALIKE_FROM = 8
"""Minimum number of equal small runs copied together."""


# -- neighbours ----------------------------------------------------------------------------------------------


class FileRange(Protocol):
    """Range of bytes of a file."""

    @property
    def file(self) -> int:
        """File number."""

    @property
    def offset(self) -> int:
        """Start of the range."""

    @property
    def size_bytes(self) -> int:
        """Length of the range."""


R = TypeVar("R", bound=FileRange)


def coalesce(
    ranges: Iterable[R], *, gap_bytes: int, limit_bytes: int, join_below_bytes: int | None = None
) -> Iterator[list[R]]:
    """Yield groups of ``ranges``, sorted by file, to read together.

    Gaps in a group are at most ``gap_bytes``; a group spans at most ``limit_bytes`` unless it has a single
    range. Ranges that overlap the previous range start a new group; ranges above ``join_below_bytes`` stay
    alone.
    """
    group: list[R] = []
    file = begin = end = 0
    is_closed = True
    for range_ in ranges:
        offset, size_bytes = range_.offset, range_.size_bytes
        is_large = join_below_bytes is not None and size_bytes > join_below_bytes
        joins = not is_closed and not is_large and range_.file == file and 0 <= offset - end <= gap_bytes
        if not joins or offset + size_bytes - begin > limit_bytes:
            if group:
                yield group
            group, file, begin = [], range_.file, offset
        group.append(range_)
        end = offset + size_bytes
        is_closed = is_large
    if group:
        yield group


def coalesce_columns(
    files: Int64,
    offsets: Int64,
    ends: Int64,
    may_join: npt.NDArray[np.bool_],
    *,
    gap_bytes: int,
    limit_bytes: int,
) -> Int64:
    """Return the first rows of groups, like `coalesce` for the ranges with ``may_join``. Overlapping ranges
    stay alone.
    """
    if not len(offsets):
        return np.zeros(0, np.int64)
    gaps = offsets[1:] - ends[:-1]
    same_file = files[1:] == files[:-1]
    usable = may_join.copy()
    shares = same_file & (gaps < 0)
    usable[1:] &= ~shares
    usable[:-1] &= ~shares
    is_first = np.ones(len(offsets), np.bool_)
    is_first[1:] = ~(usable[1:] & usable[:-1] & same_file & (gaps <= gap_bytes))
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(offsets))
    long = np.flatnonzero(ends[last - 1] - offsets[first] > limit_bytes)
    cuts: list[int] = []
    for row, behind in zip(first[long].tolist(), last[long].tolist(), strict=True):
        group_ends, at = ends[row:behind].data, 0
        while (at := max(at + 1, bisect_right(group_ends, int(offsets[row + at]) + limit_bytes, at))) < len(
            group_ends
        ):
            cuts.append(row + at)
    is_first[cuts] = True
    return np.flatnonzero(is_first)


def span_bytes(group: Sequence[FileRange]) -> int:
    """Return the bytes from the start of a group to the end of its last range."""
    return group[-1].offset + group[-1].size_bytes - group[0].offset


# -- clusters ------------------------------------------------------------------------------------------------


class PlacedRuns(NamedTuple):
    """Runs sorted by file, with the columns of a `RequestPiece`."""

    files: Int64
    offsets: Int64
    sizes_bytes: Int64
    chunks: Int64
    positions: Int64
    addresses: Int64

    @classmethod
    def of(cls, runs: ByteRuns, chunk_files: Int64, payload_offsets: Int64) -> PlacedRuns:
        """Return runs of resolved chunks, without empty runs."""
        chunks, positions, sizes = runs.chunks, runs.payload_positions, runs.sizes_bytes
        placed = cls(
            chunk_files[chunks], payload_offsets[chunks] + positions, sizes, chunks, positions, runs.addresses
        )
        order = np.lexsort((sizes, placed.offsets, placed.files))
        return placed.take(order[sizes[order] > 0])

    def take(self, rows: npt.NDArray[np.generic] | slice) -> PlacedRuns:
        """Return the rows at ``rows``."""
        return PlacedRuns(*map(itemgetter(rows), self))


@dataclass(frozen=True, eq=False)
class Cluster:
    """Runs within bytes ``begin`` to ``end`` of a file, each in a single block of its payload."""

    file: int
    begin: int
    end: int
    members: PlacedRuns

    def copy_out(self, address: int, data: memoryview | None = None) -> npt.NDArray[np.uint32]:
        """Copy the runs out of the cluster at ``address``; return CRC-32s of the runs in ``data``."""
        _, offsets, sizes, _, _, targets = self.members
        begins = offsets - self.begin
        crcs = np.zeros(len(begins), np.uint32)
        one_by_one = np.ones(len(begins), np.bool_)
        for size in np.unique(sizes[sizes <= GATHERED_BYTES]).tolist():
            alike = np.flatnonzero(sizes == size)
            if len(alike) < _ALIKE_FROM:
                continue
            rows = gather_small(address + begins[alike], size)
            if data is not None:
                crcs[alike] = crc32_rows(rows)
            scatter_small(targets[alike], rows)
            one_by_one[alike] = False
        left = np.flatnonzero(one_by_one)
        columns = map(np.ndarray.tolist, (left, begins[left], sizes[left], targets[left]))
        for row, begin, size, target in zip(*columns, strict=True):
            if data is not None:
                crcs[row] = crc32(data[begin : begin + size])
            copy_small(target, address + begin, size)
        return crcs


def split_off_clusters(
    placed: PlacedRuns, is_small: npt.NDArray[np.bool_], *, gap_bytes: int, limit_bytes: int
) -> tuple[list[Cluster], PlacedRuns]:
    """Return (clusters of at most ``limit_bytes``, other runs).

    Clusters contain runs of ``is_small`` within one block, with gaps up to ``gap_bytes``. Overlapping runs
    stay alone.
    """
    files, offsets, sizes, _, positions, _ = placed
    ends = offsets + sizes
    usable = is_small & (positions // BLOCK_BYTES == (positions + sizes - 1) // BLOCK_BYTES)
    first = coalesce_columns(files, offsets, ends, usable, gap_bytes=gap_bytes, limit_bytes=limit_bytes)
    counts = np.diff(np.append(first, len(offsets)))
    several = counts > 1
    clusters = []
    for begin, count in zip(first[several].tolist(), counts[several].tolist(), strict=True):
        members = placed.take(slice(begin, begin + count))
        end = int(ends[begin + count - 1])
        clusters.append(Cluster(int(members.files[0]), int(members.offsets[0]), end, members))
    return clusters, placed.take(~np.repeat(several, counts))


# -- requests ------------------------------------------------------------------------------------------------


class RequestPiece(NamedTuple):
    """``size_bytes`` of a file from ``position`` of a chunk's payload.

    Destination is ``address`` or the callback ``put``; pieces with ``put`` are not divided. A cluster has
    bytes of many chunks and checks them.
    """

    file: int
    offset: int
    size_bytes: int
    chunk: int
    position: int
    address: int
    put: Put | Cluster | None


class Copy(NamedTuple):
    """Bytes wanted twice, copied from their first destination."""

    source: int
    target: int
    size_bytes: int


@dataclass(slots=True)
class JoinedRequest:
    """Bytes ``begin`` to ``end`` of a file, in a single read.

    ``direct`` pieces are read into their destination; the rest goes to scratch memory, from which
    ``copied`` pieces are copied. Both are in file order.
    """

    file: int
    begin: int
    end: int
    direct: list[RequestPiece] = field(default_factory=list)
    copied: list[RequestPiece] = field(default_factory=list)


def join(
    pieces: Iterable[RequestPiece], profile: ReadProfile, request_bytes: int
) -> tuple[list[JoinedRequest], list[Copy]]:
    """Return requests of up to ``request_bytes`` for ``pieces``, sorted by file and offset.

    Parts of boxes and overlapping pieces are joined up to ``join_below_bytes``, because such a request may
    need scratch memory as a whole. Only an indivisible piece may exceed the limit. Pieces are divided at
    block ends if the request stays nearly full; otherwise the checksum of a block is combined from two
    parts.
    """
    joiner = _RequestJoiner(profile, request_bytes)
    for piece in pieces:
        joiner.add(piece)
    return joiner.requests, joiner.copies


class _RequestJoiner:
    """Builder of requests, one at a time."""

    def __init__(self, profile: ReadProfile, limit_bytes: int) -> None:
        self.requests: list[JoinedRequest] = []
        self.copies: list[Copy] = []
        self._profile = profile
        self._limit_bytes = limit_bytes
        self._last: RequestPiece | None = None
        self._open: JoinedRequest | None = None
        self._copied_from = 0
        """File position of the start of the trailing scratch memory of the open request."""
        self._wanted_bytes = self._junk_bytes = 0
        self._overlaps = False

    def add(self, piece: RequestPiece) -> None:
        """Add a piece, in file order."""
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
                self._append(rest._replace(size_bytes=cut))
                rest = rest._replace(
                    offset=rest.offset + cut,
                    size_bytes=rest.size_bytes - cut,
                    position=rest.position + cut,
                    address=rest.address + cut,
                )
                self._open = None
            elif rest.size_bytes > room and self._open is not None:
                self._open = None
            else:
                self._append(rest)
                return

    def _room(self, piece: RequestPiece) -> int:
        """Return the number of bytes of ``piece`` that fit into the open request or a new one."""
        request, profile, limit_bytes = self._open, self._profile, self._limit_bytes
        if request is None:
            return limit_bytes
        if piece.file != request.file:
            return 0
        gap = piece.offset - request.end
        if gap < 0 or self._overlaps or not (piece.put is None or isinstance(piece.put, Cluster)):
            limit_bytes = min(limit_bytes, max(profile.join_below_bytes, BLOCK_BYTES))
        if gap < 0:  # also wanted by another piece, and needed in scratch memory
            return (
                max(0, limit_bytes - (piece.offset - request.begin))
                if piece.offset >= self._copied_from
                else 0
            )
        junk = self._junk_bytes + gap
        if gap > profile.gap_bytes or junk > self._bearable_bytes(gap, piece.size_bytes):
            return 0
        return max(0, limit_bytes - (piece.offset - request.begin))

    def _cut(self, piece: RequestPiece, room: int) -> int:
        """Return the number of bytes of ``piece`` to put into ``room``; 0 for none."""
        if piece.put is not None or (room < _LEAST_CUT_BYTES and self._open is not None):
            return 0
        aligned = (piece.position + room) // BLOCK_BYTES * BLOCK_BYTES - piece.position
        if not self._profile.scatter and self._open is not None:  # requests are cheap: blocks stay whole
            return max(aligned, 0)
        return aligned if aligned > 0 and room - aligned <= self._limit_bytes // _SLACK_SHARE else room

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
