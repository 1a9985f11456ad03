"""Publication of a target: reserve space, record finished work, and make the target visible in one atomic
step.

All steps may be repeated, even while an earlier attempt runs. Existing data is replaced only on request.

A ledger records finished work, to resume a killed conversion. The first entry names the conversion
(fingerprint), the save id and, locally, the folder (inode). Each other entry is the result of a batch,
appended after its bytes are durable. Entries count up to the first one with a wrong checksum. Entries are
bound to their bytes, by a folder with the save id in the name or by object versions, because another
conversion may write the same names after a power cut.
"""

from __future__ import annotations

import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import msgpack
import numpy as np

from dcp.conversion.gather import TaskResult
from dcp.conversion.layout import TargetLayout
from dcp.conversion.running import ResultChecks, TaskBatch, announce
from dcp.conversion.targets.job import TargetPlace, is_written_under
from dcp.inspection.values.digests import sums_of
from dcp.inspection.values.tensor_reading import TensorReader
from dcp.storage import commit
from dcp.storage.commit_names import DATA_SUFFIX, MANIFEST_NAME, METADATA_NAME, is_commit_object
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    PlanError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening import MAX_TORCH_METADATA_BYTES, has_checkpoint, open_index
from dcp.storage.formats.registry import DCP, targets
from dcp.storage.geometry.strides import starts
from dcp.storage.stores.base import ANY, TEMPORARY_PREFIX, Store, Version
from dcp.storage.stores.opening import ParentFolder

# -- ledgers -------------------------------------------------------------------------------------------------

MAX_LEDGER_BYTES: Final = 1 << 30

_HEAD: Final = struct.Struct("<II")
_VERSION: Final = 5
_SAVE_ID: Final = re.compile("[0-9a-f]{8}")


def framed(data: bytes) -> bytes:
    """Return an entry of the ledger, with length and checksum."""
    return _HEAD.pack(len(data), crc32(data)) + data


def header(fingerprint: str, save_id: str, inode: int | None = None) -> bytes:
    """Return the first entry of a ledger."""
    facts = {"version": _VERSION, "fingerprint": fingerprint, "save_id": save_id, "inode": inode}
    return framed(msgpack.packb(facts))


def parse(data: bytes, fingerprint: str | None) -> tuple[str, int | None, list[bytes], int] | None:
    """Parse a ledger: (save id, inode, entries, end of the last valid entry).

    None for another conversion than ``fingerprint`` (None: any).
    """
    found, position = [], 0
    while position + _HEAD.size <= len(data):
        size, crc = _HEAD.unpack_from(data, position)
        entry = data[position + _HEAD.size : position + _HEAD.size + size]
        if not size or len(entry) != size or crc32(entry) != crc:  # zeros are left by a power failure
            break
        found.append(entry)
        position += _HEAD.size + size
    match _unpacked(found[0]) if found else None:
        case {"version": version, "fingerprint": of, "save_id": str(save_id), "inode": inode}:
            is_own = version == _VERSION and (fingerprint is None or of == fingerprint)
            if is_own and _SAVE_ID.fullmatch(save_id):  # the id becomes part of a file name
                return save_id, inode, found[1:], position
    return None


def _unpacked(data: bytes) -> Any:
    """Return None for anything but msgpack."""
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException):
        return None


# -- steps of any target -------------------------------------------------------------------------------------


