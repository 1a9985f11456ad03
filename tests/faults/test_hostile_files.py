"""Hostile files and pickled values. Internal: pure readers of bytes, tried thousands of times.

They raise typed errors, run no code, and use little memory and time.
"""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import time
import tracemalloc
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dcp
from dcp.errors import CheckpointError, CheckpointFormatError, UnsafeObjectError
from dcp.loading.call import load_object
from dcp.storage.formats.safetensors import index_of_safetensors_file
from dcp.storage.formats.torch.archive import MAX_FILE_ENTRIES
from dcp.storage.formats.torch.python_values import HARMLESS_MARK, decode_value
from tests.support.fault_doors import run
from tests.support.hostile_files import CENTRAL, END, STORAGE, archive, directory_of, tensor_pickle
from tests.support.torch_files import index_of, reader, saved

_MEMORY_BYTES = 200 << 20
_VALUE_MEMORY_BYTES = 64 << 20
_SECONDS = 30.0


@contextmanager
def _bounded(memory_bytes: int = _VALUE_MEMORY_BYTES) -> Iterator[None]:
    """Limit memory and time of the block."""
    tracemalloc.start()
    begun = time.process_time()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < memory_bytes
        assert time.process_time() - begun < _SECONDS
    finally:
        tracemalloc.stop()


