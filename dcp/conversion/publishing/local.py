"""Publishing on a local file system: built in a folder beside the target, which gets its name by a rename.

A native checkpoint that replaces another, or comes to files that are of none, is committed as a save is;
another folder is exchanged.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from dcp.conversion.copying.batches import ResultChecks
from dcp.conversion.copying.tasks import Output, TaskBatch, TaskResult, announce
from dcp.conversion.layouts.layout import TargetLayout
from dcp.conversion.publishing import local_files
from dcp.conversion.publishing.publisher import MAX_LEDGER_BYTES, Publisher, framed, header, parse
from dcp.conversion.targets.places import TargetPlace
from dcp.storage import commit
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME
from dcp.storage.errors import CheckpointConflictError, CheckpointError, StorageError
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.torch.metadata_writer import encode_torch_metadata
from dcp.storage.stores.posix.files import NO_LOCKS, WITHOUT_LOCKS, is_named, step, storage_error, warn_once
from dcp.storage.stores.posix.store import PosixStore

__all__ = ["LEDGER_NAME", "LocalLedger", "LocalPublisher"]


LEDGER_NAME: Final = "ledger"

_ATTEMPTS: Final = 100
"""To lock a file that its last holder may have removed just then."""


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
                    f"{self._path} is removed or replaced as soon as it is made, so that no process can be "
                    "kept from converting to the same target",
                    path=str(self._path),
                    op="lock",
                )
            local_files.settle(self._folder)
            size = min(os.fstat(self._descriptor).st_size, MAX_LEDGER_BYTES)
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
            self._path.unlink()  # last: as long as it is there, no other process begins
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


class LocalPublisher(Publisher):
    """Of a target at ``place.path``: files are made with their sizes, and tasks write ranges of them."""

    def __init__(self, place: TargetPlace, save_id: str, *, overwrite: bool = False) -> None:
        super().__init__(place, save_id, overwrite=overwrite)
        self._target = Path(place.url)
        self._ledger = LocalLedger(place.work_folder, save_id)

    def close(self) -> None:
        """Release the lock."""
        self._ledger.close()

    @property
    def output(self) -> Output:
        """The folder beside the target."""
        return Output(PosixStore(self._ledger.output), in_place=True)

    @property
    def inode(self) -> int | None:
        """As `Publisher.inode`."""
        if self.place.file_name is None:
            return self._ledger.inode
        path = self._ledger.output / self.place.file_name
        with step(None, "stat", path):
            return path.stat().st_ino

    def begin(self, layout: TargetLayout, fingerprint: str) -> tuple[TargetLayout, list[TaskResult]]:
        """As `Publisher.begin`."""
        place, ledger = self.place, self._ledger
        PosixStore(self._target.parent).make_root()
        is_known = ledger.open(fingerprint)
        try:
            if layout.index is not None and self.overwrite and place.exists():
                # What the commit compares with is taken before anything is written.
                self.previous = commit.previous_state(place.store, commit.Names())
        except BaseException:
            if not is_known:
                ledger.remove()
            raise
        resumed = self._resumed(layout, ledger.save_id, ledger.done) if is_known else None
        if resumed is not None:
            new, self.save_id = self.save_id, ledger.save_id
            if self._is_built(resumed[0]):
                self.has_begun = True
                return resumed
            self.save_id = new
        try:
            if not self.overwrite:
                place.refuse_existing()
            ledger.begin(fingerprint, self.save_id)
            local_files.reserve(ledger.output, layout)
        except BaseException:
            ledger.remove()
            raise
        self.has_begun = True
        return layout, []

    def _is_built(self, layout: TargetLayout) -> bool:
        """Return whether what an earlier run has made is there: beside the target or, of a folder, if it was
        killed after that, under its name. What replaces another is rather made again."""
        if local_files.have_sizes(self._ledger.output, layout):
            return True
        is_renamed = self.place.file_name is None and not self.overwrite
        return is_renamed and self.is_published(layout, self._ledger.inode)

    def expect(self, batch: TaskBatch) -> None:
        """Do nothing: all that is written is in the work folder."""

    def append(self, result: TaskResult, batch: TaskBatch) -> None:
        """As `Publisher.append`."""
        self._ledger.append(result.encode())

    def is_published(self, layout: TargetLayout, inode: int | None) -> bool:
        """As `Publisher.is_published`."""
        with step(None, "stat", self._target):
            if not self._target.exists() or self._target.stat().st_ino != inode:
                return False
        return super().is_published(layout, inode)

    def _publish(self, layout: TargetLayout, checks: ResultChecks, index: CheckpointIndex | None) -> None:
        output, target, previous = self._ledger.output, self._target, self.previous
        local_files.fill_holes(output, layout, checks)
        local_files.drop_half_written(output)
        for name, data in layout.last_files.items():
            self._write(output, name, data)
        if index is not None:
            if previous is not None and (previous.exists or local_files.has_only_others(target)):
                self._commit_over(output, index, previous)
                return
            self._write_index(output, index)
        PosixStore(output).sync()
        self._ledger.sync()  # a run that finds the target knows by it that all of this one is done
        announce("publish", target)
        try:
            if self.place.file_name is not None:
                local_files.rename(output / self.place.file_name, target, overwrite=self.overwrite)
            elif self.overwrite and target.is_dir() and any(target.iterdir()):
                local_files.keep_others(output, target, layout)
                self._ledger.forget()  # a resumed run would take the old files for its own
                self.has_begun = False  # what is aside from now on may be the only copy: the next run looks
                local_files.move_late(local_files.exchange(output, target), target, layout)
            else:
                output.rename(target)  # also over an empty folder
        except StorageError:
            raise
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise self._conflict() from error
            raise storage_error(error, "rename", target) from error

    def _make_durable(self) -> None:
        try:
            PosixStore(self._target.parent).sync()
        except StorageError as error:
            raise type(error)(
                f"{self.place.url} is complete, but may not outlast a power cut: {error}",
                **error.facts | {"committed": True},
            ) from error

    def _write(self, output: Path, path: str, data: bytes) -> None:
        announce("write", path)
        holder = PosixStore((output / path).parent)
        holder.make_root()
        holder.publish(Path(path).name, data, durable=True)

    def _write_index(self, output: Path, index: CheckpointIndex) -> None:
        """Nobody looks at the folder yet, so that these two need no order."""
        metadata = encode_torch_metadata(index, checkpoint_id=self.place.url, save_id=self.save_id)
        self._write(output, METADATA_NAME, metadata)
        self._write(
            output, MANIFEST_NAME, encode_manifest(replace(index, torch_metadata_crc=crc32(metadata)))
        )

    def _commit_over(self, output: Path, index: CheckpointIndex, previous: commit.Previous) -> None:
        """Data files of unique names beside the old ones, then the commit that any save makes."""
        store = self.place.store
        try:
            for name in index.files:
                with step(announce, "move", output / name):
                    (output / name).rename(store.path_of(name))
            store.sync()
            self._commit(store, index, previous)
        except BaseException:
            commit.discard(store, self.save_id, commit.Names())
            raise

    def clear(self, batches: int) -> None:
        """As `Publisher.clear`."""
        self._ledger.remove()

    discard = clear
