"""Ledgers of conversions: what of one is done, so that a killed one is resumed.

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
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgpack

from dcp.conversion.copying.sinks import announce
from dcp.conversion.publishing import local_files
from dcp.storage.errors import CheckpointConflictError, CheckpointError, StorageError
from dcp.storage.formats.checksums import crc32
from dcp.storage.stores.posix.files import is_named, step
from dcp.storage.stores.posix.refusals import NO_LOCKS, WITHOUT_LOCKS, warn_once

__all__ = ["LEDGER_NAME", "MAX_BYTES", "LocalLedger", "Noted", "framed", "header", "parse", "unpacked"]

LEDGER_NAME: Final = "ledger"
MAX_BYTES: Final = 1 << 30

_HEAD: Final = struct.Struct("<II")
_VERSION: Final = 5
_SAVE_ID: Final = re.compile("[0-9a-f]{8}")
_ATTEMPTS: Final = 100
"""To lock a file that whoever held it may have removed just then."""


class Noted(NamedTuple):
    """The entries of a ledger, behind the first; ``end`` is where the last one ends."""

    save_id: str
    inode: int | None
    entries: list[bytes]
    end: int


def framed(data: bytes) -> bytes:
    """An entry."""
    return _HEAD.pack(len(data), crc32(data)) + data


def header(fingerprint: str, save_id: str, inode: int | None = None) -> bytes:
    """The first entry."""
    facts = {"version": _VERSION, "fingerprint": fingerprint, "save_id": save_id, "inode": inode}
    return framed(msgpack.packb(facts))


def parse(data: bytes, fingerprint: str | None) -> Noted | None:
    """The entries whose checksums fit, up to the first that does not; None if they are of another conversion
    than ``fingerprint`` (None: of any)."""
    found, position = [], 0
    while position + _HEAD.size <= len(data):
        size, crc = _HEAD.unpack_from(data, position)
        entry = data[position + _HEAD.size : position + _HEAD.size + size]
        if not size or len(entry) != size or crc32(entry) != crc:  # zeros are what a power cut leaves
            break
        found.append(entry)
        position += _HEAD.size + size
    head = unpacked(found[0]) if found else None
    if not isinstance(head, dict) or head.get("version") != _VERSION:
        return None
    if fingerprint is not None and head.get("fingerprint") != fingerprint:
        return None
    save_id = head.get("save_id")
    if not isinstance(save_id, str) or not _SAVE_ID.fullmatch(save_id):  # it becomes a file name
        return None
    return Noted(save_id, head.get("inode"), found[1:], position)


def unpacked(data: bytes) -> Any:
    """None for anything but msgpack."""
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException):
        return None


class LocalLedger:
    """A file in the folder where the output is built, locked while a process is at it.

    ``save_id`` is that of the first run, ``done`` are its batches' results, ``inode`` is of the folder that
    becomes the target, by which it is known under any name. For the `output` alone it need not be open.
    """

    def __init__(self, folder: Path, save_id: str = "") -> None:
        self.save_id = save_id
        self.inode: int | None = None
        self.done: list[bytes] = []
        self._folder = folder
        self._path = folder / LEDGER_NAME
        self._descriptor = -1

    @property
    def output(self) -> Path:
        """The folder beside the ledger in which the files are built: of no other conversion, ever."""
        return self._folder / f"output-{self.save_id}"

    def open(self, fingerprint: str) -> bool:
        """Lock it; whether it is of the conversion ``fingerprint``, which is resumed then.

        The folder is made if it is not there; a replacement that was interrupted is undone. Raises
        CheckpointConflictError where another process is at it.
        """
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
            size = min(os.fstat(self._descriptor).st_size, MAX_BYTES)
            noted = parse(os.pread(self._descriptor, size, 0), fingerprint)
            if noted is None:
                return False
            self.save_id, self.inode, self.done, end = noted
            os.ftruncate(self._descriptor, end)
            os.lseek(self._descriptor, end, os.SEEK_SET)
            if self.output.is_dir() and (inode := self.output.stat().st_ino) != self.inode:
                # A copy of the folder, such as a restored one: the old inode may be of something else now.
                self.forget()
                self.inode = inode
                self._write(header(fingerprint, self.save_id, inode) + b"".join(map(framed, self.done)))
        return True

    def begin(self, fingerprint: str, save_id: str) -> None:
        """Begin anew, under the lock, before anything is written; what another conversion has left goes."""
        self.forget()
        self.save_id, self.done = save_id, []
        with step(None, "open", self._path):
            self._clear()
            self.output.mkdir(exist_ok=True)
            self.inode = self.output.stat().st_ino
            self._write(header(fingerprint, save_id, self.inode))

    def append(self, result: bytes) -> None:
        """Note that a batch is done. Not durable on its own: losing entries costs work, not correctness."""
        with step(announce, "ledger", self._path):
            self._write(framed(result))

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
        """Release the lock; the entries stay."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):  # closed all the same; entries that are lost cost work, not correctness
                os.close(descriptor)

    def remove(self) -> None:
        """Remove the folder with all that is left in it; best effort, the conversion has its outcome."""
        announce("remove", self._folder)
        with suppress(OSError, CheckpointError):
            self._clear()
            self._path.unlink()  # last: as long as it is there, nobody else begins
        self.close()
        with suppress(OSError):  # only now: NFS and FUSE keep a removed file in the folder while it is open
            self._folder.rmdir()

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

    def _clear(self) -> None:
        """Remove what lies beside the ledger, unless it is the only copy of something."""
        local_files.settle(self._folder)
        # Not `shutil.rmtree`, which refuses folders whose inode numbers change.
        for place, folders, files in os.walk(self._folder, topdown=False):
            for name in files:
                if (path := Path(place, name)) != self._path:
                    path.unlink()
            for name in folders:
                if (path := Path(place, name)).is_symlink():
                    path.unlink()
                else:
                    path.rmdir()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]
