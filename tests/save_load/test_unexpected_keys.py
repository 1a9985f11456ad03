"""Unexpected keys: entries of the checkpoint below requested keys that no rank takes are an error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn

import dcp
from dcp.errors import MissingKeyError, PlanError, UnexpectedKeyError
from tests.save_load.code_paths import CODE_PATHS, load
from tests.support.ranks import RankRaised, run_ranks


def save(path: Path, **more: Any) -> None:
    """Save a model with an encoder, and other entries."""
    model = {"encoder": {"w": torch.ones(2), "b": torch.ones(2)}, "head": {"w": torch.ones(3), "n": 4}}
    dcp.save({"model": model, "optim": {"m": torch.ones(2)}, "step": 3} | more, checkpoint_id=path)


def encoder() -> dict[str, Any]:
    """Return a target for the encoder."""
    return {"model": {"encoder": {"w": torch.zeros(2), "b": torch.zeros(2)}}}


@pytest.mark.parametrize("code_path", CODE_PATHS)
def test_unexpected_keys_raise_with_remedies(tmp_path: Path, code_path: str) -> None:
    """Unexpected keys raise before any read, and each remedy in the message loads the rest."""
    save(tmp_path)
    state = encoder()
    with pytest.raises(UnexpectedKeyError) as caught:
        load(state, tmp_path, code_path)
    message = str(caught.value)
    assert "'model.head' (2 below it, such as 'model.head.w')" in message
    assert 'unexpected="ignore"' in message and "exclude=['model.head']" in message
    assert "'optim" not in message and "'step'" not in message
    assert sorted(caught.value.fqns) == ["model.head.n", "model.head.w"]
    assert isinstance(caught.value, PlanError)
    assert not state["model"]["encoder"]["w"].any()

    report = load(state, tmp_path, code_path, unexpected="ignore")
    assert sorted(report.unexpected) == ["model.head.n", "model.head.w", "optim.m", "step"]
    assert state["model"]["encoder"]["w"].all()
    for allowed in ({"exclude": ["model.head"]}, {"only": "model.encoder"}):
        state = encoder()
        load(state, tmp_path, code_path, **allowed)
        assert state["model"]["encoder"]["b"].all()


@pytest.mark.parametrize("code_path", CODE_PATHS)
def test_one_error_names_missing_and_unexpected_keys(tmp_path: Path, code_path: str) -> None:
    """One error names both, as in torch's load_state_dict, without permitted names and suggested ones."""
    save(tmp_path)
    state = encoder()
    state["model"]["new"] = torch.zeros(2)
    with pytest.raises(MissingKeyError, match=r"'model\.new'(.|\n)*Also, 2 stored .*'model\.head"):
        load(state, tmp_path, code_path)
    state["model"]["encoder"]["w"] = torch.zeros(5)
    with pytest.raises(PlanError, match=r"'model\.new'(.|\n)*Size mismatch(.|\n)*'model\.head"):
        load(state, tmp_path, code_path)
    for allowed in ({"unexpected": "ignore"}, {"exclude": "model.head"}):
        with pytest.raises(PlanError) as caught:
            load(state, tmp_path, code_path, **allowed)
        assert "Also" not in str(caught.value)
    renamed = {"model": encoder()["model"] | {"head": {"other": torch.zeros(9)}}}
    with pytest.raises(MissingKeyError, match=r"exclude=\['model\.head\.w', 'model\.head\.n'\]"):
        load(renamed, tmp_path, code_path)
    other = {"model": encoder()["model"] | {"head": {"w": 5, "n": 0}}}
    with pytest.raises(PlanError, match=r"'model\.head\.w' is a tensor in the checkpoint") as caught:
        load(other, tmp_path, code_path)
    assert "Also" not in str(caught.value)
    head = {"n": 0, "weight": torch.zeros(3)}
    with pytest.raises(MissingKeyError) as caught:
        load({"model": encoder()["model"] | {"head": head}}, tmp_path, code_path)
    assert "Did you mean 'model.head.w'" in str(caught.value) and "Also" not in str(caught.value)


def test_other_keys_at_the_top_level_are_expected(tmp_path: Path) -> None:
    """Other keys at the top level are not unexpected, also in a flat checkpoint with dotted keys."""
    save(tmp_path / "nested")
    state: dict[str, Any] = {"step": 0}
    dcp.load(state, checkpoint_id=tmp_path / "nested")
    assert state["step"] == 3
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    dcp.save(net.state_dict(), checkpoint_id=tmp_path / "flat")
    flat = {"0.weight": torch.zeros(2, 2)}
    dcp.load(flat, checkpoint_id=tmp_path / "flat")
    assert torch.equal(flat["0.weight"], net.state_dict()["0.weight"])


