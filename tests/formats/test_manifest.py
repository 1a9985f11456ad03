"""Manifests. Internal: any index and plain value, hostile columns under valid checksums, golden bytes."""

from __future__ import annotations

import collections
import enum
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp.storage.errors import CheckpointFormatError, CorruptCheckpointError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.native.manifest import decode_manifest, encode_manifest, summarize_manifest
from dcp.storage.formats.plain import MAX_PLAIN_BYTES, MAX_PLAIN_DEPTH, decode_plain, encode_plain
from tests.support.examples import examples
from tests.support.formats_indexes import assert_same, indexes_of_torch, small_index

GOLDEN = Path(__file__).parent / "golden" / "manifest-1.0.msgpack"
Change = Callable[[dict[str, Any]], object]


def resealed(change: Change) -> bytes:
    """Return the small index as a manifest after ``change(fields)``, with a valid checksum."""
    fields = msgpack.unpackb(encode_manifest(small_index()))
    del fields["crc32"]
    change(fields)
    # one more key in the map than packed here; a map of fewer than 16 keys has a head of one byte
    body: bytes = msgpack.packb(fields)
    body = bytes([body[0] + 1]) + body[1:] + b"\xa5crc32\xce"
    return body + struct.pack(">I", zlib.crc32(body))


@examples(100)
@given(indexes_of_torch())
def test_round_trip(index: CheckpointIndex) -> None:
    """An encoded index decodes to equal columns of equal types, and the summary agrees."""
    data = encode_manifest(index)
    assert_same(decode_manifest(data), index)
    summary = summarize_manifest(data)
    assert (summary.format, summary.file_count) == (index.format, len(index.files))


def test_golden_bytes() -> None:
    """A committed manifest of version 1.0 can be decoded, and is still written byte by byte."""
    decoded = decode_manifest(GOLDEN.read_bytes())
    assert_same(decoded, small_index())
    assert (decoded.provenance, decoded.user) == (small_index().provenance, small_index().user)
    assert encode_manifest(small_index()) == GOLDEN.read_bytes()
    assert summarize_manifest(GOLDEN.read_bytes()).bytes == 1980


def test_every_flipped_bit_is_found() -> None:
    """The CRC covers the whole file."""
    data = encode_manifest(small_index())
    for bit in range(0, 8 * len(data), 5):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(CorruptCheckpointError):
            decode_manifest(bytes(damaged))


def drop(section: str, key: str) -> Change:
    """Return a change that removes one key."""
    return lambda fields: fields[section].pop(key)


def put(section: str, key: str, value: Any) -> Change:
    """Return a change that replaces the value of one key."""
    return lambda fields: fields[section].__setitem__(key, value)


OF_THE_SUMMARY: list[Change] = [
    lambda fields: fields.pop("files"),
    lambda fields: fields.update(files=7),
    drop("tensors", "shapes"),
    lambda fields: fields.update(user=[1, 0, b"\x01"]),
    lambda fields: fields.update(user=[1, 0, b"\xc0"]),
    lambda fields: fields.update(provenance=[1, 0, b"\xc1"]),
    lambda fields: fields.update(format=7),
    lambda fields: fields.update(torch_metadata_crc=-1),
]


