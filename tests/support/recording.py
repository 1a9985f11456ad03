"""An in-memory store that prefers few large reads, like an object store, and records each read."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from dcp.storage.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp.storage.stores import FileInfo, MemoryStore, Version
from dcp.storage.stores.base import Inflow, ReadHandle, ReadProfile

__all__ = ["OBJECT_PROFILE", "ReadNote", "RecordingStore"]

OBJECT_PROFILE = ReadProfile(
    threads=3, request_bytes=8 << 20, join_below_bytes=8 << 20, gap_bytes=256 << 10, scatter=True
)


@dataclass(frozen=True)
class ReadNote:
    """A read: file, first byte, size, and number of filled buffers."""

    name: str
    offset: int
    size_bytes: int
    buffers: int


class RecordingStore(MemoryStore):
    """A store with a list of reads of data files in ``reads``; `traffic` counts like an object service.

    Opening a file of known size sends no request, so only the first read can find the file missing.
    """

    def __init__(self, name: str, profile: ReadProfile = OBJECT_PROFILE) -> None:
        super().__init__(name)
        self.read_profile = profile
        self.reads: list[ReadNote] = []
        self._counts: dict[str, float] = {}
        self._guard = threading.Lock()

    def note(self, op: str, received_bytes: int = 0) -> None:
        """Count a request."""
        with self._guard:
            for name, amount in (("requests", 1), (op, 1), ("bytes_received", received_bytes)):
                self._counts[name] = self._counts.get(name, 0) + amount

    def traffic(self) -> dict[str, float]:
        """Return requests by kind, and bytes."""
        with self._guard:
            return dict(self._counts)

    def list(self) -> list[FileInfo]:
        """List files: one request."""
        self.note("list")
        return super().list()

    def stat(self, name: str) -> FileInfo | None:
        """Stat a file: one request."""
        self.note("head")
        return super().stat(name)

    def version(self, name: str) -> Version | None:
        """Return a version: one request."""
        self.note("head")
        return super().version(name)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """Read a file: one request."""
        data = super().read(name, limit_bytes=limit_bytes)
        self.note("get", len(data))
        return data

    def read_start(self, name: str, size_bytes: int) -> tuple[bytes, int]:
        """Read the start of a file: one request."""
        data = super().read(name, limit_bytes=1 << 40)
        self.note("get", min(size_bytes, len(data)))
        return data[:size_bytes], len(data)

    def open_read(self, name: str, *, expected_bytes: int | None = None) -> ReadHandle:
        """Open a file; sends a request only if the size is unknown."""
        if expected_bytes is None:
            self.note("head")
            expected_bytes = len(self._file(name).data)
        return _Handle(self, name, expected_bytes)


class _Handle(ReadHandle):
    def __init__(self, store: RecordingStore, name: str, size_bytes: int) -> None:
        self._store = store
        self.name = name
        self.size_bytes = size_bytes

    def preadv(self, buffers: Sequence[memoryview], offset: int) -> None:
        store, size = self._store, sum(buffer.nbytes for buffer in buffers)
        found = MemoryStore.stat(store, self.name)
        if found is None:
            path = store.path_of(self.name)
            raise CheckpointNotFoundError(f"{path} does not exist", path=path)
        if found.size_bytes != self.size_bytes:
            path = store.path_of(self.name)
            raise CorruptCheckpointError(f"{path} has {found.size_bytes} bytes", path=path)
        with MemoryStore.open_read(store, self.name) as inner:
            inner.preadv(buffers, offset)
        store.note("get", size)
        store.reads.append(ReadNote(self.name, offset, size, len(buffers)))

    def receive(self, inflow: Inflow, offset: int) -> None:
        data = bytearray(inflow.size_bytes)
        self.preadv([memoryview(data)], offset)
        for buffer in inflow.buffers():
            buffer[:], data = data[: len(buffer)], data[len(buffer) :]

    def pread(self, length: int, offset: int) -> bytes:
        data = bytearray(length)
        self.preadv([memoryview(data)], offset)
        return bytes(data)

    def close(self) -> None:
        pass
