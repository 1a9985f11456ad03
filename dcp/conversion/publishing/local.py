"""Publishing on a local file system: built in a folder beside the target, which gets its name by a rename.

What replaces a checkpoint of ours, or comes to files that are of none, goes through the commit of a save;
another folder is exchanged.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

from dcp.conversion.copying.batches import TargetChecksums
from dcp.conversion.copying.sinks import Output, announce
from dcp.conversion.copying.tasks import TaskBatch, TaskResult
from dcp.conversion.layouts.layout import TargetLayout
from dcp.conversion.publishing import local_files
from dcp.conversion.publishing.ledger import LocalLedger
from dcp.conversion.publishing.publisher import Publisher
from dcp.conversion.targets.places import TargetPlace
from dcp.storage import commit
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME
from dcp.storage.errors import StorageError
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import encode_manifest
from dcp.storage.formats.torch.metadata.writer import encode_torch_metadata
from dcp.storage.stores.posix.files import step, storage_error
from dcp.storage.stores.posix.store import PosixStore

__all__ = ["LocalPublisher"]


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
        """Whether what an earlier run has made is there: beside the target or, of a folder, if it was killed
        after that, under its name. What replaces another is rather made again."""
        if local_files.have_sizes(self._ledger.output, layout):
            return True
        is_renamed = self.place.file_name is None and not self.overwrite
        return is_renamed and self.is_published(layout, self._ledger.inode)

    def expect(self, batch: TaskBatch) -> None:
        """All that is written is in the work folder."""

    def append(self, result: TaskResult, batch: TaskBatch) -> None:
        """As `Publisher.append`."""
        self._ledger.append(result.encode())

    def is_published(self, layout: TargetLayout, inode: int | None) -> bool:
        """As `Publisher.is_published`."""
        with step(None, "stat", self._target):
            if not self._target.exists() or self._target.stat().st_ino != inode:
                return False
        return super().is_published(layout, inode)

    def _publish(
        self, layout: TargetLayout, checksums: TargetChecksums, index: CheckpointIndex | None
    ) -> None:
        output, target, previous = self._ledger.output, self._target, self.previous
        local_files.fill_holes(output, layout, checksums)
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
