"""Manifests. Internal: any index at all, hostile columns behind a checksum that fits, and golden bytes."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given

from dcp.storage.errors import (
    CheckpointFormatError,
    CorruptCheckpointError,
    PlanError,
    UnsupportedFormatError,
)
from dcp.storage.formats.checksums import crc32
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.formats.native.manifest import decode_manifest, encode_manifest
from dcp.storage.formats.native.manifest_summary import summarize_manifest
from tests.support.examples import examples
from tests.support.formats_indexes import assert_same_index, indexes, small_index

GOLDEN = Path(__file__).parent / "golden" / "manifest-1.0.msgpack"


def resealed(change: Any) -> bytes:
    """The small index' manifest after ``change(fields)``, with a checksum that fits again."""
    fields = msgpack.unpackb(encode_manifest(small_index()))
    change(fields)
    fields["crc32"] = fields.pop("crc32")
    body: bytes = msgpack.packb({key: value for key, value in fields.items() if key != "crc32"})
    # one more entry in the map than packed here; the map has fewer than 16, so its head is one byte
    body = bytes([body[0] + 1]) + body[1:] + b"\xa5crc32\xce"
    return body + struct.pack(">I", crc32(body))


@examples(100)
@given(indexes())
def test_round_trip(index: CheckpointIndex) -> None:
    """What is encoded is decoded again, every column with its type."""
    index.check()
    assert_same_index(decode_manifest(encode_manifest(index)), index)


def test_golden_bytes() -> None:
    """The manifest of version 1.0, committed once, is decoded for ever and still written byte by byte."""
    assert_same_index(decode_manifest(GOLDEN.read_bytes()), small_index())
    assert encode_manifest(small_index()) == GOLDEN.read_bytes()


def test_every_flipped_bit_is_noticed() -> None:
    """The CRC covers the whole file."""
    data = encode_manifest(small_index())
    for bit in range(0, 8 * len(data), 5):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(CorruptCheckpointError):
            decode_manifest(bytes(damaged))


def test_a_newer_minor_version_with_new_keys_is_read() -> None:
    """Additions do not break this reader: keys that it does not know are passed over."""

    def add(fields: dict[str, Any]) -> None:
        fields["version"] = [1, 7]
        fields["novelty"] = {"x": [1, 2, 3]}
        fields["chunks"]["novelty"] = 1

    assert_same_index(decode_manifest(resealed(add)), small_index())


def test_a_newer_major_version_is_refused() -> None:
    """A format that this reader would misread is refused, and the message says what to do."""

    def bump(fields: dict[str, Any]) -> None:
        fields["version"] = [2, 0]

    with pytest.raises(UnsupportedFormatError, match=r"version 2\.0.*newer dcphub"):
        decode_manifest(resealed(bump))


def drop(section: str, key: str) -> Any:
    """A change that removes one key."""
    return lambda fields: fields[section].pop(key)


def put(section: str, key: str, value: Any) -> Any:
    """A change that replaces one key's value."""
    return lambda fields: fields[section].__setitem__(key, value)


@pytest.mark.parametrize(
    "change",
    [
        drop("chunks", "crcs"),
        drop("tensors", "fqns"),
        lambda fields: fields.pop("objects"),
        lambda fields: fields.update(kind="something else"),
        lambda fields: fields.update(version="1.0"),
        lambda fields: fields.update(torch_metadata_crc=-1),
        lambda fields: fields.update(user=[1, 0, b"\x01"]),
        put("tensors", "dtypes", [2, None, 200, 0, 0, b""]),
        put("tensors", "dtypes", [2, None, 300, 0, 0, b""]),
        put("tensors", "ndims", [2, None, -1, 0, 0, b""]),
        put("tensors", "ndims", [2, None, 65, 0, 0, b""]),
        put("tensors", "stride_rows", [1, None, 9, 0, 0, b""]),
        put("tensors", "stride_orders", [2, None, 1, 0, 0, b""]),
        put("chunks", "files", [3, None, 7, 0, 0, b""]),
        put("chunks", "sizes", [4, None, 1 << 62, 0, 0, b""]),
        put("chunks", "sizes", [4, None, -1, 0, 0, b""]),
        put("chunks", "record_offsets", [3, None, 1 << 63, 0, 0, b""]),
        put("chunks", "record_offsets", [3, 1, 1, [], 0, b""]),
        put("chunks", "record_offsets", [3, None, 0, 1, 1, b"not zlib"]),
        put("chunks", "record_offsets", [3, None, 0, 1, 9, b"123"]),
        put("chunks", "record_offsets", [3, None, 0, 3, 0, b"123456789"]),
        put("chunks", "record_offsets", [3, None, 0, 1, 0, b"12"]),
        put("chunks", "record_offsets", [-3, None, 0, 1, 0, b""]),
        put("chunks", "record_offsets", "column"),
        put("files", "names", [[2, None, 4, 0, 0, b""], [8, 0, b"../a../b"]]),
        put("files", "names", [[2, None, 1, 0, 0, b""], [2, 0, b"\xff\xfe"]]),
        put("files", "names", [[2, None, 5, 0, 0, b""], [2, 0, b"ab"]]),
        put("objects", "plain", [2, None, 5, 0, 0, b""]),
        lambda fields: fields.update(planner_data=[1]),
    ],
)
def test_inconsistent_fields_are_refused(change: Any) -> None:
    """A lie under a correct checksum is a format error, whichever field tells it."""
    with pytest.raises(CheckpointFormatError):
        decode_manifest(resealed(change))


