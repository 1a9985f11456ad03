"""Objects whose state is smaller when they are made than when they were saved."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp
from tests.save_load.code_paths import TakesObjects
from tests.support.ranks import run_ranks


class _Holder:
    """A `Stateful` that keeps any given state, and counts loads."""

    def __init__(self, state: Any) -> None:
        self.state = state
        self.loads = 0

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
        self.loads += 1


def tensor(*values: float) -> torch.Tensor:
    """Return a small tensor."""
    return torch.tensor(values, dtype=torch.float32)


FORMS: dict[str, tuple[Any, Any]] = {
    "empty dict": ({}, {"a": 1}),
    "empty dict, deeper": ({"seen": {}}, {"seen": {"a": {"b": [1, 2]}, "t": tensor(1)}}),
    "dict of tensors": ({"x": {"a": tensor(0)}}, {"x": {"a": tensor(1), "b": tensor(2, 3)}}),
    "counter": (Counter(), Counter({"a": 2, "b": 3})),
    "counter within": ({"counts": Counter({"a": 0})}, {"counts": Counter({"a": 2, "b": 3})}),
    "counter that has lost a key": ({"counts": Counter({"z": 1})}, {"counts": Counter({"a": 2})}),
    "defaultdict": ({"by": defaultdict(int)}, {"by": defaultdict(int, {"a": 2})}),
    "integer keys": ({"by": {1: 0}}, {"by": {1: 5, 2: 6}}),
    "empty dict in a dict": ({}, {"a": {}}),
    "order": ({"lru": OrderedDict(b=0)}, {"lru": OrderedDict(a=1, b=2)}),
    "list of values": ({"list": []}, {"list": [1, 2, 3]}),
    "list of tensors": ({"list": []}, {"list": [tensor(1), tensor(2)]}),
    "longer list": ({"list": [tensor(0)]}, {"list": [tensor(1), tensor(2)]}),
    "shorter list": ({"list": [tensor(0), tensor(0)]}, {"list": [tensor(1)]}),
    "emptied list": ({"list": [tensor(0), tensor(0)]}, {"list": []}),
    "list of dicts": ({"queue": []}, {"queue": [{"a": 1}, {"a": 2, "t": tensor(1)}]}),
    "none to tensor": ({"x": None}, {"x": tensor(1, 2)}),
    "none to value": ({"x": None}, {"x": 3}),
    "none to dict": ({"x": None}, {"x": {"a": 1, "t": tensor(1)}}),
    "tensor to none": ({"x": tensor(1)}, {"x": None}),
    "dict to none": ({"x": {"a": 1}}, {"x": None}),
    "empty tensor": ({"history": torch.zeros(0)}, {"history": tensor(1, 2, 3)}),
    "grown tensor": ({"history": tensor(0)}, {"history": tensor(1, 2, 3)}),
    "own of the rank": ({"own": dcp.PerRank({})}, {"own": dcp.PerRank({"a": 1})}),
    "all at once": (
        {"a": {}, "b": None, "c": [], "d": {"t": tensor(0)}},
        {"a": {"x": 1}, "b": tensor(1), "c": [tensor(2)], "d": {"t": tensor(3), "u": tensor(4)}},
    ),
}


def typed(value: Any) -> Any:
    """Return a value with its types, and lists for tensors."""
    if isinstance(value, torch.Tensor):
        return ("tensor", str(value.dtype), value.tolist())
    if isinstance(value, dcp.PerRank):
        return ("own", typed(value.value))
    if isinstance(value, dict):
        return [type(value).__name__, [(key, typed(entry)) for key, entry in value.items()]]
    return [typed(entry) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("code_path", ["columns", "objects", "stock"])
def test_an_object_gets_the_saved_state(tmp_path: Path, code_path: str) -> None:
    """Any initial state becomes the saved state, by each code path of a load, and for stock torch's
    checkpoints. New containers have the saved classes as far as the checkpoint records them."""
    planner = TakesObjects() if code_path == "objects" else None
    left_out = (
        {"own of the rank", "empty dict in a dict"} if code_path == "stock" else set()
    )  # stock torch does not save these
    forms = {name: form for name, form in FORMS.items() if name not in left_out}
    saved = {name: _Holder(copy.deepcopy(after)) for name, (_, after) in forms.items()}
    fresh = {name: _Holder(copy.deepcopy(before)) for name, (before, _) in forms.items()}
    before = {name: copy.deepcopy(holder.state) for name, holder in fresh.items()}
    (stock.save if code_path == "stock" else dcp.save)(saved, checkpoint_id=tmp_path)
    own = {name: holder.state for name, holder in fresh.items()}
    dcp.load(fresh, checkpoint_id=tmp_path, planner=planner)
    for name, (_, after) in forms.items():
        assert typed(fresh[name].state) == typed(after), name
        assert fresh[name].loads == 1
        if own[name] is not fresh[name].state:  # a container that grew is a copy
            assert set(own[name]) == set(before[name]), name


class _Extra(nn.Linear):
    extra: Any = None  # set after the first use

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_the_extra_state_of_a_module(tmp_path: Path) -> None:
    """The extra state of a module is loaded like any object's state."""
    modules = {name: _Extra(2, 2) for name in ("tensor", "dict", "list")}
    modules["tensor"].extra, modules["dict"].extra, modules["list"].extra = tensor(1), {"a": 1}, [tensor(2)]
    dcp.save(dict(modules), checkpoint_id=tmp_path)
    fresh = {name: _Extra(2, 2) for name in modules}
    dcp.load(dict(fresh), checkpoint_id=tmp_path)
    for name, module in modules.items():
        assert typed(fresh[name].extra) == typed(module.extra)
        assert torch.equal(fresh[name].weight, module.weight)


