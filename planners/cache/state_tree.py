"""The shape of a nested state dict, so that an unchanged one is flattened again without building its names.

A training loop saves the same tree of dicts over and over. Comparing its keys and types with those of the
last time costs a fifth of flattening it; the flat keys and paths, which follow from them, are then known.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dcp.planners.flatten import LIST, MAPPING, OTHER, TENSOR, is_closed_list, kind_of
from dcp.planners.per_rank import PerRank

__all__ = ["StateTree"]

_MAPPINGS = frozenset({dict, OrderedDict, defaultdict})
"""Their keys and values are what iteration gives; other mappings may do anything."""

_KEYS = frozenset({str, int})
"""Equal keys of these very types have equal names; True == 1 and 1.0 == 1, and subclasses, need not."""


@dataclass(frozen=True, slots=True)
class StateTree:
    """A container of a state dict: keys and types of its entries, and those of its entries that are opened.

    ``branches`` are (position, tree) of the opened entries, ``lists`` the positions of lists that are kept
    whole, for as long as nothing in them has to be opened.
    """

    kind: int
    keys: tuple[Any, ...]
    types: list[type]
    branches: tuple[tuple[int, StateTree], ...]
    lists: tuple[int, ...]

    @classmethod
    def of(cls, container: Any) -> StateTree | None:
        """The tree of what `flatten_state_dict` opens; None where mappings or keys are of unusual types."""
        kind = kind_of(type(container))
        entries = _entries(kind, container)
        keys: tuple[Any, ...] = ()
        if kind == MAPPING:
            if type(container) not in _MAPPINGS or not _KEYS.issuperset(map(type, container)):
                return None
            keys = tuple(container)
        types = list(map(type, entries))
        branches, lists = [], []
        opened = {cls for cls in set(types) if kind_of(cls) not in (TENSOR, OTHER)}
        for position, entry in enumerate(entries) if opened else ():
            entry_kind = kind_of(type(entry))
            if entry_kind in (TENSOR, OTHER):
                continue
            if entry_kind == LIST and is_closed_list(entry):
                lists.append(position)
                continue
            branch = cls.of(entry)
            if branch is None:
                return None
            branches.append((position, branch))
        return cls(kind, keys, types, tuple(branches), tuple(lists))

    def leaves(self, container: Any) -> list[Any] | None:
        """The values of ``container`` in flat order if it still has this shape, else None."""
        if kind_of(type(container)) != self.kind or (
            self.kind == MAPPING and type(container) not in _MAPPINGS
        ):
            return None
        leaves: list[Any] = []
        return leaves if self._collect(container, leaves) else None

    def _collect(self, container: Any, leaves: list[Any]) -> bool:
        # the type of ``container`` was compared by whoever holds it
        if self.kind == MAPPING and (
            tuple(container) != self.keys or not _KEYS.issuperset(map(type, container))
        ):
            return False
        entries = _entries(self.kind, container)
        if list(map(type, entries)) != self.types:
            return False
        if not all(is_closed_list(entries[position]) for position in self.lists):
            return False
        begin = 0
        for position, branch in self.branches:
            leaves += entries[begin:position]
            if not branch._collect(entries[position], leaves):
                return False
            begin = position + 1
        leaves += entries[begin:] if begin else entries
        return True


def _entries(kind: int, container: Any) -> list[Any]:
    if kind == MAPPING and isinstance(container, Mapping):
        return list(container.values())
    if isinstance(container, PerRank):
        return [container.value]
    return list(container)
