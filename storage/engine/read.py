"""Reading ranges of a checkpoint into memory: sorted, coalesced, split for threads, verified on the way.

Two kinds of work. A *run* is contiguous in the file and in memory: large ones are read straight into their
destination, small neighbours are read together and handed out. A *region* is a box of a chunk whose rows
lie apart in the file or in memory: the blocks it spans are read once into scratch, checked whole, and the
wanted stride is copied out. Torch-free: destinations are addresses.

Where a request is dear (`ReadProfile.scatter`) all of it is joined into large requests instead, see
`dcp.storage.engine.scatter`.
"""

from __future__ import annotations

import ctypes
import math
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import get_args

import numpy as np

from dcp.storage.engine import scatter
from dcp.storage.engine.fragments import Fragments
from dcp.storage.engine.joining import NO_CHUNK, Copy, Piece, join
from dcp.storage.engine.memory import item_view
from dcp.storage.engine.payloads import Payloads
from dcp.storage.engine.read_requests import Box, ReadStats, Region, Runs, Verify
from dcp.storage.engine.read_worker import MAX_SPAN_BYTES, Worker
from dcp.storage.errors import CheckpointNotFoundError, CorruptCheckpointError, PlanError
from dcp.storage.formats.checksums import BLOCK_BYTES
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, Int64
from dcp.storage.stores.base import ReadHandle, Store

__all__ = ["ReadEngine", "Unit"]

_UNIT_BYTES = 16 << 20

Unit = Callable[[Worker], None]


