"""Where tasks write: a range of a preallocated local file, or an object that is streamed front to back."""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from dcp.storage.errors import CheckpointConflictError
from dcp.storage.stores.base import Store, WriteHandle
from dcp.storage.stores.buffers import ALIGNMENT_BYTES, POOL, BounceBuffer
from dcp.storage.stores.posix_files import storage_error

__all__ = ["ComparingSink", "FileSink", "Sink", "StreamSink", "announce", "observers"]

observers: Final[list[Callable[[str, str], None]]] = []
"""Called with (step, file name) before everything that changes storage: crash tests kill there."""

_DIRECT_ABOVE_BYTES: Final = 1 << 20
_IN_FLIGHT: Final = 1
"""Buffers on their way to the disk while the next one is filled."""


def announce(op: str, path: str | os.PathLike[str]) -> None:
    """Tell the observers what is about to happen."""
    for observer in observers:
        observer(op, Path(path).name)


class Sink(ABC):
    """Takes a task's range, window by window, in order; on storage when the context ends normally."""

    @abstractmethod
    def buffer(self, size_bytes: int) -> memoryview:
        """Memory to assemble the next window in."""

    @abstractmethod
    def write(self, buffer: memoryview, offset: int) -> None:
        """Take the window that `buffer` gave memory for; it may still be on its way afterwards."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until all of it is durable."""

    @abstractmethod
    def abort(self) -> None:
        """Give up; what was written stays undefined."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.finish()
        except BaseException:
            self.abort()
            raise


class FileSink(Sink):
    """Writes past the page cache (O_DIRECT) where that is allowed, in a thread, while the next window is
    read."""

    def __init__(self, folder: str, name: str) -> None:
        self._path = Path(folder) / name
        self._direct = -1
        try:
            self._plain = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise storage_error(error, "open", self._path) from error
        with suppress(OSError):  # tmpfs of old kernels, some network file systems
            self._direct = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dcp-convert-write")
        self._filling: BounceBuffer | None = None
        self._pending: deque[tuple[Future[None], BounceBuffer]] = deque()

    def buffer(self, size_bytes: int) -> memoryview:
        """Page-aligned, from the process' pool."""
        if self._filling is None:
            self._filling = POOL.take()
        return self._filling.view[:size_bytes]

    def write(self, buffer: memoryview, offset: int) -> None:
        """Hand it to the thread; waits for the one before the last."""
        filled, self._filling = self._filling, None
        if filled is None:
            raise ValueError("no window to write")
        self._pending.append((self._thread.submit(self._write, buffer, offset), filled))
        while len(self._pending) > _IN_FLIGHT:
            self._await_oldest()

    def finish(self) -> None:
        """fdatasync: sizes do not change any more."""
        while self._pending:
            self._await_oldest()
        announce("fdatasync", self._path)
        try:
            os.fdatasync(self._plain)
        except OSError as error:
            raise storage_error(error, "fdatasync", self._path) from error
        self._close()

    def abort(self) -> None:
        """Wait for the thread, which uses memory of the pool."""
        while self._pending:
            with suppress(OSError):  # the failure that led here is the one to report
                self._await_oldest()
        self._close()

    def _await_oldest(self) -> None:
        future, buffer = self._pending.popleft()
        try:
            future.result()
        finally:
            POOL.give(buffer)

    def _write(self, data: memoryview, offset: int) -> None:
        announce("pwrite", self._path)
        try:
            if self._direct >= 0 and len(data) >= _DIRECT_ABOVE_BYTES and offset % ALIGNMENT_BYTES == 0:
                size = len(data) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
                done = self._write_direct(data[:size], offset)
                data, offset = data[done:], offset + done
            _write_all(self._plain, data, offset)
        except OSError as error:
            raise storage_error(error, "pwrite", self._path) from error

    def _write_direct(self, data: memoryview, offset: int) -> int:
        """Bytes written so; fewer where the file system refuses."""
        done = 0
        while done < len(data):
            try:
                written = os.pwrite(self._direct, data[done:], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                return done
            done += written
            if written % ALIGNMENT_BYTES:
                return done
        return done

    def _close(self) -> None:
        self._thread.shutdown()
        if self._filling is not None:
            POOL.give(self._filling)
            self._filling = None
        for descriptor in (self._plain, self._direct):
            if descriptor >= 0:
                os.close(descriptor)
        self._plain = self._direct = -1


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


class StreamSink(Sink):
    """A new file of a store, whole or not there at all; stores send parts while the next ones are read.

    ``replace`` an existing one, as `Store.create` does.
    """

    def __init__(self, store: Store, name: str, size_bytes: int, *, replace: bool) -> None:
        self._store = store
        self._name = name
        self._handle: WriteHandle = store.create(
            name, durable=True, expected_bytes=size_bytes, replace=replace
        )
        self._memory = memoryview(bytearray(0))

    def buffer(self, size_bytes: int) -> memoryview:
        """One buffer for all windows: `write` copies."""
        if size_bytes > len(self._memory):
            self._memory = memoryview(bytearray(size_bytes))
        return self._memory[:size_bytes]

    def write(self, buffer: memoryview, offset: int) -> None:
        """Append it."""
        announce("append", self._name)
        self._handle.write(buffer)

    def finish(self) -> None:
        """The file appears."""
        announce("finish", self._name)
        self._handle.finish()
        self._store.sync()
        announce("finished", self._name)

    def abort(self) -> None:
        """Nothing of it stays."""
        self._handle.abort()


class ComparingSink(Sink):
    """A file of a store that is there already, since an attempt before this one wrote it: nothing is written.

    Raises CheckpointConflictError if it has not the very bytes that would be.
    """

    def __init__(self, store: Store, name: str, size_bytes: int) -> None:
        self._path = store.path_of(name)
        self._memory = memoryview(bytearray(0))
        self._handle = store.open_read(name)
        if self._handle.size_bytes != size_bytes:
            self._handle.close()
            raise self._conflict()

    def buffer(self, size_bytes: int) -> memoryview:
        """One buffer for all windows."""
        if size_bytes > len(self._memory):
            self._memory = memoryview(bytearray(size_bytes))
        return self._memory[:size_bytes]

    def write(self, buffer: memoryview, offset: int) -> None:
        """Compare it with what is there."""
        if self._handle.pread(len(buffer), offset) != buffer:
            self._handle.close()
            raise self._conflict()

    def finish(self) -> None:
        """It was the same."""
        self._handle.close()

    def abort(self) -> None:
        """It stays."""
        self._handle.close()

    def _conflict(self) -> CheckpointConflictError:
        return CheckpointConflictError(
            f"{self._path} is there already, and not of this conversion; give another target, or delete it",
            path=self._path,
        )
