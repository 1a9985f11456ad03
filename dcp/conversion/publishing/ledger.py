"""What of a conversion is done: a file of small entries, so that a killed one goes on where it was.

The first entry says of which conversion (fingerprint) and under which save id; each other one is the result
of a task whose bytes were durable before. An entry counts if its checksum fits, and none after one that does
not: that is how far the file was written.

Entries must never be believed of bytes that another conversion has written since, whichever of both a power
cut has left. So they are bound to these: by a folder that has the save id in its name, or by the versions of
the objects.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import struct
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Final

import msgpack

from dcp.conversion.copying.sinks import announce
from dcp.storage.commit_names import DATA_SUFFIX
from dcp.storage.errors import CheckpointConflictError, CheckpointError, CheckpointNotFoundError
from dcp.storage.formats.checksums import crc32
from dcp.storage.stores.base import Store
from dcp.storage.stores.posix import NO_LOCKS
from dcp.storage.stores.posix_files import storage_error

__all__ = ["LEDGER_NAME", "ConversionLedger", "LocalLedger", "StoredLedger"]

LEDGER_NAME: Final = "ledger"

_HEAD: Final = struct.Struct("<II")
_VERSION: Final = 3
_SAVE_ID: Final = re.compile("[0-9a-f]{8}")
_MAX_BYTES: Final = 1 << 30


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
    """Entries of one conversion. ``save_id`` is that of its first run; ``done`` are its tasks' results."""

    save_id: str = ""

    def __init__(self) -> None:
        self.done: list[bytes] = []

    @abstractmethod
    def open(self, fingerprint: str, save_id: str) -> bool:
        """Go on with what is there if it is of ``fingerprint``, else begin anew with ``save_id``.

        True if it goes on. Raises CheckpointConflictError where another process is at it.
        """

    @abstractmethod
    def append(self, result: bytes, file: str) -> None:
        """Note that a task is done, which has written ``file`` or a part of it."""

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
        self.save_id, self.done = save_id, entries[1:]
        return True

    @staticmethod
    def _header(fingerprint: str, save_id: str) -> bytes:
        return _framed(msgpack.packb({"version": _VERSION, "fingerprint": fingerprint, "save_id": save_id}))


class LocalLedger(ConversionLedger):
    """A file in the folder where the output is built, locked while a process is at it.

    ``save_id`` is for whoever needs `output` and does not `open` it, beside the one who has.
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

    def open(self, fingerprint: str, save_id: str) -> bool:
        """The folders are made if they are not there; of another conversion, all that is there goes."""
        announce("mkdir", self._folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666
            )
            self._lock()
            data = os.pread(self._descriptor, min(os.fstat(self._descriptor).st_size, _MAX_BYTES), 0)
            entries, end = _entries(data)
            resumed = self._take(entries, fingerprint)
            if resumed:
                os.ftruncate(self._descriptor, end)
                os.lseek(self._descriptor, end, os.SEEK_SET)
            else:
                self._begin(fingerprint, save_id)
            self.output.mkdir(exist_ok=True)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            raise storage_error(error, "open", self._path) from error
        return resumed

    def _begin(self, fingerprint: str, save_id: str) -> None:
        self.forget()
        self.save_id, self.done = save_id, []
        for entry in self._folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != self._path:
                entry.unlink()
        self._write(self._header(fingerprint, save_id))

    def append(self, result: bytes, file: str) -> None:
        """Not durable on its own: losing entries costs work, not correctness."""
        announce("ledger", self._path)
        try:
            self._write(_framed(result))
        except OSError as error:
            raise storage_error(error, "append", self._path) from error

    def forget(self) -> None:
        """Drop all entries, durably: what lies beside them is about to be something else."""
        announce("forget", self._path)
        try:
            os.ftruncate(self._descriptor, 0)
            os.fsync(self._descriptor)
            os.lseek(self._descriptor, 0, os.SEEK_SET)
        except OSError as error:
            raise storage_error(error, "truncate", self._path) from error

    def close(self) -> None:
        """Releases the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """The folder with all that is left in it; best effort, the conversion has its outcome."""
        announce("remove", self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise CheckpointConflictError(
                f"another process is converting to the same target now (it holds {self._path}); wait for it, "
                "or "
                "stop it",
                path=str(self._path),
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:  # then two conversions to one target are not told apart
                raise

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]


class StoredLedger(ConversionLedger):
    """A small object beside the output, replaced with each file that is done."""

    def __init__(self, store: Store, name: str) -> None:
        super().__init__()
        self._store = store
        self._name = name
        self._data = b""

    def open(self, fingerprint: str, save_id: str) -> bool:
        """Two processes at once are not told apart: files of one name are refused by the store."""
        try:
            data = self._store.read(self._name, limit_bytes=_MAX_BYTES)
        except CheckpointNotFoundError:
            data = b""
        entries, end = _entries(data)
        if self._take(entries, fingerprint):
            self._data = data[:end]
            self.done = [result for entry in self.done if (result := self._still_done(entry)) is not None]
            return True
        self.save_id, self.done, self._data = save_id, [], self._header(fingerprint, save_id)
        self._publish()  # before a file is written: one of another conversion's would be taken for its own
        return False

    def append(self, result: bytes, file: str) -> None:
        """One request, or two: an object store has no appending."""
        self._data += _framed(msgpack.packb([result, file, self._version(file)]))
        self._publish()

    def _still_done(self, entry: bytes) -> bytes | None:
        """The result of a task, if what it wrote is what is there."""
        noted = _unpacked(entry)
        if not isinstance(noted, list) or len(noted) != 3:
            return None
        result, file, version = noted
        if not isinstance(result, bytes) or not isinstance(file, str):
            return None
        return result if self._store.stat(file) is not None and self._version(file) == version else None

    def _version(self, file: str) -> str:
        if file.endswith(DATA_SUFFIX):  # they have the save id in their names
            return ""
        version = self._store.version(file)
        return "" if version is None else version.token

    def _publish(self) -> None:
        self._store.publish(self._name, self._data, durable=True)

    def close(self) -> None:
        """Nothing is held."""

    def remove(self) -> None:
        """Delete the object."""
        self._store.delete(self._name)