class Publisher(ABC):
    """Steps of the target at ``place`` before and after tasks write to `output`.

    ``save_id`` belongs to a ``dcp`` target, unless an earlier run began with another id. An attempt
    (`TargetPlace.attempt`) has no ledger; its job records finished work. ``inode`` identifies the local
    folder to rename.
    """

    def __init__(self, place: TargetPlace, save_id: str, *, overwrite: bool = False) -> None:
        self.place = place
        self.save_id = save_id
        self.overwrite = overwrite
        self.inode: int | None = None
        self.has_begun = False
        self._previous: commit.Previous | None = None

    @property
    @abstractmethod
    def output(self) -> Store:
        """Place where tasks write, after the reservation."""

    @abstractmethod
    def begin(self, layout: TargetLayout, fingerprint: str) -> tuple[TargetLayout, list[TaskResult]]:
        """Reserve space. Returns the layout with the save id of the run that began, and finished results.

        Raises CheckpointConflictError if the target exists.
        """

    def expect(self, batch: TaskBatch) -> None:  # noqa: B027 - of a local target all is in the work folder
        """Record the files of ``batch`` before another process writes them, for `discard`."""

    @contextmanager
    def noted(self, batch: TaskBatch) -> Iterator[None]:
        """Record the files of an attempt's batch, written inside the block, for `discard`."""
        yield

    @abstractmethod
    def append(self, result: TaskResult, batch: TaskBatch) -> None:
        """Record a finished batch in the ledger."""

    def close(self) -> None:  # noqa: B027 - nothing is held of objects
        """Release the ledger."""

    @abstractmethod
    def clear(self, batches: int) -> None:
        """Remove auxiliary files of ``batches`` batches, after publication or abandonment."""

    @abstractmethod
    def discard(self, batches: int) -> None:
        """Remove all written files of a target that is not published."""

    def publish(self, layout: TargetLayout, checks: ResultChecks, inode: int | None) -> None:
        """Make the target visible, durably; repetitions have no effect.

        ``inode`` identifies a target published earlier on a local file system. Raises CheckpointConflictError
        for a foreign target.
        """
        if not self.is_published(layout, inode):
            try:
                index = None if layout.index is None else self._final_index(layout, layout.index, checks)
                self._publish(layout, checks, index)
            except (CheckpointError, OSError) as error:
                is_committed = isinstance(error, CheckpointError) and error.committed
                if is_committed or not self.is_published(layout, inode):  # a faster attempt has published
                    raise

    @abstractmethod
    def _publish(self, layout: TargetLayout, checks: ResultChecks, index: CheckpointIndex | None) -> None:
        """Make `output`, complete except for holes, visible; ``index`` belongs to a ``dcp`` target."""

    def is_published(self, layout: TargetLayout, inode: int | None) -> bool:
        """Test whether the complete target of this conversion exists."""
        place = self.place
        for name, size in zip(layout.file_names, layout.file_sizes, strict=True):
            info = place.store.stat(name)
            if info is None or info.size_bytes != size:
                return False
        if not all(_holds(*place.holder(path), data) for path, data in layout.last_files.items()):
            return False
        return layout.index is None or self._is_committed()

    def _is_committed(self) -> bool:
        """Test whether the complete commit of a ``dcp`` target exists."""
        store = self.place.store
        try:
            index = open_index(store)
            if index.format != DCP.name or index.provenance.get("save_id") != self.save_id:
                return False
            data = store.read(METADATA_NAME, limit_bytes=MAX_TORCH_METADATA_BYTES)
        except CheckpointNotFoundError:
            return False
        return crc32(data) == index.torch_metadata_crc

    def _commit(self, index: CheckpointIndex, previous: commit.Previous) -> None:
        announce("publish", MANIFEST_NAME)
        facts: dict[str, Any] = {"save_id": self.save_id, "durable": True, "torch_compatible": True}
        commit.commit(self.place.store, index, previous, names=commit.Names(), **facts)

    def _conflict(self) -> CheckpointConflictError:
        return CheckpointConflictError(
            f"{self.place.url} was created by another process during the conversion; choose another target",
            alternative="replace it",
            argument="overwrite=True",
            path=self.place.url,
        )

    def _resumed(
        self, layout: TargetLayout, save_id: str, entries: list[bytes]
    ) -> tuple[TargetLayout, list[TaskResult]] | None:
        """Return the layout with the save id of the run that began, and the results of a ledger's
        ``entries``; None if unreadable."""
        try:
            done = [TaskResult.decode(entry) for entry in entries]
        except CheckpointFormatError:
            return None
        if layout.index is None or save_id == self.save_id:
            return layout, done
        names = [name.replace(f".{self.save_id}.", f".{save_id}.") for name in layout.file_names]
        provenance = {**layout.index.provenance, "save_id": save_id}
        index = replace(layout.index, files=names, provenance=provenance)
        return replace(layout, file_names=names, index=index), done

    def _final_index(
        self, layout: TargetLayout, index: CheckpointIndex, checks: ResultChecks
    ) -> CheckpointIndex:
        """Return the index of a ``dcp`` target with block checksums and digests.

        Digests are stored if the source has digests; changed tensors are read again.
        """
        copies = layout.chunk_copies.tolist() if layout.chunk_copies is not None else ()
        blocks = [checks.blocks(copy) for copy in copies]
        crcs = np.concatenate([np.zeros(0, np.uint32), *blocks]).astype(np.uint32)
        index = replace(index, crc_start=starts([len(block) for block in blocks]), crcs=crcs)
        if not (rows := [row for row, total in enumerate(index.digests) if not total]):
            return index
        with TensorReader(self.output, index) as reader:
            found = sums_of(reader, rows)
        return replace(index, digests=[found.get(row, total) for row, total in enumerate(index.digests)])