def test_the_state_dict_of_an_optimizer_without_state(tmp_path: Path) -> None:
    """An optimizer's state dict without state is an error with a remedy, because a dict cannot create the
    state. Empty dicts and short lists are errors too."""
    net = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    torch.autograd.backward(net(torch.ones(1, 2)).sum())
    optimizer.step()
    state = {"optim": optimizer.state_dict(), "found": {"a": 1}, "many": [torch.ones(1), torch.ones(1)]}
    dcp.save(state, checkpoint_id=tmp_path)
    new = torch.optim.AdamW(net.parameters())
    with pytest.raises(UnexpectedKeyError, match=r"'optim\.state'.*after its first step"):
        dcp.load({"optim": new.state_dict()}, checkpoint_id=tmp_path)
    with pytest.raises(UnexpectedKeyError, match="'found'"):
        dcp.load({"found": {}}, checkpoint_id=tmp_path)
    with pytest.raises(UnexpectedKeyError, match=r"'many\.1'"):
        dcp.load({"many": [torch.zeros(1)]}, checkpoint_id=tmp_path)


class _StepsInTrainModeOnly(torch.optim.SGD):
    """An optimizer that must be in train mode, as those of schedulefree."""

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    def step(self, closure: Any = None) -> Any:
        if not all(group.get("train_mode") for group in self.param_groups):
            raise RuntimeError("not in train mode")
        return super().step(closure)


@pytest.mark.parametrize("code_path", CODE_PATHS)
@pytest.mark.parametrize("kind", ["LBFGS", "train mode"])
def test_optimizers_that_need_a_closure_or_mode(tmp_path: Path, kind: str, code_path: str) -> None:
    """Optimizers that need a closure or a mode get their state, and train as the saved one."""
    makes: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "LBFGS": lambda net: torch.optim.LBFGS(net.parameters(), max_iter=3, history_size=4),
        "train mode": lambda net: _StepsInTrainModeOnly(net.parameters(), lr=0.1, momentum=0.9),
    }
    torch.manual_seed(0)
    nets = [nn.Linear(2, 2) for _ in range(2)]
    saved, fresh = [makes[kind](net) for net in nets]

    def train(net: nn.Module, optimizer: Any) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = net(torch.ones(1, 2)).square().sum()
            torch.autograd.backward(loss)
            return loss

        if kind == "train mode":
            optimizer.train()
        optimizer.step(closure)

    train(nets[0], saved)
    dcp.save({"net": nets[0], "optim": saved}, checkpoint_id=tmp_path)
    load({"net": nets[1], "optim": fresh}, tmp_path, code_path)
    assert repr(fresh.state_dict()) == repr(saved.state_dict())
    for net, optimizer in zip(nets, (saved, fresh), strict=True):
        train(net, optimizer)
    assert torch.equal(nets[0].weight, nets[1].weight)


def test_an_option_of_the_planner_or_the_call(tmp_path: Path) -> None:
    """A planner's option applies unless the call has one. torch's planners, and dcp's planners in torch's
    functions, ignore unexpected keys, as torch does."""
    save(tmp_path)
    lenient, states = dcp.DefaultLoadPlanner(unexpected="ignore"), [encoder() for _ in range(3)]
    dcp.load(states[0], checkpoint_id=tmp_path, planner=lenient)
    with pytest.raises(UnexpectedKeyError):
        dcp.load(encoder(), checkpoint_id=tmp_path, planner=lenient, unexpected="error")
    with pytest.raises(PlanError, match="unexpected must be"):
        dcp.load(encoder(), checkpoint_id=tmp_path, unexpected="drop")  # type: ignore[arg-type]
    with pytest.raises(MissingKeyError):  # the class if keys are missing, as for an additional prefix
        dcp.load({"model": {"module": {"w": torch.zeros(2)}}}, checkpoint_id=tmp_path)
    dcp.load(states[1], checkpoint_id=tmp_path, planner=stock.DefaultLoadPlanner())
    stock.load(states[2], storage_reader=dcp.FileSystemReader(tmp_path), planner=dcp.DefaultLoadPlanner())
    for state in states:
        assert all(tensor.tolist() == [1, 1] for tensor in state["model"]["encoder"].values())


def _stages(rank: int, world_size: int, path: str, code_path: str) -> list[str]:
    full = {f"layer{number}": {"w": torch.full((2,), float(number))} for number in range(world_size)}
    dcp.save({"model": full, "more": {"x": 1, "y": 2}}, checkpoint_id=path)
    own: dict[str, Any] = {"model": {f"layer{rank}": {"w": torch.zeros(2)}}}
    load(own, Path(path), code_path)  # each stage takes its layer
    assert own["model"][f"layer{rank}"]["w"].tolist() == [rank, rank]
    other: dict[str, Any] = {"more": {"x": 0}} if rank == 0 else {}
    other |= {"model": {"layer0": {"w": torch.zeros(2)}}}
    load(other, Path(path), code_path)
    return []


@pytest.mark.parametrize("code_path", CODE_PATHS)
def test_a_key_that_any_rank_takes_is_expected(tmp_path: Path, code_path: str) -> None:
    """A key is expected if any rank takes it, as in a pipeline; otherwise all ranks raise."""
    for result in run_ranks(2, _stages, str(tmp_path), code_path, failures=True):
        assert isinstance(result, RankRaised)
        assert result.type_name == "UnexpectedKeyError"
        assert "'model.layer1'" in result.message and "'more.y'" in result.message
        assert "layer0" not in result.message
