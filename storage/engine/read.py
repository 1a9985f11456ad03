"""Read engine: sort, join and distribute ranges of a checkpoint among threads, and verify checksums.

A *run* is contiguous in file and memory: large runs are read into their destination, small neighbors are
read together and copied. A *box* has regularly spaced elements of a chunk, scattered in file or memory or
in need of conversion: boxes go through scratch memory. Torch-free: destinations are addresses or functions.
"""

from __future__ import annotations

import ctypes
import heapq
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter, itemgetter
from typing import get_args

import numpy as np
import numpy.typing as npt

from dcp.storage.engine.memory import ScratchBuffers, item_dtype, item_view, view
from dcp.storage.engine.requests import (
    CHEAP_GAP_BYTES,
    COPIED_BELOW_BYTES,
    NO_CHUNK,
    BoxRequest,
    ByteRuns,
    Cluster,
    Copy,
    Elements,
    JoinedRequest,
    PlacedRuns,
    PutBox,
    ReadStats,
    RequestPiece,
    Verify,
    join,
    split_off_clusters,
)
from dcp.storage.engine.source import Fragment, Fragments, OpenFiles, Payloads, within_blocks
from dcp.storage.errors import CorruptCheckpointError, OptionError
from dcp.storage.formats.checksums import BLOCK_BYTES, crc32
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.geometry.strides import BoxPart, Int64, box_parts, reaches
from dcp.storage.stores.base import Closable, ReadHandle, Store
from dcp.storage.threads import work_off

_STEP_BYTES = 2 << 20
"""Bytes received between hash updates, and unneeded bytes received at a time."""

SCRATCH = ScratchBuffers(4 * BLOCK_BYTES)
"""Scratch buffers of all reading threads of the process."""


class _Worker:
    """Reading thread with reused scratch memory and statistics."""

    def __init__(self, engine: ReadEngine) -> None:
        self.engine = engine
        self.stats = ReadStats()
        self._scratch = memoryview(b"")

    def room(self, size_bytes: int) -> tuple[memoryview, int]:
        """Return scratch memory of ``size_bytes`` and its address, with undefined content."""
        if size_bytes > len(self._scratch):
            self.engine.scratch.put(self._scratch)
            self._scratch = self.engine.scratch.get(size_bytes)
        return self._scratch[:size_bytes], ctypes.addressof(ctypes.c_char.from_buffer(self._scratch))

    def work_off(self, requests: Iterator[JoinedRequest], on_bytes: Callable[[int], None] | None) -> None:
        """Read, check and copy the ``requests``."""
        try:
            for request in requests:
                handle, streaming = self.engine.handle(request.file), _StreamingRead(request, self)
                fetched_bytes = streaming.size_bytes
                if not streaming.follows:
                    streaming.read_whole(handle)
                elif self.engine.profile.scatter:
                    handle.receive(streaming, request.begin)
                else:
                    fetched_bytes = streaming.read_pieces(handle)
                self.stats.bytes_read += fetched_bytes
                streaming.check()
                if on_bytes is not None:
                    on_bytes(streaming.size_bytes)
        finally:
            self.engine.scratch.put(self._scratch)


