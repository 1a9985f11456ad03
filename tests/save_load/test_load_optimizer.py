"""Optimizers that have made no step yet get the state of the checkpoint, and nothing else of them changes."""

from __future__ import annotations

import copy
from pathlib import Path
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


def exactly(first: Any, second: Any) -> bool:
    """Whether two states are equal, bits and types."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(exactly(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(exactly, first, second))
    return type(first) is type(second) and bool(first == second)


def model(seed: int = 0) -> nn.Sequential:
    """Two layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Some steps."""
    for _ in range(steps):
        torch.autograd.backward(net(torch.linspace(0, 1, 6).view(2, 3)).square().sum())
        optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"lr": torch.tensor(0.1), "fused": True}),
    (torch.optim.Adam, {"eps": 0.0, "weight_decay": 0.5, "amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9, "lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
]


@pytest.mark.parametrize("number", range(len(OPTIMIZERS)))
def test_a_new_optimizer_is_filled(tmp_path: Path, number: int) -> None:
    """State as saved; parameters, gradients, rates and schedulers as they were, whatever the class does in a
    step: with ``eps=0`` it would make all parameters NaN."""
    cls, options = OPTIMIZERS[number]
    net = model()
    optimizer = cls(net.parameters(), **copy.deepcopy(options))
    train(net, optimizer, 3)
    dcp.save({"model": net, "optim": optimizer}, checkpoint_id=tmp_path)

    new = model(1)
    before = {name: value.clone() for name, value in new.state_dict().items()}
    resumed = cls(new.parameters(), **copy.deepcopy(options))
    called: list[str] = []
    resumed.register_step_pre_hook(lambda *_: called.append("before"))
    resumed.register_step_post_hook(lambda *_: called.append("after"))
    dcp.load({"optim": resumed}, checkpoint_id=tmp_path)
    assert exactly(resumed.state_dict(), optimizer.state_dict())
    assert exactly(dict(new.state_dict()), before)
    assert [parameter.grad for parameter in new.parameters()] == [None] * 4
    assert not called


def test_state_that_is_loaded_in_inference_mode_can_be_trained_with(tmp_path: Path) -> None:
    """It outlives the load, and tensors of inference mode may not be changed outside of it."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 3)
    dcp.save({"model": net, "optim": optimizer}, checkpoint_id=tmp_path)
    new = model(1)
    resumed = torch.optim.AdamW(new.parameters())
    with torch.inference_mode():
        dcp.load({"model": new, "optim": resumed}, checkpoint_id=tmp_path)
    assert exactly(resumed.state_dict(), optimizer.state_dict())
    train(net, optimizer, 1)
    train(new, resumed, 1)
    assert exactly(dict(new.state_dict()), dict(net.state_dict()))

    with torch.inference_mode():
        made_there = model()
        dcp.load({"optim": torch.optim.AdamW(made_there.parameters())}, checkpoint_id=tmp_path)


def test_schedulers_do_not_count_the_step(tmp_path: Path) -> None:
    """A scheduler notices steps of its optimizer; none was made."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(net, optimizer, 2)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    resumed = torch.optim.AdamW(net.parameters(), lr=0.5)
    other = torch.optim.lr_scheduler.StepLR(resumed, 1)
    counted = copy.deepcopy(other.state_dict())
    dcp.load({"optim": resumed}, checkpoint_id=tmp_path)
    assert other.state_dict() == counted
    assert not hasattr(resumed, "_opt_called")
    assert resumed.param_groups[0]["lr"] == 0.5
    assert scheduler.last_epoch == 0


@pytest.mark.parametrize("steps", [0, 1])
def test_settings_of_a_scheduler_that_is_made_later_are_kept(tmp_path: Path, steps: int) -> None:
    """``initial_lr``, without which it would begin at the rate of the last step; also by other names, and for
    an optimizer that has state."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(3):
        train(net, optimizer, 1)
        scheduler.step()
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    for name in ("optim", "other"):
        new = model(1)
        resumed = torch.optim.AdamW(new.parameters(), lr=0.5)
        train(new, resumed, steps)
        dcp.load({name: resumed}, checkpoint_id=tmp_path, rename={"^other": "optim"})
        assert resumed.param_groups[0]["initial_lr"] == 0.5
        later = torch.optim.lr_scheduler.StepLR(resumed, 1, last_epoch=3)
        assert later.base_lrs == [0.5]


