"""From finished bytes to a target that exists: room for it, what of it is done, one atomic step.

A local target is built in a folder beside it and gets its name by a rename. What replaces a checkpoint of
ours, or comes to files that are of none, goes through its commit; another folder is exchanged. Behind a store
files appear one by one, each whole, the one that makes them a checkpoint last.

All of it may be repeated, also while an earlier attempt at it still runs. Nothing is replaced unless it is to
be.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from dcp.conversion.copying.checks import TargetChecksums
from dcp.conversion.copying.sinks import Output, announce
from dcp.conversion.copying.tasks import TaskBatch, TaskResult
from dcp.conversion.layouts.layout import TargetLayout
from dcp.conversion.publishing import local_files
from dcp.conversion.publishing.ledger import ConversionLedger, LocalLedger, StoredLedger
from dcp.conversion.targets.places import TargetPlace
from dcp.inspection.values.digests import sums_of
from dcp.inspection.values.tensor_reading import TensorReader
from dcp.storage import commit
from dcp.storage.commit_names import (
    DATA_SUFFIX,
    MANIFEST_NAME,
    METADATA_NAME,
    is_commit_object,
)
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    PlanError,
    StorageError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex, starts
from dcp.storage.formats.native.format import DCP
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.opening.folder import MAX_TORCH_METADATA_BYTES, has_checkpoint, open_index
from dcp.storage.formats.registry import targets
from dcp.storage.formats.torch.metadata.writer import encode_torch_metadata
from dcp.storage.stores.base import ANY, Store
from dcp.storage.stores.folders import ParentFolder
from dcp.storage.stores.names import TEMPORARY_PREFIX
from dcp.storage.stores.posix.files import step, storage_error
from dcp.storage.stores.posix.store import PosixStore

__all__ = ["Publisher"]


class Publisher:
    """What happens to a target before and after its bytes are written.

    ``save_id`` is that of a ``dcp`` target, unless an earlier run has begun it under another one. `ledger`
    says what is done; of an attempt (`TargetPlace.attempt`) the job does that it is of.
    """

    def __init__(self, place: TargetPlace, save_id: str, *, overwrite: bool = False) -> None:
        self._place = place
        self._save_id = save_id
        self._overwrite = overwrite
        self._previous: commit.Previous | None = None
        self._expected: dict[str, int] = {}
        self.has_begun = False
        self._local = None if place.path is None else LocalLedger(place.work_folder, save_id)
        self.ledger: ConversionLedger = self._local or StoredLedger(place.store, place.ledger_name)

    @property
    def output(self) -> Output:
        """Where tasks write, once there is room."""
        if self._local is not None:
            return Output(PosixStore(self._local.output), in_place=True)
        return Output(self._place.store, in_place=False, replace=self._overwrite)

    # -- before ----------------------------------------------------------------------------------------------

    def begin(self, layout: TargetLayout, fingerprint: str) -> tuple[TargetLayout, list[TaskResult]]:
        """Make room. The layout under the save id of the run that began it, and the results of what is done.

        Raises CheckpointConflictError if something is at the target.
        """
        place, ledger = self._place, self.ledger
        if place.attempt and self._local is None:
            self._refuse(layout)
            place.store.make_root()
            return layout, []
        if place.path is not None:
            PosixStore(place.path.parent).make_root()
        is_known = ledger.open(fingerprint)
        if layout.index is not None and (place.path is None or (self._overwrite and place.exists())):
            try:  # what the commit compares with is taken before anything is written
                self._previous = commit.previous_state(place.store, commit.Names())
            except BaseException:
                if self._local is not None and not is_known:
                    ledger.remove()
                raise
        if is_known and (done := _results(ledger.done)) is not None:
            new, self._save_id = self._save_id, ledger.save_id
            resumed = _with_save_id(layout, new, self._save_id)
            if self._local is None or self._is_built(self._local, resumed):
                self.has_begun = True
                return resumed, done
            self._save_id = new
        self._begin_anew(layout, fingerprint)
        self.has_begun = True
        return layout, []

    def _is_built(self, ledger: LocalLedger, layout: TargetLayout) -> bool:
        """Whether what an earlier run has made is there: beside the target or, of a folder, if it was killed
        after that, under its name. What replaces another is rather made again."""
        if local_files.have_sizes(ledger.output, layout):
            return True
        is_renamed = self._place.file_name is None and not self._overwrite
        return is_renamed and self.is_published(layout, ledger.inode)

    def refuse_local(self) -> None:
        """Raise CheckpointConflictError for a local target that is there and may not be replaced, while there
        is something left to do: it is none of ours."""
        if self._local is not None and not self._overwrite:
            self._place.refuse_existing()

    def _begin_anew(self, layout: TargetLayout, fingerprint: str) -> None:
        store = self._place.store
        try:
            self._refuse(layout)
            if self._local is None:
                store.make_root()
            self.ledger.begin(fingerprint, self._save_id)
            if self._local is not None:
                local_files.reserve(self._local.output, layout)
            elif self._overwrite:
                # Readers must not take new shards for those of the old index.
                for path in {*layout.last_files, *_replaced(self._place, layout)}:
                    holder, name = self._place.holder(path)
                    holder.delete(name)
        except BaseException:
            if self._local is not None:
                self.ledger.remove()
            raise

    def _refuse(self, layout: TargetLayout) -> None:
        """What is there and may not be replaced. What an attempt has left is compared with what it should
        be."""
        place = self._place

        def is_leftover(name: str) -> bool:
            if layout.index is not None:
                return not is_commit_object(name) and name.startswith(("__", TEMPORARY_PREFIX))
            return name.startswith(TEMPORARY_PREFIX) or (
                bool(layout.last_files) and name in layout.file_names
            )

        if not self._overwrite:
            place.refuse_existing(is_leftover if place.attempt else None)
        elif (
            place.path is None
            and place.file_name is None
            and layout.index is None
            and has_checkpoint(place.store)
        ):
            raise PlanError(
                f"{place.url} holds a sharded checkpoint, which files of another format cannot replace in "
                "one step; delete it first, or convert to another target",
                path=place.url,
            )

    def expect(self, batch: TaskBatch) -> None:
        """It is about to be carried out by another process, of which nobody may hear that it has written its
        files: `discard` knows them then."""
        if self._local is None:
            store = self._place.store
            sizes = _own_files(batch).items()
            self._expected |= {name: size for name, size in sizes if store.stat(name) is None}

    def take(self, batch: TaskBatch) -> None:
        """What was expected of it is noted."""
        for name in batch.file_names:
            self._expected.pop(name, None)

    @contextmanager
    def noted(self, batch: TaskBatch) -> Iterator[None]:
        """Around the writing of a batch: of an attempt its files are noted, so that `discard` knows them."""
        sizes = _own_files(batch)
        if self._local is not None or not sizes:
            yield
            return
        ledger = StoredLedger(self._place.store, self._place.ledger_of(batch.number))
        ledger.expect(self._save_id, sizes)
        try:
            yield
        except CheckpointConflictError:  # one of them is somebody else's
            ledger.note(self._save_id, ())
            raise
        ledger.note(self._save_id, sizes)

    @property
    def inode(self) -> int | None:
        """The inode of what is to be renamed to the target, or has been, where that is local."""
        if self._local is None or self._place.file_name is None:
            return self.ledger.inode
        path = self._local.output / self._place.file_name
        with step(None, "stat", path):
            return path.stat().st_ino

    # -- publishing ------------------------------------------------------------------------------------------

    def publish(self, layout: TargetLayout, checksums: TargetChecksums) -> None:
        """Make the target exist. Raises CheckpointConflictError if something else has come into being."""
        index = _final_index(layout, checksums)
        if index is not None:
            index = _with_digests(self.output.store, index)
        if self._local is not None:
            self._publish_locally(self._local, layout, checksums, index)
            return
        store = self._place.store
        for path, data in layout.last_files.items():
            holder, name = self._place.holder(path)
            if self._overwrite or not _holds(holder, name, data):  # of a run that was killed here
                announce("publish", path)
                holder.make_root()
                holder.publish(name, data, durable=True, expected=ANY if self._overwrite else None)
        if index is not None:
            previous = self._previous or commit.previous_state(store, commit.Names())
            if previous.exists and not self._overwrite:
                raise self._conflict()
            self._commit(store, index, previous)

    def _publish_locally(
        self,
        ledger: LocalLedger,
        layout: TargetLayout,
        checksums: TargetChecksums,
        index: CheckpointIndex | None,
    ) -> None:
        output, target = ledger.output, Path(self._place.url)
        local_files.fill_holes(output, layout, checksums)
        local_files.drop_half_written(output)
        for name, data in layout.last_files.items():
            self._write(output, name, data)
        if (
            index is not None
            and self._previous is not None
            and (self._previous.exists or local_files.has_only_others(target))
        ):
            self._commit_over(output, index, self._previous)
            return
        if index is not None:
            self._write_index(output, index)
        PosixStore(output).sync()
        ledger.sync()  # a run that finds the target knows by it that all of this one is done
        announce("publish", target)
        try:
            if self._place.file_name is not None:
                local_files.rename(output / self._place.file_name, target, overwrite=self._overwrite)
            elif self._overwrite and target.is_dir() and any(target.iterdir()):
                self._replace(ledger, target, layout)
            else:
                output.rename(target)  # also over an empty folder
        except StorageError:
            raise
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise self._conflict() from error
            raise storage_error(error, "rename", target) from error

    def make_durable(self) -> None:
        """The target's name, which it has. Raises StorageError (``committed``) where that fails."""
        if self._local is None:
            return
        try:
            PosixStore(Path(self._place.url).parent).sync()
        except StorageError as error:
            raise type(error)(
                f"{self._place.url} is complete, but may not outlast a power cut: {error}",
                **error.facts | {"committed": True},
            ) from error

    def _replace(self, ledger: LocalLedger, target: Path, layout: TargetLayout) -> None:
        local_files.keep_others(ledger.output, target, layout)
        ledger.forget()  # a run that went on from here would take the old files for its own
        self.has_begun = False  # what is aside from now on may be the only copy: the next run looks at it
        old = local_files.exchange(ledger.output, target)
        local_files.move_late(old, target, layout)

    def _write(self, output: Path, path: str, data: bytes) -> None:
        announce("write", path)
        holder = PosixStore((output / path).parent)
        holder.make_root()
        holder.publish(Path(path).name, data, durable=True)

    def _write_index(self, output: Path, index: CheckpointIndex) -> None:
        """Nobody looks at the folder yet, so that these two need no order."""
        metadata = encode_torch_metadata(index, checkpoint_id=self._place.url, save_id=self._save_id)
        self._write(output, METADATA_NAME, metadata)
        index = replace(index, torch_metadata_crc=crc32(metadata))
        self._write(output, MANIFEST_NAME, encode_manifest(index))

    def _commit_over(self, output: Path, index: CheckpointIndex, previous: commit.Previous) -> None:
        """Data files of unique names beside the old ones, then the commit that any save makes."""
        store = self._place.store
        try:
            for name in index.files:
                with step(announce, "move", output / name):
                    (output / name).rename(store.path_of(name))
            store.sync()
            self._commit(store, index, previous)
        except BaseException:
            commit.discard(store, self._save_id, commit.Names())
            raise

    def _commit(self, store: Store, index: CheckpointIndex, previous: commit.Previous) -> None:
        announce("publish", MANIFEST_NAME)
        commit.commit(
            store,
            index,
            previous,
            names=commit.Names(),
            save_id=self._save_id,
            durable=True,
            torch_compatible=True,
        )

    def _conflict(self) -> CheckpointConflictError:
        return CheckpointConflictError(
            f"{self._place.url} has come into being while its replacement was being written, and is "
            "untouched; give another target",
            alternative="replace it",
            argument="overwrite=True",
            path=self._place.url,
        )

    def is_published(self, layout: TargetLayout, inode: int | None) -> bool:
        """Whether the target is what this conversion makes, and complete."""
        path, store = self._place.path, self._place.store
        if path is not None:
            with step(None, "stat", path):
                if not path.exists() or path.stat().st_ino != inode:
                    return False
        for name, size in zip(layout.file_names, layout.file_sizes, strict=True):
            info = store.stat(name)
            if info is None or info.size_bytes != size:
                return False
        if not all(_holds(*self._place.holder(path), data) for path, data in layout.last_files.items()):
            return False
        return layout.index is None or self._is_committed(store)

    def _is_committed(self, store: Store) -> bool:
        """Whether all of the commit of a ``dcp`` target is there."""
        try:
            index = open_index(store)
            if index.format != DCP.name or index.provenance.get("save_id") != self._save_id:
                return False
            data = store.read(METADATA_NAME, limit_bytes=MAX_TORCH_METADATA_BYTES)
        except CheckpointNotFoundError:
            return False
        return crc32(data) == index.torch_metadata_crc

    # -- after -----------------------------------------------------------------------------------------------

    def clear(self, batches: int) -> None:
        """Remove what is aside, of ``batches`` batches; the target is published, or will never be."""
        place, store = self._place, self._place.store
        if self._local is not None:
            self.ledger.remove()
            return
        if not place.attempt or store.stat(place.ledger_name) is None:  # else of a conversion that may go on
            place.end_uploads()
        announce("remove", place.ledger_name)
        for error in store.delete_all(self._ledger_names(batches)).values():
            raise error

    def discard(self, batches: int) -> None:
        """Remove all that was written, unless it has been published after all."""
        place, store = self._place, self._place.store
        if self._local is None:
            commit.discard(store, self._save_id, commit.Names())
            if place.file_name is not None or not _is_complete(store):
                for name in self._ledger_names(batches):
                    StoredLedger(store, name).discard_files()
                for name, size in self._expected.items():
                    info = store.stat(name)
                    if info is not None and info.size_bytes == size:
                        store.delete(name)
        self.clear(batches)

    def _ledger_names(self, batches: int) -> list[str]:
        place = self._place
        return (
            [place.ledger_of(number) for number in range(batches)] if place.attempt else [place.ledger_name]
        )


