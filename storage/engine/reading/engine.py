"""Reading ranges of a checkpoint into memory: sorted, joined, divided among threads, verified on the way.

Two kinds of work. A *run* is contiguous in the file and in memory: large ones are read straight into their
destination, small neighbours are read together and handed out. A *box* has elements of a chunk at regular
steps that lie apart in the file or in memory, or are to be converted: they are handed out of scratch memory.
Torch-free: destinations are addresses, or functions that take what was read.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from dcp.storage.closable import Closable
from dcp.storage.engine.reading.coalescing import NO_CHUNK, JoinedRequest, RequestPiece, join
from dcp.storage.engine.reading.pieces import requests_for
from dcp.storage.engine.reading.receiving import SCRATCH, ReadWorker
from dcp.storage.engine.reading.requests import BoxRequest, ByteRuns, ReadStats, Verify
from dcp.storage.engine.reading.source import ReadSource
from dcp.storage.errors import CorruptCheckpointError
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, Int64
from dcp.storage.stores.base import Store
from dcp.storage.stores.handles import ReadHandle
from dcp.storage.threads import work_off

__all__ = ["ReadEngine"]

_THREAD_BYTES = 1 << 20
"""Less than this for each is not worth another thread, where a request costs next to nothing."""


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
        self.scratch = SCRATCH
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

    def run(self, runs: ByteRuns, boxes: Sequence[BoxRequest] = ()) -> ReadStats:
        """Carry out all of it; raises the first failure after the other threads have stopped.

        No memory is written to any more when it returns or raises. The chunks of ``boxes`` are resolved.
        """
        with self._files.missing_is_damage():
            self.resolve(runs.chunks)
            needed = int(runs.sizes_bytes.sum())
            for elements, _ in boxes:
                needed += math.prod(elements.lengths) * self.itemsize(elements.chunk)
            self.stats.bytes_needed += needed
            requests, copies = requests_for(self, runs, boxes, needed, self.threads)
            self._carry_out(requests, self.on_bytes)
        for copy in copies:
            ctypes.memmove(copy.target, copy.source, copy.size_bytes)
        if self.verify != "none":
            uncompared = self.payloads.verify_whole()
            self.stats.blocks_verified -= uncompared
            self.stats.blocks_unverified += uncompared + self._fragments.end()
        return self.stats

    def read_blobs(self, places: Sequence[tuple[int, int, int]]) -> list[bytes]:
        """The stored bytes of objects, each at (file, offset, length): neighbours are read together."""
        with self._files.missing_is_damage():
            for file, offset, length in places:
                self._check_end(self.handle(file), offset + length)
            found = {place: np.empty(place[2], np.uint8) for place in places}
            self._fetch(
                [RequestPiece(*place, NO_CHUNK, 0, found[place].ctypes.data, None) for place in sorted(found)]
            )
        return [found[place].tobytes() for place in places]

    def read_blob(self, file: int, offset: int, length: int) -> bytes:
        """An object's stored bytes."""
        return self.read_blobs([(file, offset, length)])[0]

    def _fetch(self, pieces: Sequence[RequestPiece]) -> None:
        """Read ``pieces``, which are sorted and of which no two are alike."""
        requests, _ = join(pieces, self.profile, self.profile.request_bytes)
        self._carry_out(requests, None)

    def _open_all(self, files: Int64) -> None:
        """Open those of ``files`` at once that take a request, because the index does not know their size."""
        unsized = files[self.index.file_sizes[files] == UNKNOWN]
        unknown = [file for file in unsized.tolist() if file not in self._files]
        if len(unknown) > 1:
            work_off(unknown, min(self.threads, len(unknown)), self._open_some, "dcp-read")

    def _open_some(self, files: Iterator[int]) -> None:
        for file in files:
            self.handle(file)

    def _check_end(self, handle: ReadHandle, end: int) -> None:
        """Whether a file can have an object at its place, before memory for that is taken."""
        if end > handle.size_bytes:
            raise CorruptCheckpointError(
                f"{self.store.url}: an object ends at byte {end} of {handle.name}, which has "
                f"{handle.size_bytes}; the file was truncated, or the metadata is damaged",
                path=f"{self.store.url}/{handle.name}",
            )

    def _carry_out(self, requests: Sequence[JoinedRequest], on_bytes: Callable[[int], None] | None) -> None:
        threads = min(self.threads, len(requests))
        if not self.joins and threads > 1:
            threads = min(threads, 1 + sum(each.end - each.begin for each in requests) // _THREAD_BYTES)
        work_off(requests, threads, partial(self._work, on_bytes), "dcp-read")

    def _work(self, on_bytes: Callable[[int], None] | None, requests: Iterator[JoinedRequest]) -> None:
        worker = ReadWorker(self, self.scratch)
        try:
            for request in requests:
                before = worker.stats.bytes_read
                worker.carry_out(request)
                if on_bytes is not None:
                    on_bytes(worker.stats.bytes_read - before)
        finally:
            with self._lock:
                self.stats.add(worker.stats)
            worker.release()
