"""Several checkpoints seen as one source: names of tensors and files have the number of theirs in front."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar, overload

import numpy as np

from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening import Source, complete_index
from dcp.storage.geometry.strides import starts
from dcp.storage.stores.base import FileInfo, ReadHandle, ReadOnlyStore, Store
from dcp.storage.threads import WorkerThreads

__all__ = ["JoinedSource", "JoinedStore", "join", "open_joined"]

T = TypeVar("T")

_FORMAT: Final = "joined"
_AT_ONCE: Final = 2
"""The index of a file of many tensors takes much memory while it is read."""
_COLUMNS: Final = (
    "dtype_codes",
    "shape_values",
    "requires_grad",
    "chunk_offsets",
    "chunk_sizes",
    "record_offsets",
    "record_lengths",
    "payload_offsets",
    "payload_lengths",
    "crcs",
    "file_sizes",
)
_RAGGED: Final = ("shape_start", "chunk_start", "crc_start")


class JoinedStore(ReadOnlyStore):
    """The files of ``stores``: number 2's ``model.pt`` is ``2.model.pt``. Can be pickled as they can."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = tuple(stores)
        self.url = " + ".join(store.url for store in stores)
        profiles = [store.read_profile for store in stores]
        # A request is dear where it is dear for any of them, and large ones suit all.
        self.read_profile = next((profile for profile in profiles if profile.scatter), profiles[0])
        self.capabilities = replace(
            self.capabilities, is_shared=all(store.capabilities.is_shared for store in stores)
        )

    def path_of(self, name: str) -> str:
        """Return the path in the store that has the file."""
        store, own = self._owner(name)
        return store.path_of(own)

    def list(self) -> list[FileInfo]:
        """Return the files of all stores."""
        found = {store.url: store.list() for store in self.stores}
        return [
            replace(info, name=f"{number}.{info.name}")
            for number, store in enumerate(self.stores)
            for info in found[store.url]
        ]

    def stat(self, name: str) -> FileInfo | None:
        """Return the facts of a file from the store that has it."""
        store, own = self._owner(name)
        info = store.stat(own)
        return None if info is None else replace(info, name=name)

    def open_read(self, name: str, *, expected_bytes: int | None = None) -> ReadHandle:
        """Return a handle from the store that has it."""
        store, own = self._owner(name)
        return store.open_read(own, expected_bytes=expected_bytes)

    def _owner(self, name: str) -> tuple[Store, str]:
        number, _, own = name.partition(".")
        return self.stores[int(number)], own


@dataclass(frozen=True, slots=True)
class JoinedSource(Source):
    """``members`` as one source. Values that are no tensors are those of the first."""

    members: tuple[Source, ...] = ()


def open_joined(members: Sequence[Callable[[], Source]]) -> JoinedSource:
    """`join` of what ``members`` open, some at a time. Raises what these raise."""
    with WorkerThreads(min(_AT_ONCE, len(members))) as pool:
        return join(list(pool.map(_opened, members)))


def _opened(member: Callable[[], Source]) -> Source:
    found = member()
    return replace(found, index=complete_index(found.store, found.index))


def join(members: Sequence[Source]) -> JoinedSource:
    """Return one source of ``members``, whose indexes are complete. Rows of the first one's tensors,
    chunks and values stay what they are; those of the others follow in their order."""
    store = JoinedStore([member.store for member in members])
    members = [members[0], *(_sharing(member, members[0]) for member in members[1:])]
    index = _joined_index([member.index for member in members])
    name = " + ".join(member.name for member in members)
    return JoinedSource(store, index, name, None, tuple(_parts_of(index, members)))


def _parts_of(joined: CheckpointIndex, members: Sequence[Source]) -> Iterator[Source]:
    """Yield the same, their columns those of ``joined``, so that nothing is in memory twice."""
    begins = dict.fromkeys(_COLUMNS, 0)
    for member in members:
        ends = {name: begin + len(getattr(member.index, name)) for name, begin in begins.items()}
        own = {name: getattr(joined, name)[begins[name] : end] for name, end in ends.items()}
        yield replace(member, index=replace(member.index, **own))
        begins = ends


def _sharing(member: Source, first: Source) -> Source:
    """Share the names of the first source where they are the same, of which there may be very many. The
    nesting of the state is that of the first alone."""
    own = member.index
    fqns = first.index.fqns if own.fqns == first.index.fqns else own.fqns
    return replace(member, index=replace(own, fqns=fqns, planner_data=None))


class _JoinedNames(Sequence[str]):
    """The names of all sources: those of number 2 have ``2/`` in front. They are made when they are asked
    for."""

    def __init__(self, members: Sequence[Sequence[str]]) -> None:
        self._members = members
        self._begins = starts(list(map(len, members))).tolist()

    def __len__(self) -> int:
        return int(self._begins[-1])

    def __iter__(self) -> Iterator[str]:
        return (f"{number}/{name}" for number, names in enumerate(self._members) for name in names)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        if isinstance(row, slice):
            return [self[one] for one in range(*row.indices(len(self)))]
        number = self._number(row)
        return f"{number}/{self._members[number][row - self._begins[number]]}"

    def own_name(self, row: int) -> str:
        """Return the name without the number: for errors, which name the source by the path of its file."""
        number = self._number(row)
        return str(self._members[number][row - self._begins[number]])

    def _number(self, row: int) -> int:
        return bisect_right(self._begins, row) - 1


def _joined_index(parts: Sequence[CheckpointIndex]) -> CheckpointIndex:
    """Return one index of several complete ones, one behind the other."""
    tensors, chunks, files = (
        starts([len(getattr(part, name)) for part in parts]).tolist()
        for name in ("fqns", "chunk_files", "files")
    )
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS
    }
    for name in _RAGGED:
        columns[name] = starts(np.concatenate([np.diff(getattr(part, name)) for part in parts]))
    return CheckpointIndex(
        format=_FORMAT,
        fqns=_JoinedNames([part.fqns for part in parts]),
        chunk_files=np.concatenate([part.chunk_files + files[at] for at, part in enumerate(parts)]),
        files=[f"{number}.{name}" for number, part in enumerate(parts) for name in part.files],
        objects=parts[0].objects,
        stride_orders=_moved([part.stride_orders for part in parts], tensors),
        payload_strides=_moved([part.payload_strides for part in parts], chunks),
        record_crcs=_moved([part.record_crcs for part in parts], chunks),
        provenance={"save_id": [part.provenance.get("save_id") for part in parts]},
        **columns,
    )


def _moved(parts: Sequence[Mapping[int, T]], begins: Sequence[int]) -> dict[int, T]:
    """Return the values by row of all sources joined."""
    return {begins[at] + row: value for at, part in enumerate(parts) for row, value in part.items()}
