"""What of a conversion is done: a file of small entries, so that a killed one goes on where it was.

The first entry says of which conversion (fingerprint), under which save id and, locally, in which folder
(inode); each other one is the result of a batch of tasks whose bytes were durable before. An entry counts if
its checksum fits, and none after one that does not: that is how far the file was written.

Entries must never be believed of bytes that another conversion has written since, whichever of both a power
cut has left. So they are bound to these: by a folder that has the save id in its name, or by the versions of
the objects.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgpack

from dcp.conversion.copying.sinks import announce
from dcp.conversion.publishing import local_files
from dcp.storage.commit_names import DATA_SUFFIX
from dcp.storage.errors import CheckpointConflictError, CheckpointError, CheckpointNotFoundError, StorageError
from dcp.storage.formats.checksums import crc32
from dcp.storage.stores.base import Store, Version
from dcp.storage.stores.posix.files import is_named, step
from dcp.storage.stores.posix.refusals import NO_LOCKS, WITHOUT_LOCKS, warn_once

__all__ = ["LEDGER_NAME", "ConversionLedger", "LocalLedger", "StoredLedger"]

LEDGER_NAME: Final = "ledger"

_HEAD: Final = struct.Struct("<II")
_VERSION: Final = 5
_SAVE_ID: Final = re.compile("[0-9a-f]{8}")
_MAX_BYTES: Final = 1 << 30
_ATTEMPTS: Final = 100
"""To lock a file that whoever held it may have removed just then."""
_EXPECTED: Final = "of bytes: "
"""Where the version of a file belongs that is not written yet; its size follows."""


def _framed(data: bytes) -> bytes:
    return _HEAD.pack(len(data), crc32(data)) + data


def _entries(data: bytes) -> tuple[list[bytes], int]:
    """Entries whose checksums fit, up to the first that does not, and where they end."""
    found, position = [], 0
    while position + _HEAD.size <= len(data):
        size, crc = _HEAD.unpack_from(data, position)
        entry = data[position + _HEAD.size : position + _HEAD.size + size]
        if not size or len(entry) != size or crc32(entry) != crc:  # zeros are what a power cut leaves
            break
        found.append(entry)
        position += _HEAD.size + size
    return found, position


def _unpacked(data: bytes) -> Any:
    """None for what is no msgpack."""
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException):
        return None


class ConversionLedger(ABC):
    """Entries of one conversion. ``save_id`` is that of its first run; ``done`` are its batches' results.
    ``inode`` is of the folder that becomes a local target, by which it is known under any name."""

    save_id: str = ""
    inode: int | None = None

    def __init__(self) -> None:
        self.done: list[bytes] = []

    @abstractmethod
    def open(self, fingerprint: str) -> bool:
        """Whether what is there is of the conversion ``fingerprint``, which goes on then.

        Raises CheckpointConflictError where another process is at it.
        """

    @abstractmethod
    def begin(self, fingerprint: str, save_id: str) -> None:
        """Anew, before anything is written; what there is of another conversion goes."""

    @abstractmethod
    def append(self, result: bytes, files: Iterable[str]) -> None:
        """Note that a batch is done, which has written ``files`` or ranges of them."""

    @abstractmethod
    def close(self) -> None:
        """Let go of it; the entries stay."""

    @abstractmethod
    def remove(self) -> None:
        """The conversion is complete: nothing is to be resumed any more."""

    def _take(self, entries: list[bytes], fingerprint: str) -> bool:
        """Whether ``entries`` are of this conversion."""
        head = _unpacked(entries[0]) if entries else None
        if not isinstance(head, dict) or head.get("version") != _VERSION:
            return False
        save_id = head.get("save_id")
        if not isinstance(save_id, str) or not _SAVE_ID.fullmatch(save_id):  # it becomes a file name
            return False
        if head.get("fingerprint") != fingerprint:
            return False
        self.save_id, self.inode, self.done = save_id, head.get("inode"), entries[1:]
        return True

    def _header(self, fingerprint: str) -> bytes:
        facts = {"fingerprint": fingerprint, "save_id": self.save_id, "inode": self.inode}
        return _framed(msgpack.packb({"version": _VERSION, **facts}))


class LocalLedger(ConversionLedger):
    """A file in the folder where the output is built, locked while a process is at it.

    ``save_id`` is for whoever needs `output` and does not `open` it.
    """

    def __init__(self, folder: Path, save_id: str = "") -> None:
        super().__init__()
        self.save_id = save_id
        self._folder = folder
        self._path = folder / LEDGER_NAME
        self._descriptor = -1

    @property
    def output(self) -> Path:
        """The folder beside the ledger in which the files are built: of no other conversion, ever."""
        return self._folder / f"output-{self.save_id}"

    def open(self, fingerprint: str) -> bool:
        """The folder is made if it is not there; a replacement that was interrupted is undone."""
        announce("mkdir", self._folder)
        with step(None, "open", self._path):
            for _ in range(_ATTEMPTS):
                if self._hold():
                    break
                self.close()
            else:
                raise StorageError(
                    f"{self._path} is removed or replaced as soon as it is made, so that nobody can be kept "
                    "from converting to the same target",
                    path=str(self._path),
                    op="lock",
                )
            local_files.settle(self._folder)
            size = min(os.fstat(self._descriptor).st_size, _MAX_BYTES)
            entries, end = _entries(os.pread(self._descriptor, size, 0))
            if not self._take(entries, fingerprint):
                return False
            os.ftruncate(self._descriptor, end)
            os.lseek(self._descriptor, end, os.SEEK_SET)
            self._follow_output(fingerprint)
        return True

    def _hold(self) -> bool:
        """Make and lock the file; False where who held it has just removed it: such a lock says nothing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, flags, 0o666)
            self._lock()
            return is_named(self._path, self._descriptor)
        except (FileNotFoundError, FileExistsError):
            is_none = os.path.lexists(self._folder) and not self._folder.is_dir()
            if is_none or not self._folder.parent.is_dir():
                raise
            return False

    def _follow_output(self, fingerprint: str) -> None:
        """In a copy of the folder, such as a restored one, what is built has another inode, and the old one
        may be that of something else, which would be taken for it."""
        if self.output.is_dir() and (inode := self.output.stat().st_ino) != self.inode:
            self.forget()
            self.inode = inode
            self._write(self._header(fingerprint))
            for entry in self.done:
                self._write(_framed(entry))

    def begin(self, fingerprint: str, save_id: str) -> None:
        """Its lock is held."""
        self.forget()
        self.save_id, self.done = save_id, []
        with step(None, "open", self._path):
            self._clear()
            self.output.mkdir(exist_ok=True)
            self.inode = self.output.stat().st_ino
            self._write(self._header(fingerprint))

    def append(self, result: bytes, files: Iterable[str]) -> None:
        """Not durable on its own: losing entries costs work, not correctness."""
        with step(announce, "ledger", self._path):
            self._write(_framed(result))

    def sync(self) -> None:
        """Make the entries durable, where it is open."""
        if self._descriptor >= 0:
            with step(announce, "fsync", self._path):
                os.fsync(self._descriptor)

    def forget(self) -> None:
        """Drop all entries, durably: what lies beside them is about to be something else."""
        with step(announce, "forget", self._path):
            os.ftruncate(self._descriptor, 0)
            os.fsync(self._descriptor)
            os.lseek(self._descriptor, 0, os.SEEK_SET)

    def close(self) -> None:
        """Releases the lock."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):  # closed all the same; entries that are lost cost work, not correctness
                os.close(descriptor)

    def remove(self) -> None:
        """The folder with all that is left in it; best effort, the conversion has its outcome."""
        announce("remove", self._folder)
        with suppress(OSError, CheckpointError):
            self._clear()
            self._path.unlink()  # last: as long as it is there, nobody else begins
        self.close()
        with suppress(OSError):  # only now: NFS and FUSE keep a removed file in the folder while it is open
            self._folder.rmdir()

    def _clear(self) -> None:
        """What lies beside the ledger, unless it is the only copy of something."""
        local_files.settle(self._folder)
        for entry in self._folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                _remove_tree(entry)
            elif entry != self._path:
                entry.unlink()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise CheckpointConflictError(
                f"another process is converting to the same target now (it holds {self._path}); wait for it, "
                "or stop it",
                path=str(self._path),
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            warn_once(self._folder.parent, error, WITHOUT_LOCKS)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]


def _remove_tree(folder: Path) -> None:
    """As `shutil.rmtree`, which refuses folders whose inode numbers change."""
    for place, folders, files in os.walk(folder, topdown=False):
        for name in files:
            Path(place, name).unlink()
        for name in folders:
            path = Path(place, name)
            if path.is_symlink():
                path.unlink()
            else:
                path.rmdir()
    folder.rmdir()


class StoredLedger(ConversionLedger):
    """A small object beside the output, replaced with each batch that is done."""

    def __init__(self, store: Store, name: str) -> None:
        super().__init__()
        self._store = store
        self._name = name
        self._data = b""

    def open(self, fingerprint: str) -> bool:
        """Two processes at once are not told apart: files of one name are refused by the store."""
        data = self._read()
        entries, end = _entries(data)
        if not self._take(entries, fingerprint):
            return False
        self._data = data[:end]
        self.done = [noted[0] for noted in map(_noted, self.done) if noted and self._is_there(noted[1])]
        return True

    def begin(self, fingerprint: str, save_id: str) -> None:
        """Before a file is written: one of another conversion's would be taken for its own."""
        self.save_id, self.done = save_id, []
        self._data = self._header(fingerprint)
        self._publish()

    def append(self, result: bytes, files: Iterable[str]) -> None:
        """One request, and one for each file: an object store has no appending."""
        versions = {file: self._version(file) for file in files}
        self._data += _framed(msgpack.packb([result, versions]))
        self._publish()

    def expect(self, save_id: str, sizes: Mapping[str, int]) -> None:
        """One batch alone, whose result is known elsewhere, is about to write files of these sizes: so that
        `discard_files` knows them also if it is killed before it can `note` them. Those that are there are
        none of its own, unless it was about to before."""
        store = self._store
        absent = {name: f"{_EXPECTED}{size}" for name, size in sizes.items() if store.stat(name) is None}
        if absent:
            self._note(save_id, self._files() | absent)

    def note(self, save_id: str, files: Iterable[str]) -> None:
        """The batch has written them, and nothing else."""
        self._note(save_id, {file: self._version(file) for file in files})

    def _note(self, save_id: str, files: Mapping[str, str]) -> None:
        self.save_id = save_id
        self._data = self._header("") + _framed(msgpack.packb([b"", dict(files)]))
        self._publish()

    def discard_files(self) -> None:
        """Remove what it has noted and is still the same, and what was expected and has the size; data files
        have the save id in their names, and are removed by that."""
        for file, version in self._files().items():
            if version.startswith(_EXPECTED):
                info = self._store.stat(file)
                if info is not None and info.size_bytes == int(version.removeprefix(_EXPECTED)):
                    self._store.delete(file)
            elif version:
                self._store.delete_if(file, Version(version))

    def _files(self) -> dict[str, str]:
        """By file what was noted of it."""
        noted = map(_noted, _entries(self._read())[0][1:])
        return {file: version for entry in noted if entry for file, version in entry[1].items()}

    def _is_there(self, versions: Mapping[str, str]) -> bool:
        """Whether what a batch wrote is what is there."""
        return all(
            self._store.stat(file) is not None and self._version(file) == version
            for file, version in versions.items()
        )

    def _version(self, file: str) -> str:
        if file.endswith(DATA_SUFFIX):  # they have the save id in their names
            return ""
        version = self._store.version(file)
        return "" if version is None else version.token

    def _read(self) -> bytes:
        try:
            return self._store.read(self._name, limit_bytes=_MAX_BYTES)
        except CheckpointNotFoundError:
            return b""

    def _publish(self) -> None:
        announce("ledger", self._name)
        self._store.publish(self._name, self._data, durable=True)

    def close(self) -> None:
        """Nothing is held."""

    def remove(self) -> None:
        """Delete the object."""
        announce("remove", self._name)
        self._store.delete(self._name)


def _noted(entry: bytes) -> tuple[bytes, dict[str, str]] | None:
    """(result, versions by file) of an entry of a `StoredLedger`; None for anything else."""
    noted = _unpacked(entry)
    if not isinstance(noted, list) or len(noted) != 2:
        return None
    result, versions = noted
    if not isinstance(result, bytes) or not isinstance(versions, dict):
        return None
    if not all(type(text) is str for pair in versions.items() for text in pair):
        return None
    return result, versions
