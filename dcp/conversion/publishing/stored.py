"""Publishing in an object store: files appear one by one, each whole; the one that completes them is last.

The ledger is a small object beside the output, replaced with each batch that is done. Two processes at once
cannot be distinguished by it: files of one name are refused by the store. An attempt has one for each batch,
which notes the files that its task has written or is about to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import msgpack

from dcp.conversion.copying.batches import ResultChecks
from dcp.conversion.copying.tasks import Output, TaskBatch, TaskResult, announce
from dcp.conversion.layouts.layout import TargetLayout
from dcp.conversion.publishing.publisher import (
    MAX_LEDGER_BYTES,
    Publisher,
    framed,
    header,
    holds,
    parse,
    unpacked,
)
from dcp.conversion.targets.places import TargetPlace
from dcp.storage import commit
from dcp.storage.commit_names import DATA_SUFFIX, is_commit_object
from dcp.storage.errors import CheckpointConflictError, CheckpointNotFoundError, PlanError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening import has_checkpoint
from dcp.storage.formats.registry import targets
from dcp.storage.stores.base import ANY, TEMPORARY_PREFIX, Version
from dcp.storage.stores.opening import ParentFolder

__all__ = ["StoredPublisher"]

_EXPECTED: Final = "of bytes: "
"""In place of the version of a file that is not written yet; its size follows."""


class StoredPublisher(Publisher):
    """Of a target behind a store: each task writes a whole file."""

    def __init__(self, place: TargetPlace, save_id: str, *, overwrite: bool = False) -> None:
        super().__init__(place, save_id, overwrite=overwrite)
        self._store = place.store
        self._ledger = b""
        self._expected: dict[str, str] = {}

    @property
    def output(self) -> Output:
        """The store itself."""
        return Output(self._store, in_place=False, replace=self.overwrite)

    # -- before ----------------------------------------------------------------------------------------------

    def begin(self, layout: TargetLayout, fingerprint: str) -> tuple[TargetLayout, list[TaskResult]]:
        """As `Publisher.begin`."""
        if self.place.attempt:
            self._refuse(layout)
            self._store.make_root()
            return layout, []
        data = self._read(self.place.ledger_name)
        noted = parse(data, fingerprint)
        if layout.index is not None:  # what the commit compares with is taken before anything is written
            self.previous = commit.previous_state(self._store, commit.Names())
        if noted is not None:
            done = [one for one in map(_noted, noted.entries) if one is not None and self._are_there(one[1])]
            resumed = self._resumed(layout, noted.save_id, [result for result, _ in done])
            if resumed is not None:
                self.save_id, self._ledger, self.has_begun = noted.save_id, data[: noted.end], True
                return resumed
        self._refuse(layout)
        self._store.make_root()
        # Before a file is written: one of another conversion's would be taken for its own.
        self._ledger = header(fingerprint, self.save_id)
        self._write(self.place.ledger_name, self._ledger)
        if self.overwrite:  # readers must not take new shards for those of the old index
            for path in {*layout.last_files, *self._replaced(layout)}:
                holder, name = self.place.holder(path)
                holder.delete(name)
        self.has_begun = True
        return layout, []

    def _refuse(self, layout: TargetLayout) -> None:
        """Raise for what is there and may not be replaced. What an attempt has left is compared with what it
        should be."""
        place = self.place

        def is_leftover(name: str) -> bool:
            if layout.index is not None:
                return not is_commit_object(name) and name.startswith(("__", TEMPORARY_PREFIX))
            is_shard = bool(layout.last_files) and name in layout.file_names
            return is_shard or name.startswith(TEMPORARY_PREFIX)

        if not self.overwrite:
            place.refuse_existing(is_leftover if place.attempt else None)
        elif place.file_name is None and layout.index is None and has_checkpoint(place.store):
            raise PlanError(
                f"{place.url} holds a sharded checkpoint, which files of another format cannot replace in "
                "one step; delete it first, or convert to another target",
                path=place.url,
            )

    def _replaced(self, layout: TargetLayout) -> Iterator[str]:
        """Yield paths of what is in the target's folder, and in those directly below, and does not stay."""
        yield from layout.replaced("", {info.name for info in self._store.list()})
        if layout.last_files and self._store.capabilities.lists_folders:
            parent = ParentFolder(self._store, self.place.open_store)
            for folder, listing in parent.listings().items():
                files = parent.store(folder).list() if listing is None else listing
                names = {one.name for one in files}
                yield from (f"{folder}/{name}" for name in layout.replaced(folder, names))

    # -- what is done ----------------------------------------------------------------------------------------

    def append(self, result: TaskResult, batch: TaskBatch) -> None:
        """Write the ledger anew, with one request and one for each file: an object store has no appending."""
        versions = {file: self._version(file) for file in batch.file_names}
        self._ledger += framed(msgpack.packb([result.encode(), versions]))
        self._write(self.place.ledger_name, self._ledger)
        for name in batch.file_names:
            self._expected.pop(name, None)

    def expect(self, batch: TaskBatch) -> None:
        """As `Publisher.expect`."""
        self._expected |= self._absent(batch)

    @contextmanager
    def noted(self, batch: TaskBatch) -> Iterator[None]:
        """As `Publisher.noted`. Files that are there before are none of its own, unless it was about to write
        them before."""
        if not (files := _own_files(batch)):
            yield
            return
        name = self.place.ledger_of(batch.number)
        if absent := self._absent(batch):
            self._note(name, _files(self._read(name)) | absent)
        try:
            yield
        except CheckpointConflictError:  # one of them is not its own
            self._note(name, {})
            raise
        self._note(name, {file: self._version(file) for file in files})

    def _absent(self, batch: TaskBatch) -> dict[str, str]:
        """Return the files of ``batch`` that are not there, with their sizes in place of versions."""
        sizes = _own_files(batch).items()
        return {name: f"{_EXPECTED}{size}" for name, size in sizes if self._store.stat(name) is None}

    def _note(self, ledger: str, files: Mapping[str, str]) -> None:
        self._write(ledger, header("", self.save_id) + framed(msgpack.packb([b"", dict(files)])))

    def _are_there(self, versions: Mapping[str, str]) -> bool:
        """Return whether the files are there as a batch has written them."""
        return all(
            self._store.stat(file) is not None and self._version(file) == version
            for file, version in versions.items()
        )

    def _version(self, file: str) -> str:
        if file.endswith(DATA_SUFFIX):  # they have the save id in their names
            return ""
        version = self._store.version(file)
        return "" if version is None else version.token

    def _read(self, ledger: str) -> bytes:
        try:
            return self._store.read(ledger, limit_bytes=MAX_LEDGER_BYTES)
        except CheckpointNotFoundError:
            return b""

    def _write(self, ledger: str, data: bytes) -> None:
        announce("ledger", ledger)
        self._store.publish(ledger, data, durable=True)

    # -- publishing ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def _make_durable(self) -> None:
        """Do nothing: objects are durable when they appear."""

    def _publish(self, layout: TargetLayout, checks: ResultChecks, index: CheckpointIndex | None) -> None:
        for path, data in layout.last_files.items():
            holder, name = self.place.holder(path)
            if self.overwrite or not holds(holder, name, data):  # of a run that was killed here
                announce("publish", path)
                holder.make_root()
                holder.publish(name, data, durable=True, expected=ANY if self.overwrite else None)
        if index is not None:
            previous = self.previous or commit.previous_state(self._store, commit.Names())
            if previous.exists and not self.overwrite:
                raise self._conflict()
            self._commit(self._store, index, previous)

    def clear(self, batches: int) -> None:
        """As `Publisher.clear`."""
        place, store = self.place, self._store
        if not place.attempt or store.stat(place.ledger_name) is None:  # else of a conversion to be resumed
            place.end_uploads()
        announce("remove", place.ledger_name)
        for error in store.delete_all(self._ledger_names(batches)).values():
            raise error

    def discard(self, batches: int) -> None:
        """Remove all that was noted and is still the same, and what was expected and has the size, unless it
        has been published after all; data files have the save id in their names, and are removed by that."""
        store, is_folder = self._store, self.place.file_name is None
        commit.discard(store, self.save_id, commit.Names())
        last = (target.last_file for target in targets() if target.last_file is not None)
        if not (is_folder and any(store.stat(name) is not None for name in last)):
            found = self._expected
            for ledger in self._ledger_names(batches):
                found = found | _files(self._read(ledger))
            for file, version in found.items():
                if version.startswith(_EXPECTED):
                    info = store.stat(file)
                    if info is not None and info.size_bytes == int(version.removeprefix(_EXPECTED)):
                        store.delete(file)
                elif version:
                    store.delete_if(file, Version(version))
        self.clear(batches)

    def _ledger_names(self, batches: int) -> list[str]:
        place = self.place
        return [place.ledger_of(at) for at in range(batches)] if place.attempt else [place.ledger_name]


def _own_files(batch: TaskBatch) -> dict[str, int]:
    """Return sizes in bytes by name, but of data files, which have the save id in theirs."""
    return {task.name: task.file_bytes for task in batch.tasks if not task.name.endswith(DATA_SUFFIX)}


def _noted(entry: bytes) -> tuple[bytes, dict[str, str]] | None:
    """Return (result, versions by file) of an entry; None for anything else."""
    match unpacked(entry):
        case [bytes() as result, dict() as versions] if all(
            type(text) is str for pair in versions.items() for text in pair
        ):
            return result, versions
    return None


def _files(ledger: bytes) -> dict[str, str]:
    """Return by file the note of a ledger."""
    noted = parse(ledger, None)
    found = map(_noted, noted.entries) if noted is not None else ()
    return {file: version for entry in found if entry for file, version in entry[1].items()}
