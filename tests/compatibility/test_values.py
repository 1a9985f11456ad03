"""Values other than tensors, nested states, Stateful objects and state that differs by rank, between dcp and
stock torch. Harmless values load without weights_only=False."""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
import pickle
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

import dcp
from tests.support.harmless_values import ARRAYS, SCALARS, STDLIB, same
from tests.support.hostile_files import archive
from tests.support.ranks import run_ranks

SAVE: dict[str, Any] = {"dcp": dcp.save, "stock": stock.save}
LOAD: dict[str, Any] = {"dcp": dcp.load, "stock": stock.load}
ROUTES = (("dcp", "dcp"), ("dcp", "stock"), ("stock", "dcp"))


class Color(enum.Enum):
    """Enumeration of the user's program, with values equal to no plain data."""

    RED = 1


@dataclasses.dataclass
class Settings:
    """Class of the user's program."""

    width: int
    names: list[str]


Level = enum.IntEnum("Level", ["LOW", "HIGH"])
Mode = enum.StrEnum("Mode", {"EVAL": "eval"})
Access = enum.IntFlag("Access", ["READ", "WRITE"])
Mixed = enum.Enum("Mixed", {"A": "a"}, type=str)
Step = type("Step", (int,), {})
Name = type("Name", (str,), {})
Raw = type("Raw", (bytes,), {})
History = type("History", (list,), {})
Weighed = type("Weighed", (float,), {"__slots__": ("unit",)})
Pair = collections.namedtuple("Pair", ["first", "second"])


class Lr(float):
    """Subclass of float with another signature than float."""

    def __new__(cls, value: float, unit: str) -> Lr:
        """Require two arguments."""
        return super().__new__(cls, value)


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
    "long text": "x" * 200_000,
    "ordered": (OrderedDict([("b", 1), ("a", (2,))]),),
    "size": torch.Size([2, 3]),
    "torch dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "counts": (OrderedDict(x=1), torch.Size([])),
}
HARMLESS: dict[str, dict[str, Any]] = {"plain": PLAIN, "arrays": ARRAYS, "scalars": SCALARS, "stdlib": STDLIB}
UNSAFE = {
    "dataclass": Settings(3, ["a"]),
    "enum": Color.RED,
    "named tuple": Pair(1, 2),
    "objects": np.array([1, None]),
    "function": len,
}
EQUAL: dict[str, tuple[Any, Any]] = {
    "int enum": (Level.HIGH, 2),
    "str enum": (Mode.EVAL, "eval"),
    "mixed enum": (Mixed.A, "a"),
    "int flag": (Access.READ | Access.WRITE, 3),
    "int": (Step(3), 3),
    "float": (Lr(0.5, "a step"), 0.5),
    "str": (Name("x"), "x"),
    "bytes": (Raw(b"x"), b"x"),
    "list": (History([Lr(0.5, ""), 2, [Name("y")]]), [0.5, 2, ["y"]]),
    "classes in a dict": (({"a": [Name("x"), 1]},), ({"a": ["x", 1]},)),
    "version": (torch.__version__, str(torch.__version__)),
    "typed tuple": (Pair(Level.LOW, [Level.LOW]), (1, [1])),
    "in a list": ([Level.LOW, Mode.EVAL], [1, "eval"]),
    "in a tuple": ((Level.LOW, {"k": Mode.EVAL}), (1, {"k": "eval"})),
    "ellipsis": ((..., 1), (..., 1)),
    "not implemented": (NotImplemented, NotImplemented),
}
"""Values of classes that equal plain data, with their plain data."""


@pytest.mark.parametrize("kind", HARMLESS)
def test_harmless_values_keep_their_types(kind: str, tmp_path: Path) -> None:
    """Plain data, torch's safe classes, and values of numpy and the standard library are loaded equal, with
    equal types and writable, by default. Stock loads dcp's save if its own load accepts such values."""
    values = HARMLESS[kind]
    for saver, loader in ROUTES if kind == "plain" else ROUTES[::2]:
        folder = tmp_path / f"{saver}-{loader}"
        SAVE[saver]({"extra": dict(values)}, checkpoint_id=folder)
        target: dict[str, Any] = {"extra": dict.fromkeys(values, "not loaded")}
        LOAD[loader](target, checkpoint_id=folder)
        wrong = [name for name, value in values.items() if not same(target["extra"][name], value)]
        assert wrong == [], (saver, loader)
        arrays = [value for value in target["extra"].values() if isinstance(value, np.ndarray)]
        assert all(array.flags.writeable and array.flags.owndata for array in arrays)


