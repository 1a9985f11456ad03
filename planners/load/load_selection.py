"""What of a flat state dict a load is for, and which entry of the checkpoint each of them gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from dcp.planners.load.selection import Matches, Selection
from dcp.planners.per_rank import PerRank
from dcp.storage.formats.index import CheckpointIndex, Path

__all__ = ["LoadSelection", "choose", "per_rank_path"]


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
    keep: Callable[[str], str | None] | None,
    world_size: int,
    unasked: Sequence[str],
) -> LoadSelection:
    """Choose among the entries of ``flat`` for a load from ``index`` by ``world_size`` ranks.

    ``keep`` gives the name of the `PerRank` value that an entry is part of, where such values may be kept.
    ``unasked`` as for `Selection.match`.
    """
    if selection is None and renamed is None and keep is None:
        return LoadSelection(flat, None, (), None, frozenset(), None)
    names = None if renamed is None else {fqn: renamed(fqn) for fqn in flat}
    stored = chain(index.fqns, index.objects.fqns)
    matches = None if selection is None else selection.match(flat, unasked, stored)
    values = (
        flat if selection is None else {fqn: value for fqn, value in flat.items() if selection.selects(fqn)}
    )
    kept = {} if keep is None else _kept(values, names, index, keep, world_size)
    if kept:
        values = {fqn: value for fqn, value in values.items() if fqn not in kept}
    left_out = (fqn for fqn in flat if fqn not in values)
    others = frozenset(left_out if names is None else (names[fqn] for fqn in left_out))
    return LoadSelection(values, names, tuple(sorted(set(kept.values()))), matches, others, selection)


def _kept(
    values: Mapping[str, Any],
    names: Mapping[str, str] | None,
    index: CheckpointIndex,
    keep: Callable[[str], str | None],
    world_size: int,
) -> dict[str, str]:
    """Entries that stay as they are, with the name of their `PerRank` value.

    A value is kept whole or not at all: half of a generator's state is none.
    """
    below: dict[str, list[str]] = {}
    for fqn in values:
        name = keep(fqn)
        if name is not None:
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


def per_rank_path(root: Any, path: Path) -> Path | None:
    """The path of the `PerRank` value that holds what is at ``path`` below ``root``; None if none does."""
    container = root
    for depth, key in enumerate(path):
        if isinstance(container, PerRank):
            return path[:depth]
        container = _child(container, key)
    return None


def _child(container: Any, key: str | int) -> Any:
    """The entry of a container; None where it has none: a planner of the user's own has other paths."""
    if isinstance(container, Mapping):
        # flattening makes strings of keys
        named = (child for other, child in container.items() if str(other) == key)
        return container[key] if key in container else next(named, None)
    return container[key] if isinstance(container, list) and isinstance(key, int) else None
