"""The notes file of a checkpoint: bytes as documented, and unreadable notes count as a pin."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dcp
from dcp.errors import UnsupportedFormatError
from tests.support.command import run as command
from tests.support.manager_runs import manager_of, state_at

DOCUMENT = Path(__file__).parents[2] / "docs/reference/format.md"


def sealed(fields: Any) -> bytes:
    """Encode fields with the right checksum, by msgpack and zlib alone."""
    body = msgpack.packb({**fields, "crc32": 0xFFFFFFFF})[:-4]
    return bytes(body + struct.pack(">I", zlib.crc32(body)))


def fields_of(data: bytes) -> dict[str, Any]:
    """Decode a notes file by msgpack alone."""
    fields: dict[str, Any] = msgpack.unpackb(data)
    del fields["crc32"]
    return fields


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dcp.CheckpointManager, Path]]:
    """Yield a manager with one step, and the path of its notes."""
    root = tmp_path_factory.mktemp("notes")
    with manager_of(root, mode="sync", handle_sigterm=False) as manager:
        manager.save(1, state_at(1))
        yield manager, root / "step-00000001" / "notes.msgpack"


Run = tuple[dcp.CheckpointManager, Path]


@pytest.fixture(scope="module")
def whole(run: Run) -> dict[str, Any]:
    """Return the fields of the notes of a step that is verified and not pinned."""
    manager, path = run
    assert manager.wait(240)
    fields = fields_of(path.read_bytes())
    assert fields["verified"]["ok"] is True and fields["pinned"] is False
    return fields


def test_the_docs_have_the_bytes_of_notes(tmp_path: Path) -> None:
    """docs/reference/format.md names every key, and its example has the bytes of a pinned step."""
    with manager_of(tmp_path, mode="sync", verify_saved="off") as manager:
        manager.save(1, state_at(1))
        manager.pin(1)
    section = DOCUMENT.read_text(encoding="utf-8").split("## 8. Notes")[1]
    shown = re.findall(r"^(?:[0-9a-f]{2} ?)+$", section, re.MULTILINE)
    data = (tmp_path / "step-00000001" / "notes.msgpack").read_bytes()
    assert bytes.fromhex(" ".join(shown)) == data == sealed(fields_of(data))
    for key in [*fields_of(data), "save_id", "ok", "what", "owners"]:
        assert f"`{key}`" in section, key


def test_entries_of_a_later_minor_version_are_kept(run: Run, whole: dict[str, Any]) -> None:
    """Unknown fields of a later minor version are kept by a change of another field."""
    manager, path = run
    path.write_bytes(sealed(whole | {"version": [1, 9], "tags": ["good"], "later": {"x": 1}}))
    assert manager.pinned() == []
    manager.pin(1)
    changed = fields_of(path.read_bytes())
    assert (changed["pinned"], changed["tags"], changed["later"]) == (True, ["good"], {"x": 1})
    assert changed["verified"] == whole["verified"]


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
def test_damage_counts_as_a_pin(run: Run, whole: dict[str, Any], position: int, bit: int, cut: bool) -> None:
    """A flipped bit or a truncation counts as a pin, because the notes may have held one."""
    manager, path = run
    data = bytearray(sealed(whole))
    position %= len(data)
    if not cut:
        data[position] ^= 1 << bit
    path.write_bytes(data[:position] if cut else data)
    assert manager.pinned() == [1]


@given(data=st.binary(max_size=200))
def test_hostile_bytes_count_as_a_pin(run: Run, data: bytes) -> None:
    """Arbitrary bytes with a right checksum count as a pin, and have no other effect."""
    manager, path = run
    body = data + b"\xa5crc32\xce"
    path.write_bytes(body + struct.pack(">I", zlib.crc32(body)))
    assert manager.pinned() == manager.all_steps() == [1]


DELETING = {"save_id": "0a", "time": 1.0, "owners": ["0a"], "newest": 1.0}
HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "other kind": lambda f: f | {"kind": "dcphub.manifest"},
    "odd version": lambda f: f | {"version": [1, True]},
    "pin is not a bool": lambda f: f | {"pinned": 1},
    "time is not a float": lambda f: f | {"verified": f["verified"] | {"time": "now"}},
    "an owner is not a string": lambda f: f | {"deleting": DELETING | {"owners": [1]}},
    "too large": lambda f: f | {"x": "y" * (1 << 20)},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_invalid_fields_count_as_a_pin(run: Run, whole: dict[str, Any], name: str) -> None:
    """Wrong types, missing fields and an excessive size count as a pin."""
    manager, path = run
    path.write_bytes(sealed(HOSTILE[name](whole)))
    assert manager.pinned() == [1]


def test_notes_of_a_newer_major_version_are_not_replaced(run: Run, whole: dict[str, Any]) -> None:
    """Neither an unpin nor a deletion replaces notes of a newer major version, whose content is unknown."""
    manager, path = run
    path.write_bytes(data := sealed(whole | {"version": [2, 0]}))
    with pytest.raises(UnsupportedFormatError, match="newer dcphub"):
        manager.unpin(1)
    assert command("rm", path.parent, "--yes").status != 0
    assert path.read_bytes() == data and manager.all_steps() == [1]
