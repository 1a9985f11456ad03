"""From finished bytes to a target that exists: preallocated files, checksums filled in, one atomic step.

A local target is built in a folder beside it and gets its name by a rename. What replaces a checkpoint of
ours goes through its commit; another folder is exchanged. Behind a store files appear one by one, each whole,
the one that makes them a checkpoint last.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from dcp.conversion.copying.checks import TargetChecksums
from dcp.conversion.copying.sinks import announce
from dcp.conversion.layouts.layout import TargetLayout
from dcp.conversion.publishing.ledger import ConversionLedger, LocalLedger, StoredLedger
from dcp.conversion.targets.places import TargetPlace
from dcp.storage import commit
from dcp.storage.commit_names import DATA_SUFFIX, MANIFEST_NAME, METADATA_NAME
from dcp.storage.errors import CheckpointConflictError, PlanError, StorageError
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex, starts
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.open import has_checkpoint
from dcp.storage.formats.registry import formats
from dcp.storage.formats.torch.metadata_writer import encode_torch_metadata
from dcp.storage.stores.base import LOCK_NAME
from dcp.storage.stores.posix import PosixStore
from dcp.storage.stores.posix_files import storage_error

__all__ = ["LocalPublisher", "Publisher", "StoredPublisher", "publisher_of"]

_NOTES: Final = ("notes.msgpack", LOCK_NAME)
"""Beside the commit objects of a checkpoint."""

_RENAME_EXCHANGE: Final = 2
_AT_FDCWD: Final = -100


class Publisher(ABC):
    """What happens to a target before and after its bytes are written."""

    ledger: ConversionLedger

    def __init__(self, place: TargetPlace, *, overwrite: bool) -> None:
        self._place = place
        self._overwrite = overwrite
        self._previous: commit.Previous | None = None

    @property
    @abstractmethod
    def folder(self) -> str:
        """Where tasks write the files; known once the ledger is open."""

    @abstractmethod
    def prepare(self, layout: TargetLayout, *, resumed: bool) -> bool:
        """Files ready to be written. False if what was resumed is not there any more: begin anew."""

    @abstractmethod
    def publish(self, layout: TargetLayout, checksums: TargetChecksums) -> None:
        """Make the target exist."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what was written: nothing of it can be used."""

    def _look(self) -> None:
        """What a commit of ours compares with, taken before anything is written."""
        self._previous = commit.previous_state(self._place.store, commit.Names())


def publisher_of(place: TargetPlace, *, overwrite: bool) -> Publisher:
    """The publisher for a place."""
    kind = LocalPublisher if place.path is not None else StoredPublisher
    return kind(place, overwrite=overwrite)


def final_index(layout: TargetLayout, checksums: TargetChecksums) -> CheckpointIndex | None:
    """The index of a ``dcp`` target with the checksums of its blocks."""
    index, copies = layout.index, layout.chunk_copies
    if index is None or copies is None:
        return None
    blocks = [checksums.blocks(copy) for copy in copies.tolist()]
    crcs = np.concatenate([np.zeros(0, np.uint32), *blocks]).astype(np.uint32)
    return replace(index, crc_start=starts([len(block) for block in blocks]), crcs=crcs)


