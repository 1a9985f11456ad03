"""Reading ranges of a checkpoint into memory: sorted, coalesced, split for threads, verified on the way.

Two kinds of work. A *run* is contiguous in the file and in memory: large ones are read straight into their
destination, small neighbours are read together and handed out. A *region* is a box of a chunk whose rows
lie apart in the file or in memory: the blocks it spans are read once into scratch, checked whole, and the
wanted stride is copied out. Torch-free: destinations are addresses.
"""

from __future__ import annotations

import math
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import numpy as np

from dcp.storage.engine.memory import item_view
from dcp.storage.engine.payloads import Payloads
from dcp.storage.engine.read_requests import ReadStats, Region, Runs, Verify
from dcp.storage.engine.read_worker import SCRATCH, Worker
from dcp.storage.errors import CheckpointNotFoundError, CorruptCheckpointError, PlanError
from dcp.storage.formats.checksums import BLOCK_BYTES
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.stores.base import ReadHandle, Store

__all__ = ["ReadEngine", "Unit"]

_SMALL_RUN_BYTES = 64 << 10
_SPAN_BYTES = 4 << 20
_GAP_BYTES = 16 << 10
"""Bytes read for nothing to join two small runs; a record's own header and trailer are well below."""

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
        self.stats = ReadStats()
        self.on_bytes: Callable[[int], None] | None = None
        # Views, not lists: an index may have millions of chunks, of which this rank needs a thousand.
        self.payload_lengths = item_view(index.payload_lengths)
        self.payloads = Payloads(index, self.handle)
        self._itemsizes = item_view(index.itemsizes)
        self._chunk_tensors = item_view(index.chunk_tensors)
        self._crc_start = item_view(index.crc_start)
        self._crcs = item_view(index.crcs)
        self._handles: dict[int, ReadHandle] = {}
        self._max_handles = _max_open_files()
        self._lock = threading.Lock()

    def __enter__(self) -> ReadEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    def run(self, runs: Runs, regions: Sequence[Region], extra: Sequence[Unit] = ()) -> ReadStats:
        """Carry out all of it; raises the first failure after the other threads have stopped."""
        needed = [*runs.chunks.tolist(), *(region.chunk for region in regions)]
        self.payloads.resolve(needed)
        units = [*self._run_units(runs), *self._region_units(regions), *extra]
        self.stats.bytes_needed += int(runs.sizes_bytes.sum())
        self.stats.bytes_needed += sum(math.prod(r.lengths) * self.itemsize(r.chunk) for r in regions)
        self._execute(units)
        if self.verify != "none":
            uncompared = self.payloads.verify_whole()
            self.stats.blocks_verified -= uncompared
            self.stats.blocks_unverified += uncompared
        return self.stats

    def read_blob(self, file: int, offset: int, length: int) -> bytes:
        """An object's stored bytes."""
        handle = self.handle(file)
        if offset + length > handle.size_bytes:  # before memory for them is taken
            name = self.index.files[file]
            raise CorruptCheckpointError(
                f"{self.store.url}: an object ends at byte {offset + length} of {name}, which has "
                f"{handle.size_bytes}; the file was truncated, or the metadata is damaged",
                path=f"{self.store.url}/{name}",
            )
        self.stats.bytes_read += length
        return handle.pread(length, offset)

    # -- what workers need -----------------------------------------------------------------------------------

    def handle(self, file: int) -> ReadHandle:
        """The open data file number ``file``; its size must be the committed one."""
        handle = self._handles.get(file)
        if handle is None:
            with self._lock:
                handle = self._handles.get(file)
                if handle is None:
                    if len(self._handles) >= self._max_handles:
                        # Dropped, not closed: another thread may be reading it; the last to let go closes.
                        del self._handles[next(iter(self._handles))]
                    handle = self._handles[file] = self._open(file)
        return handle

    def _open(self, file: int) -> ReadHandle:
        name, expected = self.index.files[file], int(self.index.file_sizes[file])
        try:
            handle = self.store.open_read(name)
        except CheckpointNotFoundError as error:
            raise CorruptCheckpointError(
                f"{self.store.url}: data file {name} is missing, though the checkpoint refers to it; "
                "restore the file or resume from another checkpoint",
                path=f"{self.store.url}/{name}",
            ) from error
        if expected not in (UNKNOWN, handle.size_bytes):
            size = handle.size_bytes
            handle.close()
            raise CorruptCheckpointError(
                f"{self.store.url}: data file {name} has {size} bytes, {expected} were committed; "
                "it was truncated, replaced or extended",
                path=f"{self.store.url}/{name}",
            )
        return handle

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
            if size > _SMALL_RUN_BYTES or (self.verify == "full" and size != self.payload_lengths[chunk]):
                for part in _split(chunk, position, size, address):
                    large.append(part)
                    large_bytes += part[2]
                    if large_bytes >= _UNIT_BYTES:
                        yield _direct_unit(large)
                        large, large_bytes = [], 0
                continue
            if span and (
                file != span_file
                or offset - span_end > _GAP_BYTES
                or offset + size - span_begin > _SPAN_BYTES
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
        """Parts of about a unit's size along the first dimension, so that threads can share one large box."""
        size = math.prod(region.lengths) * self.itemsize(region.chunk)
        if size <= 2 * _UNIT_BYTES or not region.lengths or region.lengths[0] < 2:
            yield region
            return
        rows = max(1, region.lengths[0] * _UNIT_BYTES // size)
        for first in range(0, region.lengths[0], rows):
            yield Region(
                region.chunk,
                (region.offsets[0] + first, *region.offsets[1:]),
                (min(rows, region.lengths[0] - first), *region.lengths[1:]),
                region.address + first * region.strides[0],
                region.strides,
            )

    def _execute(self, units: Sequence[Unit]) -> None:
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
                    if self.on_bytes is not None:
                        self.on_bytes(worker.stats.bytes_read - before)
            except BaseException:
                stop.set()
                raise
            finally:
                with lock:
                    self.stats.add(worker.stats)
                SCRATCH.put(worker.scratch)

        threads = min(self.threads, len(units))
        if threads <= 1:
            work()
            return
        with ThreadPoolExecutor(threads - 1, thread_name_prefix="dcp-read") as pool:
            futures = [pool.submit(work) for _ in range(threads - 1)]
            try:
                work()
            finally:
                errors = [future.exception() for future in futures]
            for error in errors:
                if error is not None:
                    raise error


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
