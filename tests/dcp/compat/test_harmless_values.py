"""Values of numpy and the standard library load without trust, from files of ours and of stock."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as stock
from typer.testing import CliRunner

import dcp
from dcp.cli.app import app
from dcp.conversion.run import convert
from dcp.inspection.checkpoints import open_index
from dcp.inspection.values.difference import diff
from dcp.planners.load.objects import load_object
from tests.support.hostile_files import archive

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "bool": np.array([True, False]),
    "f8": np.linspace(-1, 1, 1000),
    "f2": np.arange(6, dtype=np.float16).reshape(2, 3),
    "u8": np.array([1 << 63], np.uint64),
    "big endian": np.arange(3, dtype=">i4"),
    "c16": np.array([1 + 2j, complex("nan")]),
    "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "strided": np.arange(20)[::3],
    "scalar array": np.array(3.5),
    "empty": np.zeros((3, 0, 2)),
    "text": np.array(["höhe", "x"]),
    "bytes": np.array([b"ab", b"c"]),
    "days": np.array(["2026-01-02", "NaT"], "M8[D]"),
    "durations": np.array([1, 2], "m8[25ms]"),
    "void": np.array([b"abc", b"def"], "V3"),
    "structured": np.array([(1, [2.0, 3.0])], [("a", "<i4"), ("b", ">f8", (2,))]),
}
SCALARS: dict[str, Any] = {
    "float64": np.float64(0.1),
    "float16": np.float16(2),
    "int64": np.int64(-3),
    "bool_": np.bool_(True),
    "complex64": np.complex64(1j),
    "str_": np.str_("x"),
    "datetime64": np.datetime64("2026-01-02T03:04", "m"),
    "dtype": np.dtype("<f4"),
    "losses": [np.float64(1.5), np.float32(2.5)],
    "random state": np.random.RandomState(3).get_state(),
}


def _buffer(data: bytes, place: int) -> io.BytesIO:
    buffer = io.BytesIO(data)
    buffer.seek(place)
    return buffer


STDLIB: dict[str, Any] = {
    "datetime": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, fold=1),
    "utc": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    "zone": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=-5), "EST")),
    "date": datetime.date(2026, 1, 2),
    "time": datetime.time(23, 59, 59, 999999),
    "timedelta": datetime.timedelta(-1, 2, 3),
    "path": pathlib.Path("/a/b"),
    "windows path": pathlib.PureWindowsPath("c:/a"),
    "decimal": decimal.Decimal("1.50"),
    "fraction": fractions.Fraction(-1, 3),
    "uuid": uuid.UUID(int=1 << 127),
    "deque": collections.deque([1, 2], 5),
    "frozenset": frozenset({"a", 1}),
    "set": {"a", 1},
    "range": range(3),
    "slice": slice(1, None),
    "bytearray": bytearray(b"a\xff"),
    "buffer": _buffer(b"a\xff" * 300, 7),
    "buffers": [io.BytesIO(), _buffer(b"end", 3)],
    "defaults": (collections.defaultdict(list, a=[1]),),
    "history": [datetime.date(2026, 1, 2), (np.float64(1), b"")],
}


def same(first: Any, second: Any) -> bool:
    """Equal values of equal types, dtypes and shapes."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return bool(first.dtype == second.dtype and torch.equal(first, second))
    if isinstance(first, np.ndarray):
        shape = first.dtype == second.dtype and first.shape == second.shape
        return bool(shape and first.tobytes() == second.tobytes())
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple | collections.deque):
        is_as_long = len(first) == len(second) and getattr(first, "maxlen", 0) == getattr(second, "maxlen", 0)
        return is_as_long and all(map(same, first, second))
    if isinstance(first, io.BytesIO):
        return bool(first.getvalue() == second.getvalue() and first.tell() == second.tell())
    return bool(first == second)


@pytest.mark.parametrize("values", [ARRAYS, SCALARS, STDLIB], ids=["arrays", "scalars", "stdlib"])
@pytest.mark.parametrize("save", [dcp.save, stock.save], ids=["ours", "stock"])
def test_they_load_as_they_were(values: dict[str, Any], save: Any, tmp_path: Path) -> None:
    """With weights_only, from our checkpoints and stock's: equal, of the same types, arrays writable."""
    folder = str(tmp_path / "c")
    save({"w": torch.ones(2), **values}, checkpoint_id=folder)
    target: dict[str, Any] = {"w": torch.zeros(2), **dict.fromkeys(values)}
    dcp.load(target, checkpoint_id=folder)
    assert [name for name, value in values.items() if not same(target[name], value)] == []
    arrays = [value for value in target.values() if isinstance(value, np.ndarray)]
    assert all(array.flags.writeable and array.flags.owndata for array in arrays)