class LocalPublisher(Publisher):
    """A file or folder of this machine, or of a file system that it has mounted.

    ``save_id`` as for `LocalLedger`.
    """

    def __init__(self, place: TargetPlace, *, overwrite: bool, save_id: str = "") -> None:
        super().__init__(place, overwrite=overwrite)
        self._ledger = self.ledger = LocalLedger(place.work_folder, save_id)

    @property
    def folder(self) -> str:
        """A folder beside the target; known once the ledger is open."""
        return str(self._output)

    @property
    def _output(self) -> Path:
        return self._ledger.output

    def prepare(self, layout: TargetLayout, *, resumed: bool) -> bool:
        """Every file with its size, so that tasks write to any place of it."""
        if layout.index is not None and self._overwrite and self._place.exists():
            self._look()
        files = [
            (self._output / name, size)
            for name, size in zip(layout.file_names, layout.file_sizes, strict=True)
        ]
        if resumed:
            return all(path.is_file() and path.stat().st_size == size for path, size in files)
        for path, size in files:
            announce("create", path)
            _allocate(path, size)
        return True

    def publish(self, layout: TargetLayout, checksums: TargetChecksums) -> None:
        """Complete the files, make them durable, rename."""
        self._fill_holes(layout, checksums)
        for name, data in layout.last_files.items():
            self._write(name, data)
        index, path = final_index(layout, checksums), self._target
        if index is not None and self._previous is not None and self._previous.exists:
            self._commit_over(index)
            return
        if index is not None:
            self._write_index(index)
        PosixStore(self._output).sync()
        announce("publish", path)
        try:
            if self._place.file_name is not None:
                self._publish_file(self._output / self._place.file_name, path)
            elif path.is_dir() and any(path.iterdir()):
                self._replace_folder(path)
            else:
                self._output.rename(path)  # also over an empty folder
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise self._conflict() from error
            raise storage_error(error, "rename", path) from error
        PosixStore(path.parent).sync()

    def discard(self) -> None:
        """The folder with all that is in it."""
        self.ledger.remove()

    @property
    def _target(self) -> Path:
        if self._place.path is None:
            raise PlanError(f"{self._place.url} is not local")
        return self._place.path

    def _conflict(self) -> CheckpointConflictError:
        return CheckpointConflictError(
            f"{self._place.url} has come into being while its replacement was being written, and is "
            "untouched; give another target",
            alternative="replace it",
            argument="overwrite=True",
            path=self._place.url,
        )

    def _fill_holes(self, layout: TargetLayout, checksums: TargetChecksums) -> None:
        """Checksums into the files; then each is durable."""
        holes = defaultdict(list)
        crcs: dict[int, bytes] = {}
        for hole in layout.holes:
            holes[hole.file].append((hole.offset, hole.copy))
        for file, name in enumerate(layout.file_names):
            path = self._output / name
            announce("holes", path)
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    for offset, copy in sorted(holes[file]):
                        if copy not in crcs:
                            crcs[copy] = checksums.whole(copy).to_bytes(4, "little")
                        os.pwrite(descriptor, crcs[copy], offset)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise storage_error(error, "write", path) from error

    def _write(self, name: str, data: bytes) -> None:
        announce("write", self._output / name)
        PosixStore(self._output).publish(name, data, durable=True)

    def _write_index(self, index: CheckpointIndex) -> None:
        """Nobody looks at the folder yet, so that these two need no order."""
        save_id = str(index.provenance["save_id"])
        metadata = encode_torch_metadata(index, checkpoint_id=self._place.url, save_id=save_id)
        self._write(METADATA_NAME, metadata)
        self._write(MANIFEST_NAME, encode_manifest(replace(index, torch_metadata_crc=crc32(metadata))))

    def _commit_over(self, index: CheckpointIndex) -> None:
        """Data files of unique names beside the old ones, then the commit that any save makes."""
        store, save_id = PosixStore(self._target), str(index.provenance["save_id"])
        if self._previous is None:
            raise PlanError("nothing to commit over")
        try:
            for name in index.files:
                announce("move", self._target / name)
                (self._output / name).rename(self._target / name)
            store.sync()
            commit.commit(
                store,
                index,
                self._previous,
                names=commit.Names(),
                save_id=save_id,
                durable=True,
                torch_compatible=True,
            )
        except BaseException:
            commit.discard(store, save_id, commit.Names())
            raise

    def _publish_file(self, source: Path, target: Path) -> None:
        if self._overwrite:
            source.rename(target)
            return
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            if os.path.lexists(target):  # without hard links, this and the rename are two steps
                raise self._conflict() from error
            source.rename(target)

    def _replace_folder(self, target: Path) -> None:
        if not self._overwrite:
            raise self._conflict()
        for entry in target.iterdir():
            if _is_replaced(entry.name):
                continue
            if entry.is_dir() or entry.is_symlink():
                raise PlanError(
                    f"{entry} is in the folder to be replaced, and would have to be moved; convert to "
                    "another target "
                    "and put the folders together yourself",
                    path=str(entry),
                )
            _keep(entry, self._output / entry.name)
        PosixStore(self._output).sync()  # what is kept is there before its only other name goes
        self._ledger.forget()  # a run that went on from here would take the old files for its own
        aside = self._output.with_name("replacement")  # a name that no ledger goes by
        self._output.rename(aside)
        _exchange(aside, target)
        announce("exchanged", target)
        PosixStore(target.parent).sync()  # before the old files go
        shutil.rmtree(aside, ignore_errors=True)


