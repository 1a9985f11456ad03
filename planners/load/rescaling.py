"""Which `Rescale` values a load makes by their rules, because another number of ranks saved them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import NamedTuple

from dcp.planners.load.selection import Selection
from dcp.planners.per_rank import PerRank, rank_holder, rank_key, rank_number
from dcp.planners.rescale import Rescale
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import CheckpointIndex

__all__ = ["StatesOfRanks", "states_to_rescale"]


class StatesOfRanks(NamedTuple):
    """One value of the state dict, called ``name`` there: what the checkpoint has of each of ``ranks`` ranks
    is below ``stored``."""

    name: str
    target: Rescale
    stored: str
    ranks: int


def states_to_rescale(
    per_rank: Mapping[str, PerRank],
    owners: Mapping[str, str],
    index: CheckpointIndex,
    *,
    selection: Selection | None,
    renamed: Callable[[str], str] | None,
    rank: int,
    world_size: int,
) -> list[StatesOfRanks]:
    """The values with a rule that a load by ``world_size`` ranks has to make.

    ``per_rank`` and ``owners`` are those of `dcp.planners.flatten.Flat`. Raises PlanError where the
    checkpoint has the state of some of the ranks only.
    """
    rules = {name: own for name, own in per_rank.items() if isinstance(own, Rescale)}
    first = {name: fqn for fqn, name in owners.items() if selection is None or selection.selects(fqn)}
    if selection is None:
        first = {name: f"{name}.{rank_key(rank)}" for name in rules} | first
    stored = {
        name: holder
        for name in rules.keys() & first
        if (holder := rank_holder(first[name] if renamed is None else renamed(first[name]))) is not None
    }
    numbers = _ranks_below(index, set(stored.values())) if stored else {}
    saved = index.provenance.get("world_size")
    found = []
    for name, holder in sorted(stored.items()):
        ranks = saved if isinstance(saved, int) else max(numbers[holder], default=-1) + 1
        if ranks == world_size or not numbers[holder]:
            continue
        if numbers[holder] != set(range(ranks)):
            raise PlanError(
                f"{name!r} cannot be rescaled: {ranks} ranks saved the checkpoint, and it has the state of "
                f"ranks {sorted(numbers[holder])} only",
                fqn=name,
            )
        found.append(StatesOfRanks(name, rules[name], holder, ranks))
    return found


def _ranks_below(index: CheckpointIndex, holders: set[str]) -> dict[str, set[int]]:
    numbers: dict[str, set[int]] = {holder: set() for holder in holders}
    for name in chain(index.fqns, index.objects.fqns):
        holder = rank_holder(name) if ".rank-" in name else None
        if holder in numbers:
            numbers[holder].add(rank_number(name))
    return numbers
