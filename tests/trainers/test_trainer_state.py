"""State of models, optimizers and generators in the trainers' plug-ins, and errors for missing packages."""

from __future__ import annotations

import importlib
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dcp
from dcp.errors import CheckpointError
from dcp.integrations.random_state import RandomState
from dcp.integrations.trainer_state import TrainedModel, TrainedOptimizers, refused_by_all
from tests.support.crashes import in_lab
from tests.support.harmless_values import same
from tests.support.ranks import run_ranks


class Net(nn.Module):
    """Model with a used and an unused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)


def trained(net: Net) -> torch.optim.Optimizer:
    """Return an optimizer after two steps, with weight decay in one of two groups."""
    groups: list[dict[str, Any]] = [
        {"params": [net.used.weight, net.unused.weight]},
        {"params": [net.used.bias], "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for _ in range(2):
        net.used(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_unused_parameters_have_no_state(tmp_path: Path) -> None:
    """An unused parameter has no state in the checkpoint or in a fresh optimizer after a load, which takes no
    optimizer step. The next steps are equal."""
    net, fresh = Net(), Net()
    optimizer, other = trained(net), torch.optim.AdamW(Net().parameters())
    dcp.save(
        {"model": TrainedModel(net), "optimizer": TrainedOptimizers(net, [optimizer])}, checkpoint_id=tmp_path
    )
    names = dcp.open_index(tmp_path).fqns
    assert not [name for name in names if "state.unused" in name]
    groups: list[dict[str, Any]] = [
        {"params": [fresh.used.weight, fresh.unused.weight]},
        {"params": [fresh.used.bias]},
    ]
    other = torch.optim.AdamW(groups, lr=0.5)
    steps = []
    other.register_step_pre_hook(lambda *_: steps.append(1))
    dcp.load(
        {"model": TrainedModel(fresh), "optimizer": TrainedOptimizers(fresh, [other])}, checkpoint_id=tmp_path
    )
    assert (len(other.state), steps, other.param_groups[1]["weight_decay"]) == (2, [], 0)
    for one, made in ((net, optimizer), (fresh, other)):
        one.used(torch.ones(2, 3)).square().sum().backward()
        made.step()
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in net.state_dict().items())


def batch_norm(rank: int, world_size: int, root: Path) -> Any:
    """Save and load a model with other running means on each rank, as in DDP between two forwards."""
    torch.manual_seed(0)
    norm: Any = nn.BatchNorm1d(2)
    net = nn.Sequential(nn.Linear(2, 2), norm)
    net(torch.full((4, 2), float(rank)) + torch.randn(4, 2))
    own = norm.running_mean.clone()
    dcp.save({"model": TrainedModel(net, saving=True)}, checkpoint_id=root)
    norm.running_mean.zero_()
    dcp.load({"model": TrainedModel(net)}, checkpoint_id=root)
    return own.tolist(), norm.running_mean.tolist()


def test_running_means_of_ranks_may_differ(tmp_path: Path) -> None:
    """Rank 0's running means are saved, which DDP continues with, and loaded on each rank."""
    (first, one), (second, other) = run_ranks(2, batch_norm, tmp_path)
    assert first != second
    assert first == one == other


def _failing_on_one_rank(rank: int, world_size: int, root: str) -> list[str]:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=f"{root}/whole")
    errors = []
    uses: list[Any] = [
        partial(dcp.save, checkpoint_id=f"{root}/new"),
        partial(dcp.load, checkpoint_id=f"{root}/whole"),
    ]
    for use in uses:
        try:
            with refused_by_all(use):
                if rank == 1:
                    raise ValueError("a state of its own")
                state = {"w": torch.ones(2)}
            use(state)
        except (CheckpointError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_a_failing_rank_fails_all_ranks(tmp_path: Path) -> None:
    """Saves and loads fail at once on all ranks, and the other ranks name the failed rank."""
    others, own = run_ranks(2, _failing_on_one_rank, str(tmp_path))
    assert own == ["ValueError: a state of its own"] * 2
    assert [("a state of its own" in error, "rank 1" in error) for error in others] == [(True, True)] * 2
    assert not (tmp_path / "new").exists()


def _with_zero(rank: int, world_size: int, checkpoint: str) -> bool:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def stepped(gradient: float) -> ZeroRedundancyOptimizer:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=gradient)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
        return optimizer

    saved, other = (stepped(gradient).optim.state_dict() for gradient in (1.0, 2.0))
    dcp.save({"part": dcp.PerRank(saved)}, checkpoint_id=checkpoint)
    dcp.load(loaded := {"part": dcp.PerRank(other)}, checkpoint_id=checkpoint)
    return same(loaded["part"].value, saved)


def test_each_rank_has_its_part_of_a_zero_redundancy_optimizer(tmp_path: Path) -> None:
    """The state of each rank's local optimizer is saved and loaded as that rank's own."""
    assert run_ranks(2, _with_zero, str(tmp_path / "checkpoint")) == [True, True]


def draw() -> tuple[float, float, float]:
    """Return one number of each generator."""
    return random.random(), float(np.random.random()), float(torch.rand(()))


def test_all_generators_resume(tmp_path: Path) -> None:
    """After a load the generators of Python, numpy and torch continue as after the save."""
    dcp.save({"random": RandomState()}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    drawn = draw()
    dcp.load({"random": RandomState()}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert draw() == drawn


def save_and_draw(rank: int, world_size: int, checkpoint: str) -> tuple[float, float, float]:
    """Seed the generators by rank, save them, and draw."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(rank)
    dcp.save({"random": RandomState()}, checkpoint_id=checkpoint)
    return draw()


def load_and_draw(rank: int, world_size: int, checkpoint: str) -> tuple[float, float, float]:
    """Load the generators, and draw."""
    dcp.load({"random": RandomState()}, checkpoint_id=checkpoint)
    return draw()


def test_each_rank_loads_its_own_generators(tmp_path: Path) -> None:
    """Each of two ranks continues its generators; a single rank keeps its own generators."""
    checkpoint = str(tmp_path / "checkpoint")
    drawn = run_ranks(2, save_and_draw, checkpoint)
    assert drawn[0] != drawn[1]
    assert run_ranks(2, load_and_draw, checkpoint) == drawn

    before = RandomState().state_dict()
    expected = draw()
    RandomState().load_state_dict(before)
    report = dcp.load({"random": RandomState()}, checkpoint_id=checkpoint, no_dist=True)
    assert draw() == expected and report.rescaled == ["random.generators"]


@pytest.mark.parametrize(
    ("extra", "package", "module"),
    [
        ("transformers", "transformers", "huggingface"),
        ("accelerate", "accelerate", "accelerate"),
        ("lightning", "lightning", "lightning"),
        ("megatron", "megatron", "megatron"),
        ("torchtitan", "torchtitan", "torchtitan"),
        ("ray", "ray.train", "ray"),
        ("torchdata", "torchdata.stateful_dataloader", "torchdata"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(extra: str, package: str, module: str) -> None:
    """The import of a plug-in without its framework says what to install."""
    assert f"pip install 'dcphub[{extra}]'" in in_lab(_imported_without, package, module)


def _imported_without(package: str, module: str) -> str:
    for name in (package, package.partition(".")[0]):
        sys.modules[name] = None  # type: ignore[assignment]
    sys.modules.pop(f"dcp.integrations.{module}", None)
    try:
        importlib.import_module(f"dcp.integrations.{module}")
    except ModuleNotFoundError as error:
        return str(error)
    return ""