@pytest.mark.parametrize(
    "column",
    [
        [1 << 40, None, 7, 0, 0, b""],
        [1 << 40, 7, 1, 0, 0, b""],
        [1 << 26, None, 7, 0, 0, b""],
        [1 << 40, None, 0, 8, 0, b""],
    ],
)
def test_a_small_manifest_cannot_claim_a_large_index(column: list[Any]) -> None:
    """Constant columns of a huge count are refused before memory is taken for them."""
    data = resealed(put("chunks", "files", column))
    assert _peak_bytes(data) < 64 << 20


def test_a_zlib_bomb_is_not_inflated() -> None:
    """A stream that inflates to more than its column declares stops there."""
    bomb = zlib.compress(bytes(1 << 28), 9)
    assert len(bomb) < 1 << 20
    data = resealed(put("chunks", "files", [3, None, 0, 1, 1, bomb]))
    assert _peak_bytes(data) < 16 << 20
    data = resealed(put("chunks", "files", [1 << 28, None, 0, 1, 1, bomb]))
    assert _peak_bytes(data) < 64 << 20


def _peak_bytes(data: bytes) -> int:
    """Peak memory of decoding ``data``, which must fail."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointFormatError):
            decode_manifest(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_what_is_not_plain_is_refused_when_written() -> None:
    """Objects in provenance, user metadata or planner data are named; nothing is stored in part."""
    for changes in ({"user": {"x": object()}}, {"provenance": {"x": {1}}}, {"planner_data": [object()]}):
        with pytest.raises(PlanError, match="cannot be stored in the manifest"):
            encode_manifest(small_index(**changes))


@examples(30)
@given(indexes())
def test_as_the_index(index: CheckpointIndex) -> None:
    """Whatever the index is, and whatever plain data it carries: tuples, large numbers, bytes."""
    data = encode_manifest(index)
    summary = summarize_manifest(data)
    assert summary.format == index.format
    assert summary.file_count == len(index.files)
    known = not (index.file_sizes == UNKNOWN).any()
    assert summary.bytes == (sum(index.file_sizes.tolist()) if known else None)
    assert msgpack.packb(repr(summary.provenance)) == msgpack.packb(repr(dict(index.provenance)))
    assert repr(summary.user) == repr(dict(index.user))
    assert summary.torch_metadata_crc == index.torch_metadata_crc
    assert summary.replaced_torch_metadata_crc == index.replaced_torch_metadata_crc


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.pop("files"),
        lambda fields: fields.update(files=7),
        lambda fields: fields["tensors"].pop("shapes"),
        lambda fields: fields.update(user=[1, 0, b"\xc0"]),
        lambda fields: fields.update(provenance=[1, 0, b"\xc1"]),
        lambda fields: fields.update(format=7),
        lambda fields: fields.update(torch_metadata_crc=-1),
    ],
)
def test_hostile_fields_are_refused(change: Any) -> None:
    """What no writer produces is an error of the format, and no other."""
    with pytest.raises(CheckpointFormatError):
        summarize_manifest(resealed(change))
