"""Values that are no tensors, nested structures, Stateful objects and state that differs by rank."""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import dcp
from tests.support.parallel import Block
from tests.support.ranks import run_ranks
from tests.support.values import differences, fill, raw, scrub

SAVE = {"ours": dcp.save, "stock": stock.save}
LOAD = {"ours": dcp.load, "stock": stock.load}
ROUTES = (("ours", "ours"), ("ours", "stock"), ("stock", "ours"))


class Color(enum.Enum):
    """An enumeration of the user's program."""

    RED = 1


@dataclass
class Settings:
    """A class of the user's program."""

    width: int
    names: list[str]


class Point(NamedTuple):
    """A named tuple of the user's program."""

    x: int
    y: int


PLAIN: dict[str, Any] = {
    "none": None,
    "true": True,
    "int": -7,
    "long": 1 << 200,
    "float": 0.1,
    "infinity": float("-inf"),
    "str": "höhe\x00\ud800",
    "bytes": b"\x00\xff" * 10,
    "complex": 1 - 2j,
    "tuple": (1, (2.0, "x"), [None]),
    "list": [1, [2, [3]], ("a",)],
    "empty": ({}, [], (), "", b""),
    "betas": (0.9, 0.999),
    "long text": "x" * 200_000,
}
CLASSES = {
    "ordered": (OrderedDict([("b", 1), ("a", (2,))]),),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "set": {1, 2, 3},
    "bytearray": bytearray(b"abc"),
    "counts": (OrderedDict(x=1), torch.Size([])),
}
UNSAFE = {
    "dataclass": Settings(3, ["a"]),
    "enum": Color.RED,
    "named tuple": Point(1, 2),
    "objects": np.array([1, None]),
    "function": len,
}


def exactly(first: Any, second: Any) -> bool:
    """Equal values of equal types all the way down."""
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        return list(first) == list(second) and all(exactly(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(exactly, first, second))
    if isinstance(first, torch.Tensor):
        return raw(first) == raw(second)
    if isinstance(first, np.ndarray):
        return first.dtype == second.dtype and first.shape == second.shape and repr(first) == repr(second)
    return bool(first == second)


def blanked(value: Any) -> Any:
    """The same structure with its leaves replaced by something else."""
    if isinstance(value, dict):
        return {key: blanked(entry) for key, entry in value.items()}
    if isinstance(value, list) and any(isinstance(entry, dict | torch.Tensor) for entry in value):
        return [blanked(entry) for entry in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else "not loaded"


@pytest.mark.parametrize("values", [PLAIN, CLASSES], ids=["plain", "classes"])
def test_safe_values_keep_their_types(values: dict[str, Any], tmp_path: Path) -> None:
    """Plain data and what torch counts as safe come back equal and of the same types, with weights_only."""
    for saver, loader in ROUTES:
        folder = str(tmp_path / f"{saver}-{loader}")
        SAVE[saver]({"extra": dict(values)}, checkpoint_id=folder)
        target = {"extra": dict.fromkeys(values, "not loaded")}
        LOAD[loader](target, checkpoint_id=folder)
        wrong = [name for name, value in values.items() if not exactly(target["extra"][name], value)]
        assert wrong == [], (saver, loader)


def test_objects_of_the_users_classes_need_weights_only_false(tmp_path: Path) -> None:
    """They are refused by name by default, whoever saved them, and load when the caller trusts the file."""
    for saver, loader in ROUTES:
        for name, value in UNSAFE.items():
            if (saver, name) == ("ours", "named tuple"):
                continue  # which is saved as a tuple
            folder = str(tmp_path / f"{saver}-{loader}-{name}")
            SAVE[saver]({"x": value}, checkpoint_id=folder)
            target: dict[str, Any] = {"x": None}
            if loader == "stock":
                stock.load(target, checkpoint_id=folder)
            else:
                with pytest.raises(dcp.errors.UnsafeObjectError, match="'x'"):
                    dcp.load(target, checkpoint_id=folder)
                assert target == {"x": None}
                dcp.load(target, checkpoint_id=folder, weights_only=False)
            assert exactly(target["x"], value), (saver, loader, name)


def nested() -> dict[Any, Any]:
    """Tensors and values in dicts, lists and tuples, with int keys and keys that look like paths."""
    return {
        "state": {0: {"step": torch.tensor(3.0), "flag": True}, 1: {"step": torch.tensor(4.0), "flag": None}},
        "groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": []}],
        "mixed": [torch.arange(3), {"deep": [torch.ones(2), 5]}, "text"],
        "tuple": (1, 2),
        "empty": {},
        "nothing": [],
        "a.b": {"c": 1},
        "ordered": OrderedDict([("z", torch.zeros(1) + 8), ("y", 2)]),
        "defaults": defaultdict(int, n=3),
        -5: "negative key",
    }


