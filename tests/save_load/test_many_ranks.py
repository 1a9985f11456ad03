"""As many real ranks as a small machine bears: most have next to nothing, some nothing at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp
from tests.support.ranks import run_ranks


def whole(name: str) -> torch.Tensor:
    """What the ranks hold together."""
    return torch.arange({"rows": 100, "few": 3, "one": 1}[name] * 2, dtype=torch.float32).reshape(-1, 2)


def sharded(name: str, world_size: int) -> DTensor:
    """Over all ranks; the last of them may be left out."""
    return distribute_tensor(whole(name), init_device_mesh("cpu", (world_size,)), [Shard(0)])


def save_and_load(rank: int, world_size: int, folder: str) -> bool:
    """Synchronously and by a manager, with tensors that have fewer rows than there are ranks."""
    tensors = {name: sharded(name, world_size) for name in ("rows", "few", "one")}
    state: dict[str, Any] = {
        **tensors,
        "replica": torch.arange(1000.0),
        "own": dcp.PerRank(torch.tensor([rank])),
    }
    dcp.save(state, checkpoint_id=f"{folder}/sync")
    with dcp.CheckpointManager(f"{folder}/run", every_steps=1) as manager:
        manager.save(1, state)
    for place in ("sync", "run/step-00000001"):
        expected = {name: tensor.to_local().clone() for name, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.to_local().zero_()
        state["replica"].zero_()
        state["own"].value.fill_(-1)
        dcp.load(state, checkpoint_id=f"{folder}/{place}")
        assert all(torch.equal(tensors[name].to_local(), local) for name, local in expected.items())
        assert torch.equal(state["replica"], torch.arange(1000.0))
        assert state["own"].value.tolist() == [rank]
    return True


@pytest.mark.exhaustive
def test_32_ranks(tmp_path: Path) -> None:
    """32 ranks save and load each their own; one process loads the whole."""
    assert all(run_ranks(32, save_and_load, str(tmp_path), timeout_seconds=600))
    state: dict[str, Any] = {name: torch.zeros_like(whole(name)) for name in ("rows", "few", "one")}
    for place in ("sync", "run/step-00000001"):
        dcp.load(state, checkpoint_id=tmp_path / place, no_dist=True)
        assert all(torch.equal(tensor, whole(name)) for name, tensor in state.items())