@pytest.mark.parametrize(
    "change",
    [
        drop("chunks", "crcs"),
        lambda fields: fields.pop("objects"),
        lambda fields: fields.update(kind="something else"),
        lambda fields: fields.update(version="1.0"),
        put("tensors", "dtypes", [2, None, 200, 0, 0, b""]),
        put("tensors", "ndims", [2, None, -1, 0, 0, b""]),
        put("tensors", "ndims", [2, None, 65, 0, 0, b""]),
        put("tensors", "stride_rows", [1, None, 9, 0, 0, b""]),
        put("chunks", "files", [3, None, 7, 0, 0, b""]),
        put("chunks", "sizes", [4, None, 1 << 62, 0, 0, b""]),
        put("chunks", "record_offsets", [3, None, 1 << 63, 0, 0, b""]),
        put("chunks", "record_offsets", [3, 1, 1, [], 0, b""]),
        put("chunks", "record_offsets", [3, None, 0, 1, 1, b"not zlib"]),
        put("chunks", "record_offsets", [3, None, 0, 1, 9, b"123"]),
        put("chunks", "record_offsets", [3, None, 0, 3, 0, b"123456789"]),
        put("chunks", "record_offsets", "column"),
        put("files", "names", [[2, None, 4, 0, 0, b""], [8, 0, b"../a../b"]]),
        put("files", "names", [[2, None, 1, 0, 0, b""], [2, 0, b"\xff\xfe"]]),
        put("files", "names", [[2, None, 5, 0, 0, b""], [2, 0, b"ab"]]),
        put("objects", "plain", [2, None, 5, 0, 0, b""]),
        put("tensors", "digests", [[2, None, 16, 0, 0, b""], [1 << 40, 0, b""]]),
        put("tensors", "digests", 5),
        lambda fields: fields.update(planner_data=[1]),
        *OF_THE_SUMMARY,
    ],
)
def test_inconsistent_fields_are_refused(change: Change) -> None:
    """An inconsistent field under a valid checksum is a format error, whichever the field."""
    with pytest.raises(CheckpointFormatError):
        decode_manifest(resealed(change))
    if change in OF_THE_SUMMARY:
        with pytest.raises(CheckpointFormatError):
            summarize_manifest(resealed(change))


@pytest.mark.parametrize(
    ("column", "limit"),
    [
        ([1 << 40, None, 7, 0, 0, b""], 64),
        ([1 << 40, 7, 1, 0, 0, b""], 64),
        ([1 << 26, None, 7, 0, 0, b""], 64),
        ([1 << 40, None, 0, 8, 0, b""], 64),
        ([3, None, 0, 1, 1, "bomb"], 16),
        ([1 << 28, None, 0, 1, 1, "bomb"], 64),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_small_manifest_cannot_claim_a_large_index(column: list[Any], limit: int) -> None:
    """Constant columns with a huge count and zlib bombs are refused before memory is allocated for them."""
    bomb = zlib.compress(bytes(1 << 28), 1) if column[-1] == "bomb" else b""
    data = resealed(put("chunks", "files", [*column[:-1], bomb]))
    assert refused_with_bytes(decode_manifest, data) < limit << 20


def refused_with_bytes(decode: Callable[[bytes], object], data: bytes) -> int:
    """Return the peak memory of decoding ``data``, which must fail."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointFormatError):
            decode(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# -- plain values --------------------------------------------------------------------------------------------

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
    """Return ``value`` in a form that compares types and, for floats, bits."""
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
def test_plain_values_round_trip(value: Any) -> None:
    """Decoded values have the exact types, order of keys, and bits of floats."""
    encoded = encode_plain(value)
    assert encoded is not None
    assert bits(decode_plain(encoded)) == bits(value)


class Color(enum.IntEnum):
    """Subclass of int."""

    RED = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        bytearray(b"x"),
        Color.RED,
        Point(1, 2),
        collections.OrderedDict(a=1),
        np.float64(1.0),
        msgpack.ExtType(1, b""),
        [object()],
        {"a": (1, {2: Color.RED})},
        {Color.RED: 1},
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_not_plain(value: Any) -> None:
    """A subclass or foreign object, at any depth, is refused, because decoding would return another type."""
    assert encode_plain(value) is None


CUT_OR_ODD = (
    "9201 0101 c1 a5616263 8201010102 819001 818001 c70001 9201c70001 9192c70001c70001 81c7000101 d40200"
)
CUT_OR_ODD += " d40900 d6ff00000001 ddffffffff dfffffffff c6ffffffff dbffffffff c9ffffffff01 a2fffe"
HOSTILE = [b"", *map(bytes.fromhex, CUT_OR_ODD.split()), b"\x91" * (MAX_PLAIN_DEPTH + 1) + b"\x01"]
HOSTILE += [b"\x91" * 60_000, b"\xdd\x00\x00\xff\xf0" * 13_000, b"\x01" * (MAX_PLAIN_BYTES + 1)]


@pytest.mark.parametrize("data", HOSTILE, ids=lambda data: data[:12].hex())
def test_hostile_bytes_are_refused(data: bytes) -> None:
    """Truncated, doubled, too deep, unhashable or inconsistent input is a typed error in little memory."""
    assert refused_with_bytes(decode_plain, data) < 4 << 20