@pytest.mark.parametrize("kind", ["arrays", "scalars", "stdlib"])
def test_harmless_values_survive_conversion(kind: str, tmp_path: Path) -> None:
    """Such values are converted to torch.save and back, and loaded from a torch.save file."""
    values = HARMLESS[kind]
    dcp.save({"w": torch.ones(2), **values}, checkpoint_id=tmp_path / "c")
    dcp.convert(tmp_path / "c", tmp_path / "file.pt", to="torch", executor="inline")
    loaded = torch.load(tmp_path / "file.pt", weights_only=False)
    native = {
        name: pickle.loads(pickle.dumps(value)) for name, value in values.items()
    }  # as numpy's own pickles make them
    assert [name for name, value in native.items() if not same(loaded[name], value)] == []
    torch.save({"w": torch.ones(2), **values}, tmp_path / "stock.pt")
    dcp.convert(tmp_path / "stock.pt", tmp_path / "back", to="dcp", executor="inline")
    flat = [name for name in values if name != "defaults"]  # a dict becomes several entries
    for source in ("stock.pt", "back"):
        target: dict[str, Any] = dict.fromkeys(flat)
        dcp.load(target, checkpoint_id=tmp_path / source)
        assert [name for name in flat if not same(target[name], values[name])] == [], source


def test_pickles_of_numpy_1_and_newer_protocols_load(tmp_path: Path) -> None:
    """Pickles of numpy 1, with other module names, and of protocols 3 to 5, with other functions, load."""
    value = (np.arange(4.0).reshape(2, 2), np.float32(3), {"a"}, frozenset({1}), bytearray(b"x"))
    first = pickle.dumps({"x": value}, protocol=2).replace(b"numpy._core.", b"numpy.core.")
    for pickled in (first, *(pickle.dumps({"x": value}, protocol=protocol) for protocol in (3, 4, 5))):
        (tmp_path / "x.pt").write_bytes(archive(pickled))
        target: dict[str, Any] = {"x": None}
        dcp.load(target, checkpoint_id=tmp_path / "x.pt", no_dist=True)
        assert same(target["x"], value)


# -- classes of the user -------------------------------------------------------------------------------------


def test_objects_of_the_users_classes_need_trust(tmp_path: Path) -> None:
    """Objects of user classes, saved by any package, are refused by name without weights_only=False."""
    for saver, loader in ROUTES:
        for name, value in UNSAFE.items():
            if (saver, name) == ("dcp", "named tuple"):
                continue  # saved as a tuple
            folder = tmp_path / f"{saver}-{loader}-{name}"
            SAVE[saver]({"x": value}, checkpoint_id=folder)
            target: dict[str, Any] = {"x": None}
            if loader == "stock":
                stock.load(target, checkpoint_id=folder)
            else:
                with pytest.raises(dcp.errors.UnsafeObjectError, match="'x'"):
                    dcp.load(target, checkpoint_id=folder)
                assert target == {"x": None}
                dcp.load(target, checkpoint_id=folder, weights_only=False)
            assert type(target["x"]) is type(value) and repr(target["x"]) == repr(value), (
                saver,
                loader,
                name,
            )


def _equal() -> dict[str, Any]:
    return {name: value for name, (value, _) in EQUAL.items()}


def _check_equal(root: Path) -> None:
    """Assert that a read gives plain data, and a load into values of the classes gives the classes."""
    found = dcp.read(root)
    assert [name for name, (_, plain) in EQUAL.items() if not same(found[name], plain)] == []
    target = _equal() | {"int enum": Level.LOW, "int flag": Access.READ}
    dcp.load(target, checkpoint_id=root, no_dist=True)
    assert target == _equal()
    for name in EQUAL.keys() - {"ellipsis", "not implemented"}:
        assert type(target[name]) is type(EQUAL[name][0]), name
    assert isinstance(target["typed tuple"].first, Level)


class Overriding(dcp.DefaultSavePlanner):
    """Planner that overrides a step, so plans are torch's objects."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plan of the base class."""
        return super().create_global_plan([dataclasses.replace(plan) for plan in all_plans])


