"""The plan cache. Internal: dozens of simulated ranks: a plan that serves again is as a fresh one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp.errors import ReplicaMismatchError
from dcp.planners.columns import SaveColumns
from dcp.planners.digest import ReplicaCheck
from dcp.planners.layout.placements import LocalBox
from dcp.planners.rank_state import RankState
from dcp.planners.save.global_plan import GlobalSavePlan, plan_save
from dcp.planners.save.plan_cache import PlanCache
from dcp.storage.tensors import LocalMemory
from tests.support.examples import examples
from tests.support.planning_simulation import Held, save_columns, tensor_shapes, worlds


@dataclasses.dataclass(frozen=True, eq=False)
class Part(RankState):
    """What one rank contributes; ``columns`` have the digests of its values."""

    def digested_as(self, check: ReplicaCheck) -> SaveColumns:
        """The columns that a full plan compares."""
        return self.with_digests(check).columns


def held_part(tensors: dict[str, Held], objects: dict[str, int] | None = None) -> Part:
    """The simulated tensors of a rank, all of which may be replicas, and digests of values."""
    columns = save_columns(tensors, objects)
    sources = [torch.from_numpy(np.array(held.local)) for held in tensors.values()]
    replicated = np.ones(len(columns.item_tensors), np.uint8)
    return Part(columns, LocalMemory.of(sources), [0] * len(objects or {}), replicated)


class Job:
    """The caches of all ranks through a series of saves; rank 0 coordinates."""

    def __init__(self, ranks: int, split_bytes: int = 64 << 20) -> None:
        self.caches = [PlanCache() for _ in range(ranks)]
        self.check: ReplicaCheck = "sampled"
        self.split_bytes = split_bytes

    def is_reused(self, parts: Sequence[Part], *, commit: bool = True) -> bool:
        """One save as `dcp.saving` does it: whether the plan before served."""
        try:
            is_hit = self._plan(parts)
        except ReplicaMismatchError:
            commit = False
            raise
        finally:
            for cache in self.caches:
                cache.commit() if commit else cache.drop()
        return is_hit

    def _plan(self, parts: Sequence[Part]) -> bool:
        offers = [
            cache.offer(
                part,
                part.columns.objects.digests,
                check=self.check,
                options=[self.split_bytes, rank, len(parts)],
            )
            for rank, (cache, part) in enumerate(zip(self.caches, parts, strict=True))
        ]
        if is_hit := self.caches[0].hit(offers):
            assert all(len(offer) <= 16 + 8 * len(parts) for offer in offers), "more than digests travels"
            return is_hit
        plan = self.fresh(parts)
        extras = self.caches[0].planned(plan)
        for cache, part, writes, extra in zip(self.caches, parts, plan.writes, extras, strict=True):
            cache.receive(part, writes, extra, check=self.check)
        return is_hit

    def assert_is_fresh(self, parts: Sequence[Part]) -> None:
        """The plan that is kept says what a fresh one says."""
        fresh, kept = self.fresh(parts), self.caches[0].plan.index
        for cache, wanted in zip(self.caches, fresh.writes, strict=True):
            np.testing.assert_equal(dataclasses.asdict(cache.writes), dataclasses.asdict(wanted))
        for name in ("fqns", "shape_values", "chunk_start", "chunk_offsets", "chunk_sizes", "dtype_codes"):
            np.testing.assert_equal(getattr(kept, name), getattr(fresh.index, name))

    def fresh(self, parts: Sequence[Part]) -> GlobalSavePlan:
        """The plan without a cache."""
        columns = [part.digested_as(self.check) for part in parts]
        check = self.check != "off"
        return plan_save(columns, split_bytes=self.split_bytes, check_replicas=check, with_sets=True)


@given(tensor_shapes.flatmap(worlds), st.integers(1, 200))
@examples(60)
def test_a_hit_writes_what_a_fresh_plan_would(world: list[dict[str, Held]], split_bytes: int) -> None:
    """Any layout: when values change equally everywhere, the second save goes by the very same plan."""
    job, parts = Job(len(world), split_bytes), [held_part(tensors) for tensors in world]
    assert not job.is_reused(parts)
    for part in parts:
        for source in part.sources:
            source += 1
    assert job.is_reused(parts)
    job.assert_is_fresh(parts)


@given(tensor_shapes.flatmap(worlds), st.data())
@examples(60)
def test_a_hit_hides_no_mismatch_of_tensors(world: list[dict[str, Held]], data: st.DataObject) -> None:
    """After one element changed on one rank, the plan serves exactly where a full one finds nothing wrong."""
    job, parts = Job(len(world)), [held_part(tensors) for tensors in world]
    job.is_reused(parts)
    places = [(r, s) for r, part in enumerate(parts) for s, t in enumerate(part.sources) if t.numel()]
    for rank, source in data.draw(st.lists(st.sampled_from(places), max_size=2)) if places else []:
        flat = parts[rank].sources[source].view(-1)
        flat[data.draw(st.integers(0, len(flat) - 1))] ^= data.draw(st.integers(1, 1 << 40))
    try:
        job.fresh(parts)
    except ReplicaMismatchError as wrong:
        with pytest.raises(ReplicaMismatchError) as told:
            job.is_reused(parts)
        assert str(told.value) == str(wrong)
    else:
        assert job.is_reused(parts)
        job.assert_is_fresh(parts)


def rows(count: int = 3, size: int = 4, name: str = "t{}") -> dict[str, Held]:
    """Tensors by name, which every rank has in whole."""
    box = LocalBox((0,), (size,), (0,))
    return {name.format(n): Held((size,), np.arange(size, dtype=np.int64) + n, (box,)) for n in range(count)}


def changed(**columns: Any) -> Part:
    """The part with other columns."""
    part = held_part(rows())
    return dataclasses.replace(part, columns=dataclasses.replace(part.columns, **columns))


STRUCTURES: dict[str, Part] = {
    "shape": held_part(rows(size=5)),
    "a tensor more": held_part(rows(count=4)),
    "order of keys": held_part(dict(reversed(rows().items()))),
    "name": held_part(rows(name="t{}!")),
    "dtype": changed(dtype_codes=np.array([9, 9, 10], np.uint8)),
    "requires_grad": changed(requires_grad=np.ones(3, np.uint8)),
    "replicas": changed(item_sharded=np.zeros(3, np.uint8)),
    "ties": changed(item_ties=np.array([0, 0, -1], np.int64)),
    "stride order": changed(stride_orders={0: (0,)}),
    "paths": changed(planner_data={"t0": ("t0",), "t1": ("t1",), "t2": ("t2",)}),
    "an object": held_part(rows(), {"lr": 1}),
    "replicated": dataclasses.replace(held_part(rows()), replicated=np.zeros(3, np.uint8)),
}


@pytest.mark.parametrize("change", STRUCTURES)
def test_a_changed_structure_is_planned_anew(change: str) -> None:
    """Where anything but values changed, all ranks get a new plan, which then serves."""
    job, parts, other = Job(3), [held_part(rows())] * 3, [STRUCTURES[change]] * 3
    assert [job.is_reused(each) for each in (parts, parts, other, other)] == [0, 1, 0, 1]
    job.assert_is_fresh(other)
    assert not job.is_reused(parts)


def test_options_and_ranks_are_part_of_the_structure() -> None:
    """Another split size or way to compare, another number of ranks, another rank of the same process."""
    job, parts = Job(2), [held_part(rows(size=40))] * 2
    job.is_reused(parts)
    job.split_bytes = 64
    assert not job.is_reused(parts)
    job.check = "full"
    assert [job.is_reused(parts) for _ in range(2)] == [False, True]
    job.caches.append(PlanCache())
    parts *= 2
    assert [job.is_reused(parts[:3]) for _ in range(2)] == [False, True]
    job.caches[1:] = reversed(job.caches[1:])
    assert not job.is_reused(parts[:3])


def test_a_rank_without_the_plan_forces_a_new_one() -> None:
    """Dropped on one rank, on the coordinator, or made by another save than the others': never half a hit."""
    job, elsewhere, parts = Job(3), Job(3), [held_part(rows())] * 3
    for loses in (2, 0):
        assert [job.is_reused(parts) for _ in range(2)] == [loses == 0, True]
        job.caches[loses].drop()
        assert not job.is_reused(parts)
    elsewhere.is_reused(parts)
    job.caches[1] = elsewhere.caches[1]
    assert [job.is_reused(parts) for _ in range(2)] == [False, True]


def test_a_plan_whose_save_failed_is_not_used() -> None:
    """Only a committed save leaves a plan behind, and a failed one takes the plan before with it."""
    job, parts = Job(2), [held_part(rows())] * 2
    commits = (False, True, False, True, True)
    assert [job.is_reused(parts, commit=commit) for commit in commits] == [0, 0, 1, 0, 1]