class StoredPublisher(Publisher):
    """Objects of a store, written front to back by one task each."""

    def __init__(self, place: TargetPlace, *, overwrite: bool) -> None:
        super().__init__(place, overwrite=overwrite)
        self.ledger = StoredLedger(place.store, place.ledger_name)

    @property
    def folder(self) -> str:
        """The target's own."""
        return self._place.store.url

    def prepare(self, layout: TargetLayout, *, resumed: bool) -> bool:
        """Nothing is reserved; an index that is to be replaced goes first."""
        store = self._place.store
        store.make_root()
        if layout.index is not None:
            self._look()
        elif self._overwrite and self._place.file_name is None and not resumed:
            if has_checkpoint(store):
                raise PlanError(
                    f"{store.url} holds a sharded checkpoint, which files of another format cannot replace "
                    "in one "
                    "step; delete it first, or convert to another target",
                    path=store.url,
                )
            for name in layout.last_files:  # readers must not take new shards for those of the old index
                store.delete(name)
        return True

    def publish(self, layout: TargetLayout, checksums: TargetChecksums) -> None:
        """The files are there: now those that make them a checkpoint."""
        store = self._place.store
        for name, data in layout.last_files.items():
            store.publish(name, data, durable=True)
        index = final_index(layout, checksums)
        if index is not None:
            self._commit(index)
        self._place.end_uploads()

    def _commit(self, index: CheckpointIndex) -> None:
        store = self._place.store
        previous = self._previous or commit.previous_state(store, commit.Names())
        if previous.exists and not self._overwrite:
            self._place.refuse_existing()
        commit.commit(
            store,
            index,
            previous,
            names=commit.Names(),
            save_id=str(index.provenance["save_id"]),
            durable=True,
            torch_compatible=True,
        )

    def discard(self) -> None:
        """Whole files stay; without the ledger they are written anew, or refused as existing."""
        self.ledger.remove()


def _is_replaced(name: str) -> bool:
    """Whether a new checkpoint in the folder takes the place of a file; others, such as config.json, stay."""
    if name.endswith(DATA_SUFFIX) and name.startswith("__"):
        return True
    if name in (MANIFEST_NAME, METADATA_NAME, *_NOTES):
        return True
    folders = (one for one in formats() if one.target is not None and one.target.as_file != "always")
    return any(one.is_in_folder(name) for one in folders)


def _keep(entry: Path, kept: Path) -> None:
    """The same file under another name; where there are no hard links, a copy that is durable."""
    kept.unlink(missing_ok=True)  # of a run that was killed here
    try:
        os.link(entry, kept)
    except OSError:
        shutil.copy2(entry, kept)
        with kept.open("rb") as file:
            os.fsync(file.fileno())


def _allocate(path: Path, size: int) -> None:
    """A file of ``size`` bytes, with blocks where the file system can: a full disk shows now, not after
    hours."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            if size:
                _reserve(path, size)
                os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise storage_error(error, "create", path) from error


def _reserve(path: Path, size: int) -> None:
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


def _exchange(first: Path, second: Path) -> None:
    """Swap two folders in one step where the kernel can, else in two."""
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(AttributeError):
        arguments = (_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
        if libc.renameat2(*arguments) == 0:
            return
    aside = first.with_name("replaced")
    second.rename(aside)
    first.rename(second)
    aside.rename(first)
