"""Saves that remember their plan: a wrapper around the planning of repeated saves."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final

from torch.distributed.checkpoint.metadata import Metadata

from dcp.planners.rank_state import SaveColumns
from dcp.planners.save.plan_cache import PlanCache
from dcp.ranks.collectives import Codec
from dcp.saving.save import ColumnSave, RankPlan, Save, SaveOutcome
from dcp.storage.packing import pack, unpack

_caches: dict[int, tuple[weakref.ref[object], PlanCache]] = {}
"""By identity: equal writers are not one, and a user's may not be hashable. Entries go with their owners."""


def cache_of(owner: object) -> PlanCache:
    """Return the plan cache of a writer or planner that is used again; it lives as long as its owner, and is
    no one else's."""
    number = id(owner)
    if number not in _caches:
        _caches[number] = (weakref.ref(owner, lambda _: _caches.pop(number, None)), PlanCache())
    return _caches[number][1]


def remembering(save: Save, cache: PlanCache) -> Save:
    """Let the plan of the save before, in ``cache``, serve ``save`` again; all ranks do so, or none. Planners
    of other packages plan anew."""
    if not isinstance(save, ColumnSave):
        return save
    given = {each.name: getattr(save, each.name) for each in fields(save) if each.init}
    return _RememberingSave(**given, cache=cache)


_PLANS: Final = Codec(
    lambda plan: pack((plan[0].encode(), plan[1])),
    lambda data: (RankPlan.decode(unpack(data)[0]), unpack(data)[1]),
)
"""A rank's part of a plan, and what its cache keeps of it."""


@dataclass(kw_only=True, eq=False)
class _RememberingSave(ColumnSave):
    cache: PlanCache

    manner: ClassVar = ("with a plan cache",)

    def _attempt(self, number: int) -> tuple[Metadata, SaveOutcome]:
        """Forget a plan that did not end in a commit."""
        try:
            done = super()._attempt(number)
        except BaseException:
            self.cache.drop()
            raise
        self.cache.commit()
        return done

    def plan(self) -> Callable[[], RankPlan]:
        """Compare first, on every rank: one that has no plan any more says so in that step."""
        self.start()
        begun = time.perf_counter()
        save_id = self.steps.reduce_broadcast("digests", self._offer, self._compare).decode("ascii")
        self.times["digests"] = time.perf_counter() - begun - self.times["local_plan"]
        if save_id:
            return lambda: RankPlan(save_id, self.cache.writes)
        planned = self.steps.reduce_scatter(
            "plan", self.local_plan, self._plan_all, sent=self.parts, reply=_PLANS
        )

        def received() -> RankPlan:
            plan, kept = planned()
            self.cache.receive(plan.writes, kept, check=self.check)
            own: RankPlan = plan
            return own

        return received

    def _offer(self) -> bytes:
        begun, local = time.perf_counter(), self.local_state()
        digests = local.digested_objects(self.check).digests
        facts = [*self.plan_options, self.together, self.ranks.rank, self.ranks.world_size]
        offered = self.cache.offer(local, digests, check=self.check, options=facts)
        self.times["local_plan"] = time.perf_counter() - begun
        return offered

    def _compare(self, offers: list[bytes]) -> bytes:
        """Return the id of the save if the plan in the cache serves, else nothing."""
        begun = time.perf_counter()
        self.planned = self.cache.hit(offers)
        if self.planned is None:
            return b""
        self.times["global_plan"] = time.perf_counter() - begun
        return self.storage.save_id.encode("ascii")

    def _plan_all(self, parts: list[SaveColumns]) -> list[tuple[RankPlan, bytes]]:
        plans = self.global_plan(parts, with_sets=True)
        kept: list[Any] = [] if self.planned is None else self.cache.planned(self.planned)
        return [*zip(plans, kept, strict=True)]
