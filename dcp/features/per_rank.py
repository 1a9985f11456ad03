"""`PerRank` and `Rescale` values in a load: kept, loaded, or computed from the states of all ranks."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import chain
from typing import Any

import torch

from dcp.loading.feature import LoadFeature, LoadReport, ReadWhole
from dcp.planners.layout.local_tensor import claim_of, with_claim
from dcp.planners.per_rank import rank_holder, rank_key, rank_number
from dcp.planners.rescale import Rescale, rescaled_value
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import CheckpointIndex, Path
from dcp.storage.near_names import listed

logger = logging.getLogger(__name__)

_GLOB = re.compile(r"[*?[]")
_MAX_LISTED = 10


class PerRankValues(LoadFeature):
    """Values of a load that differ by rank.

    ``rescaled``: `Rescale` values saved by another number of ranks, with the stored prefix and this number.
    ``kept``: unchanged values. ``left``: names with stored values of absent ranks.
    """

    name = "per_rank"
    rescaled: Mapping[str, tuple[str, int]] = {}
    kept: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    _ready: Sequence[tuple[Rescale, Any]] = ()
    _copies: Sequence[tuple[str, torch.Tensor, torch.Tensor]] = ()

    def agreed(self) -> dict[str, Any]:
        """Return the rule for values without a specific rule."""
        return {"per_rank": self.options.per_rank}

    def takes_part(self) -> bool:
        """Forget the earlier plan; return True if there are such values."""
        self.rescaled, self.kept, self.left, self._ready, self._copies = {}, (), (), (), ()
        return bool(self.call.flat.per_rank)

    def entries(self, index: CheckpointIndex) -> None:
        """Leave out values made by rules, and with ``per_rank="keep"`` values of other ranks.

        Values are kept whole or not at all. Raises PlanError if a rule needs states of ranks that are not
        stored.
        """
        call, owners = self.call, self.call.flat.owners
        rescaled = self.rescaled = self._to_rescale(index)
        kept, stored = set[str](), set[str]()
        for fqn, name in owners.items() if self._may_be_kept else ():
            if name not in rescaled and fqn in call.values:
                kept.add(name)
                if call.stored(fqn) in index.position or call.stored(fqn) in index.objects.position:
                    stored.add(name)
        if index.provenance.get("world_size") in (None, call.world_size):
            kept -= stored
        self.kept = tuple(sorted(kept))
        rules = self._rules
        self.whole = [name for name in rescaled if rules[name].rule != "keep"]
        self.made = [fqn for fqn, name in owners.items() if name in self.whole]
        left = {fqn for fqn, name in owners.items() if name in kept or name in rescaled}
        if left:
            call.values = {fqn: value for fqn, value in call.values.items() if fqn not in left}

    def destinations(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return new memory for tensors that may stay unfilled.

        A load after a damaged checkpoint may keep them, or use another number of ranks.
        """
        copies = self._copies = list[tuple[str, torch.Tensor, torch.Tensor]]()
        apart, rules = dict(values), self._rules
        for fqn, name in self.call.flat.owners.items():
            value = values.get(fqn)
            if (self._may_be_kept or name in rules) and isinstance(value, torch.Tensor):
                # keeps elements outside of the boxes of a CheckpointableTensor, too
                apart[fqn] = with_claim(value.detach().clone(), claim_of(value))
                copies.append((fqn, value, apart[fqn]))
        self.later = [fqn for fqn, _, _ in copies]
        return apart

    def unexpected(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names without values of other ranks."""
        call, rescaled = self.call, {holder for holder, _ in self.rescaled.values()}
        stored = call.names or {}
        holders = ({rank_holder(stored.get(fqn, fqn)) for fqn in call.flat.owners} | rescaled) - {None}
        found = {name: rank_holder(name) for name in names}
        of_ranks = {name: holder for name, holder in found.items() if holder in holders}
        absent = {holder for name, holder in of_ranks.items() if rank_number(name) >= call.world_size}
        self.left = tuple(sorted(holder for holder in absent - rescaled if holder is not None))
        return tuple(name for name in names if name not in of_ranks)

    def loaded(self, read_whole: ReadWhole) -> None:
        """Compute the rules' values. Raises CheckpointError if a rule fails."""
        if not self.whole:
            return
        wanted = {name: self.rescaled[name] for name in self.whole}
        state, paths = read_whole([_GLOB.sub(r"[\g<0>]", holder) for holder, _ in wanted.values()])
        ready, ranks = list[tuple[Rescale, Any]](), (self.call.rank, self.call.world_size)
        rules = self._rules
        for name, place in wanted.items():
            target = rules[name]
            ready.append((target, rescaled_value(name, target.rule, _states(*place, state, paths), *ranks)))
        self._ready = ready

    def put(self) -> None:
        """Store the rules' values, and copy separately loaded values."""
        ready, self._ready = self._ready, ()
        for target, value in ready:
            target.value = value
        copies, self._copies = self._copies, ()
        with torch.no_grad():
            for _, tensor, loaded in copies:
                tensor.copy_(loaded)

    def done(self, report: LoadReport, *, is_coordinator: bool) -> None:
        """Report kept and computed values, and warn of values that restart."""
        report.kept_per_rank, report.rescaled = list(self.kept), [*self.rescaled]
        saved_by = report.world_size
        kept, left = listed(self.kept, most=_MAX_LISTED), listed(self.left, most=_MAX_LISTED)
        rank, world_size = self.call.rank, self.call.world_size
        if saved_by in (None, world_size):
            if kept:
                logger.warning("the checkpoint has no %s of rank %d: the value is unchanged", kept, rank)
        elif is_coordinator and (kept or left):
            what = (
                f"{kept} of every rank is unchanged (for example, a data loader starts at its beginning)"
                if kept
                else f"each rank loads its own state of {left}; the state of the other ranks is not loaded"
            )
            logger.warning("saved by %s ranks, loaded by %d: %s", saved_by, world_size, what)

    @property
    def _may_be_kept(self) -> bool:
        return self.call.options.per_rank == "keep"

    @property
    def _rules(self) -> dict[str, Rescale]:
        return {name: own for name, own in self.call.flat.per_rank.items() if isinstance(own, Rescale)}

    def _to_rescale(self, index: CheckpointIndex) -> dict[str, tuple[str, int]]:
        call, rules = self.call, self._rules
        selection = call.selection
        first = {
            name: fqn for fqn, name in call.flat.owners.items() if selection is None or selection.selects(fqn)
        }
        if selection is None:
            first = {name: f"{name}.{rank_key(call.rank)}" for name in rules} | first
        stored = {
            name: holder
            for name in rules.keys() & first
            if (holder := rank_holder(call.stored(first[name]))) is not None
        }
        numbers = _ranks_below(index, set(stored.values())) if stored else {}
        saved = index.provenance.get("world_size")
        found = {}
        for name, holder in sorted(stored.items()):
            ranks = saved if isinstance(saved, int) else max(numbers[holder], default=-1) + 1
            if ranks == call.world_size or not numbers[holder]:
                continue
            if numbers[holder] != set(range(ranks)):
                raise PlanError(
                    f"{name!r} cannot be rescaled: {ranks} ranks saved the checkpoint, but it has only the "
                    f"state of ranks {sorted(numbers[holder])}",
                    fqn=name,
                )
            found[name] = holder, ranks
        return found


def _ranks_below(index: CheckpointIndex, holders: set[str]) -> dict[str, set[int]]:
    numbers: dict[str, set[int]] = {holder: set() for holder in holders}
    for name in chain(index.fqns, index.objects.fqns):
        holder = rank_holder(name) if ".rank-" in name else None
        if holder in numbers:
            numbers[holder].add(rank_number(name))
    return numbers


def _states(stored: str, ranks: int, state: Any, paths: Mapping[str, Path]) -> list[Any]:
    keys = [rank_key(number) for number in range(ranks)]
    below = next(path for name, path in paths.items() if name.startswith(f"{stored}.{keys[0]}"))
    depth = next(
        depth
        for depth, key in enumerate(below)
        if key == keys[0] and ".".join(map(str, below[:depth])) == stored
    )
    holder = reduce(lambda container, key: container[key], below[:depth], state)
    return [holder[key] for key in keys]
