"""Files in the memory of this process: for tests, examples, and state that need not outlive the process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final

from dcp.storage.errors import (
    CorruptCheckpointError,
)
from dcp.storage.stores.base import (
    ANY,
    Capabilities,
    Expected,
    FileInfo,
    PlainWriteHandle,
    ReadHandle,
    Store,
    StoreType,
    Version,
    WriteHandle,
    byte_view,
    check_name,
    is_name,
)
from dcp.storage.stores.objects.shared import locked


@dataclass
class _MemoryFile:
    data: bytearray
    modified_seconds: float


@dataclass
class _MemoryFolder:
    files: dict[str, _MemoryFile] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)


_FOLDERS: dict[str, _MemoryFolder] = {}
_FOLDERS_GUARD = threading.Lock()


def folder_names() -> list[str]:
    """Return the names of the stores that have files, in no order."""
    with _FOLDERS_GUARD:
        return [name for name, folder in _FOLDERS.items() if folder.files]


class MemoryStore(Store):
    """Stores of one ``name`` share their files. Nothing survives the process; ``durable`` has no effect."""

    capabilities = Capabilities(is_shared=False, lists_folders=True)

    def __init__(self, name: str) -> None:
        self.url = f"memory://{name}"
        with _FOLDERS_GUARD:
            self._folder = _FOLDERS.setdefault(name, _MemoryFolder())

    def make_root(self) -> None:
        """Do nothing: the folder exists as long as the process."""

    def list(self) -> list[FileInfo]:
        """Return a snapshot; files that are being written are listed with their size so far."""
        with self._folder.guard:
            return [_file_info(name, file) for name, file in sorted(self._folder.files.items())]

    def stat(self, name: str) -> FileInfo | None:
        """Return the size so far, for a file that is being written."""
        file = self._folder.files.get(check_name(name))
        return _file_info(name, file) if file else None

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """Return a copy of the file."""
        data = self._file(name).data
        if len(data) > limit_bytes:
            raise self.too_large(name, len(data), limit_bytes)
        return bytes(data)

    def open_read(self, name: str, *, expected_bytes: int | None = None) -> ReadHandle:
        """Open a file; the handle keeps the file's memory, also when the file is deleted or replaced."""
        return _MemoryReadHandle(name, self.path_of(name), self._file(name))

    def create(
        self, name: str, *, durable: bool, expected_bytes: int | None = None, replace: bool = False
    ) -> WriteHandle:
        """Begin a file, which grows in memory; sizes and durability have no effect."""
        file = _MemoryFile(bytearray(), time.time())
        with self._folder.guard:
            if replace:
                self._folder.files.pop(check_name(name), None)
            if self._folder.files.setdefault(check_name(name), file) is not file:
                raise self.taken(name)
        return _MemoryWriteHandle(name, self, file)

    def version(self, name: str) -> Version | None:
        """Return a digest of the content."""
        file = self._folder.files.get(check_name(name))
        return Version(bytes(file.data)) if file else None

    def publish(self, name: str, data: bytes, *, durable: bool, expected: Expected = ANY) -> Version:
        """Compare and replace under one mutex."""
        new = _MemoryFile(bytearray(data), time.time())
        with self._folder.guard:
            if expected is not ANY and self.version(name) != expected:
                raise self.conflict(name)
            self._folder.files[check_name(name)] = new
        return Version(data)

    def delete(self, name: str) -> None:
        """Open read handles still read it."""
        with self._folder.guard:
            self._folder.files.pop(check_name(name), None)

    def delete_if(self, name: str, expected: Version) -> bool:
        """Compare and remove under one mutex."""
        with self._folder.guard:
            if self.version(name) not in (None, expected):
                return False
            self._folder.files.pop(check_name(name), None)
            return True

    def lock(self, *, timeout_seconds: float) -> AbstractContextManager[None]:
        """Hold a lock between threads: other processes have a folder of their own."""
        return locked(self.url, timeout_seconds)

    def sync(self) -> None:
        """Do nothing: nothing is durable here."""

    def remove_root(self) -> None:
        """Do nothing: an empty folder takes no space, and a store object may still refer to it."""

    def folders(self) -> Sequence[str]:
        """Return only folders with files directly in them: empty ones are what looking at a name leaves."""
        return sorted(name for name in self._below() if "/" not in name and is_name(name))

    def tree(self) -> Iterator[tuple[str, FileInfo]]:
        """Yield the files of the other stores whose names begin as this one's, and of this one."""
        for info in self.list():
            yield "", info
        for folder in sorted(self._below(), key=lambda name: f"{name}/"):
            for info in MemoryStore(f"{self._name.rstrip('/')}/{folder}").list():
                yield folder, info

    def _below(self) -> Sequence[str]:
        prefix = f"{self._name.rstrip('/')}/"
        return [name.removeprefix(prefix) for name in folder_names() if name.startswith(prefix)]

    @property
    def _name(self) -> str:
        return self.url.removeprefix("memory://")

    def _file(self, name: str) -> _MemoryFile:
        file = self._folder.files.get(check_name(name))
        if file is None:
            raise self.absent(name)
        return file

    def _forget(self, name: str, file: _MemoryFile) -> None:
        with self._folder.guard:
            if self._folder.files.get(name) is file:
                del self._folder.files[name]


class _MemoryReadHandle(ReadHandle):
    def __init__(self, name: str, path: str, file: _MemoryFile) -> None:
        self.name = name
        self.size_bytes = len(file.data)
        self._path = path
        self._file: _MemoryFile | None = file

    def preadv(self, buffers: Sequence[memoryview], offset: int) -> None:
        if self._file is None:
            raise ValueError(f"{self._path} is closed: it cannot be read any more")
        size, end = len(self._file.data), offset + sum(buffer.nbytes for buffer in buffers)
        if end > size and end > offset:
            raise CorruptCheckpointError(
                f"{self._path} ends at byte {size}, but the checkpoint has data up to byte {end}",
                path=self._path,
                size_bytes=size,
                wanted_bytes=end,
            )
        for buffer in buffers:
            target = byte_view(buffer)
            target[:] = self._file.data[offset : offset + len(target)]
            offset += len(target)

    def close(self) -> None:
        self._file = None


class _MemoryWriteHandle(PlainWriteHandle):
    def __init__(self, name: str, store: MemoryStore, file: _MemoryFile) -> None:
        super().__init__(name, store.path_of(name))
        self._store = store
        self._file = file

    def _append(self, view: memoryview) -> None:
        self._file.data += view

    def _complete(self) -> None:
        self._file.modified_seconds = time.time()

    def _throw_away(self) -> None:
        self._store._forget(self.name, self._file)


def _file_info(name: str, file: _MemoryFile) -> FileInfo:
    return FileInfo(name, len(file.data), file.modified_seconds)


def _open(url: str, options: Mapping[str, Any] | None) -> Store:
    return MemoryStore(url.partition("://")[2])


STORE_TYPE: Final = StoreType(schemes=("memory",), open=_open)