class _StreamingRead:
    """`Inflow` of a request: large pieces go to their destination, others through scratch memory.

    Checksums are compared only in `check`, because bytes of failed attempts do not count.
    """

    def __init__(self, request: JoinedRequest, worker: _Worker) -> None:
        self.size_bytes = request.end - request.begin
        self._request = request
        self._worker = worker
        self._verify = worker.engine.verify != "none"
        self._pieces = request.direct
        self._direct = set(map(id, request.direct))
        self._copied_bytes = 0
        self.follows = True
        """True if no pieces overlap; each piece is complete on arrival."""
        if request.copied:
            self._pieces = [*heapq.merge(request.direct, request.copied, key=attrgetter("offset"))]
            self._copied_bytes = max(piece.size_bytes for piece in request.copied)
            self.follows = all(a.offset + a.size_bytes <= b.offset for a, b in pairwise(self._pieces))
        self._parts: list[tuple[int, int, int, int]] = []
        self._clusters: list[tuple[PlacedRuns, npt.NDArray[np.uint32]]] = []

    def buffers(self) -> Iterator[memoryview]:
        """Yield memory for one attempt."""
        self._parts, self._clusters = [], []
        position = self._request.begin
        for piece in self._pieces:
            while position < piece.offset:
                step = min(piece.offset - position, _STEP_BYTES)
                yield self._worker.room(step)[0]
                position += step
            yield from self._received(piece)
            position = piece.offset + piece.size_bytes

    def read_pieces(self, handle: ReadHandle) -> int:
        """Read only the pieces, without gaps, for stores with cheap requests; return the number of bytes."""
        fetched_bytes = 0
        for piece in self._pieces:
            offset = piece.offset
            for memory in self._received(piece):
                handle.preadv([memory], offset)
                offset += len(memory)
            fetched_bytes += piece.size_bytes
        return fetched_bytes

    def read_whole(self, handle: ReadHandle) -> None:
        """Read the whole request before copying."""
        data, address = self._worker.room(self.size_bytes)
        handle.preadv([data], self._request.begin)
        for piece in self._pieces:
            at = piece.offset - self._request.begin
            own = data[at : at + piece.size_bytes]
            for _ in self._filled(piece, own):
                pass
            self._hand_out(piece, own, address + at)

    def check(self) -> None:
        """Compare the checksums of the received bytes. Raises CorruptCheckpointError."""
        engine, stats = self._worker.engine, self._worker.stats
        for part in self._parts:
            engine.check_part(stats, *part)
        if self._clusters:  # processed together, because there may be hundreds
            runs, crcs = zip(*self._clusters, strict=True)
            joined = PlacedRuns(*map(np.concatenate, zip(*runs, strict=True)))
            engine.check_runs(stats, joined, np.concatenate(crcs))

    def _received(self, piece: RequestPiece) -> Iterator[memoryview]:
        """Yield the memory of a piece in steps, and copy pieces out of scratch memory."""
        if id(piece) in self._direct:
            yield from self._filled(piece, view(piece.address, piece.size_bytes))
            return
        room, address = self._worker.room(self._copied_bytes)
        data = room[: piece.size_bytes]
        yield from self._filled(piece, data)
        self._hand_out(piece, data, address)

    def _filled(self, piece: RequestPiece, memory: memoryview) -> Iterator[memoryview]:
        """Yield the memory of a piece in steps, hashed on arrival."""
        if not self._verify or piece.chunk == NO_CHUNK:
            yield memory
            return
        for begin, end in within_blocks(len(memory), piece.position):
            crc = 0
            for at in range(begin, end, _STEP_BYTES):
                step = memory[at : min(at + _STEP_BYTES, end)]
                yield step
                crc = crc32(step, crc)
            self._parts.append((piece.chunk, piece.position + begin, end - begin, crc))

    def _hand_out(self, piece: RequestPiece, data: memoryview, address: int) -> None:
        put = piece.put
        if isinstance(put, Cluster):
            crcs = put.copy_out(address, data if self._verify else None)
            if self._verify:
                self._clusters.append((put.members, crcs))
        elif put is None:
            ctypes.memmove(piece.address, address, piece.size_bytes)
        else:
            put(data)


_MAX_FRAGMENTS = 64
"""Maximum number of pieces of a block for combining checksums."""

_THREAD_BYTES = 1 << 20
"""Minimum bytes per additional thread, for stores with cheap requests."""

_LEAST_REQUEST_BYTES = 4 << 20

_CLUSTERS_PER_REQUEST = 8
"""Clusters per request; clusters are not divided."""

_SPARSE_GAP_BYTES = 512 << 10
"""Minimum gap between rows of a box on a disk for separate reads."""


