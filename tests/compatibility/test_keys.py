"""Dict keys other than strings, and empty containers: loaded as they were saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp
from dcp.state_dict_loader import _load_state_dict_from_keys
from tests.support.ranks import run_ranks

read_all = _load_state_dict_from_keys
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adam-amsgrad": lambda params: torch.optim.Adam(params, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, 0.1),
    "SGD-momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.5),
    "LBFGS": torch.optim.LBFGS,
    "NAdam": torch.optim.NAdam,
}


def shape(value: Any) -> Any:
    """Return a nested value with types and order of keys, and tensors as lists."""
    if isinstance(value, Mapping):
        return [(type(key).__name__, str(key), shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        return [shape(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def _mixed() -> dict[str, Any]:
    return {
        "first": {},
        "numbers": {7: torch.ones(1), 3: {"x": 1}, -1: 2},
        "any": {0: torch.ones(2), "s": 1, None: 2, True: 3, (1, "a"): 4, 0.5: 5, b"x": 6, 1 << 80: 7},
        "empty": {1: {}, 2: {"inner": {}, "after": 1}},
        "list": [{"a": torch.zeros(1)}, {0: 1, 1: []}],
        "last": 1,
    }


def _stepped(make: Callable[[Any], torch.optim.Optimizer]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = make(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 3)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_survives_conversion_to_torch(name: str, tmp_path: Path) -> None:
    """An optimizer state saved, converted, and loaded by torch has the right state per parameter."""
    model, optimizer = _stepped(OPTIMIZERS[name])
    dcp.save({"o": optimizer.state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True)
    dcp.convert(tmp_path / "c", tmp_path / "o.pt", to="torch")
    loaded = torch.load(tmp_path / "o.pt")["o"]
    assert shape(loaded["state"]) == shape(optimizer.state_dict()["state"])
    fresh = OPTIMIZERS[name](model.parameters())
    fresh.load_state_dict(loaded)
    assert list(fresh.state) == list(optimizer.state)
    for parameter, state in optimizer.state.items():
        assert shape(fresh.state[parameter]) == shape(state)
    assert shape(read_all("o.state", checkpoint_id=tmp_path / "c")["o"]["state"]) == shape(loaded["state"])


def test_all_key_types_and_empty_containers_are_kept(tmp_path: Path) -> None:
    """Read without a template, and converted to all formats and back, keys keep their types and order."""
    expected = shape(_mixed())
    dcp.save(_mixed(), checkpoint_id=tmp_path / "c", no_dist=True)
    assert shape(read_all(checkpoint_id=tmp_path / "c")) == expected
    assert shape(dcp.read(tmp_path / "c", no_dist=True)) == expected
    dcp.convert(tmp_path / "c", tmp_path / "t.pt", to="torch")
    assert shape(torch.load(tmp_path / "t.pt")) == expected
    dcp.convert(tmp_path / "t.pt", tmp_path / "c2", to="dcp")
    assert shape(read_all(checkpoint_id=tmp_path / "c2")) == expected
    dcp.convert(tmp_path / "c", tmp_path / "s", to="safetensors")
    dcp.convert(tmp_path / "s", tmp_path / "s.pt", to="torch")
    assert shape(torch.load(tmp_path / "s.pt")) == expected
    dcp.convert(tmp_path / "c", tmp_path / "part.pt", to="torch", only=["numbers", "empty"])
    assert shape(torch.load(tmp_path / "part.pt")) == [
        pair for pair in expected if pair[1] in ("numbers", "empty")
    ]


@pytest.mark.parametrize(
    "clash",
    [
        {0: torch.ones(1), "0": torch.zeros(1)},
        {"x": {0: {"a": 1}, "0": {"b": 2}}},
        {"x": {0: {}, "0": {}}},
        {"x": {True: {"a": 1}, "True": {"b": 2}}},
    ],
)
def test_keys_with_one_flat_name_are_refused(clash: dict[Any, Any], tmp_path: Path) -> None:
    """Two keys with the same flat name are refused: one would be lost, or both would become one dict."""
    with pytest.raises(dcp.errors.PlanError, match="duplicated flatten key"):
        dcp.save(clash, checkpoint_id=tmp_path / "c", no_dist=True)
    torch.save(clash, tmp_path / "c.pt")
    with pytest.raises(dcp.errors.CheckpointFormatError, match="flatten to the same name"):
        dcp.open_index(tmp_path / "c.pt")


def test_stock_torch_reads_all_key_types(tmp_path: Path) -> None:
    """Stock torch loads into a template with such keys, and without one as strings, as from its own saves."""
    _, optimizer = _stepped(OPTIMIZERS["AdamW"])
    state = {"o": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    stock.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    for name in ("dcp", "stock"):
        found: dict[str, Any] = {}
        stock.state_dict_loader._load_state_dict(
            found,
            storage_reader=stock.FileSystemReader(tmp_path / name),
            planner=stock.default_planner._EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]
            no_dist=True,
        )
        assert list(found["o"]["state"]) == ["0", "1", "2", "3"]
    assert list(read_all(checkpoint_id=tmp_path / "stock")["o"]["state"]) == ["0", "1", "2", "3"]
    target = {"o": _stepped(OPTIMIZERS["AdamW"])[1].state_dict()}
    dcp.load(target, checkpoint_id=tmp_path / "stock", no_dist=True)
    assert list(target["o"]["state"]) == [0, 1, 2, 3]


def keys_of_ranks(rank: int, world: int, root: str) -> dict[str, Any]:
    """Save different keys of one dict on each rank, and a key that only one rank has. Return the results."""
    shard = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (world,)), [Shard(0)])
    state = {
        "stage": {rank: {"w": torch.full((1,), float(rank))}, "shared": 1},
        "o": {"state": {0: shard}},
        "own": dcp.PerRank({rank: rank, str(rank + 5): {}}),
        "empty": {"a": {}} if rank else {"a": {1: 1}},
    }
    dcp.save(state, checkpoint_id=f"{root}/together")
    dcp.save(state, checkpoint_id=f"{root}/apart", use_collectives=False)
    target = {"own": dcp.PerRank({rank: -1})}
    dcp.load(target, checkpoint_id=f"{root}/together")
    try:
        dcp.save({"x": {(0 if rank else "0"): {str(rank): rank}}}, checkpoint_id=f"{root}/clash")
        clash = ""
    except dcp.errors.PlanError as error:
        clash = str(error)
    return {"clash": clash, "own": target["own"].value}


def test_different_keys_of_ranks_are_kept(tmp_path: Path) -> None:
    """All ranks' keys are kept; keys of different types with one name are an error on all ranks."""
    results = run_ranks(2, keys_of_ranks, str(tmp_path))
    for rank, result in enumerate(results):
        assert "the key '0' below 'x' is of type str on one rank and int on another" in result["clash"]
        assert result["own"] == {rank: rank}
    for name in ("together", "apart"):
        found = read_all(checkpoint_id=tmp_path / name)
        assert set(found["stage"]) == {0, 1, "shared"}
        assert list(found["o"]["state"]) == [0]
        assert sorted(list(own) for own in found["own"].values()) == [[0, "5"], [1, "6"]]
        assert found["empty"] == {"a": {1: 1}}


