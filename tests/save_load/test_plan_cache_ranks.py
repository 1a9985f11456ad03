"""Plans that are used again by ranks. Internal: a file looks the same with a plan of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dcp
from dcp.errors import ReplicaMismatchError, StorageError
from dcp.planners.rank_state import RankState
from dcp.planners.save.options import PlanOptions
from dcp.planners.save.plan_cache import PlanCache
from dcp.planners.save.planner import DefaultSavePlanner
from dcp.ranks.collectives import Ranks
from dcp.ranks.failures import RankFailedError
from dcp.saving import columns as columnar_save
from dcp.saving.columns import ColumnSaveEngine, cache_of
from dcp.saving.engine import SaveOrder
from dcp.saving.options import SaveOptions
from dcp.storage.stores import PosixStore
from dcp.storage.stores.base import Store
from dcp.storage.stores.faults import Fault, FaultInjectingStore
from dcp.storage.torch_storage.writer import FileSystemWriter
from tests.support.ranks import run_ranks

TENSORS = 300


def state(rank: int, world_size: int, step: int) -> dict[str, Any]:
    """What a trainer has at a step: shards, replicas of some ranks and of all, ties, values, and its own."""
    rows, half = init_device_mesh("cpu", (world_size,)), init_device_mesh("cpu", (world_size // 2, 2))
    base = torch.arange(8.0).view(2, 4) + 100 * step
    tied = torch.nn.Parameter(torch.full((5,), float(step)))
    return {
        "sharded": DTensor.from_local(base + rank, rows, [Shard(0)], run_check=False),
        "hybrid": DTensor.from_local(base + rank % 2, half, [Replicate(), Shard(0)], run_check=False),
        "plain": {f"layer{number}": torch.full((3,), float(step + number)) for number in range(TENSORS)},
        "tied": [tied, tied],
        "step": step,
        "lr": 0.1 / step,
        "mine": dcp.PerRank({"seed": rank + step, "rng": torch.full((2,), rank * step)}),
    }


def loads(rank: int, world_size: int, folder: str, step: int) -> bool:
    """Whether a checkpoint holds the state of a step on every rank."""
    target, expected = state(rank, world_size, 99), state(rank, world_size, step)
    dcp.load(target, checkpoint_id=folder)
    assert torch.equal(target["sharded"].to_local(), expected["sharded"].to_local())
    assert torch.equal(target["hybrid"].to_local(), expected["hybrid"].to_local())
    assert all(torch.equal(target["plain"][key], expected["plain"][key]) for key in expected["plain"])
    assert torch.equal(target["tied"][1], expected["tied"][1])
    assert torch.equal(target["mine"].value["rng"], expected["mine"].value["rng"])
    values = target["step"], target["lr"], target["mine"].value["seed"]
    return values == (expected["step"], expected["lr"], expected["mine"].value["seed"])


class CountingRanks(Ranks):
    """Notes the steps and the bytes that this rank says in each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.said: list[tuple[str, int]] = []

    def _counted_local(self, step: str, local: Callable[[], bytes]) -> Callable[[], bytes]:
        def counted() -> bytes:
            message = local()
            self.said.append((step, len(message)))
            return message

        return counted

    def reduce_scatter(
        self, step: str, local: Callable[[], bytes], reduce: Callable[[list[bytes]], Sequence[bytes]]
    ) -> bytes:
        """See `Ranks`."""
        return super().reduce_scatter(step, self._counted_local(step, local), reduce)

    def reduce_broadcast(
        self, step: str, local: Callable[[], bytes], reduce: Callable[[list[bytes]], bytes]
    ) -> bytes:
        """See `Ranks`."""
        return super().reduce_broadcast(step, self._counted_local(step, local), reduce)


@dataclass
class Step:
    """One save: what this rank said in which step, whether the plan was reused, and its phases."""

    said: dict[str, int]
    reused: bool
    phases: set[str]
    loaded: bool


def save_steps(rank: int, world_size: int, folder: str) -> list[Step]:
    """Three saves with one cache."""
    cache, steps = PlanCache(), []
    for step in (1, 2, 3):
        place = f"{folder}/{step}"
        planner, ranks = DefaultSavePlanner(), CountingRanks(use_dist=True)
        planner.rank = rank

        def local(step: int = step, planner: DefaultSavePlanner = planner) -> RankState:
            planner.set_up_planner(state(rank, world_size, step))
            return planner.create_local_columns(digests=False)

        writer = FileSystemWriter(place, sync_files=False)
        engine = ColumnSaveEngine(writer, planner, PlanOptions.of(planner))
        save = engine.attempt(SaveOrder(engine, SaveOptions()), local, ranks, cache)
        save.run()
        loaded = loads(rank, world_size, place, step)
        steps.append(Step(dict(ranks.said), save.plan_reused, set(save.seconds), loaded))
    return steps


def test_only_digests_travel_for_an_unchanged_structure(tmp_path: Path) -> None:
    """Four ranks: the first save sends plans; from the second on each rank says a few dozen bytes before it
    writes, and every checkpoint holds its own step's values."""
    for steps in run_ranks(4, save_steps, str(tmp_path)):
        assert [step.reused for step in steps] == [False, True, True]
        assert all(step.loaded for step in steps)
        first, *later = steps
        assert list(first.said) == ["digests", "plan", "write"]
        assert first.said["plan"] > 2000
        for step in later:
            assert list(step.said) == ["digests", "write"]
            assert step.said["digests"] <= 64
            assert step.phases == set(later[0].phases) >= {"local_plan", "digests", "write"}


