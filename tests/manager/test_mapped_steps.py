"""A manager with a weight map: steps are stored under the other model definition, and restores map back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp
from dcp.errors import PlanError
from tests.support.manager_runs import data_files, manager_of
from tests.support.ranks import run_ranks
from tests.support.versions import TOGETHER, seen_by_dcp, version_apart, version_state


def save_and_resume(rank: int, world_size: int, root: str, mode: str) -> None:
    """Save two steps, half of the model on each rank, damage the newest, and resume."""
    with manager_of(root, mode=mode, map=TOGETHER) as manager:
        for step in (1, 2):
            manager.save(step, version_apart(step, own=rank))
    if rank == 0:
        data_files(Path(root, "step-00000002"))[0].unlink()
    dist.barrier()
    with manager_of(root, mode=mode, map=TOGETHER) as manager:
        state = version_apart(0, own=rank)
        restored = manager.restore(state)
        assert restored is not None and restored.step == state["step"] == 1
        assert [step for step, _ in restored.skipped] == [2]
        wanted = version_apart(1, own=rank)["model"]["w"][str(rank)]
        assert torch.equal(state["model"]["w"][str(rank)], wanted)
        manager.save(3, state)


@pytest.mark.parametrize(
    "mode", ["thread", *(pytest.param(mode, marks=pytest.mark.exhaustive) for mode in ("sync", "process"))]
)
def test_steps_are_stored_through_the_map(tmp_path: Path, mode: str) -> None:
    """Each step equals a mapped save; a restore by the inverse map skips damage, and saves continue."""
    run_ranks(2, save_and_resume, str(tmp_path), mode)
    assert [seen_by_dcp(tmp_path / f"step-{step:08d}") for step in (1, 3)] == [1, 1]


ALL: dict[str, Any] = {"from": "{name:*}", "to": "{name:*}"}


@pytest.mark.parametrize(
    ("weights", "lost"),
    [
        ({"rules": TOGETHER["rules"]}, r"the sizes of .* are not known"),
        ({"rules": [{"from": "model.half"}, ALL]}, r"does not map back to .*model\.half"),
        (dcp.weight_map({"rules": [ALL]}, below="model"), r"does not map back to .*other"),
    ],
)
def test_a_save_refuses_a_map_without_inverse(tmp_path: Path, weights: Any, lost: str) -> None:
    """A save fails before any write if the map cannot be inverted: unknown sizes, a key dropped by a rule, or
    a key that the inverse would take for a weight."""
    with (
        manager_of(tmp_path, mode="sync", map=weights, on_failure="raise", retries=0) as manager,
        pytest.raises(PlanError, match=lost),
    ):
        manager.save(1, version_apart(1) | {"other": torch.ones(2)})
    assert not list(tmp_path.glob("step-*"))


def test_a_restore_with_another_map(tmp_path: Path) -> None:
    """`restore(map=)` reads steps of an older model; `map=None` reads a mapped step as it is stored."""
    with manager_of(tmp_path, mode="sync") as manager:
        manager.save(1, version_apart(1))
        state = version_state(0)
        assert manager.restore(state, map=TOGETHER) is not None
        assert torch.equal(state["model"]["w"], version_state(1)["model"]["w"])
        with pytest.raises(PlanError, match=r"Missing key .*'model\.w'"):
            manager.restore(state)
    with manager_of(tmp_path, mode="sync", map=TOGETHER) as manager:
        manager.save(2, version_apart(2))
        assert manager.restore(state, map=None) is not None
    assert torch.equal(state["model"]["w"], version_state(2)["model"]["w"])