def _own_files(batch: TaskBatch) -> dict[str, int]:
    """Sizes in bytes by name, but of data files, which have the save id in theirs."""
    return {task.name: task.file_bytes for task in batch.tasks if not task.name.endswith(DATA_SUFFIX)}


def _results(entries: list[bytes]) -> list[TaskResult] | None:
    """What a ledger has noted; None if that is not to be read."""
    try:
        return [TaskResult.decode(entry) for entry in entries]
    except CheckpointFormatError:
        return None


def _with_save_id(layout: TargetLayout, old: str, new: str) -> TargetLayout:
    """The same layout under the save id of the run that began it."""
    if layout.index is None or old == new:
        return layout
    names = [name.replace(f".{old}.", f".{new}.") for name in layout.file_names]
    provenance = {**layout.index.provenance, "save_id": new}
    return replace(layout, file_names=names, index=replace(layout.index, files=names, provenance=provenance))


def _final_index(layout: TargetLayout, checksums: TargetChecksums) -> CheckpointIndex | None:
    """The index of a ``dcp`` target with the checksums of its blocks."""
    index, copies = layout.index, layout.chunk_copies
    if index is None or copies is None:
        return None
    blocks = [checksums.blocks(copy) for copy in copies.tolist()]
    crcs = np.concatenate([np.zeros(0, np.uint32), *blocks]).astype(np.uint32)
    return replace(index, crc_start=starts([len(block) for block in blocks]), crcs=crcs)


