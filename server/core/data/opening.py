"""Checkpoints that requests read: opened once, kept while they are asked for and have not changed."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dcp.server.catalog.values import short_name
from dcp.server.core.data.sharing import SharedValues
from dcp.server.core.problems import NotFoundError, UnavailableError
from dcp.server.core.roots import StorageRoot
from dcp.storage.errors import CheckpointError, CheckpointNotFoundError
from dcp.storage.stores.base import TEMPORARY_PREFIX, Store

if TYPE_CHECKING:
    from dcp.server.core.data.chunk_columns import ChunkColumns
    from dcp.storage.formats.index import CheckpointIndex
    from dcp.storage.formats.opening import SourcePlace

__all__ = ["OpenCheckpoint", "OpenCheckpoints", "OpenChunks"]

_KEPT_BYTES: Final = 64 << 20
_KEPT_CHUNK_BYTES: Final = 128 << 20
"""Five million chunks take 90 MiB."""
_KEPT: Final = 16
_LARGE_BYTES: Final = 4 << 20
_MAX_WAITING: Final = 24
"""Of the threads that answer; the others are for whoever asks for something else."""

_NAME_BYTES: Final = 400
"""Of a name as text, its place in a dict, and its path, which is a tuple of texts."""
_Name = tuple[str, str, str]
_MOVING: Final = frozenset({"notes.msgpack"})
"""Files of a checkpoint that change without its data."""


@dataclass(frozen=True, eq=False)
class _Stamped:
    """``stamp`` is another one whenever any of its files is: names, sizes or times."""

    root: str
    key: str
    stamp: str

    def etag(self, *facts: object) -> str:
        """A strong entity tag for what is made of this checkpoint by ``facts``."""
        text = "\0".join((self.root, self.key, self.stamp, *map(repr, facts)))
        return f'"{hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]}"'


@dataclass(frozen=True, eq=False)
class OpenCheckpoint(_Stamped):
    """A checkpoint with its index."""

    store: Store
    index: CheckpointIndex
    file: str | None

    @cached_property
    def held_bytes(self) -> int:
        """About how much memory the index takes."""
        return _size_bytes(self.index)

    @cached_property
    def whole_index(self) -> CheckpointIndex:
        """The index with what its format keeps elsewhere, such as values that are no tensors; read once.
        Raises errors of the formats and the storage."""
        from dcp.storage.formats.opening import complete_index  # only here, as all that reads tensors

        return complete_index(self.store, self.index)

    def row(self, fqn: str) -> int:
        """The row in the index of the tensor that is called so, or so in the catalog, which cuts names that
        are very long. Raises NotFoundError."""
        row = self.index.position.get(fqn)
        if row is None and ("..." in fqn or "\\" in fqn):
            row = next((at for at, name in enumerate(self.index.fqns) if short_name(name) == fqn), None)
        if row is None:
            is_value = fqn in self.index.objects.position
            what = "a value, and no tensor" if is_value else "not in the checkpoint"
            raise NotFoundError(f"{fqn[:200]!r} is {what}")
        return row


@dataclass(frozen=True, eq=False)
class OpenChunks(_Stamped):
    """The part of a checkpoint's index that is asked for again and again while somebody looks around in
    it."""

    columns: ChunkColumns
    provenance: Mapping[str, Any]

    @property
    def held_bytes(self) -> int:
        """About how much memory they take."""
        return self.columns.held_bytes


class OpenCheckpoints:
    """Indexes by root and key, the last ones used. Thread-safe; large ones are not kept, but shared.

    Each is read once, however many ask for it; those with large indexes one at a time, because what is made
    of them takes ten times the memory.
    """

    def __init__(self, *, kept_bytes: int = _KEPT_BYTES) -> None:
        self._values = SharedValues[_Name, OpenCheckpoint](count=_KEPT, kept_bytes=kept_bytes)
        self._chunks = SharedValues[_Name, OpenChunks](count=_KEPT, kept_bytes=_KEPT_CHUNK_BYTES)
        self._large = threading.Lock()

    def open(self, root: StorageRoot, key: str) -> OpenCheckpoint:
        """The checkpoint as it is now. Raises a ProblemError: GoneError if it is not there any more,
        UnavailableError where very many wait for one."""
        try:
            place = root.place(key)
            stamp = _stamp(place)
            return self._shared(root, key, place, stamp)
        except (CheckpointError, OSError) as error:
            raise root.problem(error, is_known=True) from error

    def chunks(self, root: StorageRoot, key: str) -> OpenChunks:
        """The chunks of the checkpoint as it is now: kept also where its index is too large for that.
        Raises as `open` does."""
        try:
            place = root.place(key)
            stamp = _stamp(place)
            name = (root.name, key, stamp.text)
            return self._chunks.get(name, lambda: self._chunks_of(root, key, place, stamp))
        except (CheckpointError, OSError) as error:
            raise root.problem(error, is_known=True) from error

    def has_chunks(self, root: StorageRoot, key: str) -> bool:
        """Whether `chunks` answers at once: not while others wait for them. Raises as `open` does."""
        try:
            return self._chunks.find((root.name, key, _stamp(root.place(key)).text)) is not None
        except (CheckpointError, OSError) as error:
            raise root.problem(error, is_known=True) from error

    def _chunks_of(self, root: StorageRoot, key: str, place: SourcePlace, stamp: _Stamp) -> OpenChunks:
        from dcp.server.core.data.chunk_columns import ChunkColumns  # only here, as all that needs numpy

        index = self._shared(root, key, place, stamp).index
        return OpenChunks(root.name, key, stamp.text, ChunkColumns.of(index), index.provenance)

    def _shared(self, root: StorageRoot, key: str, place: SourcePlace, stamp: _Stamp) -> OpenCheckpoint:
        name = (root.name, key, stamp.text)
        known = self._values.find(name)
        if known is not None:
            return known
        if stamp.is_large and self._values.waiting >= _MAX_WAITING:
            raise UnavailableError("many wait for large checkpoints to be opened", retry_seconds=5)
        return self._values.get(name, lambda: self._read(root, key, place, stamp))

    def _read(self, root: StorageRoot, key: str, place: SourcePlace, stamp: _Stamp) -> OpenCheckpoint:
        from dcp.storage.formats.opening import index_at

        with self._large if stamp.is_large else nullcontext():
            index = index_at(place)
        return OpenCheckpoint(root.name, key, stamp.text, place.store, index, place.file)


class _Stamp(NamedTuple):
    text: str
    is_large: bool


def _stamp(place: SourcePlace) -> _Stamp:
    """The stamp of all files of the checkpoint: one listing. CheckpointNotFoundError if there is nothing."""
    from dcp.storage.commit_names import is_commit_object

    if place.file is not None:
        info = place.store.stat(place.file)
        listing = [] if info is None else [info]
    else:
        listing = [
            info
            for info in place.store.list()
            if info.name not in _MOVING and not info.name.startswith(TEMPORARY_PREFIX)
        ]
    if not listing:
        raise CheckpointNotFoundError(f"{place.url} does not exist", path=place.url)
    digest = hashlib.sha256()
    for info in listing:
        digest.update(f"{info.name}\0{info.size_bytes}\0{info.modified_seconds!r}\n".encode())
    indexes = sum(info.size_bytes for info in listing if is_commit_object(info.name))
    return _Stamp(digest.hexdigest(), indexes > _LARGE_BYTES)


def _size_bytes(index: CheckpointIndex) -> int:
    import numpy as np

    values = vars(index).values()  # not by name: what is decoded when it is asked for stays as it is
    total = sum(array.nbytes for array in values if isinstance(array, np.ndarray))
    total += sum(map(len, index.fqns)) + _NAME_BYTES * (len(index.fqns) + len(index.objects))
    return total + sum(len(value) for value in index.objects.values)