def test_nested_structures_come_back_in_place(tmp_path: Path) -> None:
    """Dicts, lists, tuples and int keys of any nesting: the target gets the saved values under its keys."""
    for saver in SAVE:
        folder = str(tmp_path / saver)
        SAVE[saver](nested(), checkpoint_id=folder)
        target = blanked(nested())
        target["empty"] = {}
        dcp.load(target, checkpoint_id=folder)
        wanted = {**nested(), "ordered": dict(nested()["ordered"]), "defaults": dict(nested()["defaults"])}
        wrong = [key for key, value in wanted.items() if not exactly(target.get(key), value)]
        assert wrong == [], saver
        assert len(target) == len(wanted)


def test_stock_loads_our_nested_structures(tmp_path: Path) -> None:
    """Stock finds every tensor and value of ours where its own save would have put it."""
    state = nested()
    del state[-5]  # stock cannot sort keys of two types
    dcp.save(state, checkpoint_id=str(tmp_path / "ours"))
    stock.save(state, checkpoint_id=str(tmp_path / "stock"))
    found = []
    for saver in SAVE:
        target = blanked(state)
        stock.load(target, checkpoint_id=str(tmp_path / saver))
        found.append(target)
    assert exactly(found[0], found[1])
    assert found[0]["groups"] == nested()["groups"]


class Counter:
    """A Stateful object of the user's program."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.total = torch.full((2,), float(count))
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        """What to save."""
        return {"count": self.count, "total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was loaded."""
        self.count, self.total = state["count"], state["total"]
        self.loads += 1


def test_stateful_objects_are_saved_and_loaded_by_their_methods(tmp_path: Path) -> None:
    """Models, optimizers, schedulers and objects with state_dict are given as they are, both ways."""

    def training(seed: int, steps: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = Block()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        for _ in range(steps):
            model(torch.ones(2, 10)).sum().backward()
            optimizer.step()
            scheduler.step()
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "counter": Counter(seed)}

    for saver, loader in ROUTES:
        folder = str(tmp_path / f"{saver}-{loader}")
        original = training(1, steps=3)
        SAVE[saver](original, checkpoint_id=folder)
        resumed = training(2, steps=1)
        LOAD[loader](resumed, checkpoint_id=folder)
        for name in ("model", "scheduler", "counter"):
            assert exactly(dict(resumed[name].state_dict()), dict(original[name].state_dict())), name
        assert resumed["counter"].loads == 1
        assert exactly(resumed["optimizer"].state_dict(), original["optimizer"].state_dict())


