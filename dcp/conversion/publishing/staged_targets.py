"""Where a staged conversion writes: a folder beside a local target, or the target's own objects.

Everything here may be repeated, also while an earlier attempt at it still runs. Nothing is ever replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from dcp.conversion.copying.checks import TargetChecksums
from dcp.conversion.copying.sinks import ComparingSink, FileSink, Sink, StreamSink, announce
from dcp.conversion.copying.tasks import Task
from dcp.conversion.layouts.layout import TargetLayout
from dcp.conversion.publishing.publish import LocalPublisher, final_index
from dcp.conversion.targets.places import TargetPlace
from dcp.storage import commit
from dcp.storage.commit_names import DATA_SUFFIX, MANIFEST_NAME, METADATA_NAME, is_commit_object
from dcp.storage.errors import CheckpointConflictError, CheckpointNotFoundError
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.format import DCP
from dcp.storage.formats.open import MAX_TORCH_METADATA_BYTES, open_index
from dcp.storage.formats.registry import targets
from dcp.storage.stores.base import TEMPORARY_PREFIX, Store, Version
from dcp.storage.stores.posix import PosixStore

__all__ = ["StagedTarget", "save_id_of", "staged_target"]

_MAX_NOTE_BYTES: Final = 1 << 20


def save_id_of(attempt: str) -> str:
    """The save id of a ``dcp`` target that the attempt makes."""
    return hashlib.sha256(attempt.encode()).hexdigest()[:8]


class StagedTarget(ABC):
    """A target of the attempt ``attempt``."""

    def __init__(self, place: TargetPlace, attempt: str) -> None:
        self.place = replace(place, attempt=attempt)
        self.attempt = attempt

    @abstractmethod
    def reserve(self, layout: TargetLayout, fingerprint: str) -> int | None:
        """Make room; the inode of what will get the target's name, None where there is no such thing.

        Raises CheckpointConflictError if something is at the target.
        """

    @abstractmethod
    def sink(self, task: Task) -> Sink:
        """Where a task writes."""

    @abstractmethod
    def is_written(self, task: Task) -> bool:
        """Whether another attempt has finished the file of ``task``, so that it need only be compared."""

    @abstractmethod
    def note(self, part: int, names: Iterable[str]) -> None:
        """Part number ``part`` has finished these files."""

    @abstractmethod
    def publish(self, layout: TargetLayout, checksums: TargetChecksums) -> None:
        """Make the target exist."""

    @abstractmethod
    def is_published(self, layout: TargetLayout, inode: int | None) -> bool:
        """Whether the target is what this attempt makes, and complete."""

    @abstractmethod
    def clear(self, parts: int) -> None:
        """Remove what is aside; the target is published, or will never be."""

    @abstractmethod
    def discard(self, parts: int) -> None:
        """Remove all that the attempt has written, unless it has been published after all."""

    def _has_files(self, layout: TargetLayout) -> bool:
        store = self.place.store
        for name, size in zip(layout.file_names, layout.file_sizes, strict=True):
            info = store.stat(name)
            if info is None or info.size_bytes != size:
                return False
        for name, data in layout.last_files.items():
            if store.stat(name) is None or store.read(name, limit_bytes=len(data) + (1 << 20)) != data:
                return False
        return layout.index is None or self._is_committed()

    def _is_committed(self) -> bool:
        """Whether all of the commit of a ``dcp`` target is there."""
        store = self.place.store
        try:
            index = open_index(store)
            if index.format != DCP.name or index.provenance.get("save_id") != save_id_of(self.attempt):
                return False
            data = store.read(METADATA_NAME, limit_bytes=MAX_TORCH_METADATA_BYTES)
        except CheckpointNotFoundError:
            return False
        return crc32(data) == index.torch_metadata_crc


def staged_target(place: TargetPlace, attempt: str) -> StagedTarget:
    """The target at ``place``."""
    return (_Objects if place.path is None else _LocalTarget)(place, attempt)


class _LocalTarget(StagedTarget):
    """Built aside in a folder of this attempt alone, and renamed."""

    def __init__(self, place: TargetPlace, attempt: str) -> None:
        super().__init__(place, attempt)
        self._publisher = LocalPublisher(self.place, overwrite=False, save_id=save_id_of(attempt))

    @property
    def _path(self) -> Path:
        return self.place.work_folder.parent / Path(self.place.url).name

    def reserve(self, layout: TargetLayout, fingerprint: str) -> int:
        self.place.refuse_existing()
        PosixStore(self._path.parent).make_root()
        publisher = self._publisher
        publisher.ledger.open(fingerprint, save_id_of(self.attempt))  # a clean-up knows the folder by it
        try:
            publisher.prepare(layout, resumed=False)
        except BaseException:
            publisher.discard()
            raise
        publisher.ledger.close()
        output = Path(publisher.folder)
        name = self.place.file_name
        return (output if name is None else output / name).stat().st_ino

    def sink(self, task: Task) -> Sink:
        return FileSink(self._publisher.folder, task.name)

    def is_written(self, task: Task) -> bool:
        return False  # it is written again, the same

    def note(self, part: int, names: Iterable[str]) -> None:
        """The folder is the attempt's alone."""

    def publish(self, layout: TargetLayout, checksums: TargetChecksums) -> None:
        self._publisher.publish(layout, checksums)

    def is_published(self, layout: TargetLayout, inode: int | None) -> bool:
        try:
            if self._path.stat().st_ino != inode:
                return False
        except (FileNotFoundError, NotADirectoryError):
            return False
        return self._has_files(layout)

    def clear(self, parts: int) -> None:
        self._publisher.discard()

    def discard(self, parts: int) -> None:
        self._publisher.discard()