class _Runs:
    """Object that runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.command = f"touch {marker}"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def _opcodes(value: object) -> bytes:
    return pickle.dumps(value, protocol=2)[2:-1]


def _item(key: bytes, value: bytes) -> bytes:
    good = tensor_pickle((2,), (1,))[2:-2].replace(b"x", b"a", 1)  # without SETITEM and STOP
    return b"\x80\x02" + good + b"s" + key + value + b"s."


PLACES: dict[str, Callable[[bytes], bytes]] = {
    "value": lambda evil: _item(_opcodes("k"), evil),
    "in a list": lambda evil: _item(_opcodes("k"), b"](" + evil + b"K\x01e"),
    "in a tuple": lambda evil: _item(_opcodes("k"), evil + b"\x85"),
    "key": lambda evil: _item(evil, b"K\x01"),
    "part of a key": lambda evil: _item(evil + b"\x85", b"K\x01"),
    "root": lambda evil: b"\x80\x02" + evil + b".",
    "state": lambda evil: _item(_opcodes("k"), b"ccollections\nOrderedDict\n)R" + evil + b"b"),
    "built": lambda evil: _item(_opcodes("k"), evil + b"}X\x01\0\0\0aK\x01sb"),
    "appended to": lambda evil: _item(_opcodes("k"), evil + b"(K\x01K\x02e"),
    "set into": lambda evil: _item(_opcodes("k"), evil + b"(K\x01K\x02u"),
    "called": lambda evil: _item(_opcodes("k"), evil + b")R"),
    "new object": lambda evil: _item(_opcodes("k"), evil + b")\x81"),
    "arguments": lambda evil: _item(_opcodes("k"), b"ccollections\nOrderedDict\n" + evil + b"\x85R"),
    "persistent id": lambda evil: _item(_opcodes("k"), evil + b"Q"),
    "storage class": lambda evil: tensor_pickle(
        (2,), (1,), storage=b"(X\x07\x00\x00\x00storage" + evil + b"X\x01\0\0\x000X\x03\0\0\0cpuK\x04tQ"
    ),
    "storage": lambda evil: tensor_pickle((2,), (1,), storage=evil),
    "size": lambda evil: tensor_pickle((2,), (1,)).replace(b"(K\x02t", b"(" + evil + b"t", 1),
    "subclass": lambda evil: _item(
        _opcodes("k"), b"ctorch._tensor\n_rebuild_from_type_v2\n(" + evil + evil + b")}tR"
    ),
}


@pytest.mark.parametrize("how", ["reduce", "newobj", "global", "inst", "protocol 4"])
@pytest.mark.parametrize("place", PLACES)
def test_calls_anywhere_in_a_pickle_are_refused(tmp_path: Path, place: str, how: str) -> None:
    """os.system at any place of the pickle raises a typed error, or only its entry is refused."""
    marker = tmp_path / "run"
    command = f"touch {marker}".encode()
    evil = {
        "reduce": _opcodes(_Runs(marker)),
        "newobj": b"cos\nsystem\nX" + struct.pack("<I", len(command)) + command + b"\x85\x81",
        "global": b"cos\nsystem\n",
        "inst": b"(S'" + command + b"'\nios\nsystem\n",
        "protocol 4": pickle.dumps(_Runs(marker), protocol=4)[11:-1],
    }[how]
    try:
        index = index_of(archive(PLACES[place](evil)))
    except CheckpointFormatError:
        pass
    else:
        assert list(index.fqns) in (["a"], [])
        assert index.provenance.get("refused_objects") or place == "state"
    assert not marker.exists()


def _memo(number: int) -> bytes:
    return b"r" + struct.pack("<I", number)


def _get(number: int) -> bytes:
    return b"j" + struct.pack("<I", number)


def _laughs(first: bytes, level: Callable[[int], bytes]) -> bytes:
    levels = b"".join(level(n) + _memo(n + 1) + b"0" for n in range(40))
    return b"\x80\x02" + first + _memo(0) + b"0" + levels + b"}X\x01\0\0\0a" + _get(40) + b"s."


_LARGE = b"X" + struct.pack("<I", 1 << 20) + b"x" * (1 << 20)

BOMBS: dict[str, bytes] = {
    "deep lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "deep tuples": b"\x80\x02)" + b"\x85" * 200_000 + b".",
    "deep dicts": b"\x80\x02" + b"}X\x01\0\0\0a" * 50_000 + b"}" + b"s" * 50_000 + b".",
    "deep marks": b"\x80\x02" + b"(" * 100_000,
    "laughing lists": _laughs(b"]", lambda n: b"](" + _get(n) * 10 + b"e"),
    "laughing tuples": _laughs(b")", lambda n: b"(" + _get(n) * 10 + b"t"),
    "laughing dicts": _laughs(
        b"}", lambda n: b"}(" + b"".join(_opcodes(k)[:6] + _get(n) for k in "abcdefghij") + b"u"
    ),
    "list in itself": b"\x80\x02}X\x01\0\0\0a]" + _memo(0) + _get(0) + b"as.",
    "dict in itself": b"\x80\x02}" + _memo(0) + b"X\x01\0\0\0a" + _get(0) + b"s.",
    "tuple in itself": b"\x80\x02]" + _memo(0) + _get(0) + b"\x85a.",
    "metadata in itself": b"\x80\x02ccollections\nOrderedDict\n)R"
    + _memo(0)
    + b"}X\x09\0\0\0_metadata"
    + _get(0)
    + b"sb.",
    "a repeated string": b"\x80\x02"
    + _LARGE
    + _memo(0)
    + b"0}("
    + b"".join(b"X\x06\0\0\0" + b"%06d" % n + b"]" + _get(0) + b"a" for n in range(5000))
    + b"u.",
    "many names": b"\x80\x02](" + b"".join(b"cm\nf%d\n" % n for n in range(20_000)) + b"e.",
    "huge integer": b"\x80\x02}\x8b" + struct.pack("<i", 1 << 20) + b"\x01" * (1 << 20) + b"Ns.",
    "huge size": b"\x80\x02ctorch\nSize\n(" + b"K\x01" * 100_000 + b"t\x85R.",
}


_HARMLESS = ("laughing lists", "laughing tuples", "metadata in itself")


@pytest.mark.parametrize("name", BOMBS)
def test_expanding_pickles_are_refused(name: str) -> None:
    """Small pickles that expand to large values are refused in bounded memory."""
    data = archive(BOMBS[name])
    with _bounded(_MEMORY_BYTES):
        if name in _HARMLESS:  # one value is too large or is dropped; the others are unaffected
            assert index_of(data).tensor_count == 0
            return
        with pytest.raises(CheckpointFormatError):
            index_of(data)


@pytest.mark.parametrize(
    ("sizes", "strides", "offset"),
    [
        ((5,), (1,), 0),
        ((4,), (1,), 1),
        ((2, 2), (3, 1), 0),
        ((2,), (1 << 40,), 0),
        ((1,), (1,), 1 << 61),
        ((2,), (-1,), 1),
        ((-2,), (1,), 0),
        ((1 << 31, 1 << 31, 4), (0, 0, 0), 0),
        ((1 << 70,), (0,), 0),
        ((1,) * 65, (1,) * 65, 0),
        ((2, 2), (1,), 0),
    ],
)
def test_false_shapes_are_refused(sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> None:
    """Shapes, strides and offsets outside the storage are refused."""
    with pytest.raises(CheckpointFormatError):
        index_of(archive(tensor_pickle(sizes, strides, offset)))


def test_false_storage_sizes_are_refused() -> None:
    """A storage that is missing or of another size is refused. A tensor may repeat one element, as masks do,
    but not expand a kilobyte to a terabyte."""
    for storages in ({"1": bytes(16)}, {"0": bytes(12)}, {"0": bytes(20)}):
        with pytest.raises(CheckpointFormatError, match="storage"):
            index_of(archive(tensor_pickle((4,), (1,)), storages))
    assert index_of(archive(tensor_pickle((1 << 16, 1 << 14), (0, 0)))).tensor_count == 1
    with pytest.raises(CheckpointFormatError, match="expanded"):
        index_of(archive(tensor_pickle((1 << 20, 1 << 18), (0, 0))))


def _patched(lie: dict[str, int]) -> bytes:
    data = bytearray(archive(tensor_pickle((4,), (1,))))
    at = directory_of(bytes(data))
    for _ in range(2):
        at += CENTRAL.size + sum(CENTRAL.unpack_from(data, at)[10:13])
    changed = list(CENTRAL.unpack_from(data, at))
    for name, value in lie.items():
        changed[_FIELDS[name]] = value
    CENTRAL.pack_into(data, at, *changed)
    return bytes(data)


_FIELDS = {"flags": 3, "method": 4, "packed": 8, "size": 9, "header_at": 16}
_LIES: list[dict[str, int]] = [
    *({"method": 8}, {"flags": 1}, {"packed": 15}, {"packed": 17, "size": 17}),
    *({"packed": size, "size": size} for size in (1 << 31, 100_000, 0xFFFFFFFF)),
    *({"header_at": place} for place in (0, 1, 1 << 31)),
]


@pytest.mark.parametrize("lie", _LIES, ids=str)
def test_zips_with_false_directories_are_refused(lie: dict[str, int]) -> None:
    """Compressed, encrypted, overlapping, huge and displaced entries are refused."""
    assert index_of(_patched({})).tensor_count == 1
    with pytest.raises(CheckpointFormatError):
        index_of(_patched(lie))


def test_zips_with_false_end_records_are_refused() -> None:
    """The number of entries and the size of the directory are checked before memory is allocated for them."""
    data = archive(tensor_pickle((4,), (1,)))
    count, directory_bytes, directory_at = END.unpack(data[-END.size :])[4:7]
    for fields in (
        (0xFFFE, 0xFFFE, directory_bytes, directory_at),
        (count, count, 1 << 30, directory_at),
        (count, count, directory_bytes, 1 << 31),
        (count + 1, count + 1, directory_bytes, directory_at),
        (0, 0, 0, directory_at),
        (count, count - 1, directory_bytes, directory_at),
    ):
        end = END.pack(b"PK\5\6", 0, 0, fields[0], fields[1], fields[2], fields[3], 0)
        with pytest.raises(CheckpointFormatError):
            index_of(data[: -END.size] + end)
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, *[MAX_FILE_ENTRIES + 1] * 2, 1 << 24, 0)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(data), 1)
    end = END.pack(b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    with pytest.raises(CheckpointFormatError):
        index_of(data + end64 + locator + end)


def test_ambiguous_names_in_zips_are_refused() -> None:
    """A file with names in two folders, without a folder, or twice is refused as a torch.save file."""
    for names in (["../data.pkl"], ["m/data.pkl", "n/data/0"], ["data.pkl"], ["m/data.pkl", "m/data.pkl"]):
        buffer = BytesIO()
        with zipfile.ZipFile(buffer, "w") as target:
            for name in names:
                target.writestr(name, b"\x80\x02}.")
        if names == ["../data.pkl"]:  # accepted as a folder: readers never write to a path from the file
            assert index_of(buffer.getvalue()).tensor_count == 0
            continue
        with pytest.raises(CheckpointFormatError):
            index_of(buffer.getvalue())


@pytest.mark.parametrize(
    ("first", "repeated", "last"),
    [
        (b'{"__metadata__":{', b'"a":"",', b'"b":""}}'),
        (b'{"a":{"shape":[', b"[],", b"[]]}}"),
        (b'{"a":{"shape":[', b".1,", b"1]}}"),
        (b'{"a":[', b"{},", b"{}]}"),
    ],
)
def test_large_safetensors_headers_are_refused(first: bytes, repeated: bytes, last: bytes) -> None:
    """Headers that repeat small values many times are refused before they take a multiple of their size."""
    count = 27_000_000 // len(repeated)
    length = struct.pack("<Q", len(first) + count * len(repeated) + len(last))
    data = b"".join((length, first, repeated * count, last, bytes(16)))
    with _bounded(_MEMORY_BYTES), pytest.raises(CheckpointFormatError):
        index_of_safetensors_file(reader(data), len(data), "m.safetensors")


# -- pickled values ------------------------------------------------------------------------------------------


class _Call:
    """Object that is pickled as a call of a global with arguments and a state."""

    def __init__(self, call: Any, args: tuple[Any, ...], state: Any = None) -> None:
        self.parts = (call, args) if state is None else (call, args, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


class _Made:
    """Object that is pickled as a class instance made without arguments, and a state that is not None."""

    def __init__(self, kind: Any, state: Any) -> None:
        self.kind, self.state = kind, state


class _Global:
    """Object that is pickled as a global of a name, which need not exist."""

    def __init__(self, module: str, name: str) -> None:
        self.module, self.name = module, name


_PythonPickler: Any = pickle._Pickler  # has hooks that the C pickler lacks


class _Pickler(_PythonPickler):  # type: ignore[misc]
    """Pickler that writes `_Global` in place of a callable without a check that it exists."""

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


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, 2).dump(value)
    return buffer.getvalue()


def _called(name: str, *args: Any) -> _Call:
    module, _, attribute = name.rpartition(".")
    return _Call(_Global(module, attribute), args)


RECONSTRUCT = _Global("numpy._core.multiarray", "_reconstruct")
SCALAR = _Global("numpy._core.multiarray", "scalar")
FROM_BUFFER = _Global("numpy._core.numeric", "_frombuffer")
NDARRAY = _Global("numpy", "ndarray")
DTYPE = _Global("numpy", "dtype")
F8 = np.dtype("f8")


def dtype(text: Any, state: Any = None) -> _Call:
    """Return a dtype as numpy pickles it."""
    return _Call(DTYPE, (text, False, True), state)


def _array(shape: Any, kind: Any, data: Any, *, first: Any = (0,), is_fortran: Any = False) -> _Call:
    return _Call(RECONSTRUCT, (NDARRAY, first, b"b"), (1, shape, kind, is_fortran, data))


def _structure(fields: dict[str, Any], size: int, names: Any = None) -> _Call:
    names = tuple(fields) if names is None else names
    return dtype(f"V{size}", (3, "|", None, names, fields, size, 1, 16))


def nested_structure(levels: int) -> Any:
    """Return nested overlapping fields: each level has twice the fields of the level below, at one offset."""
    inner: Any = F8
    for _ in range(levels):
        inner = _structure({"a": (inner, 0), "b": (inner, 0)}, 8)
    return inner


def _shared(count: int) -> list[Any]:
    data = bytes(1 << 20)
    return [_array((1 << 17,), F8, data) for _ in range(count)]


def _buffers(count: int) -> list[Any]:
    data = bytes(1 << 20)
    return [_Made(_Global("_io", "BytesIO"), (data, 0, None)) for _ in range(count)]


def _layers(levels: int) -> Any:
    value: Any = [np.float64(1)]
    for _ in range(levels):
        value = [value] * 10
    return value


HOSTILE: dict[str, Any] = {
    "a huge first shape": _array((1,), F8, bytes(8), first=(1 << 40,)),
    "a huge shape": _array((1 << 40,), F8, bytes(8)),
    "a shape that overflows": _array((1 << 61, 1 << 61), F8, bytes(8)),
    "a negative shape": _array((-1, -1), F8, bytes(8)),
    "a shape of another type": _array((1.0,), F8, bytes(8)),
    "many dimensions": _array((1,) * 1000, F8, bytes(8)),
    "too few bytes": _array((4,), F8, bytes(31)),
    "too many bytes": _array((4,), F8, bytes(33)),
    "text for bytes": _array((1,), F8, "x" * 8),
    "objects": _array((1,), dtype("O8", (3, "|", None, None, None, -1, -1, 63)), [print]),
    "pointers": _array((1,), dtype("O8", (3, "|", None, None, None, -1, -1, 63)), bytes(8)),
    "a number with an object's flags": _array(
        (1,), dtype("f8", (3, "<", None, None, None, -1, -1, 63)), [print]
    ),
    "a huge element": _array((0,), dtype("V999999999"), b""),
    "elements of nothing": _array((1 << 40,), dtype("V0"), b""),
    "a field outside": _array((1,), _structure({"a": (F8, 1000)}, 8), bytes(8)),
    "a field before": _array((1,), _structure({"a": (F8, -8)}, 8), bytes(8)),
    "a field of objects": _array((1,), _structure({"a": (np.dtype("O"), 0)}, 8), bytes(8)),
    "a field without a dtype": _array((1,), _structure({"a": (1, 0)}, 8), bytes(8)),
    "fields that do not exist": _array((1,), _structure({}, 8, names=("a",)), bytes(8)),
    "exponential fields": _array((1,), nested_structure(40), bytes(8)),
    "a dtype of a call": dtype(_called("os.system", "false")),
    "a dtype of long text": dtype("f8," * 100_000),
    "a dtype of a class": dtype(_Global("builtins", "object")),
    "a unit of another type": _array(
        (1,), dtype("M8", (4, "<", None, None, None, -1, -1, 0, ({}, 1))), bytes(8)
    ),
    "a unit with metadata": dtype("M8", (4, "<", None, None, None, -1, -1, 0, ({"x": 1}, (b"s", 1, 1, 1)))),
    "metadata": dtype("f8", (4, "<", None, None, None, -1, -1, 0, {"x": print})),
    "a scalar of objects": _Call(SCALAR, (dtype("O8"), print)),
    "a scalar of the wrong length": _Call(SCALAR, (F8, bytes(9))),
    "a view of nothing": _Call(FROM_BUFFER, (b"", F8, (1 << 40,), "C")),
    "an array of a subclass": _Call(RECONSTRUCT, (_Global("os", "system"), (0,), b"b")),
    "an array without a state": _Call(RECONSTRUCT, (NDARRAY, (0,), b"b")),
    "an array as a key": {(1, _array((1,), F8, bytes(8))): 1},
    "one piece many times": _shared(500),
    "a fraction of a huge power": _called("fractions.Fraction", "1e999999999"),
    "a fraction by zero": _called("fractions.Fraction", 1, 0),
    "an invalid date": _called("datetime.datetime", b"\x07\xea\x0d\x40\x20\x00\x00\x00\x00\x00"),
    "a zone of a class": _called("datetime.datetime", bytes(10), print),
    "a duration without end": _called("datetime.timedelta", 1 << 70, 0, 0),
    "a path of a call": _called("pathlib.PosixPath", print),
    "a factory that is called": _called("collections.defaultdict", _Global("os", "getcwd")),
    "a huge range": _called("builtins.range", 0, 1 << 100_000, 1),
    "one buffer many times": _buffers(500),
    "a buffer of text": _Made(_Global("_io", "BytesIO"), ("abc", 0, None)),
    "a buffer far beyond its end": _Made(_Global("_io", "BytesIO"), (b"abc", 1 << 40, None)),
    "a buffer with attributes": _Made(_Global("_io", "BytesIO"), (b"abc", 0, {"write": 1})),
    "a buffer without its bytes": _Made(_Global("_io", "BytesIO"), None),
    "a buffer of a call": _called("_io.BytesIO", b"abc"),
    "bytes of a number": _called("builtins.bytearray", 1 << 40),
    "a set that collides": lambda: (np.ones(1), frozenset(n * ((1 << 61) - 1) for n in range(5000))),
}


def _hostile(name: str) -> bytes:
    value = HOSTILE[name]
    return _pickled(value() if callable(value) else value)


BOUNDED = {
    "shared lists": _layers(60),
    "a deque without end": _called("collections.deque", (), 1 << 62),
    "a Decimal of a huge power": _called("decimal.Decimal", "1e999999999"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_values_are_refused(name: str) -> None:
    """A hostile value in a checkpoint's object or in an index raises a dcp error with bounded resources. In a
    torch.save file the entry or the whole file is refused."""
    data = _hostile(name)
    with _bounded():
        with pytest.raises(CheckpointFormatError):
            load_object("x", archive(data), weights_only=True)
        with pytest.raises(CheckpointFormatError):
            decode_value(HARMLESS_MARK + data)
    with _bounded(), suppress(CheckpointFormatError):
        index = index_of(archive(b"\x80\x02}(X\x01\x00\x00\x00x" + data[2:-1] + b"X\x01\x00\x00\x00yK\x01u."))
        assert index.objects.fqns == ["y"]
        assert any(refused.startswith("x") for refused in index.provenance["refused_objects"])


@pytest.mark.parametrize("name", BOUNDED)
def test_values_that_only_look_hostile_are_cheap(name: str) -> None:
    """Values that look hostile but are valid load in bounded memory."""
    with _bounded():
        value = load_object("x", archive(_pickled(BOUNDED[name])), weights_only=True)
    assert type(value).__name__ in name


def test_tensors_within_values_stay_inside_their_storages() -> None:
    """A strided view that repeats its storage to many times the size is refused."""
    for sizes, strides in (((1 << 40,), (0,)), ((5,), (1,)), ((1 << 20, 1 << 20), (0, 0))):
        tensor = tensor_pickle(sizes, strides)[2:-1]
        data = archive(b"\x80\x02" + tensor + _pickled(np.ones(1))[2:-1] + b"\x86.")
        with _bounded(), pytest.raises(CheckpointFormatError):
            load_object("x", data, weights_only=True)


def test_impossible_tensors_within_values_are_refused() -> None:
    """An integer tensor with requires_grad is refused."""
    tail = _pickled(np.ones(1))[2:-1] + b"\x86."
    graded = tensor_pickle((2,), (1,), storage=STORAGE.replace(b"FloatStorage", b"LongStorage"))
    graded = graded[2:-1].replace(b"\x89", b"\x88")
    data = archive(b"\x80\x02" + graded + tail, {"0": bytes(32)})
    with pytest.raises(CheckpointFormatError):
        load_object("x", data, weights_only=True)


def test_fuzzed_pickles() -> None:
    """Randomly changed pickles with valid checksums give a consistent index, a value or a typed error."""
    state = {"a": torch.arange(6.0).view(2, 3).t(), "n": {0: [torch.ones(2), 1.5, "x"], "s": (2, None)}}
    numbers = [np.zeros(2, [("a", "<i4"), ("b", "<f8", (2,))]), np.datetime64("2026-01-02"), {"a"}]
    whole = zipfile.ZipFile(BytesIO(saved(state))).read("archive/data.pkl")
    random_, count = random.Random(5), Counter[str]()
    for data in (whole, pickle.dumps(numbers, protocol=2)):
        for _ in range(250):
            changed = bytearray(data)
            for _ in range(random_.randrange(1, 4)):
                changed[random_.randrange(len(changed))] = random_.randrange(256)
            blob = archive(bytes(changed), {"0": bytes(24), "1": bytes(8)})
            for read in (lambda blob: index_of(blob).check(), _value_of):
                try:
                    read(blob)
                    count[read.__name__] += 1
                except CheckpointError:
                    count["refused"] += 1
    assert min(count.values()) > 5, count  # each outcome occurred


def _value_of(blob: bytes) -> None:
    load_object("x", blob, weights_only=True)


def test_a_hostile_object_is_listed_as_pickled(tmp_path: Any) -> None:
    """`show` lists the value without decoding, and runs no code."""
    dcp.save({"x": np.array([print])}, checkpoint_id=str(tmp_path / "c"))
    (value,) = run("show", tmp_path / "c", "--objects", "--json").json["objects"]
    assert value["fqn"] == "x" and "print" not in str(value.get("value"))
    with pytest.raises(UnsafeObjectError):
        dcp.load({"x": None}, checkpoint_id=str(tmp_path / "c"))
