"""Reading ranges of a checkpoint into memory: sorted, coalesced, split for threads, verified on the way.

Two kinds of work. A *run* is contiguous in the file and in memory: large ones are read straight into their
destination, small neighbours are read together and handed out. A *region* is a box of a chunk whose rows
lie apart in the file or in memory: the blocks it spans are read once into scratch, checked whole, and the
wanted stride is copied out. Torch-free: destinations are addresses.

Where a request is dear (`ReadProfile.scatter`) all of it is joined into large requests instead, see
`dcp.storage.engine.reading.scatter`.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import get_args

import numpy as np
import numpy.typing as npt

from dcp.storage.engine.memory import item_view
from dcp.storage.engine.reading import scatter
from dcp.storage.engine.reading.fragments import Fragment, Fragments
from dcp.storage.engine.reading.joining import NO_CHUNK, Copy, RequestPiece, join
from dcp.storage.engine.reading.open_files import OpenFiles
from dcp.storage.engine.reading.payloads import Payloads
from dcp.storage.engine.reading.requests import BoxRequest, ReadStats, Region, Runs, Verify
from dcp.storage.engine.reading.units import Unit, region_units, run_units
from dcp.storage.engine.reading.worker import ReadWorker
from dcp.storage.errors import CorruptCheckpointError, OptionError, PlanError
from dcp.storage.formats.checksums import BLOCK_BYTES
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, Int64
from dcp.storage.stores.base import ReadHandle, Store
from dcp.storage.threads import work_off

__all__ = ["ReadEngine"]

_MAX_FRAGMENTS = 64
"""A block that is read in more pieces than this is not worth combining."""


class ReadEngine:
    """Reads from one checkpoint. Use as a context manager: files stay open, as many as the process can
    afford, and are closed at the end."""

    def __init__(
        self, store: Store, index: CheckpointIndex, *, verify: Verify = "blocks", threads: int = 2
    ) -> None:
        self.store = store
        self.index = index
        if verify not in get_args(Verify):
            raise OptionError(f"verify must be one of {', '.join(get_args(Verify))}, not {verify!r}")
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
        self._fragments = Fragments(limit=_MAX_FRAGMENTS)
        self._files = OpenFiles(store, self._file_facts)
        self._lock = threading.Lock()

    def __enter__(self) -> ReadEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    def _file_facts(self, file: int) -> tuple[str, int]:
        return self.index.files[file], int(self.index.file_sizes[file])

    def resolve(self, chunks: Sequence[int] | Int64) -> None:
        """Find the payloads of ``chunks`` where the index does not say where they are."""
        rows = np.asarray(chunks, np.int64)
        with self._files.missing_is_damage():
            if self.joins:
                self._open_all(np.unique(self.index.chunk_files[rows]))
            self.payloads.resolve(rows)

    def run(
        self,
        runs: Runs,
        regions: Sequence[Region],
        extra: Sequence[Unit] = (),
        boxes: Sequence[BoxRequest] = (),
    ) -> ReadStats:
        """Carry out all of it; raises the first failure after the other threads have stopped.

        No memory is written to any more when it returns or raises. ``extra`` are reads on terms of their own;
        ``boxes`` need a store whose profile scatters.
        """
        if boxes and not self.joins:
            raise PlanError(f"{self.store.url} is read by units, not by boxes")
        wanted: list[Region | BoxRequest] = [*regions, *boxes]
        with self._files.missing_is_damage():
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
                units = [*run_units(self, runs), *region_units(self, regions)]
            self._execute([*units, *extra], self.on_bytes)
        for copy in copies:
            ctypes.memmove(copy.target, copy.source, copy.size_bytes)
        if self.verify != "none":
            uncompared = self.payloads.verify_whole()
            self.stats.blocks_verified -= uncompared
            self.stats.blocks_unverified += uncompared + len(self._fragments.incomplete())
            self._fragments.clear()
        return self.stats

    def read_blobs(self, places: Sequence[tuple[int, int, int]]) -> list[bytes]:
        """The stored bytes of objects, each at (file, offset, length): neighbours are read together."""
        if not self.joins:
            return [self.read_blob(*place) for place in places]
        with self._files.missing_is_damage():
            for file, offset, length in places:
                self._check_end(self.handle(file), offset + length)
            found = {place: np.empty(place[2], np.uint8) for place in places}
            pieces = [
                RequestPiece(file, offset, length, NO_CHUNK, 0, found[file, offset, length].ctypes.data, None)
                for file, offset, length in sorted(found)
            ]
            self._fetch(pieces)
        return [found[place].tobytes() for place in places]

    def _fetch(self, pieces: Sequence[RequestPiece]) -> None:
        """Read ``pieces``, which are sorted and of which no two are alike."""
        requests, _ = join(pieces, self.profile, self.profile.request_bytes)
        self._execute([partial(scatter.carry_out, request) for request in requests], None)

    def _open_all(self, files: Int64) -> None:
        """Open those of ``files`` at once that take a request, because the index does not know their size."""
        unsized = files[self.index.file_sizes[files] == UNKNOWN]
        unknown = [file for file in unsized.tolist() if file not in self._files]
        if len(unknown) > 1:
            self._execute([partial(_open_unit, file) for file in unknown], None)

    def read_blob(self, file: int, offset: int, length: int) -> bytes:
        """An object's stored bytes."""
        with self._files.missing_is_damage():
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
        """The open data file number ``file``; its size must be the committed one."""
        return self._files.handle(file)

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

    def check_runs(self, stats: ReadStats, runs: Runs, got: npt.NDArray[np.uint32]) -> None:
        """Take the checksums of ``runs``, each of which lies in one block: compare those of whole payloads of
        one block, and of the others as `check_part`."""
        index, chunks = self.index, runs.chunks
        first = index.crc_start[chunks]
        is_whole = (runs.sizes_bytes == index.payload_lengths[chunks]) & (index.crc_start[chunks + 1] > first)
        expected = got.copy()
        expected[is_whole] = index.crcs[first[is_whole]]
        for row in np.flatnonzero(expected != got).tolist():
            raise self.corruption(int(chunks[row]), 0, int(expected[row]), int(got[row]))
        stats.blocks_verified += int(np.count_nonzero(is_whole))
        others = np.flatnonzero(~is_whole)
        columns = (chunks, runs.payload_positions, runs.sizes_bytes, got)
        for chunk, position, size, crc in zip(*(c[others].tolist() for c in columns), strict=True):
            self.check_part(stats, chunk, position, size, crc)

    def check_part(self, stats: ReadStats, chunk: int, position: int, size: int, crc: int) -> None:
        """Take the checksum of bytes of one block: of all, or to be combined with those of the others."""
        fragment = Fragment(chunk, position, position + size, crc)
        whole = self._fragments.add(fragment, self.payload_lengths[chunk])
        if whole is not None:
            self.check_block(stats, chunk, position // BLOCK_BYTES, whole)

    def corruption(self, chunk: int, block: int, expected: int, got: int) -> CorruptCheckpointError:
        """The error for bytes that are not those committed."""
        fqn = self.index.fqns[int(self.index.chunk_tensors[chunk])]
        name = self.index.files[int(self.index.chunk_files[chunk])]
        offset = self.payloads.offset(chunk) + block * BLOCK_BYTES
        return CorruptCheckpointError(
            f"{self.store.url}: tensor {fqn!r} is damaged: block {block} at byte {offset} of {name} has "
            f"CRC-32 {got:08x}, committed was {expected:08x}. Resume from another checkpoint",
            alternative="load the bytes as they are",
            argument="verify='none'",
            path=f"{self.store.url}/{name}",
            fqn=fqn,
            offset=offset,
        )

    # -- threads ---------------------------------------------------------------------------------------------

    def _execute(self, units: Sequence[Unit], on_bytes: Callable[[int], None] | None) -> None:
        work_off(units, min(self.threads, len(units)), partial(self._work, on_bytes), "dcp-read")

    def _work(self, on_bytes: Callable[[int], None] | None, units: Iterator[Unit]) -> None:
        worker = ReadWorker(self)
        try:
            for unit in units:
                before = worker.stats.bytes_read
                unit(worker)
                if on_bytes is not None:
                    on_bytes(worker.stats.bytes_read - before)
        finally:
            with self._lock:
                self.stats.add(worker.stats)
            worker.release()


def _open_unit(file: int, worker: ReadWorker) -> None:
    worker.engine.handle(file)
