"""Reading ranges of a checkpoint into memory: sorted, coalesced, split for threads, verified on the way.

Two kinds of work. A *run* is contiguous in the file and in memory: large ones are read straight into their
destination, small neighbours are read together and handed out. A *region* has elements of a chunk at regular
steps, as the rows of a box, that lie apart in the file or in memory: the blocks it spans are read once into
scratch, checked whole, and the wanted stride is copied out. Torch-free: destinations are addresses.

Where a request is dear (`ReadProfile.scatter`) all of it is joined into large requests instead, see
`dcp.storage.engine.reading.scatter`.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from dcp.storage.closable import Closable
from dcp.storage.engine.reading import scatter
from dcp.storage.engine.reading.coalescing.joining import NO_CHUNK, Copy, RequestPiece, join
from dcp.storage.engine.reading.requests import (
    BoxRequest,
    ByteRuns,
    ReadStats,
    Region,
    StridedRegion,
    Verify,
)
from dcp.storage.engine.reading.source import ReadSource
from dcp.storage.engine.reading.units import Unit, region_units, run_units
from dcp.storage.engine.reading.worker import ReadWorker
from dcp.storage.errors import CorruptCheckpointError, PlanError
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, Int64
from dcp.storage.stores.base import Store
from dcp.storage.stores.handles import ReadHandle
from dcp.storage.threads import work_off

__all__ = ["ReadEngine"]


class ReadEngine(Closable, ReadSource):
    """Reads from one checkpoint. Use as a context manager: files stay open, as many as the process can
    afford, and are closed at the end."""

    def __init__(
        self, store: Store, index: CheckpointIndex, *, verify: Verify = "blocks", threads: int = 2
    ) -> None:
        super().__init__(store, index, verify, self._fetch)
        self.threads = max(1, threads)
        self.stats = ReadStats()
        self.on_bytes: Callable[[int], None] | None = None
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def resolve(self, chunks: Sequence[int] | Int64) -> None:
        """Find the payloads of ``chunks`` where the index does not say where they are."""
        rows = np.asarray(chunks, np.int64)
        with self._files.missing_is_damage():
            if self.joins:
                self._open_all(np.unique(self.index.chunk_files[rows]))
            self.payloads.resolve(rows)

    def run(
        self,
        runs: ByteRuns,
        regions: Sequence[Region | StridedRegion],
        extra: Sequence[Unit] = (),
        boxes: Sequence[BoxRequest] = (),
    ) -> ReadStats:
        """Carry out all of it; raises the first failure after the other threads have stopped.

        No memory is written to any more when it returns or raises. ``extra`` are reads on terms of their own;
        ``boxes`` need a store whose profile scatters.
        """
        if boxes and not self.joins:
            raise PlanError(f"{self.store.url} is read by units, not by boxes")
        with self._files.missing_is_damage():
            asked = [each.chunk if isinstance(each, Region) else each.elements.chunk for each in regions]
            self.resolve(np.concatenate([runs.chunks, np.array(asked, np.int64)]))
            strided = [self.strided(each) if isinstance(each, Region) else each for each in regions]
            needed = int(runs.sizes_bytes.sum())
            for elements in [*(each.elements for each in strided), *(each.elements for each in boxes)]:
                needed += math.prod(elements.lengths) * self.itemsize(elements.chunk)
            self.stats.bytes_needed += needed
            copies: list[Copy] = []
            if self.joins:
                all_boxes = [*(scatter.box_of(self, region) for region in strided), *boxes]
                requests, copies = scatter.plan(self, runs, all_boxes, needed, self.threads)
                units: list[Unit] = [partial(scatter.carry_out, request) for request in requests]
            else:
                units = [*run_units(self, runs), *region_units(self, strided)]
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
    worker.source.handle(file)
