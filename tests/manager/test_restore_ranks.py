"""`restore` on several ranks: the same step on all of them, within a bounded time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.manager_runs import Recorder, manager_of, truncate
from tests.support.ranks import RankRaised, run_ranks


def sharded(world_size: int, value: float) -> DTensor:
    """Return rows that are sharded over all ranks, each in the rank's own file."""
    mesh = init_device_mesh("cpu", (world_size,))
    return distribute_tensor(torch.full((6, 8), float(value)), mesh, [Shard(0)], src_data_rank=None)


def save_sharded(rank: int, world_size: int, root: str, steps: list[int]) -> None:
    """Save steps by all ranks."""
    with manager_of(root, mode="sync") as manager:
        for step in steps:
            manager.save(step, {"w": sharded(world_size, step), "n": step})


def resume_sharded(rank: int, world_size: int, root: str, more: bool = False) -> Any:
    """Restore, rank 1 with an absent key if ``more``: (step, values, n, skipped steps, their events)."""
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
    """Truncate the file that one rank reads."""
    (path,) = (root / f"step-{step:08d}").glob(f"__{rank}_0.*.distcp")
    truncate(path)


@pytest.mark.parametrize("world_size", [2, 3])
def test_damage_on_one_rank_turns_all_ranks_back(tmp_path: Path, world_size: int) -> None:
    """Damage in one rank's file makes all restore an older step, though others have filled their tensors."""
    assert run_ranks(world_size, resume_sharded, str(tmp_path)) == [None] * world_size
    run_ranks(world_size, save_sharded, str(tmp_path), [1, 2, 3])
    spoil(tmp_path, 3, world_size - 1)
    spoil(tmp_path, 2, 0)
    results = run_ranks(world_size, resume_sharded, str(tmp_path))
    skipped = results[0][3]
    assert [step for step, _ in skipped] == [3, 2]
    assert results == [(1, [1.0], 1, skipped, [3, 2])] * world_size


def test_all_ranks_raise_if_no_step_is_left(tmp_path: Path) -> None:
    """If no step is left, all ranks raise the same error."""
    run_ranks(2, save_sharded, str(tmp_path), [1, 2])
    for step in (1, 2):
        spoil(tmp_path, step, 1)
    results = run_ranks(2, resume_sharded, str(tmp_path), failures=True)
    for result in results:
        assert isinstance(result, RankRaised) and result.type_name == "CorruptCheckpointError"
        assert result.facts["steps"] == [2, 1]
    assert results[0].message == results[1].message


def test_damage_does_not_hide_a_wrong_model_on_another_rank(tmp_path: Path) -> None:
    """A state dict that does not fit on one rank is an error on all, found before damaged data is read."""
    run_ranks(2, save_sharded, str(tmp_path), [1, 2])
    spoil(tmp_path, 2, 0)
    for result in run_ranks(2, resume_sharded, str(tmp_path), True, failures=True):
        assert isinstance(result, RankRaised) and result.type_name == "MissingKeyError"
        assert "Missing key in checkpoint state_dict: 'absent'" in result.message
