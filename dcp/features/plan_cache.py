"""Plan cache for repeated saves: the plan of the previous save is reused while no rank's part changes.

The cache belongs to the owner of repeated saves (a manager's session, a writer instance), with an instance on
each rank. A rank with an unchanged structure sends the number of its plan. If all ranks have the
coordinator's plan, the plan is reused without any transfer. Values are not part of the structure.

Replicas are compared without sending a digest for each: a full plan groups rows (boxes and objects) held by
the same ranks into sets. Each rank folds the digests of a set, in a common order, into 64 bits of BLAKE2b.
Different folds cause a full plan, which names the rows.

A plan is used only after its save is committed, and forgotten on any failure.
"""

from __future__ import annotations

import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any, ClassVar, Final

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata

from dcp.planners.columns import ITEM_COLUMNS, RankSets, SaveColumns
from dcp.planners.rank_state import RankState
from dcp.planners.save.global_plan import GlobalSavePlan
from dcp.planners.value_digests import NOT_COMPARABLE, ReplicaCheck, digest_tensors
from dcp.saving.save import ColumnSave, RankPlan, Save, SaveOutcome
from dcp.storage.engine.write import WriteColumns
from dcp.storage.errors import PlanError
from dcp.storage.formats.container_notes import encode_notes
from dcp.storage.geometry.strides import Int64
from dcp.storage.packing import pack, unpack

_FOLD_BYTES = 8

_ID_BYTES = 16
"""Bytes of a plan's random number; two plans of one structure may assign boxes differently."""

_STRUCTURE: Final = (
    *("dtype_codes", "requires_grad", "shape_start", "shape_values"),
    *(name for name in ITEM_COLUMNS if name != "item_digests"),
)
"""Columns of `SaveColumns` that decide a plan. Digests of values and sizes of objects are left out."""


def _are_alike(mine: SaveColumns, others: SaveColumns) -> bool:
    """Compare names, shapes, dtypes, boxes, ties, paths, kinds of keys, and their order."""
    return (
        all(np.array_equal(getattr(mine, name), getattr(others, name)) for name in _STRUCTURE)
        and tuple(mine.fqns) == tuple(others.fqns)
        and tuple(mine.objects.fqns) == tuple(others.objects.fqns)
        and mine.planner_data == others.planner_data
        and list(mine.planner_data or ()) == list(others.planner_data or ())
        and mine.stride_orders == others.stride_orders
        and encode_notes(mine.notes) == encode_notes(others.notes)
    )


@dataclass(frozen=True, eq=False)
class _Kept:
    """A plan: its number, input columns and packed facts, this rank's part, and the folded rows.

    The coordinator also has the plan of all ranks, and the sets of each rank.
    """

    plan_id: bytes
    columns: SaveColumns
    facts: bytes
    writes: WriteColumns
    sets: RankSets
    check: ReplicaCheck
    plan: GlobalSavePlan | None
    numbers: list[Int64]


class PlanCache:
    """Plan of a series of saves on one rank; see the module. Used by the saving thread."""

    def __init__(self) -> None:
        self.drop()

    def drop(self) -> None:
        """Forget everything: a save failed."""
        self._offered: tuple[SaveColumns, bytes] | None = None
        self._kept: _Kept | None = None
        self._next: _Kept | None = None
        self._planned: tuple[GlobalSavePlan | None, list[Int64]] = None, []

    # -- on every rank ---------------------------------------------------------------------------------------

    def offer(self, part: RankState, check: ReplicaCheck, options: Sequence[Any]) -> bytes:
        """Make this rank's message to the coordinator: the number of its plan and the fold of each set; empty
        without a plan.

        ``options`` is further plain data that decides this rank's part, including rank and world size.
        """
        values = part.digested_objects(check).digests
        comparable = (values != 0) & (values != NOT_COMPARABLE)
        facts = pack([check, *options, part.replicated, comparable.view(np.uint8)])
        self._offered, kept = (part.columns, facts), self._kept
        if kept is None or facts != kept.facts or not _are_alike(kept.columns, part.columns):
            self._kept = None
            return b""
        _, start, rows = kept.sets
        digests, is_item = np.zeros(len(rows), np.uint64), rows >= 0
        digests[is_item] = digest_tensors(part.views(rows[is_item]), kept.check)
        digests[~is_item] = values[-1 - rows[~is_item]]
        folds = [
            blake2b(digests[begin:end].tobytes(), digest_size=_FOLD_BYTES).digest()
            for begin, end in pairwise(start.tolist())
        ]
        return kept.plan_id + b"".join(folds)

    @property
    def writes(self) -> WriteColumns:
        """Return this rank's part of the cached plan, after a hit."""
        if self._kept is None:
            raise PlanError("the coordinator reuses a cached plan that this rank does not have")
        return self._kept.writes

    def receive(self, writes: WriteColumns, extra: bytes, *, check: ReplicaCheck) -> None:
        """Take a new plan: ``extra`` is this rank's result of `planned`. Used after `commit`."""
        # on the next save, another rank may be the coordinator
        (plan, numbers), self._planned = self._planned, (None, [])
        self._kept = self._next = None
        if extra and self._offered is not None:
            sets = RankSets(*unpack(extra[_ID_BYTES:]))
            self._next = _Kept(extra[:_ID_BYTES], *self._offered, writes, sets, check, plan, numbers)

    def commit(self) -> None:
        """Reuse the plan of the committed save for the next save."""
        if self._next is not None:
            self._kept, self._next = self._next, None

    # -- on the coordinator ----------------------------------------------------------------------------------

    def hit(self, offers: Sequence[bytes]) -> GlobalSavePlan | None:
        """Return the cached plan if all ranks have it and replicas agree: equal folds in each set."""
        kept = self._kept
        if kept is None or kept.plan is None or any(offer[:_ID_BYTES] != kept.plan_id for offer in offers):
            return None
        by_rank = [np.frombuffer(offer[_ID_BYTES:], np.uint64) for offer in offers]
        if [len(mine) for mine in by_rank] != [len(numbers) for numbers in kept.numbers]:
            raise PlanError("a rank's folded replicas differ from its plan")
        sets, folds = np.concatenate(kept.numbers), np.concatenate(by_rank)
        order = np.argsort(sets, kind="stable")
        sets, folds = sets[order], folds[order]
        return None if ((sets[1:] == sets[:-1]) & (folds[1:] != folds[:-1])).any() else kept.plan

    def planned(self, plan: GlobalSavePlan) -> list[bytes]:
        """Keep a new plan with its sets for `receive`; return the message to each rank."""
        self._planned = None, []
        if plan.sets is None:
            return [b""] * len(plan.writes)
        plan_id = uuid.uuid4().bytes
        self._planned = replace(plan, sets=None), [mine.numbers for mine in plan.sets]
        return [plan_id + pack(mine) for mine in plan.sets]


