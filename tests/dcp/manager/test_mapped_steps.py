"""A manager with a weight map: its steps are another model definition's, and its restores lead back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp
from dcp.manager.saving.executor import Mode
from dcp.storage.errors import PlanError
from tests.save_load.test_load_mapped import FUSED, apart, assert_equal, fused
from tests.support.ranks import RankRaised, run_ranks

WEIGHTS = dcp.weight_map(FUSED, below="model", vocab=13, hidden=24)


def state_of(step: int) -> dict[str, Any]:
    """A model below a key, and beside it what no rule is about."""
    model = {name: tensor * step for name, tensor in apart().items()}
    return {
        "model": model,
        "optim": {"state": {"0.q.weight": {"exp_avg": model["0.q.weight"] + 1}}},
        "step": step,
    }


def sharded(state: dict[str, Any]) -> dict[str, Any]:
    """The same with tensors on all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in state["model"].items()}
    moment = distribute_tensor(state["optim"]["state"]["0.q.weight"]["exp_avg"], mesh, [Shard(0)])
    return {**state, "model": model, "optim": {"state": {"0.q.weight": {"exp_avg": moment}}}}


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors by name."""
    moment = state["optim"]["state"]["0.q.weight"]["exp_avg"]
    found = {**state["model"], "exp_avg": moment}
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in found.items()
    }


def save_and_resume(rank: int, world_size: int, root: str, mode: Mode) -> None:
    """Two steps, of which the newest is damaged before the run goes on."""
    with dcp.CheckpointManager(root, mode=mode, map=WEIGHTS) as manager:
        for step in (1, 2):
            manager.save(step, sharded(state_of(step)))
        manager.wait()
    if rank == 0:
        next(Path(root, "step-00000002").glob("*.distcp")).unlink()
    dist.barrier()
    with dcp.CheckpointManager(root, mode=mode, map=WEIGHTS) as manager:
        state = sharded(state_of(0))
        restored = manager.restore(state)
        assert restored is not None
        assert restored.step == state["step"] == 1
        assert [step for step, _ in restored.skipped] == [2]
        assert_equal(whole(state), whole(state_of(1)))
        manager.save(3, state)


@pytest.mark.parametrize(
    "mode", ["thread", *(pytest.param(mode, marks=pytest.mark.exhaustive) for mode in ("sync", "process"))]
)
def test_steps_are_under_the_other_definition(tmp_path: Path, mode: Mode) -> None:
    """Each is what a save through the map makes, the optimizer as it is beside; a restore through the inverse
    falls back as ever, and the run goes on."""
    run_ranks(2, save_and_resume, str(tmp_path), mode)
    for step in (1, 3):
        found = dcp.read(tmp_path / f"step-{step:08d}")
        assert_equal(found, fused())
        assert found["optim"].keys() == {"state"}
        assert torch.equal(found["optim"]["state"]["0.q.weight"]["exp_avg"], apart()["0.q.weight"] + 1)
    assert "model" not in found


def manage_by_other_maps(rank: int, world_size: int, root: str, first: int) -> None:
    """Each rank from the ``first`` with one of its own."""
    weights = {"rules": [{"from": "x", "to": f"x{rank}"}], "name": f"of rank {rank}"}
    dcp.CheckpointManager(root, map=weights if rank >= first else None)


@pytest.mark.exhaustive
def test_ranks_with_other_maps_are_told_at_once(tmp_path: Path) -> None:
    """When the manager is made, with both of their names."""
    for first in (0, 1):
        for result in run_ranks(2, manage_by_other_maps, str(tmp_path), first, failures=True):
            assert isinstance(result, RankRaised)
            assert "the option 'map' is not the same on all ranks" in result.message
            assert "of rank 1" in result.message
            assert ("of rank 0" in result.message) == (first == 0)


def test_a_map_that_does_not_lead_back_is_refused_by_the_save(tmp_path: Path) -> None:
    """What could not be restored is told before it is saved: sizes that the inverse would need, what a rule
    drops, and what the inverse takes for the model's."""
    state, loose = state_of(1), dcp.weight_map(FUSED, below="model")
    with (
        dcp.CheckpointManager(tmp_path, mode="sync", map=loose, on_failure="raise") as manager,
        pytest.raises(PlanError, match=r"the sizes of .* are not known"),
    ):
        manager.save(1, state)
    rules = [{"from": "norm.weight"}, {"from": "{name:*}", "to": "{name:*}"}]
    for rule, lost in ((rules, "norm.weight"), (rules[1:], "optim.state.0.q.weight.exp_avg")):
        weights = dcp.weight_map({"rules": rule}, below="model")
        with (
            dcp.CheckpointManager(tmp_path, mode="sync", map=weights, on_failure="raise") as manager,
            pytest.raises(PlanError, match=f"does not lead back to .*{lost}"),
        ):
            manager.save(1, state)
    assert not list(tmp_path.glob("step-*"))


def test_a_restore_through_a_map_of_its_own(tmp_path: Path) -> None:
    """Steps of a model from before it was changed; and those of a manager with a map as they are stored."""
    with dcp.CheckpointManager(tmp_path, mode="sync") as manager:
        manager.save(1, apart())
        state = {name: torch.zeros_like(tensor) for name, tensor in fused().items()}
        assert manager.restore(state, map=FUSED) is not None
        assert_equal(state, fused())
        with pytest.raises(PlanError, match=r"Missing key .*'0\.gate_up'"):
            manager.restore(state)
    with dcp.CheckpointManager(tmp_path, mode="sync", map=WEIGHTS) as manager:
        manager.save(2, state_of(1))
        state = {name: torch.zeros_like(tensor) for name, tensor in fused().items()}
        assert manager.restore(state, map=None) is not None
        assert_equal(state, fused())
