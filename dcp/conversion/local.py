"""Publisher for a local file system: build in a folder beside the target, then rename.

A native checkpoint that replaces another, or joins unrelated files, is committed as a save. Other folders are
exchanged.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from dcp.conversion.gather import TaskResult
from dcp.conversion.hf_folder import HF_NAMES
from dcp.conversion.layout import TargetLayout
from dcp.conversion.publishing import MAX_LEDGER_BYTES, Publisher, framed, header, parse
from dcp.conversion.running import ResultChecks, TaskBatch, announce
from dcp.conversion.targets.job import TargetPlace
from dcp.storage import commit
from dcp.storage.commit_names import DATA_SUFFIX, MANIFEST_NAME, METADATA_NAME
from dcp.storage.errors import CheckpointConflictError, CheckpointError, PlanError, StorageError
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.registry import formats
from dcp.storage.formats.torch.metadata_writer import encode_torch_metadata
from dcp.storage.stores.base import LOCK_NAME, TEMPORARY_PREFIX
from dcp.storage.stores.posix.files import (
    NO_EXCHANGE,
    NO_LOCKS,
    WITHOUT_LOCKS,
    is_link_refused,
    is_named,
    step,
    storage_error,
    warn_once,
)
from dcp.storage.stores.posix.store import PosixStore

LEDGER_NAME: Final = "ledger"

_ATTEMPTS: Final = 100
"""Attempts to lock a file that its last holder may have removed."""

_NOTES: Final = ("notes.msgpack", LOCK_NAME)
"""Files beside the commit objects of a checkpoint."""

_RENAME_EXCHANGE: Final = 2
_AT_FDCWD: Final = -100

_NEW: Final = "replacement"
"""Name in a work folder: the new target, or the old target after an exchange."""

_ASIDE: Final = "aside"
"""Name in a work folder: holds the old target between the two steps of a replacement."""

_OUTDATED: Final = "outdated"
"""Name of the old target once replaced."""


class LocalPublisher(Publisher):
    """Publish a target at ``place.path``; tasks write ranges of preallocated files.

    The work ``folder`` holds the files and the ledger, which is locked during a run. ``inode`` identifies the
    folder that becomes the target under any name.
    """

    def __init__(
        self, place: TargetPlace, save_id: str, *, overwrite: bool = False, folder: Path | None = None
    ) -> None:
        super().__init__(place, save_id, overwrite=overwrite)
        self._target = Path(place.url)
        self._folder = folder or place.work_folder
        self._ledger = self._folder / LEDGER_NAME
        self._descriptor = -1

    @property
    def output(self) -> PosixStore:
        """Folder beside the ledger with the files of this conversion only."""
        return PosixStore(self._folder / f"output-{self.save_id}")

    # -- the ledger ------------------------------------------------------------------------------------------

    def lock(self, fingerprint: str) -> tuple[str, int | None, list[bytes]] | None:
        """Lock the ledger and return entries of the conversion ``fingerprint``: save id, inode and batch
        results.

        Returns None for another conversion. Makes a missing folder and undoes an interrupted replacement.
        Raises CheckpointConflictError if another process holds the lock.
        """
        announce("mkdir", self._folder)
        with step(None, "open", self._ledger):
            for _ in range(_ATTEMPTS):
                if self._hold():
                    break
                self.close()
            else:
                raise StorageError(
                    f"another process removes or replaces the lock file {self._ledger}, so two conversions "
                    "to the same target cannot be prevented",
                    path=str(self._ledger),
                    op="lock",
                )
            settle(self._folder)
            size = min(os.fstat(self._descriptor).st_size, MAX_LEDGER_BYTES)
            noted = parse(os.pread(self._descriptor, size, 0), fingerprint)
            if noted is None:
                return None
            save_id, inode, done, end = noted
            os.ftruncate(self._descriptor, end)
            os.lseek(self._descriptor, end, os.SEEK_SET)
            output = self._folder / f"output-{save_id}"
            if output.is_dir() and (own := output.stat().st_ino) != inode:
                # A restored copy of the folder has another inode, and the recorded one may belong to another
                # folder.
                self._forget()
                inode = own
                self._note(header(fingerprint, save_id, inode) + b"".join(map(framed, done)))
        return save_id, inode, done

    def _hold(self) -> bool:
        """Make and lock the file; False if its previous holder removed the file."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._ledger, flags, 0o666)
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.close()
                raise CheckpointConflictError(
                    f"another process is converting to the same target (it holds the lock {self._ledger}); "
                    "wait for its end, or stop it",
                    path=str(self._ledger),
                ) from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
                warn_once(self._folder.parent, error, WITHOUT_LOCKS)
            return is_named(self._ledger, self._descriptor)
        except (FileNotFoundError, FileExistsError):
            is_none = os.path.lexists(self._folder) and not self._folder.is_dir()
            if is_none or not self._folder.parent.is_dir():
                raise
            return False

    def append(self, result: TaskResult, batch: TaskBatch) -> None:
        """Append an entry, without a sync: lost entries cost work, not correctness."""
        with step(announce, "ledger", self._ledger):
            self._note(framed(result.encode()))

    def _note(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def _forget(self) -> None:
        """Drop all entries durably, before the files beside the ledger change."""
        with step(announce, "forget", self._ledger):
            os.ftruncate(self._descriptor, 0)
            os.fsync(self._descriptor)
            os.lseek(self._descriptor, 0, os.SEEK_SET)

    def close(self) -> None:
        """Release the lock; the entries stay."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            # the descriptor is closed despite an error; lost entries cost work, not correctness
            with suppress(OSError):
                os.close(descriptor)

    def clear(self, batches: int = 0) -> None:
        """Remove the folder with all contents, ignoring errors."""
        announce("remove", self._folder)
        with suppress(OSError, CheckpointError):
            self._empty()
            self._ledger.unlink()  # last: while the file exists, no other process can begin
        self.close()
        with suppress(OSError):  # only now: NFS and FUSE keep a removed file in the folder while it is open
            self._folder.rmdir()

    discard = clear

    def _empty(self) -> None:
        """Remove files beside the ledger, except for the only copy of replaced data."""
        settle(self._folder)
        # Not `shutil.rmtree`, which refuses folders whose inode numbers change.
        for path in sorted(self._folder.rglob("*"), reverse=True):  # contents before their folders
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            elif path != self._ledger:
                path.unlink()

    # -- beginning -------------------------------------------------------------------------------------------

    def begin(self, layout: TargetLayout, fingerprint: str) -> tuple[TargetLayout, list[TaskResult]]:
        """As `Publisher.begin`."""
        place = self.place
        PosixStore(self._target.parent).make_root()
        noted = self.lock(fingerprint)
        try:
            if layout.index is not None and self.overwrite and place.exists():
                # Read the previous state before writing: the commit compares with it.
                self._previous = commit.previous_state(place.store, commit.Names())
        except BaseException:
            if noted is None:
                self.clear()
            raise
        found = None if noted is None else self._built(layout, *noted)
        if found is None:
            try:
                if not self.overwrite:
                    place.refuse_existing()
                self._begin_anew(layout, fingerprint)
            except BaseException:
                self.clear()
                raise
        self.has_begun = True
        if place.file_name is not None:
            with step(None, "stat", path := Path(self.output.path_of(place.file_name))):
                self.inode = path.stat().st_ino
        return found or (layout, [])

    def _begin_anew(self, layout: TargetLayout, fingerprint: str) -> None:
        """Make the files under the lock, after removing leftovers of other conversions."""
        output = Path(self.output.url)
        self._forget()
        with step(None, "open", self._ledger):
            self._empty()
            output.mkdir(exist_ok=True)
            self.inode = output.stat().st_ino
            self._note(header(fingerprint, self.save_id, self.inode))
        _reserve(output, layout)

    def _built(
        self, layout: TargetLayout, save_id: str, inode: int | None, done: list[bytes]
    ) -> tuple[TargetLayout, list[TaskResult]] | None:
        """Return the folder built by an earlier run, beside the target or already renamed.

        A replacement is built again instead.
        """
        found, new = self._resumed(layout, save_id, done), self.save_id
        if found is None:
            return None
        self.save_id, self.inode = save_id, inode
        paths = map(Path, map(self.output.path_of, found[0].file_names))
        sizes = zip(paths, found[0].file_sizes, strict=True)
        is_built = all(path.is_file() and path.stat().st_size == size for path, size in sizes)
        is_renamed = self.place.file_name is None and not self.overwrite
        if is_built or (is_renamed and self.is_published(found[0], inode)):
            return found
        self.save_id = new
        return None

    # -- publishing ------------------------------------------------------------------------------------------

    def is_published(self, layout: TargetLayout, inode: int | None) -> bool:
        """As `Publisher.is_published`."""
        with step(None, "stat", self._target):
            if not self._target.exists() or self._target.stat().st_ino != inode:
                return False
        return super().is_published(layout, inode)

    def _publish(self, layout: TargetLayout, checks: ResultChecks, index: CheckpointIndex | None) -> None:
        output, target, previous = Path(self.output.url), self._target, self._previous
        fill_holes(output, layout, checks)
        with step(None, "list", output):
            half_written = list(output.rglob(f"{TEMPORARY_PREFIX}*"))
        for path in half_written:  # leftovers of a killed run, which would become part of the target
            if path.is_file():
                path.unlink()
        for name, data in layout.last_files.items():
            self._write(output, name, data)
        if index is not None:
            if previous is not None and (
                previous.exists or not any(_is_replaced(entry.name) for entry in target.iterdir())
            ):
                self._commit_over(output, index, previous)
                return
            # The folder is not visible yet, so these two writes need no order.
            metadata = encode_torch_metadata(index, checkpoint_id=self.place.url, save_id=self.save_id)
            self._write(output, METADATA_NAME, metadata)
            index = replace(index, torch_metadata_crc=crc32(metadata))
            self._write(output, MANIFEST_NAME, encode_manifest(index))
        PosixStore(output).sync()
        if self._descriptor >= 0:
            with step(announce, "fsync", self._ledger):
                os.fsync(self._descriptor)  # a published target shows that this run is complete
        announce("publish", target)
        try:
            if self.place.file_name is not None:
                rename(output / self.place.file_name, target, overwrite=self.overwrite)
            elif self.overwrite and target.is_dir() and any(target.iterdir()):
                keep_others(output, target, layout)
                self._forget()  # a resumed run would take the old files for new ones
                self.has_begun = False  # the moved files may be the only copy: the next run must check first
                move_late(exchange(output, target), target, layout)
            else:
                output.rename(target)  # also replaces an empty folder
        except StorageError:
            raise
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise self._conflict() from error
            raise storage_error(error, "rename", target) from error

    def publish(self, layout: TargetLayout, checks: ResultChecks, inode: int | None) -> None:
        """As `Publisher.publish`. Raises StorageError (``committed``) where the target's name cannot be made
        durable."""
        super().publish(layout, checks, inode)
        try:
            PosixStore(self._target.parent).sync()
        except StorageError as error:
            raise type(error)(
                f"{self.place.url} is complete, but may be lost in a power failure: {error}",
                **error.facts | {"committed": True},
            ) from error

    def _write(self, output: Path, path: str, data: bytes) -> None:
        announce("write", path)
        holder = PosixStore((output / path).parent)
        holder.make_root()
        holder.publish(Path(path).name, data, durable=True)

    def _commit_over(self, output: Path, index: CheckpointIndex, previous: commit.Previous) -> None:
        """Write data files with unique names beside the old files, then commit as a save does."""
        store = self.place.store
        try:
            for name in index.files:
                with step(announce, "move", output / name):
                    (output / name).rename(store.path_of(name))
            store.sync()
            self._commit(index, previous)
        except BaseException:
            commit.discard(store, self.save_id, commit.Names())
            raise


def remove_work_folder(folder: Path) -> bool:
    """Restore replaced data and remove leftovers from a work folder, under the ledger's lock.

    Returns False, without changes, if a process holds the lock or the place is taken.
    """
    place = TargetPlace(str(folder), PosixStore(folder), None, None)  # the target is unknown
    with closing(LocalPublisher(place, "", folder=folder)) as publisher:
        try:
            publisher.lock("")
        except CheckpointConflictError:
            return False
        publisher.clear()
    return True


# -- files ---------------------------------------------------------------------------------------------------


def _reserve(folder: Path, layout: TargetLayout) -> None:
    """Preallocate every file, to report a full disk before the work starts."""
    for name, size in zip(layout.file_names, layout.file_sizes, strict=True):
        path = folder / name
        with step(announce, "create", path):
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o666)
            try:
                if size:
                    _allocate(path, size)
                    os.ftruncate(descriptor, size)
            finally:
                os.close(descriptor)


def _allocate(path: Path, size: int) -> None:
    # With O_DIRECT: where blocks cannot be allocated, glibc writes a byte to each instead, and that refuses.
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
    finally:
        os.close(descriptor)


def fill_holes(folder: Path, layout: TargetLayout, checks: ResultChecks) -> None:
    """Write checksums into the files, and make each of these durable."""
    holes = defaultdict[int, list[tuple[int, bytes]]](list)
    crcs: dict[int, bytes] = {}
    for copy, file, offset in layout.holes:
        if copy not in crcs:
            crcs[copy] = checks.whole(copy).to_bytes(4, "little")
        holes[file].append((offset, crcs[copy]))
    for file, name in enumerate(layout.file_names):
        with step(announce, "holes", folder / name):
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                for offset, crc in sorted(holes[file]):
                    os.pwrite(descriptor, crc, offset)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def rename(source: Path, target: Path, *, overwrite: bool) -> None:
    """Rename a file; FileExistsError if the name is taken, unless ``overwrite``."""
    if overwrite:
        source.rename(target)
        return
    try:
        os.link(source, target)
    except OSError as error:
        if not is_link_refused(error, source):
            raise
        if os.path.lexists(target):  # without hard links, this and the rename are two steps
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        source.rename(target)


def keep_others(folder: Path, target: Path, layout: TargetLayout) -> None:
    """Copy to ``folder``, durably, the files of ``target`` that a new checkpoint does not replace.

    Files named by ``layout.replaced`` are left out. Raises PlanError for entries that would have to be moved.
    """
    for entry in _others(target, folder, layout):
        if entry.is_dir() or entry.is_symlink():
            raise PlanError(
                f"{entry} is a folder or link in the target to be replaced, and would be lost; convert to "
                "another target and merge the folders yourself",
                path=str(entry),
            )
        _keep(entry, folder / entry.name)
    PosixStore(folder).sync()  # the kept file exists before its only other name is removed


def move_late(old: Path, target: Path, layout: TargetLayout) -> None:
    """Move files into ``target`` that appeared in the replaced folder after `keep_others`."""
    for entry in _others(old, target, layout):
        if not os.path.lexists(target / entry.name):
            entry.rename(target / entry.name)


def _others(old: Path, new: Path, layout: TargetLayout) -> Iterator[Path]:
    """Yield entries of a folder that ``new`` does not replace."""
    entries = {entry.name: entry for entry in old.iterdir()}
    replaced = layout.replaced("", entries)
    for name, entry in entries.items():
        if not (name in replaced or _is_replaced(name) or _is_replaced_folder(entry, new / name, layout)):
            yield entry


def stays(name: str) -> bool:
    """Test whether a file of a folder survives any conversion to the folder."""
    return not _is_replaced(name) and name not in HF_NAMES


def _is_replaced_folder(entry: Path, made: Path, layout: TargetLayout) -> bool:
    """Test whether a folder is replaced entirely: it is new, or named by ``layout.replaced``."""
    if entry.is_symlink() or not entry.is_dir():
        return False
    names = {one.name for one in entry.iterdir()}
    new = {one.name for one in made.iterdir()} if made.is_dir() else set()
    return names <= layout.replaced(entry.name, names) | new


def _is_replaced(name: str) -> bool:
    """Test whether a new checkpoint replaces a file; files such as config.json stay."""
    if name.endswith(DATA_SUFFIX) and name.startswith("__"):
        return True
    if name in (MANIFEST_NAME, METADATA_NAME, *_NOTES):
        return True
    folders = (one for one in formats() if one.target is not None and one.target.as_file != "always")
    return any(one.is_in_folder(name) for one in folders)


def _keep(entry: Path, kept: Path) -> None:
    """Give a file a second name, by a hard link or a durable copy."""
    kept.unlink(missing_ok=True)  # leftover of a killed run
    try:
        os.link(entry, kept)
    except OSError:
        kept.unlink(missing_ok=True)  # the link may exist despite the error: both names are one file
        with entry.open("rb") as file, kept.open("xb") as copy:
            shutil.copyfileobj(file, copy)
            copy.flush()
            shutil.copystat(entry, kept)
            os.fsync(copy.fileno())


def exchange(folder: Path, target: Path) -> Path:
    """Exchange ``folder`` with ``target`` and return the new place of the old target.

    One step where the file system supports this, else two steps, which `settle` can complete or undo.
    """
    new = folder.with_name(_NEW)  # a name that does not appear in a ledger
    folder.rename(new)
    announce("exchange", target)
    if _is_exchanged(new, target):
        old = new
    else:
        old = new.with_name(_ASIDE) / target.name
        old.parent.mkdir()
        # make the path to the destination durable first
        for durable in (old.parent, new.parent, target.parent):
            PosixStore(durable).sync()
        try:
            announce("move aside", target)
            target.rename(old)
            announce("move into place", target)
            new.rename(target)
        except BaseException as error:
            settle(new.parent)
            if new.exists() or not isinstance(error, OSError):
                raise
            old = new.with_name(_OUTDATED) / target.name  # the rename succeeded despite the error
    announce("exchanged", target)
    return old


def _is_exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders; False if kernel or file system lack the call."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number not in NO_EXCHANGE:  # after other errors the folders may have been exchanged
        raise OSError(number, os.strerror(number), str(other))
    return False


def only_copies(work: Path) -> Iterator[tuple[Path, Path]]:
    """Yield (current place, target) of data that `exchange` has moved aside without a replacement."""
    aside = work / _ASIDE
    for old in sorted(aside.iterdir()) if aside.is_dir() else ():
        target = work.parent / old.name
        if not _is_taken(target) or (work / _NEW).exists():
            yield old, target


def refusal_to_put_back(work: Path) -> str | None:
    """Return the reason why data in a work folder can be neither restored nor removed, or None."""
    for old, target in only_copies(work):
        if _is_taken(target):
            return (
                f"{target} was created by another process while a conversion was replacing it. The old "
                f"files are in {old}: move or delete them"
            )
    return None


def settle(work: Path) -> None:
    """Restore data that an interrupted `exchange` moved aside, unless the new folder is in place.

    Raises CheckpointConflictError if the place is taken, StorageError if the restore fails.
    """
    new, aside = work / _NEW, work / _ASIDE
    if not new.exists() and not aside.exists():
        return
    if refusal := refusal_to_put_back(work):
        raise CheckpointConflictError(refusal, path=str(work))
    for old, target in only_copies(work):
        announce("put back", target)
        try:
            old.rename(target)
        except OSError as error:
            raise StorageError(
                f"{target} could not be restored ({error.strerror}): its files are in {old}. The next "
                "conversion to this target or dcp gc restores them once the storage works again",
                path=str(target),
                op="rename",
                errno=error.errno,
            ) from error
    PosixStore(work.parent).sync()  # sync the new name before removing the replaced data
    with step(announce, "settled", work):
        if aside.exists():  # otherwise leftovers could be restored later
            aside.rename(work / _OUTDATED)


def _is_taken(target: Path) -> bool:
    """Test for anything except an empty folder."""
    if target.is_dir() and not target.is_symlink():
        return any(target.iterdir())
    return os.path.lexists(target)