def _holds(store: Store, name: str, data: bytes) -> bool:
    """Test whether a file has these bytes."""
    info = store.stat(name)
    is_as_long = info is not None and info.size_bytes == len(data)
    return is_as_long and store.read(name, limit_bytes=len(data)) == data


# -- targets in object stores --------------------------------------------------------------------------------

_EXPECTED: Final = "of bytes: "
"""Replaces the version of a file not written yet; the size follows."""


class StoredPublisher(Publisher):
    """Publish a target in a store: each task writes a whole file; the completing file is written last.

    The ledger is a small object beside the output, replaced after each batch. The store refuses a second file
    of the same name, which protects against concurrent processes. An attempt has a ledger for each batch with
    the written and expected files.
    """

    def __init__(self, place: TargetPlace, save_id: str, *, overwrite: bool = False) -> None:
        super().__init__(place, save_id, overwrite=overwrite)
        self._store = place.store
        self._ledger = b""
        self._expected: dict[str, str] = {}

    @property
    def output(self) -> Store:
        """The store."""
        return self._store

    def begin(self, layout: TargetLayout, fingerprint: str) -> tuple[TargetLayout, list[TaskResult]]:
        """As `Publisher.begin`."""
        if self.place.attempt:
            self._refuse(layout)
            self._store.make_root()
            return layout, []
        data = self._read(self.place.ledger_name)
        noted = parse(data, fingerprint)
        if layout.index is not None:  # what the commit compares with is taken before anything is written
            self._previous = commit.previous_state(self._store, commit.Names())
        if noted is not None:
            save_id, _, entries, end = noted
            done = []
            for result, versions in filter(None, map(_noted, entries)):
                # Batches whose files are unchanged.
                if all(self._store.stat(name) and self._version(name) == versions[name] for name in versions):
                    done.append(result)
            resumed = self._resumed(layout, save_id, done)
            if resumed is not None:
                self.save_id, self._ledger, self.has_begun = save_id, data[:end], True
                return resumed
        self._refuse(layout)
        self._store.make_root()
        # Before any write: files of another conversion must not count as own files.
        self._ledger = header(fingerprint, self.save_id)
        self._write(self.place.ledger_name, self._ledger)
        if self.overwrite:  # readers must not take new shards for those of the old index
            for path in {*layout.last_files, *self._replaced(layout)}:
                holder, name = self.place.holder(path)
                holder.delete(name)
        self.has_begun = True
        return layout, []

    def _refuse(self, layout: TargetLayout) -> None:
        """Raise for files that may not be replaced, after a comparison with leftovers of attempts."""
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
                f"{place.url} holds a sharded checkpoint, which a file of another format cannot replace "
                "atomically; remove it first (dcp rm), or convert to another target",
                path=place.url,
            )

    def _replaced(self, layout: TargetLayout) -> Iterator[str]:
        """Yield paths to replace in the target's folder and direct subfolders."""
        yield from layout.replaced("", {info.name for info in self._store.list()})
        if layout.last_files and self._store.capabilities.lists_folders:
            parent = ParentFolder(self._store, self.place.open_store)
            for folder, listing in parent.listings().items():
                files = parent.store(folder).list() if listing is None else listing
                names = {one.name for one in files}
                yield from (f"{folder}/{name}" for name in layout.replaced(folder, names))

    # -- what is done ----------------------------------------------------------------------------------------

    def append(self, result: TaskResult, batch: TaskBatch) -> None:
        """Rewrite the ledger, with one request and one for each file: objects cannot be appended to."""
        versions = {task.name: self._version(task.name) for task in batch.tasks}
        self._ledger += framed(msgpack.packb([result.encode(), versions]))
        self._write(self.place.ledger_name, self._ledger)
        for name in versions:
            self._expected.pop(name, None)

    def expect(self, batch: TaskBatch) -> None:
        """As `Publisher.expect`."""
        self._expected |= self._absent(batch)

    @contextmanager
    def noted(self, batch: TaskBatch) -> Iterator[None]:
        """Record files as `Publisher.noted`. Existing files are excluded, unless recorded before."""
        if not (files := _own_files(batch)):
            yield
            return
        name = self.place.ledger_of(batch.number)
        if absent := self._absent(batch):
            self._note(name, _files(self._read(name)) | absent)
        try:
            yield
        except CheckpointConflictError:  # a file of another conversion
            self._note(name, {})
            raise
        self._note(name, {file: self._version(file) for file in files})

    def _absent(self, batch: TaskBatch) -> dict[str, str]:
        """Return the missing files of ``batch``, with sizes in place of versions."""
        sizes = _own_files(batch).items()
        return {name: f"{_EXPECTED}{size}" for name, size in sizes if self._store.stat(name) is None}

    def _note(self, ledger: str, files: Mapping[str, str]) -> None:
        self._write(ledger, header("", self.save_id) + framed(msgpack.packb([b"", dict(files)])))

    def _version(self, file: str) -> str:
        if file.endswith(DATA_SUFFIX):  # data files have the save id in their names
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

    def _publish(self, layout: TargetLayout, checks: ResultChecks, index: CheckpointIndex | None) -> None:
        for path, data in layout.last_files.items():
            holder, name = self.place.holder(path)
            if self.overwrite or not _holds(holder, name, data):  # leftover of a killed run
                announce("publish", path)
                holder.make_root()
                holder.publish(name, data, durable=True, expected=ANY if self.overwrite else None)
        if index is not None:
            previous = self._previous or commit.previous_state(self._store, commit.Names())
            if previous.exists and not self.overwrite:
                raise self._conflict()
            self._commit(index, previous)

    def clear(self, batches: int) -> None:
        """As `Publisher.clear`."""
        place, store = self.place, self._store
        # otherwise the ledger belongs to a conversion that can be resumed
        if not place.attempt or store.stat(place.ledger_name) is None:
            # Unfinished uploads belong to killed or slower attempts.
            commit.abort_uploads(store, lambda name: is_written_under({place.ledger_name}, name))
        announce("remove", place.ledger_name)
        for error in store.delete_all(self._ledger_names(batches)).values():
            raise error

    def discard(self, batches: int) -> None:
        """Remove recorded files that are unchanged, expected files of the expected size, and data files with
        the save id, unless published."""
        store, is_folder = self._store, self.place.file_name is None
        commit.discard(store, self.save_id, commit.Names())
        last = (target.last_file for target in targets() if target.last_file is not None)
        if not (is_folder and any(map(store.stat, last))):
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
    """Return sizes in bytes by name, except for data files, whose names contain the save id."""
    return {task.name: task.file_bytes for task in batch.tasks if not task.name.endswith(DATA_SUFFIX)}


def _noted(entry: bytes) -> tuple[bytes, dict[str, str]] | None:
    """Return (result, versions by file) of an entry, or None if invalid."""
    match _unpacked(entry):
        case [bytes() as result, dict() as versions] if all(
            type(text) is str for pair in versions.items() for text in pair
        ):
            return result, versions
    return None


def _files(ledger: bytes) -> dict[str, str]:
    """Return by file the note of a ledger."""
    noted, found = parse(ledger, None), dict[str, str]()
    for entry in filter(None, map(_noted, noted[2] if noted is not None else ())):
        found |= entry[1]
    return found
