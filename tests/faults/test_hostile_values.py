"""Pickles of arrays, dates and the like made to do harm: typed errors, nothing run, little spent."""

from __future__ import annotations

import io
import pickle
import random
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from dcp.inspection.entries import object_rows
from dcp.planners.load.objects import load_object
from dcp.storage.errors import CheckpointError, CheckpointFormatError, UnsafeObjectError
from dcp.storage.formats.torch.python_values import HARMLESS_MARK, decode_value
from dcp.storage.stores import PosixStore
from tests.support.hostile_files import STORAGE, archive, tensor_pickle
from tests.support.torch_files import index_of, saved

_MEMORY_BYTES = 64 << 20
_SECONDS = 30.0


class _Call:
    """Pickled as a call of a global with arguments, and a state."""

    def __init__(self, call: Any, args: tuple[Any, ...], state: Any = None) -> None:
        self.parts = (call, args) if state is None else (call, args, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


class _Made:
    """Pickled as an instance of a class, made without arguments, and its state, if that is not None."""

    def __init__(self, kind: Any, state: Any) -> None:
        self.kind, self.state = kind, state


class _Global:
    """Pickled as a global of that name, which needs not be one."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


_PythonPickler: Any = pickle._Pickler  # it can be told more than the one in C


class _Pickler(_PythonPickler):  # type: ignore[misc]
    """Writes `_Global` where a callable stands, without looking whether there is one."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, _Global):
            self.write(f"c{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, _Made):
            self.save(obj.kind)
            self.write(b")\x81")
            if obj.state is not None:
                self.save(obj.state)
                self.write(b"b")
        else:
            super().save(obj, save_persistent_id)

    def save_reduce(self, func: Any, args: Any, state: Any = None, *more: Any, obj: Any = None) -> None:
        if not isinstance(func, _Global):
            super().save_reduce(func, args, state, *more, obj=obj)
            return
        self.save(func)
        self.save(args)
        self.write(b"R")
        if state is not None:
            self.save(state)
            self.write(b"b")


def pickled(value: Any) -> bytes:
    """The pickle of a value with `_Call` and `_Global` in it."""
    buffer = io.BytesIO()
    _Pickler(buffer, 2).dump(value)
    return buffer.getvalue()


RECONSTRUCT = _Global("numpy._core.multiarray", "_reconstruct")
SCALAR = _Global("numpy._core.multiarray", "scalar")
FROM_BUFFER = _Global("numpy._core.numeric", "_frombuffer")
NDARRAY = _Global("numpy", "ndarray")
DTYPE = _Global("numpy", "dtype")
F8 = np.dtype("f8")


def dtype(text: Any, state: Any = None) -> _Call:
    """A dtype as numpy pickles it."""
    return _Call(DTYPE, (text, False, True), state)


def array(shape: Any, kind: Any, data: Any, *, first: Any = (0,), is_fortran: Any = False) -> _Call:
    """An array as numpy pickles it."""
    return _Call(RECONSTRUCT, (NDARRAY, first, b"b"), (1, shape, kind, is_fortran, data))


def structure(fields: dict[str, Any], size: int, names: Any = None) -> _Call:
    """A structured dtype."""
    names = tuple(fields) if names is None else names
    return dtype(f"V{size}", (3, "|", None, names, fields, size, 1, 16))


def nested_structure(levels: int) -> Any:
    """Fields that lie over each other: each level has twice the fields of the one below, in one place."""
    inner: Any = F8
    for _ in range(levels):
        inner = structure({"a": (inner, 0), "b": (inner, 0)}, 8)
    return inner


def shared(count: int) -> list[Any]:
    """Many arrays of one megabyte that stands in the pickle once."""
    data = bytes(1 << 20)
    return [array((1 << 17,), F8, data) for _ in range(count)]


def buffers(count: int) -> list[Any]:
    """As many buffers of one megabyte that stands in the pickle once."""
    data = bytes(1 << 20)
    return [_Made(_Global("_io", "BytesIO"), (data, 0, None)) for _ in range(count)]


def layers(levels: int) -> Any:
    """Lists of lists that are the same ones."""
    value: Any = [np.float64(1)]
    for _ in range(levels):
        value = [value] * 10
    return value


HOSTILE: dict[str, Any] = {
    "a huge first shape": array((1,), F8, bytes(8), first=(1 << 40,)),
    "a huge shape": array((1 << 40,), F8, bytes(8)),
    "a shape that overflows": array((1 << 61, 1 << 61), F8, bytes(8)),
    "a negative shape": array((-1, -1), F8, bytes(8)),
    "a shape of another type": array((1.0,), F8, bytes(8)),
    "many dimensions": array((1,) * 1000, F8, bytes(8)),
    "too few bytes": array((4,), F8, bytes(31)),
    "too many bytes": array((4,), F8, bytes(33)),
    "text for bytes": array((1,), F8, "x" * 8),
    "objects": array((1,), dtype("O8", (3, "|", None, None, None, -1, -1, 63)), [print]),
    "pointers": array((1,), dtype("O8", (3, "|", None, None, None, -1, -1, 63)), bytes(8)),
    "a number with an object's flags": array(
        (1,), dtype("f8", (3, "<", None, None, None, -1, -1, 63)), [print]
    ),
    "a huge element": array((0,), dtype("V999999999"), b""),
    "elements of nothing": array((1 << 40,), dtype("V0"), b""),
    "a field outside": array((1,), structure({"a": (F8, 1000)}, 8), bytes(8)),
    "a field before": array((1,), structure({"a": (F8, -8)}, 8), bytes(8)),
    "a field of objects": array((1,), structure({"a": (np.dtype("O"), 0)}, 8), bytes(8)),
    "a field without a dtype": array((1,), structure({"a": (1, 0)}, 8), bytes(8)),
    "fields that are not there": array((1,), structure({}, 8, names=("a",)), bytes(8)),
    "exponential fields": array((1,), nested_structure(40), bytes(8)),
    "a dtype of a call": dtype(_Call(_Global("os", "system"), ("false",))),
    "a dtype of much text": dtype("f8," * 100_000),
    "a dtype of a class": dtype(_Global("builtins", "object")),
    "a unit of another type": array(
        (1,), dtype("M8", (4, "<", None, None, None, -1, -1, 0, ({}, 1))), bytes(8)
    ),
    "a unit with metadata": dtype("M8", (4, "<", None, None, None, -1, -1, 0, ({"x": 1}, (b"s", 1, 1, 1)))),
    "metadata": dtype("f8", (4, "<", None, None, None, -1, -1, 0, {"x": print})),
    "a scalar of objects": _Call(SCALAR, (dtype("O8"), print)),
    "a scalar of the wrong length": _Call(SCALAR, (F8, bytes(9))),
    "a view of nothing": _Call(FROM_BUFFER, (b"", F8, (1 << 40,), "C")),
    "an array of a subclass": _Call(RECONSTRUCT, (_Global("os", "system"), (0,), b"b")),
    "an array without a state": _Call(RECONSTRUCT, (NDARRAY, (0,), b"b")),
    "an array as a key": {(1, array((1,), F8, bytes(8))): 1},
    "one piece many times": shared(500),
    "a fraction of a huge power": _Call(_Global("fractions", "Fraction"), ("1e999999999",)),
    "a fraction by zero": _Call(_Global("fractions", "Fraction"), (1, 0)),
    "a date that is none": _Call(
        _Global("datetime", "datetime"), (b"\x07\xea\x0d\x40\x20\x00\x00\x00\x00\x00",)
    ),
    "a zone of a class": _Call(_Global("datetime", "datetime"), (bytes(10), print)),
    "a duration without end": _Call(_Global("datetime", "timedelta"), (1 << 70, 0, 0)),
    "a path of a call": _Call(_Global("pathlib", "PosixPath"), (print,)),
    "a factory that is called": _Call(_Global("collections", "defaultdict"), (_Global("os", "getcwd"),)),
    "a range of much": _Call(_Global("builtins", "range"), (0, 1 << 100_000, 1)),
    "one buffer many times": buffers(500),
    "a buffer of text": _Made(_Global("_io", "BytesIO"), ("abc", 0, None)),
    "a buffer far behind its end": _Made(_Global("_io", "BytesIO"), (b"abc", 1 << 40, None)),
    "a buffer with attributes": _Made(_Global("_io", "BytesIO"), (b"abc", 0, {"write": 1})),
    "a buffer without its bytes": _Made(_Global("_io", "BytesIO"), None),
    "a buffer of a call": _Call(_Global("_io", "BytesIO"), (b"abc",)),
    "bytes of a number": _Call(_Global("builtins", "bytearray"), (1 << 40,)),
    "a set that collides": lambda: (np.ones(1), frozenset(n * ((1 << 61) - 1) for n in range(5000))),
}


def hostile(name: str) -> bytes:
    """The pickle of one of them."""
    value = HOSTILE[name]
    return pickled(value() if callable(value) else value)


BOUNDED = {
    "shared lists": layers(60),
    "a deque without end": _Call(_Global("collections", "deque"), ((), 1 << 62)),
    "a decimal of a huge power": _Call(_Global("decimal", "Decimal"), ("1e999999999",)),
}


@contextmanager
def bounded() -> Iterator[None]:
    """Little memory and time."""
    tracemalloc.start()
    begun = time.process_time()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < _MEMORY_BYTES
        assert time.process_time() - begun < _SECONDS
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_values_are_refused(name: str) -> None:
    """Loaded from a checkpoint's object or found in an index: an error of ours, in bounded resources."""
    data = hostile(name)
    with bounded():
        with pytest.raises(CheckpointFormatError):
            load_object("x", archive(data), weights_only=True)
        with pytest.raises(CheckpointFormatError):
            decode_value(HARMLESS_MARK + data)


@pytest.mark.parametrize("name", BOUNDED)
def test_values_that_only_look_hostile_are_cheap(name: str) -> None:
    """They mean something, and take no more than they have in the file."""
    with bounded():
        load_object("x", archive(pickled(BOUNDED[name])), weights_only=True)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_values_of_a_file_do_no_harm(name: str) -> None:
    """In a torch.save file: the entry is refused or the whole file, in bounded resources."""
    body = hostile(name)[2:-1]
    data = archive(b"\x80\x02}(X\x01\x00\x00\x00x" + body + b"X\x01\x00\x00\x00yK\x01u.")
    with bounded():
        try:
            index = index_of(data)
        except CheckpointFormatError:
            return
        assert index.objects.fqns == ["y"]
        assert any(refused.startswith("x") for refused in index.provenance["refused_objects"])


def test_tensors_within_values_stay_inside_their_storages() -> None:
    """A strided view that repeats itself to many times its bytes is refused."""
    for sizes, strides in (((1 << 40,), (0,)), ((5,), (1,)), ((1 << 20, 1 << 20), (0, 0))):
        tensor = tensor_pickle(sizes, strides)[2:-1]
        data = archive(b"\x80\x02" + tensor + pickled(np.ones(1))[2:-1] + b"\x86.")
        with bounded(), pytest.raises(CheckpointFormatError):
            load_object("x", data, weights_only=True)


def test_tensors_within_values_that_torch_does_not_make() -> None:
    """Integers that want a gradient are refused; a storage may end within an element."""
    tail = pickled(np.ones(1))[2:-1] + b"\x86."
    graded = tensor_pickle((2,), (1,), storage=STORAGE.replace(b"FloatStorage", b"LongStorage"))
    graded = graded[2:-1].replace(b"\x89", b"\x88")
    data = archive(b"\x80\x02" + graded + tail, {"0": bytes(32)})
    with pytest.raises(CheckpointFormatError):
        load_object("x", data, weights_only=True)
    odd = tensor_pickle((2,), (1,), storage=STORAGE.replace(b"K\x04t", b"K\x0at"))[2:-1]
    odd = odd.replace(b"ctorch\nFloatStorage", b"ctorch.storage\nUntypedStorage")
    odd = odd.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v3").replace(
        b"OrderedDict\n)R", b"OrderedDict\n)Rctorch\nint32\n"
    )
    value = load_object("x", archive(b"\x80\x02" + odd + tail, {"0": bytes(10)}), weights_only=True)
    assert value[0]["x"].tolist() == [0, 0]


def test_fuzzed_values() -> None:
    """Changed and shortened pickles of honest values: a value or a typed error, whatever stands there."""
    honest = [
        np.zeros(2, [("a", "<i4"), ("b", "<f8", (2,))]),
        (np.random.RandomState(1).get_state(), torch.ones(2)),
        [np.float64(1), np.datetime64("2026-01-02"), {"a"}],
    ]
    random_ = random.Random(5)
    loaded = refused = 0
    for value in honest:
        data = pickle.dumps(value, protocol=2) if not isinstance(value, tuple) else saved(value)
        for _ in range(300):
            changed = bytearray(data)
            for _ in range(random_.randrange(1, 4)):
                changed[random_.randrange(len(changed))] = random_.randrange(256)
            blob = bytes(changed) if isinstance(value, tuple) else archive(bytes(changed))
            try:
                load_object("x", blob, weights_only=True)
            except CheckpointError:
                refused += 1
            else:
                loaded += 1
    assert min(loaded, refused) > 10, (loaded, refused)  # neither way is all that was tried


def test_a_hostile_object_is_listed_as_pickled(tmp_path: Any) -> None:
    """Whoever looks at a checkpoint sees a value that was not decoded, and nothing happens."""
    import dcp
    from dcp.inspection.checkpoints import open_index

    dcp.save({"x": np.array([print])}, checkpoint_id=str(tmp_path / "c"))
    (row,) = object_rows(PosixStore(tmp_path / "c"), open_index(tmp_path / "c"))
    assert not row.is_plain
    with pytest.raises(UnsafeObjectError):
        dcp.load({"x": None}, checkpoint_id=str(tmp_path / "c"))
