"""Bytes of the notes beside a checkpoint. Internal: a pure codec of a file that others read, and a pin."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dcp
from dcp.errors import CheckpointFormatError, CorruptCheckpointError, UnsupportedFormatError
from dcp.steps.notes import MAX_NOTES_BYTES, Deleting, Notes, Verified, decode_notes, encode_notes
from tests.support.manager_runs import command, manager_of, state_at

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"
FULL = Notes(
    pinned=True,
    verified=Verified("0a1b2c3d", 1.5e9, False, "file-size: __0_0.0a1b2c3d.distcp has 3 bytes"),
    deleting=Deleting("0a1b2c3d", 1.5e9, ("", "0a1b2c3d"), 1.4e9),
    others={"tags": ["good"], "later": {"x": 1}},
)


def sealed(fields: Any) -> bytes:
    """A file of these fields with the right checksum, by msgpack and zlib alone."""
    body = msgpack.packb({**fields, "crc32": 0xFFFFFFFF})[:-4]
    return bytes(body + struct.pack(">I", zlib.crc32(body)))


def fields_of(notes: Notes) -> dict[str, Any]:
    """What a second reader makes of a file."""
    fields = msgpack.unpackb(encode_notes(notes))
    assert isinstance(fields, dict)
    del fields["crc32"]
    return fields


@pytest.mark.parametrize("notes", [Notes(), Notes(pinned=True), FULL])
def test_what_is_written_is_read(notes: Notes) -> None:
    """Every field comes back, entries of later versions included."""
    assert decode_notes(encode_notes(notes)) == notes
    assert sealed(fields_of(notes)) == encode_notes(notes)


def test_the_document_has_the_bytes() -> None:
    """docs/format.md names every key, and the bytes it shows are those written."""
    section = DOCUMENT.read_text(encoding="utf-8").split("## 8. Notes")[1]
    shown = re.findall(r"^(?:[0-9a-f]{2} ?)+$", section, re.MULTILINE)
    assert bytes.fromhex(" ".join(shown)) == encode_notes(Notes(pinned=True))
    fields = fields_of(replace(FULL, others={}))
    for key in [*fields, *fields["verified"], *fields["deleting"]]:
        assert f"`{key}`" in section, key


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
def test_damage_is_found(position: int, bit: int, cut: bool) -> None:
    """A flipped bit or a missing end is an error."""
    data = bytearray(encode_notes(FULL))
    position %= len(data)
    damaged = data[:position] if cut else data
    if not cut:
        data[position] ^= 1 << bit
    with pytest.raises(CorruptCheckpointError):
        decode_notes(bytes(damaged))


@given(data=st.binary(max_size=200))
def test_any_bytes_with_a_right_checksum_are_notes_or_an_error(data: bytes) -> None:
    """Hostile files raise nothing but the documented errors."""
    body = data + b"\xa5crc32\xce"
    with pytest.raises((CheckpointFormatError, CorruptCheckpointError)):
        decode_notes(body + struct.pack(">I", zlib.crc32(body)))


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "other kind": lambda f: f | {"kind": "dcphub.manifest"},
    "no kind": lambda f: {name: value for name, value in f.items() if name != "kind"},
    "no version": lambda f: f | {"version": None},
    "odd version": lambda f: f | {"version": [1, True]},
    "pin is no bool": lambda f: f | {"pinned": 1},
    "no pin": lambda f: {name: value for name, value in f.items() if name != "pinned"},
    "verified is no map": lambda f: f | {"verified": [1]},
    "verified lacks ok": lambda f: f | {"verified": {"save_id": "x", "time": 1.0, "what": ""}},
    "time is no float": lambda f: f | {"verified": f["verified"] | {"time": "now"}},
    "owners are no list": lambda f: f | {"deleting": f["deleting"] | {"owners": "0a"}},
    "an owner is no string": lambda f: f | {"deleting": f["deleting"] | {"owners": [1]}},
    "too deep": lambda f: f | {"x": nested(100)},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_writer_makes_is_refused(name: str) -> None:
    """Wrong types and missing entries are format errors, not later surprises."""
    with pytest.raises(CheckpointFormatError):
        decode_notes(sealed(HOSTILE[name](fields_of(FULL))))


def test_sizes_and_versions() -> None:
    """Too large is refused both ways; a newer minor version is read, another major one is not."""
    with pytest.raises(ValueError, match="1048576 bytes"):
        encode_notes(Notes(others={"x": "y" * MAX_NOTES_BYTES}))
    with pytest.raises(CheckpointFormatError, match="limit"):
        decode_notes(bytes(MAX_NOTES_BYTES + 1))
    assert decode_notes(sealed(fields_of(FULL) | {"version": [1, 9]})) == FULL
    with pytest.raises(UnsupportedFormatError, match="newer dcphub"):
        decode_notes(sealed(fields_of(FULL) | {"version": [2, 0]}))


def test_notes_of_a_newer_major_version_are_not_replaced(tmp_path: Path) -> None:
    """Neither a pin nor a deletion is tried: what would be lost is not known."""
    with manager_of(tmp_path, mode="sync", verify_saved="off") as manager:
        manager.save(1, state_at(1))
        notes = tmp_path / "step-00000001" / "notes.msgpack"
        notes.write_bytes(data := sealed(fields_of(FULL) | {"version": [2, 0]}))
        with pytest.raises(UnsupportedFormatError):
            manager.unpin(1)
    assert command("rm", tmp_path / "step-00000001", "--yes").status != 0
    assert notes.read_bytes() == data
    assert dcp.open_index(tmp_path / "step-00000001").user["step"] == 1
