"""Plain data. Internal: pure; exact types come back, and everything else is refused."""

from __future__ import annotations

import collections
import enum
import struct
import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.storage.errors import CheckpointFormatError
from dcp.storage.formats.plain import MAX_PLAIN_BYTES, MAX_PLAIN_DEPTH, decode_plain, encode_plain
from tests.support.examples import examples

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(2**200), max_value=2**200)
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(), max_size=20)
    | st.binary(max_size=20)
)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=15,
)


def bits(value: Any) -> Any:
    """``value`` as something that compares by type and, for floats, by bits."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("<d", value)
    if kind is complex:
        return kind, struct.pack("<dd", value.real, value.imag)
    if kind in (list, tuple):
        return kind, [bits(item) for item in value]
    if kind is dict:
        return kind, [(bits(key), bits(item)) for key, item in value.items()]
    return kind, value


@examples(200)
@given(values)
def test_round_trip(value: Any) -> None:
    """Values come back with exact types, order of keys, and the very bits of floats."""
    encoded = encode_plain(value)
    assert encoded is not None
    assert bits(decode_plain(encoded)) == bits(value)


class Color(enum.IntEnum):
    """An int by inheritance."""

    RED = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        frozenset(),
        bytearray(b"x"),
        memoryview(b"x"),
        Color.RED,
        Point(1, 2),
        collections.OrderedDict(a=1),
        np.float64(1.0),
        np.zeros(2),
        range(3),
        msgpack.ExtType(1, b""),
        msgpack.Timestamp(1),
        [object()],
        {"a": (1, {2: Color.RED})},
        {Color.RED: 1},
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_not_plain(value: Any) -> None:
    """A subclass or foreign object, at any depth, is refused: it would come back as something else."""
    assert encode_plain(value) is None


def test_caps() -> None:
    """Values that are too large, too deep or contain themselves are not plain, and cost little to refuse."""
    deepest: Any = 1
    for _ in range(MAX_PLAIN_DEPTH):
        deepest = [deepest]
    assert decode_plain(encode_plain(deepest) or b"") == deepest
    assert encode_plain([deepest]) is None
    assert encode_plain("x" * MAX_PLAIN_BYTES) is None
    assert encode_plain(list(range(MAX_PLAIN_BYTES))) is None
    assert encode_plain(1 << (8 * MAX_PLAIN_BYTES)) is None
    cycle: list[Any] = []
    cycle.append(cycle)
    assert encode_plain(cycle) is None
    assert encode_plain("x" * MAX_PLAIN_BYTES, limit_bytes=MAX_PLAIN_BYTES + 10) is not None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x92\x01",
        b"\x01\x01",
        b"\xc1",
        b"\xa5abc",
        b"\x82\x01\x01\x01\x02",
        b"\x81\x90\x01",
        b"\x81\x80\x01",
        b"\xc7\x00\x01",
        b"\x92\x01\xc7\x00\x01",
        b"\x91\x92\xc7\x00\x01\xc7\x00\x01",
        b"\x81\xc7\x00\x01\x01",
        b"\xd4\x02\x00",
        b"\xd4\x09\x00",
        b"\xd6\xff\x00\x00\x00\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xa2\xff\xfe",
        b"\x91" * (MAX_PLAIN_DEPTH + 1) + b"\x01",
        b"\x91" * 60_000,
        b"\xdd\x00\x00\xff\xf0" * 13_000,
        b"\x01" * (MAX_PLAIN_BYTES + 1),
    ],
    ids=lambda data: data[:12].hex(),
)
def test_hostile_bytes_are_refused(data: bytes) -> None:
    """Truncated, doubled, over-deep, unhashable and lying input gives the typed error, without memory."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointFormatError):
            decode_plain(data)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