def _sharded(rank: int, world_size: int, path: str, code_path: str) -> list[Any]:
    """Save and load an object with sharded tensors, and with entries that are missing when it is made."""
    mesh = init_device_mesh("cpu", (world_size,))
    whole = torch.arange(24.0).reshape(4, 6)
    own = {"layer0": tensor(0)} if rank == 0 else {"layer1": tensor(1)}
    grown = {
        "weight": distribute_tensor(whole, mesh, [Shard(0)]),
        "seen": {"a": 1, "t": tensor(7)},
        "x": tensor(3),
    }
    save = stock.save if code_path == "stock" else dcp.save
    ranks = {} if code_path == "stock" else {"own": dcp.PerRank({"rank": rank})}
    save({"app": _Holder(grown | {"stage": own} | ranks)}, checkpoint_id=path)
    weight = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)])
    fresh = _Holder({"weight": weight, "seen": {}, "x": None, "stage": {key: tensor(9) for key in own}})
    fresh.state |= dict.fromkeys(ranks, dcp.PerRank({}))
    planner = TakesObjects() if code_path == "objects" else None
    dcp.load({"app": fresh}, checkpoint_id=path, planner=planner)
    dist.barrier()
    state = fresh.state
    assert state["weight"] is weight and isinstance(weight, DTensor)
    assert torch.equal(weight.full_tensor(), whole)
    assert torch.equal(weight.to_local(), whole.chunk(world_size, 1)[rank])
    assert typed(state.get("own", ranks.get("own"))) == typed(ranks.get("own"))
    return [typed(state["seen"]), typed(state["x"]), typed(state["stage"])]


@pytest.mark.parametrize("code_path", ["columns", "objects", "stock"])
def test_ranks_that_share_an_object(tmp_path: Path, code_path: str) -> None:
    """A rank's entries stay its own with their sharding; entries that no rank has are loaded whole."""
    for rank, (seen, x, stage) in enumerate(run_ranks(2, _sharded, str(tmp_path), code_path)):
        assert seen == typed({"a": 1, "t": tensor(7)}) and x == typed(tensor(3))
        assert stage == typed({f"layer{rank}": tensor(rank)})