def test_settings_in_a_plain_dict(tmp_path: Path) -> None:
    """They are put into the dict that was given, or, if the load fails, not."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    train(net, optimizer, 1)
    other = torch.optim.AdamW(net.parameters(), lr=0.5)
    train(net, other, 1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    dcp.save({"app": {"optim": optimizer.state_dict()}}, checkpoint_id=tmp_path)
    given = other.state_dict()
    with pytest.raises(MissingKeyError):
        dcp.load({"app": {"optim": given, "more": 1}}, checkpoint_id=tmp_path)
    assert "initial_lr" not in given["param_groups"][0]
    dcp.load({"app": {"optim": given}}, checkpoint_id=tmp_path)
    assert given["param_groups"][0]["initial_lr"] == 0.5


class Trainer:
    """Holds optimizers in a list and a dict, and gives their states nested in its own."""

    def __init__(self, seed: int) -> None:
        self.nets = [model(seed), model(seed + 1)]
        first, second = (torch.optim.AdamW(net.parameters()) for net in self.nets)
        self.inner = type("Inner", (), {})()
        self.inner.optimizers = {"first": first}
        self.others = [second]

    def train(self) -> None:
        """Two steps of each."""
        train(self.nets[0], self.inner.optimizers["first"], 2)
        train(self.nets[1], self.others[0], 2)

    def state_dict(self) -> dict[str, Any]:
        """All of it."""
        return {
            "first": self.inner.optimizers["first"].state_dict(),
            "others": [optimizer.state_dict() for optimizer in self.others],
            "epoch": 1,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give each its own."""
        self.inner.optimizers["first"].load_state_dict(state["first"])
        for optimizer, own in zip(self.others, state["others"], strict=True):
            optimizer.load_state_dict(own)


def test_optimizers_of_another_object_are_filled(tmp_path: Path) -> None:
    """A wrapper gives the states of its optimizers, which have none yet, as a part of its own."""
    saved, resumed = Trainer(0), Trainer(5)
    saved.train()
    dcp.save({"trainer": saved}, checkpoint_id=tmp_path)
    dcp.load({"trainer": resumed}, checkpoint_id=tmp_path)
    assert exactly(resumed.state_dict(), saved.state_dict())


def test_only_parameters_that_the_checkpoint_has_state_of_get_some(tmp_path: Path) -> None:
    """One that was never used has none; nor has an optimizer saved before its first step."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path / "none")
    torch.autograd.backward(net[0](torch.ones(1, 3)).sum())
    optimizer.step()
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path / "half")

    for name, count in (("none", 0), ("half", 2)):
        resumed = torch.optim.AdamW(model(1).parameters())
        dcp.load({"optim": resumed}, checkpoint_id=tmp_path / name)
        assert len(resumed.state) == count
    assert exactly(resumed.state_dict(), optimizer.state_dict())


def test_parameters_that_were_not_used_yet_get_state(tmp_path: Path) -> None:
    """State of the others is there, and is filled as ever."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 2)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    half = model(1)
    resumed = torch.optim.AdamW(half.parameters())
    torch.autograd.backward(half[0](torch.ones(1, 3)).sum())
    resumed.step()
    dcp.load({"optim": resumed}, checkpoint_id=tmp_path)
    assert exactly(resumed.state_dict(), optimizer.state_dict())


def test_a_load_that_fails_leaves_it_without_state(tmp_path: Path) -> None:
    """As all objects, it has its state once the load has succeeded."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    dcp.save({"optim": optimizer}, checkpoint_id=tmp_path)
    resumed = torch.optim.AdamW(net.parameters())
    with pytest.raises(MissingKeyError):
        dcp.load({"optim": resumed, "more": torch.zeros(1)}, checkpoint_id=tmp_path)
    assert len(resumed.state) == 0


def test_a_part_of_other_names(tmp_path: Path) -> None:
    """Names are chosen and renamed as for all entries."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    dcp.save({"old": optimizer, "step": 1}, checkpoint_id=tmp_path)
    resumed = torch.optim.AdamW(net.parameters())
    dcp.load({"optim": resumed}, checkpoint_id=tmp_path, rename={"^optim": "old"})
    assert exactly(resumed.state_dict(), optimizer.state_dict())
    other = torch.optim.AdamW(net.parameters(), lr=0.7)
    dcp.load({"old": other}, checkpoint_id=tmp_path, only="old.param_groups")
    assert len(other.state) == 0
    assert other.param_groups[0]["lr"] == 1e-3


