"""Objects with `load_state_dict()`: errors, and states that are not taken, are reported on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn

import dcp
from dcp.errors import CheckpointError, PlanError
from tests.support.ranks import RankRaised, run_ranks


class _Picky:
    """A `Stateful` whose `load_state_dict` fails on some ranks."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        return {"value": torch.zeros(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            raise OSError("no place for the loader's cache")


def _one_fails(rank: int, world_size: int, path: str) -> None:
    dcp.save({"app": _Picky(False), "step": 3}, checkpoint_id=path)
    dcp.load({"app": _Picky(rank == 1), "step": 0}, checkpoint_id=path)


def test_an_error_in_load_state_dict_fails_all_ranks(tmp_path: Path) -> None:
    """An error in `load_state_dict` is raised on all ranks with cause, rank and name. In a single process the
    cause is chained."""
    for result in run_ranks(3, _one_fails, str(tmp_path), failures=True):
        assert isinstance(result, RankRaised)
        assert result.type_name == "RankFailedError"
        for words in ("rank 1", "'app'", "_Picky", "OSError", "no place for the loader's cache"):
            assert words in result.message
    with pytest.raises(CheckpointError, match="'app'") as caught:
        dcp.load({"app": _Picky(True)}, checkpoint_id=tmp_path)
    assert isinstance(caught.value.__cause__, OSError)


# -- tensors on the meta device ------------------------------------------------------------------------------


class _Holder:
    """A `Stateful` with a model on the meta device, loaded with or without ``assign``."""

    def __init__(self, *, assign: bool) -> None:
        self.net, self.assign = meta_linear(), assign

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"], assign=self.assign)


def meta_linear() -> nn.Linear:
    """Return a linear layer on the meta device."""
    with torch.device("meta"):
        return nn.Linear(2, 2)


@pytest.mark.filterwarnings("ignore:for .*. copying from a non-meta parameter")
@pytest.mark.parametrize("reader", [dcp.FileSystemReader, stock.FileSystemReader])
def test_a_module_on_the_meta_device_is_refused(tmp_path: Path, reader: Any) -> None:
    """A module on the meta device copies into its own tensors, so it would stay empty; nothing is read."""
    dcp.save({"model": nn.Linear(2, 2), "step": 1}, checkpoint_id=tmp_path)
    model = meta_linear()
    state: dict[str, Any] = {"model": model, "step": 0}
    with pytest.raises(PlanError, match="to_empty") as caught:
        dcp.load(state, storage_reader=reader(tmp_path))
    assert "'model.weight', 'model.bias'" in str(caught.value)
    assert state["step"] == 0
    dcp.load(state, storage_reader=reader(tmp_path), exclude="model")
    assert state["step"] == 1
    model.to_empty(device="cpu")
    dcp.load(state, storage_reader=reader(tmp_path))
    assert model.weight.device.type == "cpu"


def test_an_optimizer_of_a_meta_module_is_refused(tmp_path: Path) -> None:
    """An optimizer would move its state to the meta device of its parameters."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    torch.autograd.backward(net(torch.ones(1, 2)).sum())
    optimizer.step()
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    with pytest.raises(PlanError, match="'optim'"):
        dcp.load({"optim": torch.optim.AdamW(meta_linear().parameters())}, checkpoint_id=tmp_path)


@pytest.mark.filterwarnings("ignore:for .*. copying from a non-meta parameter")
def test_an_object_may_assign(tmp_path: Path) -> None:
    """An object that assigns gets real tensors, as a dict does; one that does not is an error."""
    net = nn.Linear(2, 2)
    dcp.save({"app": {"net": net.state_dict()}}, checkpoint_id=tmp_path)
    holder, state = _Holder(assign=True), {"app": {"net": meta_linear().state_dict()}}
    dcp.load({"app": holder}, checkpoint_id=tmp_path)
    dcp.load(state, checkpoint_id=tmp_path)
    assert torch.equal(holder.net.weight, net.weight)
    assert torch.equal(state["app"]["net"]["weight"], net.weight)
    with pytest.raises(PlanError, match="did not copy") as caught:
        dcp.load({"app": _Holder(assign=False)}, checkpoint_id=tmp_path)
    assert "'app.net.weight'" in str(caught.value)
