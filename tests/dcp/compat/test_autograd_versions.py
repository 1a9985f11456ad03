"""What a load fills behind torch's back is known to autograd, as if torch had copied it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp
from dcp.storage.errors import CorruptCheckpointError
from tests.support.ranks import run_ranks

CHANGED = "modified by an inplace operation"


class TakesObjects(dcp.DefaultLoadPlanner):
    """Overrides a step, and so gets torch's objects."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        """As ever."""
        super().commit_tensor(read_item, tensor)


def ours(state: dict[str, Any], path: Path) -> None:
    """The road of columns."""
    dcp.load(state, checkpoint_id=path)


def objects(state: dict[str, Any], path: Path) -> None:
    """The road of torch's plans."""
    dcp.load(state, checkpoint_id=path, planner=TakesObjects())


def by_stock(state: dict[str, Any], path: Path) -> None:
    """torch's function with our reader and torch's planner."""
    stock.load(state, storage_reader=dcp.FileSystemReader(path))


@pytest.mark.parametrize("load", [ours, objects, by_stock])
@pytest.mark.parametrize("strided", [False, True])
def test_a_load_between_forward_and_backward_is_noticed(tmp_path: Path, load: Any, strided: bool) -> None:
    """The gradient would be that of other values than the loss was of; torch refuses, as after its own
    load."""
    dcp.save({"w": torch.full((4, 3), 5.0)}, checkpoint_id=tmp_path)
    weight = torch.ones(3, 4).T if strided else torch.ones(4, 3)
    weight = torch.nn.Parameter(weight)
    loss = weight.square().sum()
    load({"w": weight.detach()}, tmp_path)
    assert weight[0, 0] == 5
    with pytest.raises(RuntimeError, match=CHANGED):
        torch.autograd.backward(loss)


def test_a_cast_and_a_module_are_noticed(tmp_path: Path) -> None:
    """Values that are converted on the way, and a `Stateful`, whose own copying changes nothing."""
    dcp.save({"m": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}}, checkpoint_id=tmp_path)
    model = torch.nn.Linear(2, 2, dtype=torch.float64)
    loss = model.weight.square().sum()
    dcp.load({"m": model}, checkpoint_id=tmp_path, dtype="cast")
    with pytest.raises(RuntimeError, match=CHANGED):
        torch.autograd.backward(loss)


def test_only_what_is_filled_is_noticed(tmp_path: Path) -> None:
    """What is left as it is can still be differentiated."""
    dcp.save({"a": torch.ones(3), "b": torch.ones(3)}, checkpoint_id=tmp_path)
    state = {name: torch.nn.Parameter(torch.full((3,), 5.0)) for name in "ab"}
    loss = state["b"].square().sum()
    dcp.load(dict(state), checkpoint_id=tmp_path, only="a")
    torch.autograd.backward(loss)
    assert state["a"].tolist() == [1.0] * 3
    assert state["b"].grad is not None and state["b"].grad.tolist() == [10.0] * 3


def test_a_load_that_fails_is_noticed(tmp_path: Path) -> None:
    """It may have filled a tensor before the damage was found."""
    dcp.save({"w": torch.ones(1 << 21)}, checkpoint_id=tmp_path)
    (data,) = tmp_path.glob("*.distcp")
    with data.open("r+b") as file:
        file.seek(-1000, 2)
        file.write(b"\xff" * 64)
        file.seek(data.stat().st_size // 2)
        file.write(b"\xff" * 64)
    weight = torch.nn.Parameter(torch.zeros(1 << 21))
    loss = weight.square().sum()
    with pytest.raises(CorruptCheckpointError):
        dcp.load({"w": weight}, checkpoint_id=tmp_path)
    with pytest.raises(RuntimeError, match=CHANGED):
        torch.autograd.backward(loss)


def test_inference_tensors_load(tmp_path: Path) -> None:
    """They have no version; beside others that have one."""
    dcp.save({"a": torch.ones(3), "b": torch.ones(3)}, checkpoint_id=tmp_path)
    with torch.inference_mode():
        state = {"a": torch.zeros(3), "b": torch.zeros(3)}
        dcp.load(state, checkpoint_id=tmp_path)
    mixed = {"a": state["a"], "b": torch.zeros(3)}
    dcp.load(mixed, checkpoint_id=tmp_path)
    assert state["a"].sum() == mixed["b"].sum() == 3
    assert mixed["b"]._version > 0


def _dtensors(rank: int, world_size: int, path: str) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))
    full = torch.full((4, 2), 5.0)
    dcp.save({"s": distribute_tensor(full, mesh, [Shard(0)])}, checkpoint_id=path)
    caught = []
    for placement in (Shard(0), Replicate()):
        for load in (ours, objects):
            weight = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [placement]))
            loss = (weight * weight).sum()
            load({"s": weight.detach()}, Path(path))
            try:
                torch.autograd.backward(loss)
            except RuntimeError as error:
                caught.append(str(error))
    return caught


def test_dtensors_are_noticed(tmp_path: Path) -> None:
    """Their local tensors are filled, which torch does not see at the DTensor: stock's load gives the wrong
    gradient here."""
    for caught in run_ranks(2, _dtensors, str(tmp_path)):
        assert [CHANGED in text for text in caught] == [True] * 4
