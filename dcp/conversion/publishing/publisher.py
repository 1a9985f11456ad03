"""Publishing of a target: room for it, a note of what is done, and one atomic step that makes it exist.

All of it may be repeated, also while an earlier attempt at it still runs. Nothing is replaced unless it is to
be.

What is done is noted in a ledger, so that a killed conversion is resumed. Its first entry says of which
conversion (fingerprint), under which save id and, locally, in which folder (inode); each other one is the
result of a batch of tasks whose bytes were durable before. An entry counts if its checksum fits, and none
after one that does not: that is how far the file was written. Entries must never be believed of bytes that
another conversion has written since, whichever of both a power cut has left. So they are bound to these: by
a folder that has the save id in its name, or by the versions of the objects.
"""

from __future__ import annotations

import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple

import msgpack
import numpy as np

from dcp.conversion.copying.batches import ResultChecks
from dcp.conversion.copying.tasks import Output, TaskBatch, TaskResult, announce
from dcp.conversion.layouts.layout import TargetLayout
from dcp.conversion.targets.places import TargetPlace
from dcp.inspection.values.digests import sums_of
from dcp.inspection.values.tensor_reading import TensorReader
from dcp.storage import commit
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening import MAX_TORCH_METADATA_BYTES, open_index
from dcp.storage.formats.registry import DCP
from dcp.storage.geometry.strides import starts
from dcp.storage.stores.base import Store

__all__ = ["MAX_LEDGER_BYTES", "Noted", "Publisher", "framed", "header", "holds", "parse", "unpacked"]


class Publisher(ABC):
    """Steps of the target at ``place`` before and after its bytes are written to `output`.

    ``save_id`` is that of a ``dcp`` target, unless an earlier run has begun it under another one. An attempt
    (`TargetPlace.attempt`) has no ledger of what is done: that is known to the job that it is of.
    """

    def __init__(self, place: TargetPlace, save_id: str, *, overwrite: bool = False) -> None:
        self.place = place
        self.save_id = save_id
        self.overwrite = overwrite
        self.previous: commit.Previous | None = None
        self.has_begun = False

    @property
    @abstractmethod
    def output(self) -> Output:
        """The place where tasks write, once there is room."""

    @property
    def inode(self) -> int | None:
        """The inode of what is to be renamed to the target, or has been, where that is local."""
        return None

    @abstractmethod
    def begin(self, layout: TargetLayout, fingerprint: str) -> tuple[TargetLayout, list[TaskResult]]:
        """Make room. The layout under the save id of the run that began it, and the results of what is done.

        Raises CheckpointConflictError if something is at the target.
        """

    @abstractmethod
    def expect(self, batch: TaskBatch) -> None:
        """Note that another process is about to write the files of ``batch``: if its end is never heard
        of, `discard` removes them."""

    @contextmanager
    def noted(self, batch: TaskBatch) -> Iterator[None]:
        """Note the files of a batch of an attempt, which the block writes, so that `discard` removes them."""
        yield

    @abstractmethod
    def append(self, result: TaskResult, batch: TaskBatch) -> None:
        """Note in the ledger that a batch is done."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the ledger."""

    @abstractmethod
    def clear(self, batches: int) -> None:
        """Remove what is aside, of ``batches`` batches; the target is published, or will never be."""

    @abstractmethod
    def discard(self, batches: int) -> None:
        """Remove all that was written, unless it has been published after all."""

    # -- publishing ------------------------------------------------------------------------------------------

    def publish(self, layout: TargetLayout, checks: ResultChecks, inode: int | None) -> None:
        """Make the target exist, durably; fine if an earlier attempt has done so, which is known by ``inode``
        where it is local. Raises CheckpointConflictError if something else has come into being."""
        if not self.is_published(layout, inode):
            try:
                index = _final_index(layout, checks)
                if index is not None:
                    index = _with_digests(self.output.store, index)
                self._publish(layout, checks, index)
            except (CheckpointError, OSError) as error:
                is_committed = isinstance(error, CheckpointError) and error.committed
                if is_committed or not self.is_published(layout, inode):  # by a quicker attempt
                    raise
        self._make_durable()

    @abstractmethod
    def _publish(self, layout: TargetLayout, checks: ResultChecks, index: CheckpointIndex | None) -> None:
        """Make it exist, which is whole in `output` but for holes; ``index`` is that of a ``dcp`` target."""

    @abstractmethod
    def _make_durable(self) -> None:
        """Make the target's name durable. Raises StorageError (``committed``) where that fails."""

    def is_published(self, layout: TargetLayout, inode: int | None) -> bool:
        """Return whether the target is what this conversion makes, and complete."""
        place = self.place
        for name, size in zip(layout.file_names, layout.file_sizes, strict=True):
            info = place.store.stat(name)
            if info is None or info.size_bytes != size:
                return False
        if not all(holds(*place.holder(path), data) for path, data in layout.last_files.items()):
            return False
        return layout.index is None or self._is_committed(place.store)

    def _is_committed(self, store: Store) -> bool:
        """Return whether all of the commit of a ``dcp`` target is there."""
        try:
            index = open_index(store)
            if index.format != DCP.name or index.provenance.get("save_id") != self.save_id:
                return False
            data = store.read(METADATA_NAME, limit_bytes=MAX_TORCH_METADATA_BYTES)
        except CheckpointNotFoundError:
            return False
        return crc32(data) == index.torch_metadata_crc

    def _commit(self, store: Store, index: CheckpointIndex, previous: commit.Previous) -> None:
        announce("publish", MANIFEST_NAME)
        commit.commit(
            store,
            index,
            previous,
            names=commit.Names(),
            save_id=self.save_id,
            durable=True,
            torch_compatible=True,
        )

    def _conflict(self) -> CheckpointConflictError:
        return CheckpointConflictError(
            f"{self.place.url} has come into being while its replacement was being written, and is "
            "untouched; give another target",
            alternative="replace it",
            argument="overwrite=True",
            path=self.place.url,
        )

    def _resumed(
        self, layout: TargetLayout, save_id: str, entries: list[bytes]
    ) -> tuple[TargetLayout, list[TaskResult]] | None:
        """Return the layout under the save id of the run that began it, and the results in a ledger's
        ``entries``; None if these cannot be read."""
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