def _with_digests(store: Store, index: CheckpointIndex) -> CheckpointIndex:
    """With those of the tensors that are not as the source has them, where that has digests: by reading what
    was written."""
    rows = [row for row, total in enumerate(index.digests) if not total]
    if not rows:
        return index
    with TensorReader(store, index) as reader:
        found = sums_of(reader, rows)
    return replace(index, digests=[found.get(row, total) for row, total in enumerate(index.digests)])


def _holds(store: Store, name: str, data: bytes) -> bool:
    info = store.stat(name)
    return (
        info is not None and info.size_bytes == len(data) and store.read(name, limit_bytes=len(data)) == data
    )


def _replaced(place: TargetPlace, layout: TargetLayout) -> Iterator[str]:
    """Paths of what is in the target's folder, and in those directly below, and does not stay."""
    yield from layout.replaced("", {info.name for info in place.store.list()})
    if layout.last_files and place.store.capabilities.lists_folders:
        parent = ParentFolder(place.store, place.open_store)
        for folder, listing in parent.listings().items():
            files = parent.store(folder).list() if listing is None else listing
            yield from (f"{folder}/{name}" for name in layout.replaced(folder, {one.name for one in files}))


def _is_complete(store: Store) -> bool:
    """Whether what makes a folder of several files a checkpoint is there, of whatever format."""
    last = (target.last_file for target in targets())
    return any(store.stat(name) is not None for name in last if name is not None)
