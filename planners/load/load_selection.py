"""What of a flat state dict a load is for, and which entry of the checkpoint each of them gets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from dcp.planners.load.selection import Matches, Selection
from dcp.storage.formats.index import CheckpointIndex

__all__ = ["LoadSelection", "choose"]


@dataclass(frozen=True, eq=False)
class LoadSelection:
    """The entries of a flat state dict that are loaded.

    ``values``: those entries. ``names``: what the checkpoint calls all of them, where anything is renamed.
    ``kept``: names of the `PerRank` values that stay as they are. ``matches``: how the patterns fared, if
    there are any. ``others``: what the checkpoint calls the entries that are not loaded.
    """

    values: Mapping[str, Any]
    names: Mapping[str, str] | None
    kept: tuple[str, ...]
    matches: Matches | None
    others: frozenset[str]
    selection: Selection | None

    def stored_names(self, fqns: Sequence[str]) -> Sequence[str] | None:
        """What the checkpoint calls ``fqns``; None where that is the same."""
        return None if self.names is None else [self.names[fqn] for fqn in fqns]

    def unexpected(self, stored: Sequence[str]) -> tuple[str, ...]:
        """Of the ``stored`` names that are not loaded those that nobody left out on purpose."""
        if self.selection is None and not self.others:
            return tuple(stored)
        selects = self.selection.selects if self.selection is not None else lambda _: True
        return tuple(name for name in stored if name not in self.others and selects(name))


def choose(
    flat: Mapping[str, Any],
    index: CheckpointIndex,
    *,
    selection: Selection | None,
    renamed: Callable[[str], str] | None,
    keep: Mapping[str, str],
    world_size: int,
    unasked: Sequence[str],
    left: Collection[str] = (),
) -> LoadSelection:
    """Choose among the entries of ``flat`` for a load from ``index`` by ``world_size`` ranks.

    ``keep`` has the names of the `PerRank` values that may be kept, by the entries that are part of them.
    ``unasked`` as for `Selection.match`. ``left`` are entries that are filled otherwise.
    """
    if selection is None and renamed is None and not keep and not left:
        return LoadSelection(flat, None, (), None, frozenset(), None)
    names = None if renamed is None else {fqn: renamed(fqn) for fqn in flat}
    stored = chain(index.fqns, index.objects.fqns)
    matches = None if selection is None else selection.match(flat, unasked, stored)
    values = (
        flat if selection is None else {fqn: value for fqn, value in flat.items() if selection.selects(fqn)}
    )
    kept = _kept(values, names, index, keep, world_size) if keep else {}
    if kept or left:
        values = {fqn: value for fqn, value in values.items() if fqn not in kept and fqn not in left}
    left_out = (fqn for fqn in flat if fqn not in values)
    others = frozenset(left_out if names is None else (names[fqn] for fqn in left_out))
    return LoadSelection(values, names, tuple(sorted(set(kept.values()))), matches, others, selection)


def _kept(
    values: Mapping[str, Any],
    names: Mapping[str, str] | None,
    index: CheckpointIndex,
    keep: Mapping[str, str],
    world_size: int,
) -> dict[str, str]:
    """Entries that stay as they are, with the name of their `PerRank` value.

    A value is kept whole or not at all: half of a generator's state is none.
    """
    below: dict[str, list[str]] = {}
    for fqn, name in keep.items():
        if fqn in values:
            below.setdefault(name, []).append(fqn)
    if index.provenance.get("world_size") in (None, world_size):
        below = {
            name: fqns
            for name, fqns in below.items()
            if not any(_is_stored(index, fqn if names is None else names[fqn]) for fqn in fqns)
        }
    return {fqn: name for name, fqns in below.items() for fqn in fqns}


def _is_stored(index: CheckpointIndex, name: str) -> bool:
    return name in index.position or name in index.objects.position
