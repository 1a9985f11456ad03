"""A checkpoint as its readers see it: open files, where payloads are, and whether their bytes are right.

What is read together and by which thread is said by `dcp.storage.engine.reading.engine`.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

import numpy as np
import numpy.typing as npt

from dcp.storage.engine.memory import item_view
from dcp.storage.engine.reading.coalescing import RequestPiece
from dcp.storage.engine.reading.fragments import Fragment, Fragments
from dcp.storage.engine.reading.payloads import Payloads
from dcp.storage.engine.reading.requests import ByteRuns, Elements, ReadStats, Verify
from dcp.storage.errors import CheckpointNotFoundError, CorruptCheckpointError, OptionError
from dcp.storage.formats.checksums import BLOCK_BYTES
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.stores.base import Store
from dcp.storage.stores.handles import ReadHandle

__all__ = ["OpenFiles", "ReadSource"]

_MAX_FRAGMENTS = 64
"""A block that is read in more pieces than this is not worth combining."""


class OpenFiles:
    """Files by number, as many open as the process can afford. ``facts`` has name and committed size of a
    number, the size `UNKNOWN` where none was noted. Thread-safe."""

    def __init__(self, store: Store, facts: Callable[[int], tuple[str, int]]) -> None:
        self._store = store
        self._facts = facts
        self._handles: dict[int, ReadHandle] = {}
        self._gates: dict[int, threading.Lock] = {}
        self._max_handles = _max_open_files()
        self._lock = threading.Lock()

    def __contains__(self, file: int) -> bool:
        """Return whether it is open."""
        return file in self._handles

    def close(self) -> None:
        """Close all; no thread may be reading."""
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    def handle(self, file: int) -> ReadHandle:
        """Return the open file number ``file``; its size must be the committed one.

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
        name, expected = self._facts(file)
        expected_bytes = None if expected == UNKNOWN else expected
        try:
            handle = self._store.open_read(name, expected_bytes=expected_bytes)
        except CheckpointNotFoundError:  # a cache of names on a network file system may be behind
            with self.missing_is_damage():
                handle = self._store.open_read(name, expected_bytes=expected_bytes)
        if expected not in (UNKNOWN, handle.size_bytes):
            size = handle.size_bytes
            handle.close()
            raise CorruptCheckpointError(
                f"{self._store.url}: data file {name} has {size} bytes, {expected} were committed; "
                "it was truncated, replaced or extended",
                path=self._store.path_of(name),
            )
        return handle

    @contextmanager
    def missing_is_damage(self) -> Iterator[None]:
        """Raise damage for a missing file: the checkpoint is there. That may show only when it is
        read."""
        try:
            yield
        except CheckpointNotFoundError as error:
            path = error.path or self._store.url
            raise CorruptCheckpointError(
                f"{self._store.url}: data file {path.rpartition('/')[2]} is missing, though the checkpoint "
                "refers to it; restore the file or take another checkpoint",
                path=path,
            ) from error


def _max_open_files() -> int:
    """Return a quarter of what the process may open: a checkpoint of many ranks has more files than that."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(8, (limit if limit != resource.RLIM_INFINITY else 1 << 20) // 4)


class ReadSource:
    """The files of one checkpoint, and its checksums as ``verify`` asks for them; safe from any thread.

    ``fetch`` carries out pieces together, for stores where a request is dear (``joins``).
    """

    def __init__(
        self,
        store: Store,
        index: CheckpointIndex,
        verify: Verify,
        fetch: Callable[[Sequence[RequestPiece]], None],
    ) -> None:
        self.store = store
        self.index = index
        if verify not in get_args(Verify):
            raise OptionError(f"verify must be one of {', '.join(get_args(Verify))}, not {verify!r}")
        self.verify = verify
        self.profile = store.read_profile
        self.joins = self.profile.scatter
        # Views, not lists: an index may have millions of chunks, of which this rank needs a thousand.
        self.payload_lengths = item_view(index.payload_lengths)
        self._itemsizes = item_view(index.itemsizes)
        self._chunk_tensors = item_view(index.chunk_tensors)
        self._crc_start = item_view(index.crc_start)
        self._crcs = item_view(index.crcs)
        self._fragments = Fragments(limit=_MAX_FRAGMENTS)
        self._files = OpenFiles(store, self._file_facts)
        self.handle = self._files.handle
        self.payloads = Payloads(index, self.handle, fetch if self.joins else None)

    def _file_facts(self, file: int) -> tuple[str, int]:
        return self.index.files[file], int(self.index.file_sizes[file])

    def locate(self, chunk: int) -> tuple[ReadHandle, int]:
        """Return the file of a chunk and the absolute offset of its payload."""
        return self.handle(int(self.index.chunk_files[chunk])), self.payloads.offset(chunk)

    def elements(
        self, chunk: int, offsets: Sequence[int], lengths: Sequence[int]
    ) -> tuple[Elements, tuple[int, ...]]:
        """Return a box of a resolved chunk by the places of its elements in the payload, and its dimensions
        in the order of these axes."""
        order, steps = self.payloads.layout(chunk)
        begin = sum(offsets[d] * step for d, step in zip(order, steps, strict=True))
        return Elements(chunk, begin, tuple(lengths[d] for d in order), steps), order

    def itemsize(self, chunk: int) -> int:
        """Return bytes per element of a chunk."""
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

    def check_runs(self, stats: ReadStats, runs: ByteRuns, got: npt.NDArray[np.uint32]) -> None:
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
        for row in others.tolist():
            position, size = int(runs.payload_positions[row]), int(runs.sizes_bytes[row])
            self.check_part(stats, int(chunks[row]), position, size, int(got[row]))

    def check_part(self, stats: ReadStats, chunk: int, position: int, size: int, crc: int) -> None:
        """Take the checksum of bytes of one block: of all, or to be combined with those of the others."""
        fragment = Fragment(chunk, position, position + size, crc)
        whole = self._fragments.add(fragment, self.payload_lengths[chunk])
        if whole is not None:
            self.check_block(stats, chunk, position // BLOCK_BYTES, whole)

    def corruption(self, chunk: int, block: int, expected: int, got: int) -> CorruptCheckpointError:
        """Return the error for bytes that are not those committed."""
        fqn = self.index.own_name(int(self.index.chunk_tensors[chunk]))
        name = self.index.files[int(self.index.chunk_files[chunk])]
        offset = self.payloads.offset(chunk) + block * BLOCK_BYTES
        path = self.store.path_of(name)  # of several sources as one the store's own names are not the file's
        where, _, file = path.rpartition("/")
        return CorruptCheckpointError(
            f"{where}: tensor {fqn!r} is damaged: block {block} at byte {offset} of {file} has "
            f"CRC-32 {got:08x}, committed was {expected:08x}. Resume from another checkpoint",
            alternative="load the bytes as they are",
            argument="verify='none'",
            path=path,
            fqn=fqn,
            offset=offset,
        )
