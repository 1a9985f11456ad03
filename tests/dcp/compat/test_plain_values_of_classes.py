"""Values of classes that equal plain data: saved as that, and of their class where the target has it."""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

import dcp
from dcp.background.session import AsyncSession
from dcp.state_dict_loader import _load_state_dict_from_keys as read_all
from tests.support.ranks import run_ranks


class Level(enum.IntEnum):
    """Numbers."""

    LOW = 1
    HIGH = 2


class Color(enum.StrEnum):
    """Strings."""

    RED = "red"


class Mixed(str, enum.Enum):  # noqa: UP042  # as it was written before Python 3.11
    """Strings, too."""

    A = "a"


class Access(enum.IntFlag):
    """Bits."""

    READ = 1
    WRITE = 2


class Plain(enum.Enum):
    """Equal to nothing but itself."""

    X = 1


class Step(int):
    """A number with a name."""


class Tagged(int):
    """A number with more to it."""


class Lr(float):
    """A number that its class cannot be called for."""

    def __new__(cls, value: float, unit: str) -> Lr:
        """Two arguments."""
        return super().__new__(cls, value)


class Name(str):
    """Text."""


class Raw(bytes):
    """Bytes."""


class History(list[Any]):
    """A list."""


class Weighed(float):
    """A number with more to it, in a slot."""

    __slots__ = ("unit",)
    unit: str


class Pair(NamedTuple):
    """Two values."""

    first: Any
    second: Any


Point = collections.namedtuple("Point", "x y")

VALUES: dict[str, tuple[Any, Any]] = {
    "int enum": (Level.HIGH, 2),
    "str enum": (Color.RED, "red"),
    "mixed enum": (Mixed.A, "a"),
    "int flag": (Access.READ | Access.WRITE, 3),
    "int": (Step(3), 3),
    "float": (Lr(0.5, "a step"), 0.5),
    "str": (Name("x"), "x"),
    "bytes": (Raw(b"x"), b"x"),
    "list": (History([Lr(0.5, ""), 2, [Name("y")]]), [0.5, 2, ["y"]]),
    "classes in a dict": (({"a": [Name("x"), 1]},), ({"a": ["x", 1]},)),
    "version": (torch.__version__, str(torch.__version__)),
    "named tuple": (Point(1, Color.RED), (1, "red")),
    "typed tuple": (Pair(Level.LOW, [Level.LOW]), (1, [1])),
    "in a list": ([Level.LOW, Color.RED], [1, "red"]),
    "in a tuple": ((Level.LOW, {"k": Color.RED}), (1, {"k": "red"})),
    "ellipsis": (..., ...),
    "ellipsis in a tuple": ((..., 1), (..., 1)),
    "not implemented": (NotImplemented, NotImplemented),
}


def state() -> dict[str, Any]:
    """All of them."""
    return {name: value for name, (value, _) in VALUES.items()}


def exact(value: Any) -> Any:
    """A value with the types in it."""
    if isinstance(value, dict):
        return {key: exact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [exact(item) for item in value]
    return type(value).__name__, value


def check(root: Path) -> None:
    """What was saved comes back as plain data, and of its class in a state dict that has it."""
    found = read_all(checkpoint_id=root)
    for name, (_, plain) in VALUES.items():
        assert exact(found[name]) == exact(plain), name
    target = state() | {"int enum": Level.LOW, "named tuple": Point(5, "x"), "int flag": Access.READ}
    dcp.load(target, checkpoint_id=root, no_dist=True)
    assert target == state()
    for name in ("int enum", "str enum", "mixed enum", "int flag", "named tuple", "typed tuple"):
        assert type(target[name]) is type(VALUES[name][0]), name
    assert isinstance(target["typed tuple"].first, Level)
    for name in VALUES.keys() - {"named tuple"}:
        assert exact(target[name]) == exact(VALUES[name][0]), name


def test_they_are_saved_as_what_they_equal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No trust is needed, so the save does not warn either; stock torch reads the same."""
    with caplog.at_level(logging.WARNING):
        dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    assert not caplog.records
    check(tmp_path)
    loaded = dict.fromkeys(VALUES, 0)
    stock.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert loaded == state()


class Overriding(dcp.DefaultSavePlanner):
    """Overrides a step, so that plans are torch's objects."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As it is."""
        return super().create_global_plan([dataclasses.replace(plan) for plan in all_plans])


def test_planners_of_ones_own_and_processes_save_them_alike(tmp_path: Path) -> None:
    """By torch's plan objects, and by the writer process, which needs none of the classes."""
    dcp.save(state(), checkpoint_id=tmp_path / "a", planner=Overriding(), no_dist=True)
    check(tmp_path / "a")
    session = AsyncSession(no_dist=True, kind=dcp.AsyncCheckpointerType.PROCESS)
    try:
        session.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "b")).result(240)
    finally:
        session.close(240)
    check(tmp_path / "b")


def test_they_are_converted(tmp_path: Path) -> None:
    """To torch.save and back, as plain data."""
    dcp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
    dcp.convert(tmp_path / "a", tmp_path / "a.pt", to="torch")
    dcp.convert(tmp_path / "a.pt", tmp_path / "b", to="dcp")
    check(tmp_path / "b")


def test_what_equals_no_plain_data_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is stored as its class, which takes trust to load, and the save says so."""
    tagged = Tagged(3)
    tagged.tag = "x"  # type: ignore[attr-defined]
    weighed = Weighed(0.5)
    weighed.unit = "kg"
    values = {"enum": Plain.X, "tagged": tagged, "weighed": weighed}
    with caplog.at_level(logging.WARNING):
        dcp.save(values, checkpoint_id=tmp_path, no_dist=True)
    assert "Plain" in caplog.text and "Tagged" in caplog.text and "Weighed" in caplog.text
    target: dict[str, Any] = dict.fromkeys(values)
    with pytest.raises(dcp.errors.UnsafeObjectError):
        dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True, weights_only=False)
    assert target == values and target["tagged"].tag == "x"
    assert target["weighed"].unit == "kg"


def test_classes_that_torch_was_told_of_stay(tmp_path: Path) -> None:
    """Who has allowed a class gets it back without a state dict that has it."""
    with torch.serialization.safe_globals([Level]):
        dcp.save({"v": Level.HIGH}, checkpoint_id=tmp_path, no_dist=True)
        target = {"v": None}
        dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert target["v"] is Level.HIGH


def test_a_member_that_is_no_more_is_its_value(tmp_path: Path) -> None:
    """The class of the target has other members than that of the save."""
    dcp.save({"v": 7, "w": 2.5}, checkpoint_id=tmp_path, no_dist=True)
    target: dict[str, Any] = {"v": Level.LOW, "w": Level.LOW}
    dcp.load(target, checkpoint_id=tmp_path, no_dist=True)
    assert exact(list(target.values())) == exact([7, 2.5])


def differing(rank: int, world: int, root: str) -> str:
    """Replicas of a value that has a class are compared as any other."""
    dcp.save({"v": Level.LOW if rank else 1}, checkpoint_id=f"{root}/same")
    try:
        dcp.save({"v": Level.LOW if rank else Level.HIGH}, checkpoint_id=f"{root}/other")
    except dcp.errors.ReplicaMismatchError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_are_told(tmp_path: Path) -> None:
    """Only one of the values would be stored."""
    for told in run_ranks(2, differing, str(tmp_path)):
        assert "'v'" in told
