"""Where tasks write: a range of a file that has its size, or a file that appears whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dcp.storage.errors import CheckpointConflictError
from dcp.storage.stores.base import Store
from dcp.storage.stores.handles import Buffer, ReadHandle, WriteHandle
from dcp.storage.stores.posix.files import PosixWriteHandle, step

__all__ = ["ComparedFile", "Output", "ReservedRange", "announce", "observers"]

observers: Final[list[Callable[[str, str], None]]] = []
"""Called with (step, file name) before everything that changes storage: crash tests kill there."""


def announce(op: str, path: str | os.PathLike[str]) -> None:
    """Tell the observers what is about to happen."""
    for observer in observers:
        observer(op, Path(path).name)


@dataclass(frozen=True)
class Output:
    """Where all tasks of a conversion write.

    ``in_place``: ``store`` is a folder of this machine whose files have their sizes, and tasks write ranges
    of them. Else each task writes a whole file, which appears when it is finished, with ``replace`` in place
    of one that is there.
    """

    store: Store
    in_place: bool
    replace: bool = False

    def open(self, name: str, begin: int, size_bytes: int) -> WriteHandle:
        """The range from ``begin`` on of a file of ``size_bytes``, or the file. A file that is there already,
        since a run before this one wrote it, need only be compared."""
        if self.in_place:
            return ReservedRange(Path(self.store.url) / name, begin)
        if self.is_written(name):
            return ComparedFile(self.store.open_read(name), self.store.path_of(name), size_bytes)
        return self.store.create(name, durable=True, expected_bytes=size_bytes, replace=self.replace)

    def is_written(self, name: str) -> bool:
        """Whether a task's file is there, and may not be replaced."""
        return not (self.in_place or self.replace) and self.store.stat(name) is not None


class ReservedRange(PosixWriteHandle):
    """A range of a file that has its size, while others write other ranges of it."""

    def __init__(self, path: Path, begin: int) -> None:
        with step(None, "open", path):
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        super().__init__(path, descriptor, announce)
        self._flushed_bytes = begin

    def lend(self, size_bytes: int) -> memoryview:
        """Page-aligned memory, which `write` takes back filled, without a copy."""
        self._check_usable()
        if self._buffer is None:
            self._take_buffer()
        return self._view[:size_bytes]

    def write(self, data: Buffer) -> None:
        """Write in a thread what `lend` gave memory for; waits for the one before the last."""
        self._fill_bytes = len(data)
        self._send()

    def abort(self) -> None:
        """What was written stays undefined; the file is not this range's to remove."""
        if self._state == "open":
            self._stop()
            self._close("aborted")

    def _flush_to_end(self) -> None:
        """fdatasync: the size does not change any more."""
        while self._in_flight:
            self._pool.give(self._await_oldest())
        with step(announce, "fdatasync", self._path):
            os.fdatasync(self._descriptor)


class ComparedFile(WriteHandle):
    """A file that is there already: nothing is written.

    Raises CheckpointConflictError if it has not the very bytes that would be.
    """

    def __init__(self, there: ReadHandle, path: str, size_bytes: int) -> None:
        self.name = there.name
        self._path = path
        self._there = there
        self._position = 0
        if there.size_bytes != size_bytes:
            raise self._conflict()

    @property
    def position(self) -> int:
        """Where the next bytes are compared."""
        return self._position

    def write(self, data: Buffer) -> None:
        """Compare it with what is there."""
        if self._there.pread(len(data), self._position) != data:
            raise self._conflict()
        self._position += len(data)

    def finish(self) -> int:
        """It was the same."""
        self._there.close()
        return self._position

    def abort(self) -> None:
        """It stays."""
        self._there.close()

    def _conflict(self) -> CheckpointConflictError:
        self._there.close()
        return CheckpointConflictError(
            f"{self._path} is there already, and not of this conversion; give another target, or delete it",
            path=self._path,
        )