def test_training_resumes_exactly(tmp_path: Path) -> None:
    """Three steps, save, load, two steps give the bits of five steps."""

    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = Block()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return {"model": model, "optimizer": optimizer}

    def steps(state: dict[str, Any], count: int) -> None:
        for _ in range(count):
            state["model"](torch.linspace(0, 1, 30).view(3, 10)).square().sum().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()

    uninterrupted = build(1)
    steps(uninterrupted, 3)
    for saver in SAVE:
        SAVE[saver](uninterrupted, checkpoint_id=str(tmp_path / saver))
    steps(uninterrupted, 2)
    for saver in SAVE:
        resumed = build(2)
        steps(resumed, 1)  # so that the optimizer has state to load into
        dcp.load(resumed, checkpoint_id=str(tmp_path / saver))
        steps(resumed, 2)
        assert exactly(dict(resumed["model"].state_dict()), dict(uninterrupted["model"].state_dict())), saver


def zero_optimizer(rank: int, world: int, root: str) -> list[str]:
    """A ZeroRedundancyOptimizer, consolidated on all ranks and by its local part; what differs."""

    def build() -> tuple[nn.Module, Any]:
        model = Block()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return model, optimizer

    def consolidated(optimizer: Any) -> dict[str, Any]:
        mine: dict[str, Any] = {}
        for owner in range(world):
            optimizer.consolidate_state_dict(to=owner)
            if rank == owner:
                mine = copy.deepcopy(optimizer.state_dict())
        return mine

    found = []
    _, optimizer = build()
    for saver, loader in ROUTES:
        folder = f"{root}/whole-{saver}-{loader}"
        state = fill({"optimizer": consolidated(optimizer)})
        SAVE[saver](state, checkpoint_id=folder)
        target = scrub({"optimizer": consolidated(build()[1])})
        LOAD[loader](target, checkpoint_id=folder)
        found += differences(target)
    local = fill({"part": optimizer.optim.state_dict()})
    dcp.save({"part": dcp.PerRank(local["part"])}, checkpoint_id=f"{root}/local")
    target = scrub({"part": build()[1].optim.state_dict()})
    dcp.load({"part": dcp.PerRank(target["part"])}, checkpoint_id=f"{root}/local")
    found += differences(target)
    found += [] if target["part"]["param_groups"] == local["part"]["param_groups"] else ["groups"]
    return found


def test_zero_redundancy_optimizer_round_trips(tmp_path: Path) -> None:
    """Its consolidated state as replicated, and each rank's own part under PerRank."""
    assert run_ranks(2, zero_optimizer, str(tmp_path)) == [[], []]


def per_rank(rank: int, world: int, root: str) -> list[Any]:
    """Save and load state that differs by rank; what the rank got back."""

    def state(number: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(number)
        return {
            "position": dcp.PerRank(number),
            "loader": dcp.PerRank({"epoch": number, "rng": generator.get_state()}),
            "shared": 5,
        }

    dcp.save(state(rank), checkpoint_id=root)
    target = state(100)
    dcp.load(target, checkpoint_id=root)
    other: dict[str, Any] = {"position": {f"rank-{rank}": None}, "shared": None}
    stock.load(other, checkpoint_id=root)
    same = exactly(target["loader"].value, state(rank)["loader"].value)
    return [target["position"].value, target["shared"], same, other["position"][f"rank-{rank}"]]


def test_state_that_differs_by_rank_is_kept_by_rank(tmp_path: Path) -> None:
    """PerRank gives each rank its own back; stock sees a dict by rank."""
    results = run_ranks(3, per_rank, str(tmp_path))
    assert results == [[rank, 5, True, rank] for rank in range(3)]


def differing(rank: int, world: int, root: str) -> None:
    """Save values that differ by rank without saying so."""
    dcp.save({"seed": rank}, checkpoint_id=root)


def test_values_that_differ_by_rank_unawares_are_refused(tmp_path: Path) -> None:
    """Stock would keep rank 0's without a word; ours names the value and the ranks, on every rank."""
    results = run_ranks(2, differing, str(tmp_path / "x"), failures=True)
    assert [result.type_name for result in results] == ["ReplicaMismatchError"] * 2
    assert all("'seed'" in result.message and "PerRank" in result.message for result in results)
