"""Values of numpy, the standard library and classes, and the objects that equal them."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import io
import pathlib
import uuid
from typing import Any, Final

import numpy as np
import torch

from tests.support.values import raw

__all__ = ["ARRAYS", "SCALARS", "STDLIB", "buffer_at", "same"]

ARRAYS: Final[dict[str, np.ndarray[Any, Any]]] = {
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
SCALARS: Final[dict[str, Any]] = {
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


def buffer_at(data: bytes, place: int) -> io.BytesIO:
    """Return a buffer of ``data``, read up to ``place``."""
    buffer = io.BytesIO(data)
    buffer.seek(place)
    return buffer


STDLIB: Final[dict[str, Any]] = {
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
    "buffer": buffer_at(b"a\xff" * 300, 7),
    "buffers": [io.BytesIO(), buffer_at(b"end", 3)],
    "defaults": (collections.defaultdict(list, a=[1]),),
    "history": [datetime.date(2026, 1, 2), (np.float64(1), b"")],
}


def same(one: Any, other: Any) -> bool:
    """Return True if types, dtypes, shapes, orders and values are equal at all levels."""
    if type(one) is not type(other):
        return False
    match one:
        case torch.Tensor():
            return bool(one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other))
        case np.ndarray():
            shape = one.dtype == other.dtype and one.shape == other.shape
            return bool(shape and (one.dtype.hasobject or one.tobytes() == other.tobytes()))
        case dict():
            versions = getattr(one, "_metadata", None) == getattr(other, "_metadata", None)  # of modules
            return versions and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
        case list() | tuple() | collections.deque():
            is_as_long = len(one) == len(other) and getattr(one, "maxlen", 0) == getattr(other, "maxlen", 0)
            return is_as_long and all(map(same, one, other))
        case io.BytesIO():
            return bool(one.getvalue() == other.getvalue() and one.tell() == other.tell())
    return bool(one == other)