def _final_index(layout: TargetLayout, checks: ResultChecks) -> CheckpointIndex | None:
    """Return the index of a ``dcp`` target with the checksums of its blocks."""
    index, copies = layout.index, layout.chunk_copies
    if index is None or copies is None:
        return None
    blocks = [checks.blocks(copy) for copy in copies.tolist()]
    crcs = np.concatenate([np.zeros(0, np.uint32), *blocks]).astype(np.uint32)
    return replace(index, crc_start=starts([len(block) for block in blocks]), crcs=crcs)


def _with_digests(store: Store, index: CheckpointIndex) -> CheckpointIndex:
    """Add the digests of the tensors that are not as the source has them, where that has digests: by
    reading what was written."""
    rows = [row for row, total in enumerate(index.digests) if not total]
    if not rows:
        return index
    with TensorReader(store, index) as reader:
        found = sums_of(reader, rows)
    return replace(index, digests=[found.get(row, total) for row, total in enumerate(index.digests)])


def holds(store: Store, name: str, data: bytes) -> bool:
    """Return whether a file has these bytes."""
    info = store.stat(name)
    if info is None or info.size_bytes != len(data):
        return False
    return store.read(name, limit_bytes=len(data)) == data


MAX_LEDGER_BYTES: Final = 1 << 30

_HEAD: Final = struct.Struct("<II")
_VERSION: Final = 5
_SAVE_ID: Final = re.compile("[0-9a-f]{8}")


class Noted(NamedTuple):
    """The entries of a ledger, behind the first; ``end`` is where the last one ends."""

    save_id: str
    inode: int | None
    entries: list[bytes]
    end: int


def framed(data: bytes) -> bytes:
    """Return an entry of the ledger, with its length and checksum."""
    return _HEAD.pack(len(data), crc32(data)) + data


def header(fingerprint: str, save_id: str, inode: int | None = None) -> bytes:
    """Return the first entry of a ledger."""
    facts = {"version": _VERSION, "fingerprint": fingerprint, "save_id": save_id, "inode": inode}
    return framed(msgpack.packb(facts))


def parse(data: bytes, fingerprint: str | None) -> Noted | None:
    """Return the entries whose checksums fit, up to the first that does not; None if they are of another
    conversion than ``fingerprint`` (None: of any)."""
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
    """Return None for anything but msgpack."""
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException):
        return None