class ReadEngine(Closable):
    """Reader of a checkpoint with checksum policy ``verify``, for any thread. Use as a context manager:
    files stay open until the end.
    """

    def __init__(
        self, store: Store, index: CheckpointIndex, *, verify: Verify = "blocks", threads: int = 2
    ) -> None:
        if verify not in get_args(Verify):
            raise OptionError(f"verify must be one of {', '.join(get_args(Verify))}, not {verify!r}")
        self.store = store
        self.index = index
        self.verify = verify
        self.profile = store.read_profile
        self.joins = self.profile.scatter
        """True if requests are expensive and neighbors should be joined."""
        self.threads = max(1, threads)
        self.stats = ReadStats()
        self.on_bytes: Callable[[int], None] | None = None
        self.scratch = SCRATCH
        self._lock = threading.Lock()
        # Views, not lists: an index may have millions of chunks, of which this rank needs a thousand.
        self.payload_lengths = item_view(index.payload_lengths)
        self._itemsizes = item_view(index.itemsizes)
        self._chunk_tensors = item_view(index.chunk_tensors)
        self._crc_start = item_view(index.crc_start)
        self._crcs = item_view(index.crcs)
        self._fragments = Fragments(limit=_MAX_FRAGMENTS)
        self._files = OpenFiles(
            store, dict(enumerate(zip(index.files, index.file_sizes.tolist(), strict=True)))
        )
        self.handle = self._files.handle
        self.payloads = Payloads(index, self.handle, self._fetch if self.joins else None)

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def check_files(self, files: Iterable[int]) -> None:
        """Raise CorruptCheckpointError unless all files exist with their committed sizes."""

        def check_some(some: Iterator[int]) -> None:
            for file in some:
                self._files.check(file)

        work_off(files, self.threads if self.joins else 1, check_some, "dcp-read")

    def resolve(self, chunks: Sequence[int] | Int64) -> None:
        """Locate the payloads of ``chunks`` that the index does not locate."""
        rows = np.asarray(chunks, np.int64)
        with self._files.missing_is_damage():
            if self.joins:
                self._open_all(np.unique(self.index.chunk_files[rows]))
            self.payloads.resolve(rows)

    def run(self, runs: ByteRuns, boxes: Sequence[BoxRequest] = ()) -> ReadStats:
        """Execute all reads; raise the first failure after the other threads have stopped.

        No memory is written after the return. The chunks of ``boxes`` must be resolved.
        """
        with self._files.missing_is_damage():
            self.resolve(runs.chunks)
            needed = int(runs.sizes_bytes.sum())
            for elements, _ in boxes:
                needed += math.prod(elements.lengths) * self.itemsize(elements.chunk)
            self.stats.bytes_needed += needed
            requests, copies = _requests_for(self, runs, boxes, needed, self.threads)
            self._carry_out(requests, self.on_bytes)
        for copy in copies:
            ctypes.memmove(copy.target, copy.source, copy.size_bytes)
        if self.verify != "none":
            uncompared = self.payloads.verify_whole()
            self.stats.blocks_verified -= uncompared
            self.stats.blocks_unverified += uncompared + self._fragments.end()
        return self.stats

    def read_blobs(self, places: Sequence[tuple[int, int, int]]) -> list[bytes]:
        """Return the stored bytes of objects at (file, offset, length); neighbors are read together."""
        with self._files.missing_is_damage():
            for file, offset, length in places:
                handle = self.handle(file)
                if offset + length > handle.size_bytes:  # before memory is allocated
                    raise CorruptCheckpointError(
                        f"{self.store.url}: an object ends at byte {offset + length} of {handle.name}, but "
                        f"the file has {handle.size_bytes}: it was truncated, or the metadata is damaged",
                        path=f"{self.store.url}/{handle.name}",
                    )
            found = {place: np.empty(place[2], np.uint8) for place in places}
            self._fetch(
                [RequestPiece(*place, NO_CHUNK, 0, found[place].ctypes.data, None) for place in sorted(found)]
            )
        return [found[place].tobytes() for place in places]

    def read_blob(self, file: int, offset: int, length: int) -> bytes:
        """Return an object's stored bytes."""
        return self.read_blobs([(file, offset, length)])[0]

    def locate(self, chunk: int) -> tuple[ReadHandle, int]:
        """Return the file of a chunk and the absolute offset of its payload."""
        return self.handle(int(self.index.chunk_files[chunk])), self.payloads.offset(chunk)

    def elements(
        self, chunk: int, offsets: Sequence[int], lengths: Sequence[int]
    ) -> tuple[Elements, tuple[int, ...]]:
        """Return the elements of a box of a resolved chunk, and the box dimensions in the order of these
        axes.
        """
        order, steps = self.payloads.layout(chunk)
        begin = sum(offsets[d] * step for d, step in zip(order, steps, strict=True))
        return Elements(chunk, begin, tuple(lengths[d] for d in order), steps), order

    def itemsize(self, chunk: int) -> int:
        """Return the bytes per element of a chunk."""
        return self._itemsizes[self._chunk_tensors[chunk]]

    def check_block(self, stats: ReadStats, chunk: int, block: int, crc: int) -> None:
        """Compare the checksum of a block, or keep it for the checksum of the payload."""
        start = self._crc_start[chunk]
        if start == self._crc_start[chunk + 1]:
            if self.payloads.note_block(chunk, block, crc):
                stats.blocks_verified += 1
            else:
                stats.blocks_unverified += 1
            return
        stats.blocks_verified += 1
        if self._crcs[start + block] != crc:
            raise self.corruption(chunk, block, self._crcs[start + block], crc)

    def check_runs(self, stats: ReadStats, runs: PlacedRuns, got: npt.NDArray[np.uint32]) -> None:
        """Check the checksums of ``runs`` within single blocks: compare whole payloads, pass others to
        `check_part`.
        """
        index, (_, _, sizes, chunks, positions, _) = self.index, runs
        first = index.crc_start[chunks]
        is_whole = (sizes == index.payload_lengths[chunks]) & (index.crc_start[chunks + 1] > first)
        expected = got.copy()
        expected[is_whole] = index.crcs[first[is_whole]]
        for row in np.flatnonzero(expected != got).tolist():
            raise self.corruption(int(chunks[row]), 0, int(expected[row]), int(got[row]))
        stats.blocks_verified += int(np.count_nonzero(is_whole))
        parts = (column[~is_whole].tolist() for column in (chunks, positions, sizes, got))
        for part in zip(*parts, strict=True):
            self.check_part(stats, *part)

    def check_part(self, stats: ReadStats, chunk: int, position: int, size: int, crc: int) -> None:
        """Take the checksum of a part of a block, and compare or combine it."""
        fragment = Fragment(chunk, position, position + size, crc)
        whole = self._fragments.add(fragment, self.payload_lengths[chunk])
        if whole is not None:
            self.check_block(stats, chunk, position // BLOCK_BYTES, whole)

    def corruption(self, chunk: int, block: int, expected: int, got: int) -> CorruptCheckpointError:
        """Return the error for wrong bytes."""
        fqn = self.index.own_name(int(self.index.chunk_tensors[chunk]))
        name = self.index.files[int(self.index.chunk_files[chunk])]
        offset = self.payloads.offset(chunk) + block * BLOCK_BYTES
        path = self.store.path_of(name)  # a store of several sources renames files
        where, _, file = path.rpartition("/")
        return CorruptCheckpointError(
            f"{where}: tensor {fqn!r} is damaged: block {block} at byte {offset} of {file} has "
            f"CRC-32 {got:08x}, expected {expected:08x}. Resume from another checkpoint",
            alternative="load the bytes as they are",
            argument="verify='none'",
            path=path,
            fqn=fqn,
            offset=offset,
        )

    def _fetch(self, pieces: Sequence[RequestPiece]) -> None:
        """Read sorted, distinct ``pieces``."""
        requests, _ = join(pieces, self.profile, self.profile.request_bytes)
        self._carry_out(requests, None)

    def _open_all(self, files: Int64) -> None:
        """Open ``files`` in parallel if opening needs a request, because the index has no size."""
        unsized = files[self.index.file_sizes[files] == UNKNOWN]
        unknown = [file for file in unsized.tolist() if file not in self._files]

        def open_some(files: Iterator[int]) -> None:
            for file in files:
                self.handle(file)

        work_off(unknown, min(self.threads, len(unknown)), open_some, "dcp-read")

    def _carry_out(self, requests: Sequence[JoinedRequest], on_bytes: Callable[[int], None] | None) -> None:
        threads = min(self.threads, len(requests))
        if not self.joins and threads > 1:
            threads = min(threads, 1 + sum(each.end - each.begin for each in requests) // _THREAD_BYTES)

        def work(requests: Iterator[JoinedRequest]) -> None:
            worker = _Worker(self)
            try:
                worker.work_off(requests, on_bytes)
            finally:
                with self._lock:
                    self.stats.add(worker.stats)

        work_off(requests, threads, work, "dcp-read")


# -- requests ------------------------------------------------------------------------------------------------


def _requests_for(
    engine: ReadEngine, runs: ByteRuns, boxes: Iterable[BoxRequest], needed_bytes: int, threads: int
) -> tuple[list[JoinedRequest], list[Copy]]:
    """Return the requests for ``runs`` and ``boxes``, small enough to occupy all threads."""
    profile = engine.profile
    share = -(-needed_bytes // threads)
    request_bytes = min(profile.request_bytes, max(_LEAST_REQUEST_BYTES, share))
    # nearly a block at least, to avoid combining checksums of many parts
    copied_bytes = min(request_bytes, max(_LEAST_REQUEST_BYTES, profile.join_below_bytes))
    # small runs are copied in any case: join neighbors to one request
    placed = PlacedRuns.of(runs, engine.index.chunk_files, engine.payloads.offsets)
    is_small = placed.sizes_bytes < min(COPIED_BELOW_BYTES, profile.join_below_bytes)
    if engine.verify == "full":
        is_small &= placed.sizes_bytes == engine.index.payload_lengths[placed.chunks]
    clusters, others = split_off_clusters(
        placed,
        is_small,
        gap_bytes=min(CHEAP_GAP_BYTES, profile.gap_bytes),
        limit_bytes=copied_bytes // _CLUSTERS_PER_REQUEST if profile.scatter else copied_bytes,
    )
    pieces = [
        RequestPiece(each.file, each.begin, each.end - each.begin, NO_CHUNK, 0, 0, each) for each in clusters
    ]
    for place in zip(*map(np.ndarray.tolist, others), strict=True):
        piece = RequestPiece._make((*place, None))
        if engine.verify == "full":
            pieces += _with_whole_blocks(piece, engine.payload_lengths[piece.chunk])
        else:
            pieces.append(piece)
    # on a disk, up to the size of scratch memory, to split fewer blocks
    box_bytes = copied_bytes if profile.scatter else 2 * BLOCK_BYTES
    for box in boxes:
        pieces += _box_pieces(engine, box, box_bytes)
    pieces.sort(key=itemgetter(0, 1, 2))
    return join(pieces, profile, request_bytes)


def _with_whole_blocks(piece: RequestPiece, payload_bytes: int) -> Iterator[RequestPiece]:
    """Yield ``piece`` and the rest of partly covered blocks."""
    if piece.size_bytes == payload_bytes:
        yield piece
        return
    origin = piece.offset - piece.position
    begin, end = piece.position, piece.position + piece.size_bytes
    while begin < end:
        block = begin // BLOCK_BYTES * BLOCK_BYTES
        block_end = min(block + BLOCK_BYTES, payload_bytes)
        address = piece.address + begin - piece.position
        if begin == block and end >= block_end:
            stop = end if end == payload_bytes else end // BLOCK_BYTES * BLOCK_BYTES
            yield RequestPiece(piece.file, origin + begin, stop - begin, piece.chunk, begin, address, None)
        else:
            stop = min(end, block_end)
            put = partial(_put_part, address, begin - block, stop - block)
            yield RequestPiece(piece.file, origin + block, block_end - block, piece.chunk, block, 0, put)
        begin = stop


def _put_part(address: int, begin: int, end: int, data: memoryview) -> None:
    view(address, end - begin)[:] = data[begin:end]


def _box_pieces(engine: ReadEngine, box: BoxRequest, limit_bytes: int) -> Iterator[RequestPiece]:
    chunk, begin, lengths, strides = box.elements
    gap_bytes = engine.profile.gap_bytes if engine.profile.scatter else _SPARSE_GAP_BYTES
    itemsize = engine.itemsize(chunk)
    parts = [*box_parts(begin, lengths, strides, itemsize, limit_bytes=limit_bytes, gap_bytes=gap_bytes)]
    file, origin = int(engine.index.chunk_files[chunk]), engine.payloads.offset(chunk)
    overlap = any(after.begin < part.end for part, after in pairwise(parts))
    if engine.verify == "none" or overlap:
        reached: Iterable[tuple[int, int]] = ((part.begin, part.end) for part in parts)
    else:
        payload_bytes = engine.payload_lengths[chunk]
        reached = reaches(parts, payload_bytes, gap_bytes=gap_bytes, whole_blocks=engine.verify == "full")
    dtype = item_dtype(itemsize)
    for part, (first, end) in zip(parts, reached, strict=True):
        take = partial(_put_elements, box.put, part, dtype, part.begin - first, strides)
        yield RequestPiece(file, origin + first, end - first, chunk, first, 0, take)


def _put_elements(
    put: PutBox,
    part: BoxPart,
    dtype: np.dtype[np.generic],
    at: int,
    strides: tuple[int, ...],
    data: memoryview,
) -> None:
    put(part.offsets, np.ndarray(part.lengths, dtype, data, at, strides))