@pytest.mark.parametrize("values", [ARRAYS, SCALARS, STDLIB], ids=["arrays", "scalars", "stdlib"])
def test_they_are_converted_and_back(values: dict[str, Any], tmp_path: Path) -> None:
    """To torch.save and back, and a torch.save file is loaded directly."""
    dcp.save({"w": torch.ones(2), **values}, checkpoint_id=str(tmp_path / "c"))
    convert(tmp_path / "c", tmp_path / "file.pt", to="torch")
    loaded = torch.load(tmp_path / "file.pt", weights_only=False)
    native = {
        name: pickle.loads(pickle.dumps(value)) for name, value in values.items()
    }  # as numpy makes them
    assert [name for name, value in native.items() if not same(loaded[name], value)] == []
    torch.save({"w": torch.ones(2), **values}, tmp_path / "stock.pt")
    convert(tmp_path / "stock.pt", tmp_path / "back", to="dcp")
    flat = [name for name in values if name != "defaults"]  # opened, as all dicts of a file are
    for source in ("stock.pt", "back"):
        target: dict[str, Any] = dict.fromkeys(flat)
        dcp.load(target, checkpoint_id=str(tmp_path / source))
        assert [name for name in flat if not same(target[name], values[name])] == [], source


def test_pickles_of_numpy_1_and_newer_protocols_load() -> None:
    """numpy 1 names its modules otherwise, and protocol 5 makes arrays another way."""
    value = (np.arange(4.0).reshape(2, 2), np.float32(3), {"a"}, frozenset({1}), bytearray(b"x"))
    first = pickle.dumps(value, protocol=2)
    for pickled in (
        first.replace(b"numpy._core.", b"numpy.core."),
        *(pickle.dumps(value, protocol=protocol) for protocol in (3, 4, 5)),
    ):
        assert same(load_object("x", archive(pickled), weights_only=True), value)


