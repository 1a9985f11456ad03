"""The plan cache. Internal: dozens of simulated ranks: a hit writes what a fresh plan would."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp.planners.columns import SaveColumns, SaveObjects
from dcp.planners.digest import ReplicaCheck
from dcp.planners.rank_state import RankState
from dcp.planners.save.global_plan import GlobalSavePlan, plan_save
from dcp.planners.save.plan_cache import PlanCache
from dcp.storage.engine.write_tables import WriteColumns
from dcp.storage.errors import ReplicaMismatchError
from dcp.storage.formats.index import starts
from dcp.storage.tensors import LocalMemory
from tests.support.examples import examples
from tests.support.planning_simulation import Held, save_columns, tensor_shapes, worlds

Digests = npt.NDArray[np.uint64]
NO_OBJECTS: Digests = np.zeros(0, np.uint64)


@dataclass(frozen=True, eq=False)
class Part(RankState):
    """What one rank contributes, with the digests of its values."""

    object_digests: Digests = field(default_factory=lambda: NO_OBJECTS)

    @classmethod
    def of(cls, columns: SaveColumns, sources: Sequence[torch.Tensor], objects: Digests = NO_OBJECTS) -> Part:
        """All boxes may be replicas."""
        replicated = np.ones(len(columns.item_tensors), np.uint8)
        return cls(columns, LocalMemory.of(sources), [0] * len(objects), replicated, object_digests=objects)

    def digested_as(self, check: ReplicaCheck) -> SaveColumns:
        """The columns with the digests that a full plan compares."""
        objects = dataclasses.replace(self.columns.objects, digests=self.object_digests)
        return dataclasses.replace(self.with_digests(check).columns, objects=objects)


def held_parts(world: Sequence[dict[str, Held]]) -> list[Part]:
    """The simulated tensors of each rank."""
    return [
        Part.of(save_columns(tensors), [torch.from_numpy(np.array(held.local)) for held in tensors.values()])
        for tensors in world
    ]


def plain_part(tensors: dict[str, torch.Tensor], objects: dict[str, int] | None = None) -> Part:
    """Plain int64 tensors, which every rank has in whole."""
    objects = objects or {}
    ndims = [tensor.ndim for tensor in tensors.values()]
    shapes = np.array([size for tensor in tensors.values() for size in tensor.shape], np.int64)
    count = len(tensors)
    columns = SaveColumns(
        fqns=tuple(tensors),
        dtype_codes=np.full(count, 9, np.uint8),
        requires_grad=np.zeros(count, np.uint8),
        shape_start=starts(ndims),
        shape_values=shapes,
        item_tensors=np.arange(count, dtype=np.int64),
        item_offsets=np.zeros_like(shapes),
        item_sizes=shapes,
        item_local_offsets=np.zeros_like(shapes),
        item_sources=np.arange(count, dtype=np.int64),
        item_sharded=np.zeros(count, np.uint8),
        item_digests=np.zeros(count, np.uint64),
        item_ties=np.full(count, -1, np.int64),
        objects=SaveObjects(
            tuple(objects), np.zeros(len(objects), np.uint64), np.ones(len(objects), np.int64)
        ),
    )
    return Part.of(columns, list(tensors.values()), np.array(list(objects.values()), np.uint64))


@dataclass
class Saved:
    """How one save went: by the cache or not, who writes what, and the bytes each rank sent and got."""

    hit: bool
    writes: list[WriteColumns]
    plan: GlobalSavePlan
    sent_bytes: int


@dataclass
class Job:
    """The caches of all ranks through a series of saves; rank 0 coordinates."""

    caches: list[PlanCache]
    check: ReplicaCheck = "sampled"
    split_bytes: int | None = 64 << 20

    @classmethod
    def of(cls, ranks: int, **options: Any) -> Job:
        """Empty caches."""
        return cls([PlanCache() for _ in range(ranks)], **options)

    def save(self, parts: Sequence[Part], *, commit: bool = True) -> Saved:
        """One save as `dcp.saving.engine` does it; the caches are dropped where it raises."""
        try:
            saved = self._plan(parts)
        except BaseException:
            for cache in self.caches:
                cache.drop()
            raise
        for cache in self.caches:
            if commit:
                cache.commit()
            else:
                cache.drop()
        return saved

    def _plan(self, parts: Sequence[Part]) -> Saved:
        world = len(parts)
        offers = [
            cache.offer(part, part.object_digests, check=self.check, options=[self.split_bytes, rank, world])
            for rank, (cache, part) in enumerate(zip(self.caches, parts, strict=True))
        ]
        sent = sum(map(len, offers))
        if self.caches[0].hit(offers):
            return Saved(True, [cache.writes for cache in self.caches], self.caches[0].plan, sent)
        plan = self.fresh(parts)
        for cache, part, writes, extra in zip(
            self.caches, parts, plan.writes, self.caches[0].planned(plan), strict=True
        ):
            cache.receive(part, writes, extra, check=self.check)
        return Saved(False, plan.writes, plan, sent)

    def fresh(self, parts: Sequence[Part]) -> GlobalSavePlan:
        """The plan without a cache."""
        return plan_save(
            [part.digested_as(self.check) for part in parts],
            split_bytes=self.split_bytes,
            check_replicas=self.check != "off",
            with_sets=True,
        )


def assert_same_writes(saved: Saved, plan: GlobalSavePlan) -> None:
    """A cached plan says what a fresh one says."""
    for mine, theirs in zip(saved.writes, plan.writes, strict=True):
        for column in dataclasses.fields(WriteColumns):
            assert np.array_equal(getattr(mine, column.name), getattr(theirs, column.name)), column.name
    assert list(saved.plan.index.fqns) == list(plan.index.fqns)
    for name in ("shape_values", "chunk_start", "chunk_offsets", "chunk_sizes", "dtype_codes"):
        assert np.array_equal(getattr(saved.plan.index, name), getattr(plan.index, name)), name


@given(tensor_shapes.flatmap(worlds), st.integers(1, 200))
@examples(60)
def test_a_hit_writes_what_a_fresh_plan_would(world: list[dict[str, Held]], split_bytes: int) -> None:
    """Any layout: when values change equally everywhere, the second save is a hit with the very same plan."""
    job = Job.of(len(world), split_bytes=split_bytes)
    assert not job.save(held_parts(world)).hit
    parts = held_parts(world)
    for part in parts:
        for source in part.sources:
            source += 1
    second = job.save(parts)
    assert second.hit
    assert_same_writes(second, job.fresh(parts))
    assert all(cache.reused == 1 for cache in job.caches)


@given(tensor_shapes.flatmap(worlds), st.data())
@examples(60)
def test_a_hit_hides_no_mismatch_of_tensors(world: list[dict[str, Held]], data: st.DataObject) -> None:
    """After one element changed on one rank, there is a hit exactly where a full plan finds nothing wrong."""
    job, parts = Job.of(len(world)), held_parts(world)
    job.save(parts)
    places = [(r, s) for r, part in enumerate(parts) for s, t in enumerate(part.sources) if t.numel()]
    for rank, source in data.draw(st.lists(st.sampled_from(places), max_size=2)) if places else []:
        flat = parts[rank].sources[source].view(-1)
        flat[data.draw(st.integers(0, len(flat) - 1))] ^= data.draw(st.integers(1, 1 << 40))
    try:
        fresh = job.fresh(parts)
    except ReplicaMismatchError as wrong:
        with pytest.raises(ReplicaMismatchError) as told:
            job.save(parts)
        assert str(told.value) == str(wrong)
    else:
        saved = job.save(parts)
        assert saved.hit
        assert_same_writes(saved, fresh)


def rows(count: int = 3, size: int = 4) -> dict[str, torch.Tensor]:
    """Tensors by name."""
    return {f"t{number}": torch.arange(size, dtype=torch.int64) + number for number in range(count)}


def changed(**columns: Any) -> Callable[[Part], Part]:
    """Replaces columns of a part."""
    return lambda part: dataclasses.replace(part, columns=dataclasses.replace(part.columns, **columns))


STRUCTURES: dict[str, Callable[[Part], Part]] = {
    "shape": lambda part: plain_part(rows(size=5)),
    "a tensor more": lambda part: plain_part(rows(count=4)),
    "order of keys": lambda part: plain_part(dict(reversed(rows().items()))),
    "name": lambda part: plain_part({f"{name}!": tensor for name, tensor in rows().items()}),
    "dtype": changed(dtype_codes=np.array([9, 9, 10], np.uint8)),
    "requires_grad": changed(requires_grad=np.ones(3, np.uint8)),
    "sharded": changed(item_sharded=np.ones(3, np.uint8)),
    "ties": changed(item_ties=np.array([0, 0, -1], np.int64)),
    "stride order": changed(stride_orders={0: (0,)}),
    "paths": changed(planner_data={"t0": ("t0",), "t1": ("t1",), "t2": ("t2",)}),
    "an object": lambda part: plain_part(rows(), {"lr": 1}),
    "replicated": lambda part: dataclasses.replace(part, replicated=np.zeros(3, np.uint8)),
}


@pytest.mark.parametrize("change", list(STRUCTURES))
def test_a_changed_structure_is_planned_anew(change: str) -> None:
    """Where anything but values changed, all ranks get a new plan, and then hits again."""
    job, parts = Job.of(3), [plain_part(rows()) for _ in range(3)]
    job.save(parts)
    assert job.save(parts).hit
    other = [STRUCTURES[change](part) for part in parts]
    third = job.save(other)
    assert not third.hit
    assert_same_writes(third, job.fresh(other))
    assert job.save(other).hit
    assert not job.save(parts).hit


def test_options_and_ranks_are_part_of_the_structure() -> None:
    """Another split size or way to compare, another number of ranks, another rank of the same process."""
    parts = [plain_part(rows(size=40)) for _ in range(2)]
    job = Job.of(2)
    job.save(parts)
    job.split_bytes = 64
    split = job.save(parts)
    assert not split.hit
    assert_same_writes(split, job.fresh(parts))
    job.check = "full"
    assert not job.save(parts).hit
    assert job.save(parts).hit
    job.caches.append(PlanCache())
    assert not job.save([*parts, parts[0]]).hit
    assert job.save([*parts, parts[0]]).hit
    job.caches[1:] = reversed(job.caches[1:])
    assert not job.save([*parts, parts[0]]).hit


def test_a_rank_without_the_plan_forces_a_new_one() -> None:
    """Dropped on one rank, on the coordinator, or made by another save than the others': never half a hit."""
    parts = [plain_part(rows()) for _ in range(3)]
    job = Job.of(3)
    for loses in (2, 0):
        job.save(parts)
        assert job.save(parts).hit
        job.caches[loses].drop()
        assert not job.save(parts).hit
    elsewhere = Job.of(3)
    elsewhere.save(parts)
    job.caches[1] = elsewhere.caches[1]
    assert not job.save(parts).hit
    assert job.save(parts).hit


def test_a_plan_whose_save_failed_is_not_used() -> None:
    """Only a committed save leaves a plan behind, and a failed one takes the plan before with it."""
    parts = [plain_part(rows()) for _ in range(2)]
    job = Job.of(2)
    assert not job.save(parts, commit=False).hit
    assert not job.save(parts).hit
    assert job.save(parts, commit=False).hit
    assert not job.save(parts).hit
    assert job.save(parts).hit