# -- loads without a state dict ------------------------------------------------------------------------------

PACKAGES: dict[str, Any] = {"dcp": dcp, "stock": stock}


def _a_state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)},
        "optimizer": {"state": [{"step": torch.tensor(3.0)}], "lr": 0.5},
        "step": 7,
    }


def _as_text(state: dict[str, Any]) -> list[str]:
    found = torch.distributed.checkpoint._nested_dict.flatten_state_dict(state)[0]
    return sorted(f"{name}={value}" for name, value in found.items())


@pytest.mark.parametrize("package", PACKAGES)
def test_a_load_with_keys_and_without(package: str, tmp_path: Path) -> None:
    """Without keys the whole checkpoint is loaded, with keys all entries at or below them, as in torch."""
    PACKAGES[package].save(_a_state(), checkpoint_id=tmp_path, no_dist=True)
    assert _as_text(_load_state_dict_from_keys(checkpoint_id=tmp_path)) == _as_text(_a_state())
    for keys in ("model", {"step", "optimizer"}, {"model.weight", "optimizer.lr"}, "step"):
        by_dcp = _load_state_dict_from_keys(keys, checkpoint_id=tmp_path)
        reader = stock.FileSystemReader(tmp_path)
        by_stock = stock.state_dict_loader._load_state_dict_from_keys(keys, storage_reader=reader)
        assert _as_text(by_dcp) == _as_text(by_stock)
        assert 0 < len(_as_text(by_dcp)) < len(_as_text(_a_state()))
