"""Ranks that resume, or wait for one another: the same step on all of them, within a bounded time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.manager_runs import Recorder, manager_of, state_at, steps_on_disk, truncate
from tests.support.ranks import RankRaised, run_ranks


def sharded(world_size: int, value: float) -> DTensor:
    """Rows over all ranks, each of them in the rank's own file."""
    mesh = init_device_mesh("cpu", (world_size,))
    return distribute_tensor(torch.full((6, 8), float(value)), mesh, [Shard(0)], src_data_rank=None)


def save_sharded(rank: int, world_size: int, root: str, steps: list[int]) -> None:
    """Steps of all ranks."""
    with manager_of(root, mode="sync") as manager:
        for step in steps:
            manager.save(step, {"w": sharded(world_size, step), "n": step})


def resume_sharded(rank: int, world_size: int, root: str, more: bool = False) -> Any:
    """(step, values, skipped steps, damage seen) of one rank; rank 1 may want ``more`` than there is."""
    seen = Recorder()
    state: dict[str, Any] = {"w": sharded(world_size, 0.0), "n": 0}
    if more and rank == 1:
        state["absent"] = torch.zeros(2)
    with manager_of(root, mode="sync", on_event=seen) as manager:
        restored = manager.restore(state)
        manager.wait()
    if restored is None:
        return None
    passed = seen.steps("skipped_damaged")
    return restored.step, state["w"].to_local().unique().tolist(), state["n"], restored.skipped, passed


def spoil(root: Path, step: int, rank: int) -> None:
    """Cut what one rank reads."""
    (path,) = (root / f"step-{step:08d}").glob(f"__{rank}_0.*.distcp")
    truncate(path)


@pytest.mark.parametrize("world_size", [2, 3])
def test_damage_that_one_rank_sees_turns_all_ranks_back(tmp_path: Path, world_size: int) -> None:
    """Each rank reads its own file; the other ranks have filled theirs by the time they hear of it."""
    assert run_ranks(world_size, resume_sharded, str(tmp_path)) == [None] * world_size
    run_ranks(world_size, save_sharded, str(tmp_path), [1, 2, 3])
    spoil(tmp_path, 3, world_size - 1)
    spoil(tmp_path, 2, 0)
    results = run_ranks(world_size, resume_sharded, str(tmp_path))
    skipped = results[0][3]
    assert [step for step, _ in skipped] == [3, 2]
    assert results == [(1, [1.0], 1, skipped, [3, 2])] * world_size


def test_all_ranks_hear_that_nothing_is_left(tmp_path: Path) -> None:
    """The same error on each of them."""
    run_ranks(2, save_sharded, str(tmp_path), [1, 2])
    for step in (1, 2):
        spoil(tmp_path, step, 1)
    results = run_ranks(2, resume_sharded, str(tmp_path), failures=True)
    for result in results:
        assert isinstance(result, RankRaised) and result.type_name == "CorruptCheckpointError"
        assert result.facts["steps"] == [2, 1]
    assert results[0].message == results[1].message


def test_damage_does_not_hide_a_wrong_model_on_another_rank(tmp_path: Path) -> None:
    """No older step is taken where a rank's state dict does not fit, which is known before data is read."""
    run_ranks(2, save_sharded, str(tmp_path), [1, 2])
    spoil(tmp_path, 2, 0)
    for result in run_ranks(2, resume_sharded, str(tmp_path), True, failures=True):
        assert isinstance(result, RankRaised) and result.type_name == "MissingKeyError"
        assert "Missing key in checkpoint state_dict: 'absent'" in result.message


def save_own(rank: int, world_size: int, root: str, step: int) -> None:
    """A step with values of each rank's own."""
    with manager_of(root, mode="sync", no_dist=world_size == 1) as manager:
        manager.save(step, state_at(step, rank))


def test_kept_values_are_not_those_of_the_damaged_step(tmp_path: Path) -> None:
    """The newest was saved by as many ranks and is damaged, the older one by others: what was there stays."""
    run_ranks(2, save_own, str(tmp_path), 1)
    save_own(0, 1, str(tmp_path), 2)
    spoil(tmp_path, 2, 0)
    state = state_at(-1, 5)
    with manager_of(tmp_path, mode="sync") as manager:
        restored = manager.restore(state, per_rank="keep")
    assert restored is not None
    assert (restored.step, restored.report.kept_per_rank, state["step"]) == (1, ["own"], 1)
    assert state["own"].value == {"rank": 5, "step": -1}


def _straggler(rank: int, world_size: int, root: str) -> list[int]:
    """Rank 0 begins its step 2 only when rank 1 has passed it: waiting there would be a deadlock."""
    token = torch.zeros(1)
    with manager_of(root, every_steps=1000) as manager:
        for step in (1, 2, 3):
            if rank == 0 and step == 2:
                dist.recv(token, src=1)
            manager.save(step, state_at(step, rank))
            if rank == 1 and step == 2:
                dist.send(token, dst=0)
    return manager.all_steps()


def test_no_rank_waits_for_the_stragglers_of_its_step(tmp_path: Path) -> None:
    """Where nothing is saved the ranks may be a step apart."""
    assert run_ranks(2, _straggler, str(tmp_path)) == [[], []]


def _agrees_seldom(rank: int, world_size: int, root: str) -> int:
    with manager_of(root, every_steps=1000, agree_every_steps=5) as manager:
        for step in range(1, 40):
            if rank == 1 and step == 3:
                manager.request_stop()
            manager.save(step, state_at(step, rank))
            if manager.stop_requested:
                return step
    return 0


def test_exchanging_less_often_agrees_later(tmp_path: Path) -> None:
    """What came at step 3 is asked at the next exchange, and known to all at the step after that."""
    first, second = run_ranks(2, _agrees_seldom, str(tmp_path))
    assert first == second and 6 <= first <= 12
    assert steps_on_disk(tmp_path) == [first]