def test_tensors_beside_arrays_in_one_value(tmp_path: Path) -> None:
    """A tuple is one pickled value: all that is in it comes back, shared parts shared."""
    shared = np.ones(3)
    value = (
        torch.arange(6.0).reshape(2, 3).t(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.zeros(0),
        torch.float32,
        torch.device("cpu"),
        torch.Size([2]),
        [shared, shared],
    )
    dcp.save({"x": value}, checkpoint_id=str(tmp_path / "c"))
    target: dict[str, Any] = {"x": None}
    dcp.load(target, checkpoint_id=str(tmp_path / "c"))
    assert same(target["x"], value)
    assert target["x"][6][0] is target["x"][6][1]


def test_tensors_within_values_are_converted(tmp_path: Path) -> None:
    """An optimizer's betas as tensors are one pickled value; a torch.save file has them as tensors."""
    state = {
        "w": torch.arange(100.0),
        "betas": (torch.tensor(0.9, requires_grad=True), torch.arange(6.0).reshape(2, 3).t()),
        "z": torch.ones(3),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
    }
    dcp.save(state, checkpoint_id=str(tmp_path / "c"))
    convert(tmp_path / "c", tmp_path / "file.pt", to="torch")
    for mapped in (False, True):
        loaded = torch.load(tmp_path / "file.pt", weights_only=True, mmap=mapped)
        assert all(same(loaded[name], value) for name, value in state.items())
        assert loaded["betas"][0].requires_grad
    convert(tmp_path / "file.pt", tmp_path / "back", only=["w", "betas.*"], to="dcp")
    assert open_index(tmp_path / "back").shape(1) == ()


def test_a_conversion_tells_what_torch_load_will_refuse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """torch knows sets and the like, and no arrays: these are named when the file is made."""
    state = {"w": torch.ones(2), "x": np.ones(2), "s": {1}, "t": (torch.ones(1),), "d": torch.float32}
    dcp.save(state, checkpoint_id=str(tmp_path / "c"))
    convert(tmp_path / "c", tmp_path / "file.pt", to="torch")
    said = [one.getMessage() for one in caplog.records if one.name.startswith("dcp.conversion.")]
    assert len(said) == 1 and "because of 'x';" in said[0]
    convert(tmp_path / "c", tmp_path / "other.pt", to="torch", exclude="x")
    assert torch.load(tmp_path / "other.pt", weights_only=True)["s"] == {1}


def test_a_torch_file_keeps_its_containers_and_names_what_it_cannot(tmp_path: Path) -> None:
    """Deques with tensors stay deques, also on the way to the next file; numpy's numbers are plain keys; a
    layout and other keys are refused by name, and spoil no other entry."""
    kept: dict[str, Any] = {
        "deque": collections.deque([torch.ones(1), {"a": 1}], 3),
        "default": collections.defaultdict(list, {"a": torch.ones(1)}),
        "numpy": ({np.int64(3): 1, np.str_("a"): {np.float32(0.5)}}, {np.int64(4): torch.ones(1)}),
    }
    refused = {
        "layout": (torch.strided,),
        "dtype": {torch.float32: torch.ones(1), "w": torch.ones(1)},
        "date": {datetime.date(2026, 1, 1): 1},
        "closed": ({"a": [{decimal.Decimal(1): 1}]},),
        "set": {datetime.date(2026, 1, 1)},
    }
    torch.save({**kept, **refused}, tmp_path / "a.pt")
    with pytest.raises(dcp.errors.UnsafeObjectError) as caught:
        dcp.read(tmp_path / "a.pt")
    for name, need in [
        ("layout", "torch.layout"),
        ("dtype.<key 0>", "a Dtype as a key"),
        ("date.<key 0>", "a date as a key"),
        ("closed", "a Decimal as a key"),
        ("set", "a set of more than"),
    ]:
        assert f"'{name}" in str(caught.value) and need in str(caught.value), str(caught.value)
    convert(tmp_path / "a.pt", tmp_path / "b", to="dcp", drop_objects=True)
    convert(tmp_path / "b", tmp_path / "c.pt", to="torch")
    for place in ("a.pt", "b", "c.pt"):
        found = dcp.read(tmp_path / place, exclude=[] if place != "a.pt" else [*refused, "*<key*"])
        assert all(same(found[name], value) for name, value in kept.items()), place
        assert found["deque"].maxlen == 3 and found["default"].default_factory is list
    assert same(torch.load(tmp_path / "c.pt", weights_only=False)["deque"], kept["deque"])


def test_safetensors_refuses_and_names_them(tmp_path: Path) -> None:
    """It holds plain data only; the error names the value, and the way out works."""
    dcp.save({"w": torch.ones(2), "x": np.ones(2)}, checkpoint_id=str(tmp_path / "c"))
    with pytest.raises(dcp.errors.PlanError, match=r"'x'.*drop_objects"):
        convert(tmp_path / "c", tmp_path / "out", to="safetensors")
    assert convert(tmp_path / "c", tmp_path / "out", to="safetensors", drop_objects=True).dropped_objects == (
        "x",
    )


def test_ours_and_stocks_are_equal(tmp_path: Path) -> None:
    """A comparison sees the values, not how they are stored: bytes are plain here and pickled there."""
    state = {"b": b"x", "c": 1j, "a": np.arange(3), "d": datetime.date(2026, 1, 2)}
    dcp.save(dict(state), checkpoint_id=str(tmp_path / "ours"))
    stock.save(dict(state), checkpoint_id=str(tmp_path / "stock"))
    torch.save(state, tmp_path / "file.pt")
    for other in ("stock", "file.pt"):
        assert diff(tmp_path / "ours", tmp_path / other).objects == ()
    stock.save(state | {"a": np.arange(3.0)}, checkpoint_id=str(tmp_path / "changed"))
    assert [one.fqn for one in diff(tmp_path / "ours", tmp_path / "changed").objects] == ["a"]


def test_buffers_are_shown_by_their_bytes(tmp_path: Path) -> None:
    """Their repr is an address, which would differ each time; two of equal bytes and place do not differ."""
    for name, data in (("a", b"xyz"), ("b", b"xyz"), ("c", b"other")):
        dcp.save({"losses": _buffer(data, 1)}, checkpoint_id=tmp_path / name)
    runner = CliRunner()
    for command in (["cat", str(tmp_path / "a"), "losses"], ["show", "--objects", str(tmp_path / "a")]):
        assert "BytesIO(b'xyz')" in runner.invoke(app, command).output
    told = runner.invoke(app, ["cat", "--json", str(tmp_path / "a"), "losses"]).output
    assert "BytesIO(b'xyz')" in told
    assert runner.invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "b")]).exit_code == 0
    changed = runner.invoke(app, ["diff", str(tmp_path / "a"), str(tmp_path / "c")])
    assert (changed.exit_code, "BytesIO(b'other')" in changed.output) == (1, True)


class TrainState:
    """As in older versions of torchtitan: losses are a buffer of what torch.save wrote."""

    def __init__(self) -> None:
        self.step = 0
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        """A tensor and a buffer."""
        buffer = io.BytesIO()
        torch.save(self.losses, buffer)
        return {"step": torch.tensor(self.step, dtype=torch.int32), "losses": buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Read the buffer."""
        self.step = state["step"].item()
        state["losses"].seek(0)
        self.losses = torch.load(state["losses"], weights_only=True)


@pytest.mark.parametrize("save", [dcp.save, stock.save], ids=["ours", "stock"])
def test_a_train_state_of_torchtitan(save: Any, tmp_path: Path) -> None:
    """Saved by either, loaded by ours."""
    trained, fresh = TrainState(), TrainState()
    trained.step, trained.losses = 7, [1.5, 0.5]
    save({"train_state": trained}, checkpoint_id=str(tmp_path))
    dcp.load({"train_state": fresh}, checkpoint_id=str(tmp_path))
    assert (fresh.step, fresh.losses) == (7, [1.5, 0.5])