def test_values_equal_to_plain_data_become_plain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Values equal to plain data are saved as plain data, without a warning, also by users' planners, writer
    processes and torch.save. They load by default, and stock torch reads the same."""
    with caplog.at_level(logging.WARNING):
        dcp.save(_equal(), checkpoint_id=tmp_path / "a", no_dist=True)
    assert not caplog.records
    loaded: dict[str, Any] = dict.fromkeys(EQUAL, 0)
    stock.load(loaded, checkpoint_id=tmp_path / "a", no_dist=True)
    assert loaded == _equal()
    dcp.save(_equal(), checkpoint_id=tmp_path / "b", planner=Overriding(), no_dist=True)
    kind = dcp.AsyncCheckpointerType.PROCESS
    dcp.async_save(_equal(), checkpoint_id=tmp_path / "c", async_checkpointer_type=kind, no_dist=True).result(
        240
    )
    dcp.convert(tmp_path / "a", tmp_path / "a.pt", to="torch")
    dcp.convert(tmp_path / "a.pt", tmp_path / "d", to="dcp")
    for name in "abcd":
        _check_equal(tmp_path / name)


def test_values_other_than_plain_data_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A value unequal to plain data is stored as its class, needs weights_only=False, and warns."""
    tagged, weighed = Step(3), Weighed(0.5)
    vars(tagged)["tag"], weighed.unit = "x", "kg"
    values = {"enum": Color.RED, "tagged": tagged, "weighed": weighed}
    with caplog.at_level(logging.WARNING):
        dcp.save(values, checkpoint_id=tmp_path, no_dist=True)
    assert all(name in caplog.text for name in ("Color", "Step", "Weighed"))
    target: dict[str, Any] = dict.fromkeys(values)
    with pytest.raises(dcp.errors.UnsafeObjectError):
        dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True, weights_only=False)
    assert target == values and (target["tagged"].tag, target["weighed"].unit) == ("x", "kg")


# -- nested states, Stateful objects -------------------------------------------------------------------------


def nested() -> dict[Any, Any]:
    """Return tensors and values in dicts, lists and tuples, with int keys and keys that look like paths."""
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


def _blanked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _blanked(entry) for key, entry in value.items()}
    if isinstance(value, list) and any(isinstance(entry, dict | torch.Tensor) for entry in value):
        return [_blanked(entry) for entry in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else "not loaded"


def test_nested_structures_load_in_place(tmp_path: Path) -> None:
    """Dicts, lists, tuples and int keys of any nesting load into the target's keys. Stock finds dcp's entries
    under the names of its own saves."""
    for saver, save in SAVE.items():
        save(nested(), checkpoint_id=tmp_path / saver)
        target = _blanked(nested()) | {"empty": {}}
        dcp.load(target, checkpoint_id=tmp_path / saver)
        wanted = {**nested(), "ordered": dict(nested()["ordered"]), "defaults": dict(nested()["defaults"])}
        assert [key for key, value in wanted.items() if not same(target.get(key), value)] == [], saver
        assert len(target) == len(wanted)
    state = {key: value for key, value in nested().items() if key != -5}  # stock cannot sort two key types
    for saver, save in SAVE.items():
        save(state, checkpoint_id=tmp_path / f"{saver} again")
    dcp_state, stock_state = _blanked(state), _blanked(state)
    stock.load(dcp_state, checkpoint_id=tmp_path / "dcp again")
    stock.load(stock_state, checkpoint_id=tmp_path / "stock again")
    assert same(dcp_state, stock_state) and dcp_state["groups"] == nested()["groups"]


# -- ranks ---------------------------------------------------------------------------------------------------


def by_rank(rank: int, world: int, root: str) -> list[Any]:
    """Save and load state that differs by rank. Return the loaded state, and the errors for values, also of
    classes, that differ without PerRank."""

    def state(number: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(number)
        loader = {"epoch": number, "rng": generator.get_state()}
        return {"position": dcp.PerRank(number), "loader": dcp.PerRank(loader), "shared": 5}

    dcp.save(state(rank), checkpoint_id=root)
    target = state(100)
    dcp.load(target, checkpoint_id=root)
    other: dict[str, Any] = {"position": {f"rank-{rank}": None}, "shared": None}
    stock.load(other, checkpoint_id=root)
    equal = same(target["loader"].value, state(rank)["loader"].value)
    dcp.save({"v": Level.LOW if rank else 1}, checkpoint_id=f"{root}/equal")
    refused = []
    for value in (rank, Level.LOW if rank else Level.HIGH):
        try:
            dcp.save({"seed": value}, checkpoint_id=f"{root}/differing")
        except dcp.errors.ReplicaMismatchError as error:
            refused.append("'seed'" in str(error) and "PerRank" in str(error))
    return [target["position"].value, target["shared"], equal, other["position"][f"rank-{rank}"], refused]


def test_state_that_differs_by_rank_is_kept_by_rank(tmp_path: Path) -> None:
    """PerRank gives each rank its own value, and stock sees a dict by rank. Without PerRank stock keeps rank
    0's value silently, and dcp raises on each rank with the name."""
    expected = [[rank, 5, True, rank, [True, True]] for rank in range(3)]
    assert run_ranks(3, by_rank, str(tmp_path)) == expected
