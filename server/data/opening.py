"""Checkpoints that requests read: opened once, kept while they are asked for and have not changed."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Final

from dcp.server.roots import Root
from dcp.storage.errors import CheckpointError, CheckpointNotFoundError
from dcp.storage.stores.base import TEMPORARY_PREFIX, Store

if TYPE_CHECKING:
    from dcp.storage.formats.index import CheckpointIndex
    from dcp.storage.formats.sources import Place

__all__ = ["OpenCheckpoint", "OpenCheckpoints"]

_KEPT_BYTES: Final = 24 << 20
_KEPT: Final = 16
_MOVING: Final = frozenset({"notes.msgpack"})
"""Files of a checkpoint that change without its data."""


@dataclass(frozen=True, eq=False)
class OpenCheckpoint:
    """``stamp`` is another one whenever any of its files is: names, sizes or times."""

    root: str
    key: str
    store: Store
    index: CheckpointIndex
    file: str | None
    stamp: str

    @cached_property
    def whole_index(self) -> CheckpointIndex:
        """The index with what a conversion to safetensors has kept in a file's metadata; tensors noted there
        as tied are compared, once. Raises errors of the formats and the storage."""
        from dcp.conversion.extras import with_extras  # only here, as all that reads tensors

        return with_extras(self.store, self.index)

    def etag(self, *facts: object) -> str:
        """A strong entity tag for what is made of this checkpoint by ``facts``."""
        text = "\0".join((self.root, self.key, self.stamp, *map(repr, facts)))
        return f'"{hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]}"'


class OpenCheckpoints:
    """Indexes by root and key, the last ones used. Thread-safe; large ones are not kept."""

    def __init__(self, *, kept_bytes: int = _KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._kept: OrderedDict[tuple[str, str], tuple[OpenCheckpoint, int]] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, root: Root, key: str) -> OpenCheckpoint:
        """The checkpoint as it is now. Raises a ProblemError: GoneError if it is not there any more."""
        from dcp.storage.formats.sources import index_at

        try:
            place = root.place(key)
            stamp = _stamp(place)
            with self._lock:
                known = self._kept.get((root.name, key))
                if known is not None and known[0].stamp == stamp:
                    self._kept.move_to_end((root.name, key))
                    return known[0]
            index = index_at(place)
        except (CheckpointError, OSError) as error:
            raise root.problem(error, is_known=True) from error
        opened = OpenCheckpoint(root.name, key, place.store, index, place.file, stamp)
        self._keep(opened)
        return opened

    def _keep(self, opened: OpenCheckpoint) -> None:
        size = _size_bytes(opened.index)
        with self._lock:
            self._kept.pop((opened.root, opened.key), None)
            if size > self._kept_bytes:
                return
            self._kept[opened.root, opened.key] = opened, size
            while len(self._kept) > _KEPT or sum(own for _, own in self._kept.values()) > self._kept_bytes:
                self._kept.popitem(last=False)


def _stamp(place: Place) -> str:
    """Of all files of the checkpoint: one listing. CheckpointNotFoundError if there is nothing."""
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
    return digest.hexdigest()


def _size_bytes(index: CheckpointIndex) -> int:
    import numpy as np

    arrays = [getattr(index, field.name) for field in fields(index)]
    total = sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))
    total += sum(sys.getsizeof(name) + 100 for name in index.fqns)  # 100: of its place in a dict
    return total + sum(len(value) for value in index.objects.values) + 200 * len(index.objects)
