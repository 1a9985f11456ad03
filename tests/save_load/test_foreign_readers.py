"""torch's readers of foreign formats under their names: on ranks, with values, and for their format only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp
from dcp import HuggingFaceStorageReader, HuggingFaceStorageWriter
from dcp.errors import CheckpointError, UnsupportedFormatError
from dcp.format_utils import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner
from tests.support.ranks import run_ranks


def _state() -> dict[str, Any]:
    weight = torch.arange(40, dtype=torch.float32).reshape(10, 4)
    return {"model": {"weight": weight, "bias": torch.arange(3)}, "epoch": 5, "name": "small"}


def _load_sharded(rank: int, world_size: int, file: str) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    whole = _state()["model"]["weight"]
    for module in (dcp, stock):
        weight = distribute_tensor(torch.zeros(10, 4), mesh, [Shard(0)])
        state = {"model": {"weight": weight, "bias": torch.zeros(3, dtype=torch.int64)}}
        module.load(
            state,
            checkpoint_id=file,
            storage_reader=BroadcastingTorchSaveReader(),
            planner=DynamicMetaLoadPlanner(),
        )
        assert torch.equal(weight.full_tensor(), whole)


def test_torchs_example_on_two_ranks(tmp_path: Path) -> None:
    """Reader and planner of torch's documentation give each rank its shard, by dcp and by stock torch. Values
    load too, for which torch's planner raises."""
    torch.save(_state(), tmp_path / "model.pt")
    run_ranks(2, _load_sharded, str(tmp_path / "model.pt"))
    reader, state = BroadcastingTorchSaveReader(tmp_path / "model.pt", coordinator_rank=0), {"epoch": 0}
    dcp.load(state, storage_reader=reader, planner=DynamicMetaLoadPlanner())
    assert state["epoch"] == 5


def test_hugging_face_folders_of_stocks_writer(tmp_path: Path) -> None:
    """A folder by torch's safetensors writer is loaded by torch's reader, in dcp and in stock torch."""
    tensors = {"a": torch.randn(7, 5), "b": torch.randn(3).to(torch.bfloat16)}
    dcp.save(dict(tensors), storage_writer=HuggingFaceStorageWriter(path=str(tmp_path)), no_dist=True)
    for module in (dcp, stock):
        state = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        module.load(
            state, storage_reader=HuggingFaceStorageReader(str(tmp_path), thread_count=2), no_dist=True
        )
        assert all(torch.equal(state[name], tensors[name]) for name in tensors)


def test_other_formats_are_refused(tmp_path: Path) -> None:
    """A reader refuses another format by name, and a missing checkpoint_id."""
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    with pytest.raises(UnsupportedFormatError, match="safetensors"):
        BroadcastingTorchSaveReader(tmp_path / "a.safetensors").read_metadata()
    with pytest.raises(UnsupportedFormatError, match="torch_save"):
        HuggingFaceStorageReader(tmp_path / "a.pt").read_metadata()
    with pytest.raises(CheckpointError, match="needs a checkpoint_id"):
        BroadcastingTorchSaveReader().read_metadata()