def test_the_manager_restores_it(tmp_path: Path) -> None:
    """From an older step too, which has no state of it, after one that is damaged."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with dcp.CheckpointManager(tmp_path, every_steps=1) as manager:
        manager.save(1, {"model": net, "optim": optimizer})
        train(net, optimizer, 1)
        manager.save(2, {"model": net, "optim": optimizer})
    new = model(1)
    resumed = torch.optim.AdamW(new.parameters())
    with dcp.CheckpointManager(tmp_path, every_steps=1) as manager:
        restored = manager.restore({"model": new, "optim": resumed})
    assert restored is not None and restored.step == 2
    assert exactly(resumed.state_dict(), optimizer.state_dict())

    for data in tmp_path.glob("*2/*.distcp"):
        data.write_bytes(bytes(data.stat().st_size))
    again = torch.optim.AdamW(new.parameters())
    with dcp.CheckpointManager(tmp_path, every_steps=1) as manager:
        restored = manager.restore({"model": new, "optim": again})
    assert restored is not None and restored.step == 1
    assert len(again.state) == 0


def _fsdp(rank: int, world_size: int, path: str) -> bool:
    mesh = init_device_mesh("cpu", (world_size,))

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = model(seed)
        fully_shard(net, mesh=mesh)
        return net, torch.optim.AdamW(net.parameters())

    net, optimizer = build(0)
    train(net, optimizer, 2)
    dcp.save({"model": net, "optim": optimizer}, checkpoint_id=path)
    new, resumed = build(1)
    dcp.load({"model": new, "optim": resumed}, checkpoint_id=path)

    def local(state: dict[str, Any]) -> list[Any]:
        return [
            value.to_local() if hasattr(value, "to_local") else value
            for own in state["state"].values()
            for value in own.values()
        ]

    return (
        bool(exactly(local(resumed.state_dict()), local(optimizer.state_dict()))) and len(resumed.state) > 0
    )


def test_sharded_optimizers(tmp_path: Path) -> None:
    """State of DTensors is of DTensors."""
    assert run_ranks(2, _fsdp, str(tmp_path)) == [True, True]


def test_other_groups_of_parameters_by_name(tmp_path: Path) -> None:
    """As docs/recipes.md has it: groups cut anew, with a parameter more, or fewer; settings are those of the
    new groups. By numbers it is an error."""
    by_name = StateDictOptions(flatten_optimizer_state_dict=True)

    def made(layers: int, *rates: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
        cut = layers if len(rates) == 1 else 1
        groups = [{"params": list(net[cut:].parameters())}, {"params": list(net[:cut].parameters())}]
        pairs = zip(groups[-len(rates) :], rates, strict=True)
        return net, torch.optim.AdamW([group | {"lr": rate} for group, rate in pairs])

    net, optimizer = made(2, 0.1)
    torch.autograd.backward(net(torch.ones(1, 2)).sum())
    optimizer.step()
    state = {"optimizer": get_optimizer_state_dict(net, optimizer, options=by_name)}
    dcp.save(state, checkpoint_id=tmp_path / "named")
    dcp.save({"optimizer": optimizer}, checkpoint_id=tmp_path / "numbered")
    for layers, rates in ((3, (0.5, 0.01)), (1, (0.3,))):
        other, its = made(layers, *rates)
        with pytest.raises(PlanError):
            dcp.load({"optimizer": its}, checkpoint_id=tmp_path / "numbered")
        state = {"optimizer": get_optimizer_state_dict(other, its, options=by_name)}
        dcp.load(
            state,
            checkpoint_id=tmp_path / "named",
            exclude="optimizer.param_groups",
            allow_partial_load=True,
            unexpected="ignore",
        )
        set_optimizer_state_dict(other, its, state["optimizer"], options=by_name)
        assert [group["lr"] for group in its.param_groups] == list(rates)
        parameters = dict(net.named_parameters())
        for name, parameter in other.named_parameters():
            if name in parameters:
                saved = optimizer.state[parameters[name]]["exp_avg"]
                assert torch.equal(its.state[parameter]["exp_avg"], saved)


def test_the_error_of_other_groups_advises_names(tmp_path: Path) -> None:
    """Options that load nevertheless are not advised: by numbers, state may get to other parameters."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    one = torch.optim.AdamW(first.parameters())
    two = torch.optim.AdamW([{"params": list(net.parameters())} for net in (first, second)])
    for name, saved, loaded in (("less", one, two), ("more", two, one)):
        dcp.save({"optimizer": saved}, checkpoint_id=tmp_path / name)
        with pytest.raises(PlanError, match="flatten_optimizer_state_dict") as caught:
            dcp.load({"optimizer": loaded}, checkpoint_id=tmp_path / name)
        assert "allow_partial_load" not in str(caught.value)
        assert "unexpected=" not in str(caught.value)
    dcp.save({"optimizer": {}, "model": first}, checkpoint_id=tmp_path / "weights")
    with pytest.raises(MissingKeyError, match="allow_partial_load"):
        dcp.load({"optimizer": one}, checkpoint_id=tmp_path / "weights")
