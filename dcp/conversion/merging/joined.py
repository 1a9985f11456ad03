"""Several checkpoints seen as one source: names of tensors and files have the number of theirs in front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dcp.storage.formats.index import CheckpointIndex, ObjectColumns
from dcp.storage.formats.opening.joined_indexes import join_indexes
from dcp.storage.formats.opening.sources import Source, complete_index
from dcp.storage.stores.base import FileInfo, ReadOnlyStore, Store
from dcp.storage.stores.handles import ReadHandle
from dcp.storage.threads import WorkerThreads

__all__ = ["JoinedSource", "JoinedStore", "join", "members_of", "open_joined"]

_FORMAT: Final = "joined"
_AT_ONCE: Final = 8


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
        """That of the store which has it."""
        store, own = self._owner(name)
        return store.path_of(own)

    def list(self) -> list[FileInfo]:
        """Of all stores."""
        found = {store.url: store.list() for store in self.stores}
        return [
            replace(info, name=f"{number}.{info.name}")
            for number, store in enumerate(self.stores)
            for info in found[store.url]
        ]

    def stat(self, name: str) -> FileInfo | None:
        """Of the store which has it."""
        store, own = self._owner(name)
        info = store.stat(own)
        return None if info is None else replace(info, name=name)

    def open_read(self, name: str, *, expected_bytes: int | None = None) -> ReadHandle:
        """Of the store which has it."""
        store, own = self._owner(name)
        return store.open_read(own, expected_bytes=expected_bytes)

    def _owner(self, name: str) -> tuple[Store, str]:
        number, _, own = name.partition(".")
        return self.stores[int(number)], own


@dataclass(frozen=True, slots=True)
class JoinedSource(Source):
    """``members`` as one source. Values that are no tensors are those of the first."""

    members: tuple[Source, ...] = ()


def members_of(source: Source) -> tuple[Source, ...]:
    """The checkpoints that it is."""
    return source.members if isinstance(source, JoinedSource) else (source,)


def open_joined(members: Sequence[Callable[[], Source]]) -> JoinedSource:
    """`join` of what ``members`` open, some at a time. Raises what these raise."""
    with WorkerThreads(min(_AT_ONCE, len(members))) as pool:
        return join(list(pool.map(_opened, members)))


def _opened(member: Callable[[], Source]) -> Source:
    found = member()
    return replace(found, index=complete_index(found.store, found.index))


def join(members: Sequence[Source]) -> JoinedSource:
    """One source of ``members``, whose indexes are complete. Rows of the first one's tensors and values stay
    what they are."""
    store = JoinedStore([member.store for member in members])
    parts = {number: _numbered(number, member.index) for number, member in enumerate(members)}
    saves = [member.index.provenance.get("save_id") for member in members]
    index = replace(join_indexes(parts), format=_FORMAT, provenance={"save_id": saves})
    return JoinedSource(store, index, " + ".join(member.name for member in members), None, tuple(members))


def _numbered(number: int, index: CheckpointIndex) -> CheckpointIndex:
    return replace(
        index,
        fqns=[f"{number}/{name}" for name in index.fqns],
        files=[f"{number}.{name}" for name in index.files],
        objects=ObjectColumns() if number else index.objects,
        planner_data=None,
        provenance={},
        user={},
        torch_metadata_crc=None,
        replaced_torch_metadata_crc=None,
    )
