"""dcp's stagers as torch's: classes, protocol and results, also in torch's own async_save."""

import collections
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint import staging as torch_staging

import dcp
from dcp.staging import BlockingAsyncStager, DefaultStager, StagingOptions

Stager = DefaultStager | BlockingAsyncStager

STAGERS: dict[str, Callable[[], Stager]] = {
    "default": lambda: DefaultStager(),
    "default, all off": lambda: DefaultStager(StagingOptions(False, False, False, False)),
    "blocking": lambda: BlockingAsyncStager(),
    "blocking, cached": lambda: BlockingAsyncStager(cache_staged_state_dict=True),
}


class ModuleState(collections.OrderedDict[str, torch.Tensor]):
    _metadata: dict[str, int]


class Pair(NamedTuple):
    left: torch.Tensor
    right: int


def staged_by(stager: Stager, state: dict[str, Any]) -> dict[str, Any]:
    """Stage a state, wait, and return the copy."""
    result = stager.stage(state)
    return result.result(240) if isinstance(result, Future) else result


@pytest.fixture(params=STAGERS)
def stager(request: pytest.FixtureRequest) -> Any:
    """Yield each kind of stager."""
    made = STAGERS[request.param]()
    yield made
    made.close()
    made.close()


def test_stagers_are_instances_of_torchs(stager: Stager) -> None:
    """The stagers are instances of torch's classes and protocol, with or without a GPU."""
    base = (
        torch_staging.DefaultStager
        if isinstance(stager, DefaultStager)
        else torch_staging.BlockingAsyncStager
    )
    assert isinstance(stager, base)
    assert isinstance(stager, torch_staging.AsyncStager)
    stager.synchronize_staging()
    assert isinstance(stager.should_synchronize_after_execute, bool)


def test_structure_is_kept_and_nothing_is_shared(stager: Stager) -> None:
    """Containers of all kinds keep their class and order, and tensors and mutable values are copied."""
    shared = torch.arange(4.0)
    ordered = ModuleState(b=torch.ones(2, dtype=torch.bool), a=torch.zeros(3))
    ordered._metadata = {"version": 2}
    state: dict[str, Any] = {
        "model": ordered,
        "list": [shared, {"tied": shared}, [1, 2]],
        "tuple": (torch.tensor(5), "x"),
        "pair": Pair(torch.ones(1), 2),
        "own": dcp.PerRank({"position": torch.tensor(9)}),
        "numbers": {0: {"step": torch.tensor(1.0)}, "set": {1, 2}},
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "sparse": torch.eye(2).to_sparse(),
        "step": 3,
    }
    staged = staged_by(stager, state)
    state["numbers"]["set"].add(3)
    state["list"][2].append(3)
    shared.zero_()
    ordered["a"].fill_(1)
    assert list(staged) == list(state)
    assert type(staged["model"]) is ModuleState
    assert staged["model"]._metadata == {"version": 2}
    assert staged["model"]["a"].tolist() == [0, 0, 0]
    assert staged["list"][0].tolist() == [0, 1, 2, 3]
    assert staged["list"][0] is staged["list"][1]["tied"]
    assert staged["list"][2] == [1, 2]
    assert staged["tuple"][0].item() == 5
    assert isinstance(staged["pair"], Pair)
    assert staged["pair"].left.data_ptr() != state["pair"].left.data_ptr()
    assert staged["own"].value["position"].item() == 9
    assert staged["numbers"][0]["step"].item() == 1.0
    assert staged["numbers"]["set"] == {1, 2}
    assert not staged["parameter"].requires_grad
    assert staged["conjugate"].tolist() == [1 - 2j]
    assert staged["sparse"].to_dense().tolist() == torch.eye(2).tolist()
    assert staged["step"] == 3


def test_stock_async_save_works_with_the_stagers(stager: Stager, tmp_path: Path) -> None:
    """With torch's async_save each checkpoint has the state of its call, and stock torch loads it."""
    weight = torch.zeros(4, 8)
    for step in range(2):
        weight.fill_(step)
        state = {"weight": weight, "step": step, "list": [torch.zeros(3)]}
        options: Any = {"checkpoint_id": str(tmp_path / str(step)), "async_stager": stager, "no_dist": True}
        response: Any = stock.async_save(state, **options)
        if hasattr(response, "staging_completion"):
            response.staging_completion.result(240)
        weight.fill_(-1)
        getattr(response, "upload_completion", response).result(240)
    for step in range(2):
        loaded: dict[str, Any] = {"weight": torch.empty(4, 8), "step": -1}
        stock.load(loaded, checkpoint_id=str(tmp_path / str(step)), no_dist=True)
        assert loaded["step"] == step and bool((loaded["weight"] == step).all())