def save_reusing(values: dict[str, Any], writer: FileSystemWriter) -> bool:
    """Whether the save goes by the plan of an earlier one."""
    before = cache_of(writer).reused
    dcp.save(values, storage_writer=writer)
    return cache_of(writer).reused > before


def save_mismatch(rank: int, world_size: int, folder: str) -> list[Any]:
    """A replica that differs on one rank at the third of five saves."""
    writer = FileSystemWriter(f"{folder}/0", sync_files=False)
    seen: list[Any] = []
    for step in range(1, 6):
        values = state(rank, world_size, step)
        if step == 3 and rank == 1:
            values["plain"]["layer17"][1] += 1
        writer.reset(f"{folder}/{step}")
        try:
            seen.append(save_reusing(values, writer))
        except ReplicaMismatchError as error:
            assert isinstance(error, RankFailedError)
            seen.append(str(error))
            continue
        assert loads(rank, world_size, f"{folder}/{step}", step)
    return seen


def test_a_replica_that_differs_is_named_although_the_structure_is_known(tmp_path: Path) -> None:
    """The folds tell that something differs, the full plan which tensor on which ranks; the save after it is
    planned anew."""
    for seen in run_ranks(2, save_mismatch, str(tmp_path)):
        assert "plain.layer17" in seen[2]
        assert [*seen[:2], *seen[3:]] == [False, True, False, True]
    assert not (tmp_path / "3" / "manifest.msgpack").exists()


def faulty_store(path: Any, *, stores: list[FaultInjectingStore]) -> Store:
    """A store that the test can break."""
    store = FaultInjectingStore(PosixStore(path))
    stores.append(store)
    return store


def save_with_faults(rank: int, world_size: int, folder: str, failing: str) -> list[Any]:
    """The third save fails on rank 1: while it collects, or while it writes."""
    stores: list[FaultInjectingStore] = []
    writer = FileSystemWriter(folder, sync_files=False, open_store=partial(faulty_store, stores=stores))

    class Flaky:
        def state_dict(self) -> dict[str, Any]:
            if failing == "collect" and rank == 1 and number == 2:
                raise StorageError("the loader's position is lost")
            return {"position": number}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise AssertionError

    seen: list[Any] = []
    cache = cache_of(writer)
    for number in range(5):
        writer.reset(f"{folder}/{number}")
        if failing == "write" and rank == 1 and number == 2:
            assert writer.store is stores[-1]
            stores[-1].add(Fault("write", error=OSError("no space left"), onwards=True))
            stores[-1].add(Fault("create", error=OSError("no space left"), onwards=True))
        values = {**state(rank, world_size, number + 1), "loader": Flaky()}
        try:
            seen.append(save_reusing(values, writer))
        except RankFailedError as error:
            seen.append(error.ranks)
            assert cache._mine is None
            assert cache._joint is None
    assert loads(rank, world_size, f"{folder}/4", 5)
    return seen


@pytest.mark.parametrize("failing", ["collect", "write"])
def test_a_failure_drops_the_plan_on_all_ranks(failing: str, tmp_path: Path) -> None:
    """Whatever fails on one rank, the next save succeeds with a new plan, which the one after that reuses."""
    for seen in run_ranks(2, save_with_faults, str(tmp_path), failing):
        assert seen == [False, True, [1], False, True]


def save_after_one_rank_forgot(rank: int, world_size: int, folder: str) -> list[bool]:
    """One rank's cache is gone before the third save, the coordinator's before the fifth."""
    writer, seen = FileSystemWriter(folder, sync_files=False), []
    for number in range(6):
        if (number, rank) in ((2, 2), (4, 0)):
            cache_of(writer).drop()
        writer.reset(f"{folder}/{number}")
        values = state(rank, world_size, number + 1)
        seen.append(save_reusing(values, writer))
    assert loads(rank, world_size, f"{folder}/3", 4)
    return seen


def test_one_rank_without_the_plan_forces_a_full_one(tmp_path: Path) -> None:
    """Ranks never go by plans of different saves: one that forgot makes all plan."""
    for seen in run_ranks(4, save_after_one_rank_forgot, str(tmp_path)):
        assert seen == [False, True, False, True, False, True]


def save_by_planner(rank: int, world_size: int, folder: str, together: bool) -> list[Any]:
    """A planner with plan caching and no writer, then one-shot saves, and without collectives."""
    planner = DefaultSavePlanner(enable_plan_caching=True)
    kept = len(columnar_save._caches)
    for number in range(3):
        values = {"w": torch.full((4,), float(number)), "n": number}
        dcp.save(values, checkpoint_id=f"{folder}/{number}", planner=planner, use_collectives=together)
    added, reused = len(columnar_save._caches) - kept, cache_of(planner).reused
    target: dict[str, Any] = {"w": torch.zeros(4), "n": -1}
    dcp.load(target, checkpoint_id=f"{folder}/2")
    assert target["w"].tolist() == [2.0] * 4
    del planner
    one_shot = DefaultSavePlanner()
    for number in range(2):
        dcp.save({"w": torch.zeros(4)}, checkpoint_id=f"{folder}/once{number}", planner=one_shot)
    return [target["n"], added, reused, len(columnar_save._caches) - kept]


@pytest.mark.parametrize("together", [True, False])
def test_a_planner_can_own_the_plan_and_one_shot_saves_leave_none(together: bool, tmp_path: Path) -> None:
    """With and without collectives; what was remembered goes with its owner."""
    for seen in run_ranks(2, save_by_planner, str(tmp_path), together):
        assert seen == [2, 1, 2, 0]