class ReadEngine:
    """Reads from one checkpoint. Use as a context manager: files stay open, as many as the process can
    afford, and are closed at the end."""

    def __init__(
        self, store: Store, index: CheckpointIndex, *, verify: Verify = "blocks", threads: int = 2
    ) -> None:
        self.store = store
        self.index = index
        if verify not in get_args(Verify):
            raise PlanError(f"verify must be one of {', '.join(get_args(Verify))}, not {verify!r}")
        self.verify = verify
        self.threads = max(1, threads)
        self.profile = store.read_profile
        self.joins = self.profile.scatter
        self.stats = ReadStats()
        self.on_bytes: Callable[[int], None] | None = None
        # Views, not lists: an index may have millions of chunks, of which this rank needs a thousand.
        self.payload_lengths = item_view(index.payload_lengths)
        self.payloads = Payloads(index, self.handle, self._fetch if self.joins else None)
        self._itemsizes = item_view(index.itemsizes)
        self._chunk_tensors = item_view(index.chunk_tensors)
        self._crc_start = item_view(index.crc_start)
        self._crcs = item_view(index.crcs)
        self._fragments = Fragments()
        self._handles: dict[int, ReadHandle] = {}
        self._gates: dict[int, threading.Lock] = {}
        self._max_handles = _max_open_files()
        self._lock = threading.Lock()

    def __enter__(self) -> ReadEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    def resolve(self, chunks: Sequence[int] | Int64) -> None:
        """Find the payloads of ``chunks`` where the index does not say where they are."""
        rows = np.asarray(chunks, np.int64)
        with self._missing_is_damage():
            if self.joins:
                self._open_all(np.unique(self.index.chunk_files[rows]))
            self.payloads.resolve(rows)

    def run(
        self, runs: Runs, regions: Sequence[Region], extra: Sequence[Unit] = (), boxes: Sequence[Box] = ()
    ) -> ReadStats:
        """Carry out all of it; raises the first failure after the other threads have stopped.

        No memory is written to any more when it returns or raises. ``extra`` are reads on terms of their own;
        ``boxes`` need a store whose profile scatters.
        """
        if boxes and not self.joins:
            raise PlanError(f"{self.store.url} is read by units, not by boxes")
        wanted: list[Region | Box] = [*regions, *boxes]
        with self._missing_is_damage():
            boxed = np.array([box.chunk for box in wanted], np.int64)
            self.resolve(np.concatenate([runs.chunks, boxed]))
            needed = int(runs.sizes_bytes.sum())
            needed += sum(math.prod(box.lengths) * self.itemsize(box.chunk) for box in wanted)
            self.stats.bytes_needed += needed
            copies: list[Copy] = []
            if self.joins:
                all_boxes = [*(scatter.box_of(self, region) for region in regions), *boxes]
                requests, copies = scatter.plan(self, runs, all_boxes, needed)
                units: list[Unit] = [partial(scatter.carry_out, request) for request in requests]
            else:
                units = [*self._run_units(runs), *self._region_units(regions)]
            self._execute([*units, *extra], self.on_bytes)
        for copy in copies:
            ctypes.memmove(copy.target, copy.source, copy.size_bytes)
        if self.verify != "none":
            uncompared = self.payloads.verify_whole()
            self.stats.blocks_verified -= uncompared
            self.stats.blocks_unverified += uncompared + self._fragments.take_incomplete()
        return self.stats

    def read_blobs(self, places: Sequence[tuple[int, int, int]]) -> list[bytes]:
        """The stored bytes of objects, each at (file, offset, length): neighbours are read together."""
        if not self.joins:
            return [self.read_blob(*place) for place in places]
        with self._missing_is_damage():
            for file, offset, length in places:
                self._check_end(self.handle(file), offset + length)
            found = {place: np.empty(place[2], np.uint8) for place in places}
            pieces = [
                Piece(file, offset, length, NO_CHUNK, 0, found[file, offset, length].ctypes.data, None)
                for file, offset, length in sorted(found)
            ]
            self._fetch(pieces)
        return [found[place].tobytes() for place in places]

    def _fetch(self, pieces: Sequence[Piece]) -> None:
        """Read ``pieces``, which are sorted and of which no two are alike."""
        requests, _ = join(pieces, self.profile, self.profile.request_bytes)
        self._execute([partial(scatter.carry_out, request) for request in requests], None)

    def _open_all(self, files: Int64) -> None:
        """Open those of ``files`` at once that take a request, because the index does not know their size."""
        unsized = files[self.index.file_sizes[files] == UNKNOWN]
        unknown = [file for file in unsized.tolist() if file not in self._handles]
        if len(unknown) > 1:
            self._execute([partial(_open_unit, file) for file in unknown], None)

    def read_blob(self, file: int, offset: int, length: int) -> bytes:
        """An object's stored bytes."""
        with self._missing_is_damage():
            handle = self.handle(file)
            self._check_end(handle, offset + length)
            data = handle.pread(length, offset)
        self.stats.bytes_read += length
        return data

    def _check_end(self, handle: ReadHandle, end: int) -> None:
        """Whether a file can have an object at its place, before memory for that is taken."""
        if end > handle.size_bytes:
            raise CorruptCheckpointError(
                f"{self.store.url}: an object ends at byte {end} of {handle.name}, which has "
                f"{handle.size_bytes}; the file was truncated, or the metadata is damaged",
                path=f"{self.store.url}/{handle.name}",
            )

    # -- what workers need -----------------------------------------------------------------------------------

    def handle(self, file: int) -> ReadHandle:
        """The open data file number ``file``; its size must be the committed one.

        Files are opened beside each other, because that may take a request; one file by one thread.
        """
        handle = self._handles.get(file)
        if handle is not None:
            return handle
        with self._lock:
            gate = self._gates.setdefault(file, threading.Lock())
        with gate:
            handle = self._handles.get(file)
            if handle is None:
                handle = self._open(file)
                with self._lock:
                    if len(self._handles) >= self._max_handles:
                        # Dropped, not closed: another thread may be reading it; the last to let go closes.
                        del self._handles[next(iter(self._handles))]
                    self._handles[file] = handle
        return handle

    def _open(self, file: int) -> ReadHandle:
        name, expected = self.index.files[file], int(self.index.file_sizes[file])
        with self._missing_is_damage():
            handle = self.store.open_read(name, expected_bytes=None if expected == UNKNOWN else expected)
        if expected not in (UNKNOWN, handle.size_bytes):
            size = handle.size_bytes
            handle.close()
            raise CorruptCheckpointError(
                f"{self.store.url}: data file {name} has {size} bytes, {expected} were committed; "
                "it was truncated, replaced or extended",
                path=f"{self.store.url}/{name}",
            )
        return handle

    @contextmanager
    def _missing_is_damage(self) -> Iterator[None]:
        """The checkpoint is there: where a file of it is not, it is damaged. That may show only when it is
        read."""
        try:
            yield
        except CheckpointNotFoundError as error:
            path = str(error.facts.get("path", self.store.url))
            raise CorruptCheckpointError(
                f"{self.store.url}: data file {path.rpartition('/')[2]} is missing, though the checkpoint "
                "refers to it; restore the file or resume from another checkpoint",
                path=path,
            ) from error

    def locate(self, chunk: int) -> tuple[ReadHandle, int]:
        """The file of a chunk and the absolute offset of its payload."""
        return self.handle(int(self.index.chunk_files[chunk])), self.payloads.offset(chunk)

    def itemsize(self, chunk: int) -> int:
        """Bytes per element of a chunk."""
        return self._itemsizes[self._chunk_tensors[chunk]]

    def check_block(self, stats: ReadStats, chunk: int, block: int, crc: int) -> None:
        """Compare a block's checksum with the recorded one, or keep it for the whole payload's."""
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

    def check_part(self, stats: ReadStats, chunk: int, position: int, size: int, crc: int) -> None:
        """Take the checksum of bytes of one block: of all, or to be combined with those of the others."""
        block, begin = divmod(position, BLOCK_BYTES)
        block_bytes = min(BLOCK_BYTES, self.payload_lengths[chunk] - block * BLOCK_BYTES)
        whole: int | None = crc
        if size != block_bytes:
            whole = self._fragments.add(chunk, block, begin, begin + size, crc, block_bytes)
        if whole is not None:
            self.check_block(stats, chunk, block, whole)

    def corruption(self, chunk: int, block: int, expected: int, got: int) -> CorruptCheckpointError:
        """The error for bytes that are not those committed."""
        fqn = self.index.fqns[int(self.index.chunk_tensors[chunk])]
        name = self.index.files[int(self.index.chunk_files[chunk])]
        offset = self.payloads.offset(chunk) + block * BLOCK_BYTES
        return CorruptCheckpointError(
            f"{self.store.url}: tensor {fqn!r} is damaged: block {block} at byte {offset} of {name} has "
            f"CRC-32 {got:08x}, committed was {expected:08x}. Resume from another checkpoint, or pass "
            "verify='none' to load the bytes as they are.",
            path=f"{self.store.url}/{name}",
            fqn=fqn,
            offset=offset,
        )

    # -- units -----------------------------------------------------------------------------------------------

    def _run_units(self, runs: Runs) -> Iterator[Unit]:
        if len(runs.chunks) == 0:
            return
        small_bytes = min(self.profile.join_below_bytes, BLOCK_BYTES)
        gap_bytes = self.profile.gap_bytes
        span_bytes = min(self.profile.request_bytes, MAX_SPAN_BYTES)
        files = self.index.chunk_files[runs.chunks]
        offsets = self.payloads.offsets[runs.chunks] + runs.payload_positions
        order = np.lexsort((offsets, files))
        columns = (files, offsets, runs.sizes_bytes, runs.addresses, runs.chunks, runs.payload_positions)
        span: list[tuple[int, int, int, int, int]] = []
        span_file = span_begin = span_end = -1
        large: list[tuple[int, int, int, int]] = []
        large_bytes = 0
        for file, offset, size, address, chunk, position in zip(
            *(column[order].tolist() for column in columns), strict=True
        ):
            if size == 0:
                continue
            if size > small_bytes or (self.verify == "full" and size != self.payload_lengths[chunk]):
                for part in _split(chunk, position, size, address):
                    large.append(part)
                    large_bytes += part[2]
                    if large_bytes >= _UNIT_BYTES:
                        yield _direct_unit(large)
                        large, large_bytes = [], 0
                continue
            if span and (
                file != span_file or offset - span_end > gap_bytes or offset + size - span_begin > span_bytes
            ):
                yield _span_unit(span_file, span_begin, span_end, span)
                span = []
            if not span:
                span_file, span_begin = file, offset
                span_end = offset
            span.append((offset, size, address, chunk, position))
            span_end = max(span_end, offset + size)
        if span:
            yield _span_unit(span_file, span_begin, span_end, span)
        if large:
            yield _direct_unit(large)

    def _region_units(self, regions: Sequence[Region]) -> Iterator[Unit]:
        batch: list[Region] = []
        batch_bytes = 0
        for region in regions:
            for part in self._split_region(region):
                batch.append(part)
                batch_bytes += math.prod(part.lengths) * self.itemsize(part.chunk)
                if batch_bytes >= _UNIT_BYTES:
                    yield _region_unit(batch)
                    batch, batch_bytes = [], 0
        if batch:
            yield _region_unit(batch)

    def _split_region(self, region: Region) -> Iterator[Region]:
        """Parts of about a unit's size along the dimension that is slowest in the file, so that threads can
        share one large box."""
        size = math.prod(region.lengths) * self.itemsize(region.chunk)
        if size <= 2 * _UNIT_BYTES:
            yield region
            return
        order, _ = self.payloads.layout(region.chunk)
        slowest = next((d for d in order if region.lengths[d] > 1), 0)
        length = region.lengths[slowest]
        rows = max(1, length * _UNIT_BYTES // size)
        for first in range(0, length, rows):
            yield Region(
                region.chunk,
                _replaced(region.offsets, slowest, region.offsets[slowest] + first),
                _replaced(region.lengths, slowest, min(rows, length - first)),
                region.address + first * region.strides[slowest],
                region.strides,
            )

    def _execute(self, units: Sequence[Unit], on_bytes: Callable[[int], None] | None) -> None:
        pending = iter(units)
        lock, stop = threading.Lock(), threading.Event()

        def work() -> None:
            worker = Worker(self)
            try:
                while not stop.is_set():
                    with lock:
                        unit = next(pending, None)
                    if unit is None:
                        return
                    before = worker.stats.bytes_read
                    unit(worker)
                    if on_bytes is not None:
                        on_bytes(worker.stats.bytes_read - before)
            except BaseException:
                stop.set()
                raise
            finally:
                with lock:
                    self.stats.add(worker.stats)
                worker.release()

        threads = min(self.threads, len(units))
        if threads <= 1:
            work()
            return
        futures: list[Future[None]] = []
        with ThreadPoolExecutor(threads - 1, thread_name_prefix="dcp-read") as pool:
            try:
                futures += [pool.submit(work) for _ in range(threads - 1)]
                work()
            finally:
                _wait_to_the_end(futures, stop)
            for future in futures:
                future.result()


def _replaced(values: tuple[int, ...], position: int, value: int) -> tuple[int, ...]:
    return (*values[:position], value, *values[position + 1 :])


def _wait_to_the_end(futures: Sequence[Future[None]], stop: threading.Event) -> None:
    """Until no thread reads any more, whatever interrupts that: they write to the caller's memory."""
    interrupt: BaseException | None = None
    while True:
        try:
            wait(futures)
            break
        except BaseException as error:  # noqa: BLE001 - raised below
            stop.set()
            interrupt = interrupt or error
    if interrupt is not None:
        raise interrupt


def _max_open_files() -> int:
    """A quarter of what the process may open: a checkpoint of many ranks has more files than that."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(8, (limit if limit != resource.RLIM_INFINITY else 1 << 20) // 4)


def _split(chunk: int, position: int, size: int, address: int) -> Iterator[tuple[int, int, int, int]]:
    """Parts of a run that end at block boundaries, about a quarter of a unit each."""
    end = position + size
    while position < end:
        stop = min(end, (position // BLOCK_BYTES + 1) * BLOCK_BYTES)
        yield chunk, position, stop - position, address
        address += stop - position
        position = stop


def _open_unit(file: int, worker: Worker) -> None:
    worker.engine.handle(file)


def _span_unit(file: int, begin: int, end: int, rows: list[tuple[int, int, int, int, int]]) -> Unit:
    return lambda worker: worker.read_span(file, begin, end, rows)


def _direct_unit(parts: list[tuple[int, int, int, int]]) -> Unit:
    def unit(worker: Worker) -> None:
        for chunk, position, size, address in parts:
            worker.read_direct(chunk, position, size, address)

    return unit


def _region_unit(regions: list[Region]) -> Unit:
    def unit(worker: Worker) -> None:
        for region in regions:
            worker.read_region(region)

    return unit
