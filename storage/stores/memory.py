"""In-memory store: files in the memory of this process, for tests, examples and temporary state."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dcp.storage.errors import CorruptCheckpointError
from dcp.storage.stores.base import (
    ANY,
    Capabilities,
    Expected,
    FileInfo,
    ReadHandle,
    Store,
    StoreType,
    Version,
    WriteHandle,
    byte_view,
    check_name,
    is_name,
)


@dataclass
class _MemoryFile:
    data: bytearray
    modified_seconds: float

    def info(self, name: str) -> FileInfo:
        return FileInfo(name, len(self.data), self.modified_seconds)


_FOLDERS: dict[str, dict[str, _MemoryFile]] = {}
_GUARD = threading.RLock()


class MemoryStore(Store):
    """In-memory store. Stores of the same ``name`` share files until the process ends; ``durable`` has no
    effect.
    """

    capabilities = Capabilities(is_shared=False, lists_folders=True)

    def __init__(self, name: str) -> None:
        self.url = f"memory://{name}"
        self._name = name
        with _GUARD:
            self._files = _FOLDERS.setdefault(name, {})

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError(
            f"{self.url} is in the memory of this process and cannot be sent to another process: use a path"
        )

    def list(self) -> list[FileInfo]:
        """Return a snapshot, including unfinished files with their present size."""
        with _GUARD:
            return [file.info(name) for name, file in sorted(self._files.items())]

    def stat(self, name: str) -> FileInfo | None:
        """Return the file's size, also for an unfinished file."""
        file = self._files.get(check_name(name))
        return file.info(name) if file else None

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """Return a copy of the file."""
        data = self._file(name).data
        if len(data) > limit_bytes:
            raise self.too_large(name, len(data), limit_bytes)
        return bytes(data)

    def open_read(self, name: str, *, expected_bytes: int | None = None) -> ReadHandle:
        """Open a file; the handle keeps the content after deletion or replacement."""
        return _MemoryReadHandle(name, self.path_of(name), self._file(name).data)

    def create(
        self, name: str, *, durable: bool, expected_bytes: int | None = None, replace: bool = False
    ) -> WriteHandle:
        """Create a file that grows in memory; expected size and durability have no effect."""
        file = _MemoryFile(bytearray(), time.time())
        with _GUARD:
            if replace:
                self._files.pop(check_name(name), None)
            if self._files.setdefault(check_name(name), file) is not file:
                raise self.taken(name)
        return _MemoryWriteHandle(name, self.path_of(name), self._files, file)

    def version(self, name: str) -> Version | None:
        """Return a digest of the content."""
        file = self._files.get(check_name(name))
        return Version(bytes(file.data)) if file else None

    def publish(self, name: str, data: bytes, *, durable: bool, expected: Expected = ANY) -> Version:
        """Compare and replace under one mutex."""
        with _GUARD:
            if expected is not ANY and self.version(name) != expected:
                raise self.conflict(name)
            self._files[check_name(name)] = _MemoryFile(bytearray(data), time.time())
        return Version(data)

    def delete(self, name: str) -> None:
        """Delete a file; open read handles stay valid."""
        with _GUARD:
            self._files.pop(check_name(name), None)

    def delete_if(self, name: str, expected: Version) -> bool:
        """Compare and remove under one mutex."""
        with _GUARD:
            return super().delete_if(name, expected)

    def folders(self) -> Sequence[str]:
        """Return folders with files directly in them."""
        return sorted(name for name in self._below() if "/" not in name and is_name(name))

    def tree(self) -> Iterator[tuple[str, FileInfo]]:
        """Yield the files of this store and of stores with names below this store's name."""
        for info in self.list():
            yield "", info
        for folder in sorted(self._below(), key=lambda name: f"{name}/"):
            for info in MemoryStore(f"{self._name.rstrip('/')}/{folder}").list():
                yield folder, info

    def _below(self) -> Sequence[str]:
        prefix = f"{self._name.rstrip('/')}/"
        with _GUARD:
            return [
                name.removeprefix(prefix) for name in _FOLDERS if name.startswith(prefix) and _FOLDERS[name]
            ]

    def _file(self, name: str) -> _MemoryFile:
        file = self._files.get(check_name(name))
        if file is None:
            raise self.absent(name)
        return file


class _MemoryReadHandle(ReadHandle):
    def __init__(self, name: str, path: str, data: bytearray) -> None:
        self.name = name
        self.size_bytes = len(data)
        self._path = path
        self._data: bytearray | None = data

    def preadv(self, buffers: Sequence[memoryview], offset: int) -> None:
        if self._data is None:
            raise ValueError(f"{self._path} is closed and cannot be read")
        size, end = len(self._data), offset + sum(buffer.nbytes for buffer in buffers)
        if end > size and end > offset:
            raise CorruptCheckpointError(
                f"{self._path} ends at byte {size}, but the checkpoint has data up to byte {end}",
                path=self._path,
                size_bytes=size,
                wanted_bytes=end,
            )
        for buffer in buffers:
            target = byte_view(buffer)
            target[:] = self._data[offset : offset + len(target)]
            offset += len(target)

    def close(self) -> None:
        self._data = None


class _MemoryWriteHandle(WriteHandle):
    def __init__(self, name: str, path: str, files: dict[str, _MemoryFile], file: _MemoryFile) -> None:
        super().__init__(name, path)
        self._files = files
        self._file = file

    def _append(self, view: memoryview) -> None:
        self._file.data += view

    def _complete(self) -> None:
        self._file.modified_seconds = time.time()

    def _throw_away(self) -> None:
        with _GUARD:
            if self._files.get(self.name) is self._file:
                del self._files[self.name]


def _open(url: str, options: Mapping[str, Any] | None) -> Store:
    return MemoryStore(url.partition("://")[2])


STORE_TYPE: Final = StoreType(schemes=("memory",), open=_open)
