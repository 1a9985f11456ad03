"""Open files of a store: read at offsets by many threads, written front to back by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

from dcp.storage.closable import Closable

__all__ = ["Buffer", "Inflow", "ReadHandle", "Views", "WriteHandle", "byte_view"]

Buffer: TypeAlias = "bytes | bytearray | memoryview[Any]"
"""Bytes to be written: C-contiguous, any item format."""


def byte_view(data: Buffer) -> memoryview:
    """Return ``data`` as a one-dimensional view of bytes. Raises `TypeError` if it is not C-contiguous."""
    view = memoryview(data)
    if view.ndim == 1 and view.format == "B" and view.c_contiguous:
        return view
    return view.cast("B") if view.nbytes else memoryview(b"")


class Inflow(Protocol):
    """Takes in a range of a file as it comes, so that what has come is used while a cache has it."""

    @property
    def size_bytes(self) -> int:
        """Return how much it takes."""

    def buffers(self) -> Iterator[memoryview]:
        """Yield memory for all of it, in order, for one attempt to fetch it; from any thread.

        The next buffer is asked for when the last one is full, and after the last one once more. Asked anew,
        it begins anew: what came by an attempt before does not count.
        """


class Views:
    """The `Inflow` into memory that is all there."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = views
        self.size_bytes = sum(map(len, views))

    def buffers(self) -> Iterator[memoryview]:
        """Yield each of the views."""
        return iter(self._views)


class ReadHandle(Closable):
    """An open file, read at explicit offsets, by any number of threads at once."""

    name: str
    size_bytes: int

    @abstractmethod
    def preadv(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill all ``buffers`` exactly, in order, from byte ``offset`` on, without a copy in between.

        Raises `CorruptCheckpointError` if the file ends before, `StorageError` if reading fails. Contents of
        the buffers are then undefined.
        """

    def receive(self, inflow: Inflow, offset: int) -> None:
        """Read as `preadv`, into the buffers of ``inflow``, where its size is worth one request."""
        for buffer in inflow.buffers():
            self.preadv([buffer], offset)
            offset += len(buffer)

    def pread(self, length: int, offset: int) -> bytes:
        """Return exactly ``length`` bytes: for headers, where a destination of one's own is not worth it."""
        data = bytearray(length)
        self.preadv([memoryview(data)], offset)
        return bytes(data)

    @abstractmethod
    def close(self) -> None:
        """Release the file; idempotent. No read may be running in another thread."""


class WriteHandle(ABC):
    """A new file, written front to back by one thread at a time.

    As a context manager it finishes on a normal exit and aborts on an exception.
    """

    name: str

    @property
    @abstractmethod
    def position(self) -> int:
        """Return the bytes accepted so far, so that the caller learns at which offset a record begins."""

    @abstractmethod
    def write(self, data: Buffer) -> None:
        """Append ``data``, consumed before return: the caller may change the memory at once.

        Raises `StorageFullError` or `StorageError`, also for an earlier write that failed in the background;
        then only `abort` is of use.
        """

    def write_many(self, parts: Sequence[bytes | memoryview]) -> None:
        """Append all of ``parts``, as `write` does each."""
        for part in parts:
            self.write(part)

    @abstractmethod
    def finish(self) -> int:
        """Bring everything to storage, durable where `Store.create` was asked so; returns the size in bytes.

        Raises `CheckpointConflictError` if another process has ended its upload (`Store.abort_uploads`).
        The name itself is durable only after `Store.sync`, once for all files of a folder. Idempotent.
        """

    @abstractmethod
    def abort(self) -> None:
        """Remove the file, for a save that failed. Idempotent; after `finish` it does nothing."""

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
