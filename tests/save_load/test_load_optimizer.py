"""Optimizers before their first step get the checkpoint's state, and nothing else about them changes."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcp
from dcp.errors import MissingKeyError, PlanError
from dcp.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from tests.support.ranks import run_ranks

AdamW = torch.optim.AdamW


def exactly(first: Any, second: Any) -> bool:
    """Return whether two states are equal in bits and types."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(exactly(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(exactly, first, second))
    return type(first) is type(second) and bool(first == second)


def model(seed: int = 0) -> nn.Sequential:
    """Return a model of two layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Train some steps."""
    for _ in range(steps):
        torch.autograd.backward(net(torch.linspace(0, 1, 6).view(2, 3)).square().sum())
        optimizer.step()
        optimizer.zero_grad()


def trained(cls: Any = AdamW, steps: int = 2, seed: int = 0, **options: Any) -> tuple[nn.Sequential, Any]:
    """Return a model, and its optimizer after some steps."""
    net = model(seed)
    optimizer = cls(net.parameters(), **copy.deepcopy(options))
    train(net, optimizer, steps)
    return net, optimizer


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (AdamW, {}),
    (AdamW, {"lr": torch.tensor(0.1), "fused": True}),
    (torch.optim.Adam, {"eps": 0.0}),
    (torch.optim.Adam, {"eps": 0.0, "weight_decay": 0.5, "amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9, "lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
]


@pytest.mark.parametrize("number", range(len(OPTIMIZERS)))
def test_a_new_optimizer_is_filled(tmp_path: Path, number: int) -> None:
    """State is as saved. Parameters, gradients, hooks and schedulers are unchanged, whatever a step would do:
    with ``eps=0`` it would make all parameters NaN."""
    cls, options = OPTIMIZERS[number]
    net, optimizer = trained(cls, 3, **options)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    dcp.save({"model": net, "optim": optimizer}, checkpoint_id=tmp_path)
    new, resumed = trained(cls, 0, seed=1, **options)
    before = {name: value.clone() for name, value in new.state_dict().items()}
    called: list[str] = []
    resumed.register_step_pre_hook(lambda *_: called.append("before"))
    resumed.register_step_post_hook(lambda *_: called.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(resumed, 1)
    counted = copy.deepcopy(scheduler.state_dict())
    dcp.load({"optim": resumed}, checkpoint_id=tmp_path)
    assert exactly(resumed.state_dict(), optimizer.state_dict())
    assert exactly(dict(new.state_dict()), before) and exactly(scheduler.state_dict(), counted)
    assert [parameter.grad for parameter in new.parameters()] == [None] * 4
    assert not called and not hasattr(resumed, "_opt_called")


@pytest.mark.parametrize("steps", [0, 1])
def test_settings_of_a_later_scheduler_are_kept(tmp_path: Path, steps: int) -> None:
    """``initial_lr`` is kept, without which a scheduler would begin at the last step's rate. This holds under
    another name, and for an optimizer with state."""
    net, optimizer = trained(steps=0, lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(3):
        train(net, optimizer, 1)
        scheduler.step()
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    for name in ("optim", "other"):
        _, resumed = trained(steps=steps, seed=1, lr=0.5)
        dcp.load({name: resumed}, checkpoint_id=tmp_path, rename={"^other": "optim"})
        assert resumed.param_groups[0]["initial_lr"] == 0.5
        assert torch.optim.lr_scheduler.StepLR(resumed, 1, last_epoch=3).base_lrs == [0.5]


class _Trainer:
    """A `Stateful` with optimizers in a list and a dict, whose states are parts of its state."""

    def __init__(self, seed: int, steps: int) -> None:
        (_, first), (_, second) = trained(steps=steps, seed=seed), trained(steps=steps, seed=seed + 1)
        self.inner = SimpleNamespace(optimizers={"first": first})
        self.others = [second]

    def state_dict(self) -> dict[str, Any]:
        others = [optimizer.state_dict() for optimizer in self.others]
        return {"first": self.inner.optimizers["first"].state_dict(), "others": others, "epoch": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.optimizers["first"].load_state_dict(state["first"])
        self.others[0].load_state_dict(state["others"][0])


def test_optimizers_in_another_object_are_filled(tmp_path: Path) -> None:
    """Optimizers without state inside another object are filled too."""
    saved, resumed = _Trainer(0, 2), _Trainer(5, 0)
    dcp.save({"trainer": saved}, checkpoint_id=tmp_path)
    dcp.load({"trainer": resumed}, checkpoint_id=tmp_path)
    assert exactly(resumed.state_dict(), saved.state_dict())


def half_trained(seed: int) -> torch.optim.Optimizer:
    """Return an optimizer that has used the first layer alone."""
    net, optimizer = trained(steps=0, seed=seed)
    torch.autograd.backward(net[0](torch.ones(1, 3)).sum())
    optimizer.step()
    done: torch.optim.Optimizer = optimizer
    return done


def test_only_parameters_with_saved_state_get_state(tmp_path: Path) -> None:
    """Only parameters with state in the checkpoint get state; a checkpoint before the first step has none."""
    half = half_trained(0)
    dcp.save({"optim": trained(steps=0)[1]}, checkpoint_id=tmp_path / "none")
    dcp.save({"optim": half}, checkpoint_id=tmp_path / "half")
    for name, count in (("none", 0), ("half", 2)):
        _, resumed = trained(steps=0, seed=1)
        dcp.load({"optim": resumed}, checkpoint_id=tmp_path / name)
        assert len(resumed.state) == count
    assert exactly(resumed.state_dict(), half.state_dict())


def test_unused_parameters_get_state(tmp_path: Path) -> None:
    """Parameters without state get it, and existing state is filled, only after a successful load."""
    _, optimizer = trained()
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    resumed, fresh = half_trained(1), trained(steps=0)[1]
    dcp.load({"optim": resumed}, checkpoint_id=tmp_path)
    assert exactly(resumed.state_dict(), optimizer.state_dict())
    with pytest.raises(MissingKeyError):
        dcp.load({"optim": fresh, "more": torch.zeros(1)}, checkpoint_id=tmp_path)
    assert len(fresh.state) == 0


def local_state(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return this rank's part of all state."""
    values = [value for own in optimizer.state_dict()["state"].values() for value in own.values()]
    return [value.to_local() if hasattr(value, "to_local") else value for value in values]


def save_and_load_sharded(rank: int, world_size: int, path: str) -> None:
    """Save with FSDP2, and load into a new model."""
    nets = [model(seed) for seed in range(2)]
    for net in nets:
        fully_shard(net, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer, resumed = (AdamW(net.parameters()) for net in nets)
    train(nets[0], optimizer, 2)
    dcp.save({"model": nets[0], "optim": optimizer}, checkpoint_id=path)
    dcp.load({"model": nets[1], "optim": resumed}, checkpoint_id=path)
    assert exactly(local_state(resumed), local_state(optimizer)) and len(resumed.state) > 0


def test_sharded_optimizers(tmp_path: Path) -> None:
    """The state of DTensor parameters is loaded as DTensors."""
    run_ranks(2, save_and_load_sharded, str(tmp_path))


def grouped(layers: int, *rates: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return layers whose parameters are in one group, or in two."""
    net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    cut = layers if len(rates) == 1 else 1
    groups = [{"params": list(net[cut:].parameters())}, {"params": list(net[:cut].parameters())}]
    pairs = zip(groups[-len(rates) :], rates, strict=True)
    return net, AdamW([group | {"lr": rate} for group, rate in pairs])


@pytest.mark.parametrize(("layers", "rates"), [(3, (0.5, 0.01)), (1, (0.3,))])
def test_other_parameter_groups_load_by_name(tmp_path: Path, layers: int, rates: tuple[float, ...]) -> None:
    """By name, a checkpoint loads into other groups with more or fewer parameters, which keep their settings.
    By number it is an error."""
    by_name = StateDictOptions(flatten_optimizer_state_dict=True)
    net, optimizer = grouped(2, 0.1)
    torch.autograd.backward(net(torch.ones(1, 2)).sum())
    optimizer.step()
    state = {"optimizer": get_optimizer_state_dict(net, optimizer, options=by_name)}
    dcp.save(state, checkpoint_id=tmp_path / "named")
    dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path / "numbered")
    other, its = grouped(layers, *rates)
    with pytest.raises(PlanError):
        dcp.load({"optimizer": its}, checkpoint_id=tmp_path / "numbered")
    state = {"optimizer": get_optimizer_state_dict(other, its, options=by_name)}
    options: dict[str, Any] = {"exclude": "optimizer.param_groups", "unexpected": "ignore"}
    dcp.load(state, checkpoint_id=tmp_path / "named", allow_partial_load=True, **options)
    set_optimizer_state_dict(other, its, state["optimizer"], options=by_name)
    assert [group["lr"] for group in its.param_groups] == list(rates)
    parameters = dict(net.named_parameters())
    for name, parameter in other.named_parameters():
        if name in parameters:
            saved = optimizer.state[parameters[name]]["exp_avg"]
            assert torch.equal(its.state[parameter]["exp_avg"], saved)