class _Objects(StagedTarget):
    """Objects under their own names; that which makes them a checkpoint comes last."""

    def reserve(self, layout: TargetLayout, fingerprint: str) -> None:
        """Objects that an attempt before this one has left are no obstacle: they are compared."""
        place = self.place
        if place.file_name is not None:
            place.refuse_existing()
            place.store.make_root()
            return
        own = set(layout.file_names) if layout.last_files else set()
        for name in (info.name for info in place.store.list()):
            is_left = name in own or name.startswith(TEMPORARY_PREFIX)
            if layout.index is not None:
                is_left = not is_commit_object(name) and name.startswith(("__", TEMPORARY_PREFIX))
            if not is_left:
                raise CheckpointConflictError(
                    f"{place.url} exists (it has {name}); give another target", path=place.url
                )
        place.store.make_root()

    def sink(self, task: Task) -> Sink:
        store = self.place.store
        if self.is_written(task):
            return ComparingSink(store, task.name, task.file_bytes)
        return StreamSink(store, task.name, task.file_bytes, replace=False)

    def is_written(self, task: Task) -> bool:
        return self.place.store.stat(task.name) is not None

    def note(self, part: int, names: Iterable[str]) -> None:
        """Aside, so that `discard` knows its own by their versions. Names with a save id are known anyway."""
        store = self.place.store
        found = {name: store.version(name) for name in names if not name.endswith(DATA_SUFFIX)}
        versions = {name: version.token for name, version in found.items() if version is not None}
        if versions:
            store.publish(self._note_name(part), json.dumps(versions).encode(), durable=True)

    def _note_name(self, part: int) -> str:
        digest = hashlib.sha256(f"{self.attempt}/{part}".encode()).hexdigest()[:16]
        return f"{TEMPORARY_PREFIX}convert-{digest}"

    def publish(self, layout: TargetLayout, checksums: TargetChecksums) -> None:
        store = self.place.store
        for name, data in layout.last_files.items():
            announce("publish", name)
            store.publish(name, data, durable=True, expected=None)
        index = final_index(layout, checksums)
        if index is not None:
            self._commit(index)

    def _commit(self, index: CheckpointIndex) -> None:
        store = self.place.store
        announce("publish", MANIFEST_NAME)
        previous = commit.previous_state(store, commit.Names())
        save_id = save_id_of(self.attempt)
        if previous.exists and _published_save(store) != save_id:
            raise CheckpointConflictError(
                f"{self.place.url} has come into being while it was being written", path=self.place.url
            )
        commit.commit(
            store,
            index,
            previous,
            names=commit.Names(),
            save_id=save_id,
            durable=True,
            torch_compatible=True,
        )

    def is_published(self, layout: TargetLayout, inode: int | None) -> bool:
        return self._has_files(layout)

    def clear(self, parts: int) -> None:
        if self.place.store.stat(self.place.ledger_name) is None:  # else of a conversion that may go on
            self.place.end_uploads()
        for error in self.place.store.delete_all([self._note_name(part) for part in range(parts)]).values():
            raise error

    def discard(self, parts: int) -> None:
        store = self.place.store
        commit.discard(store, save_id_of(self.attempt), commit.Names())
        if self.place.file_name is not None or not self._is_complete():
            for part in range(parts):
                for name, token in self._noted(part).items():
                    store.delete_if(name, Version(token))
        self.clear(parts)

    def _is_complete(self) -> bool:
        """Whether what makes a folder of several files a checkpoint is there, of whatever format."""
        last = (target.last_file for target in targets())
        return any(self.place.store.stat(name) is not None for name in last if name is not None)

    def _noted(self, part: int) -> Mapping[str, str]:
        with contextlib.suppress(CheckpointNotFoundError, ValueError):
            noted = json.loads(self.place.store.read(self._note_name(part), limit_bytes=_MAX_NOTE_BYTES))
            if isinstance(noted, dict):
                return {name: token for name, token in noted.items() if isinstance(token, str)}
        return {}


def _published_save(store: Store) -> str | None:
    with contextlib.suppress(CheckpointNotFoundError):
        save_id = open_index(store).provenance.get("save_id")
        return save_id if isinstance(save_id, str) else None
    return None