_caches: dict[int, tuple[weakref.ref[object], PlanCache]] = {}
"""Caches by identity: equal writers are distinct, and custom writers may not be hashable. Entries end with
their owners."""


def cache_of(owner: object) -> PlanCache:
    """Return the plan cache of a reused writer or planner, kept as long as its owner."""
    number = id(owner)
    if number not in _caches:
        _caches[number] = (weakref.ref(owner, lambda _: _caches.pop(number, None)), PlanCache())
    return _caches[number][1]


def remembering(save: Save, cache: PlanCache) -> Save:
    """Reuse the previous plan in ``cache`` for ``save``, on all ranks or none. Planners of other packages
    always plan."""
    if not isinstance(save, ColumnSave):
        return save
    given = {each.name: getattr(save, each.name) for each in fields(save) if each.init}
    return _RememberingSave(**given, cache=cache)


@dataclass(kw_only=True, eq=False)
class _RememberingSave(ColumnSave):
    cache: PlanCache

    manner: ClassVar = ("with a plan cache",)

    def _attempt(self, number: int) -> tuple[Metadata, SaveOutcome]:
        """Forget a plan without a commit."""
        try:
            done = super()._attempt(number)
        except BaseException:
            self.cache.drop()
            raise
        self.cache.commit()
        return done

    def plan(self) -> Callable[[], RankPlan]:
        """Compare first, on every rank; a rank without a plan reports this in the same step."""
        self.start()
        begun = time.perf_counter()
        save_id = self.steps.reduce_broadcast("prepare", self._offer, self._compare).decode("ascii")
        self.times["digests"] = time.perf_counter() - begun - self.times["local_plan"]
        if save_id:
            return lambda: RankPlan(save_id, self.cache.writes)
        planned: Callable[[], RankPlan] = self.steps.reduce_scatter(
            "plan", self.local_plan, self._plan_all, sent=self.parts, reply=self.plans
        )

        def received() -> RankPlan:
            plan = planned()
            self.cache.receive(plan.writes, plan.kept, check=self.check)
            return plan

        return received

    def _offer(self) -> bytes:
        begun, local = time.perf_counter(), self.local_state()
        facts = [*self.plan_options.values(), self.together, self.ranks.rank, self.ranks.world_size]
        offered = self.cache.offer(local, self.check, facts)
        self.times["local_plan"] = time.perf_counter() - begun
        return offered

    def _compare(self, offers: list[bytes]) -> bytes:
        """Return the id of the save if the cached plan fits, else None."""
        begun = time.perf_counter()
        self.planned = self.cache.hit(offers)
        if self.planned is None:
            return b""
        self.times["global_plan"] = time.perf_counter() - begun
        return self.storage.save_id.encode("ascii")

    def _plan_all(self, parts: list[SaveColumns]) -> list[RankPlan]:
        plans = self.global_plan(parts, with_sets=True)
        kept = [] if self.planned is None else self.cache.planned(self.planned)
        return [plan._replace(kept=mine) for plan, mine in zip(plans, kept, strict=True)]
