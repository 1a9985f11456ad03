"""The data files of a checkpoint: opened when they are first needed, of the size that was committed."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dcp.storage.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp.storage.formats.index import UNKNOWN
from dcp.storage.stores.base import Store
from dcp.storage.stores.handles import ReadHandle

__all__ = ["OpenFiles"]


class OpenFiles:
    """Files by number, as many open as the process can afford. ``facts`` has name and committed size of a
    number, the size `UNKNOWN` where nobody noted it. Thread-safe."""

    def __init__(self, store: Store, facts: Callable[[int], tuple[str, int]]) -> None:
        self._store = store
        self._facts = facts
        self._handles: dict[int, ReadHandle] = {}
        self._gates: dict[int, threading.Lock] = {}
        self._max_handles = _max_open_files()
        self._lock = threading.Lock()

    def __contains__(self, file: int) -> bool:
        """Whether it is open."""
        return file in self._handles

    def close(self) -> None:
        """Close all; no thread may be reading."""
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()

    def handle(self, file: int) -> ReadHandle:
        """The open file number ``file``; its size must be the committed one.

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
        """The checkpoint is there: where a file of it is not, it is damaged. That may show only when it is
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
    """A quarter of what the process may open: a checkpoint of many ranks has more files than that."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(8, (limit if limit != resource.RLIM_INFINITY else 1 << 20) // 4)
