from __future__ import annotations

import re
import struct
import uuid
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dcp
from dcp.inspection.verification import verify
from dcp.steps.notes import (
    MAX_NOTES_BYTES,
    Deleting,
    Notes,
    Verified,
    decode_notes,
    encode_notes,
    read_notes,
    update_notes,
)
from dcp.storage.commit_names import NOTES_NAME
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointFormatError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from dcp.storage.stores import MemoryStore, PosixStore
from dcp.storage.stores.faults import Fault, FaultInjectingStore
from tests.support.versions import listing, save_version, seen_by_dcp, seen_by_stock

DOCUMENT = Path(__file__).parents[3] / "docs" / "format.md"
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


@pytest.fixture
def store() -> MemoryStore:
    """A fresh folder."""
    return MemoryStore(f"notes-{uuid.uuid4().hex}")


# -- bytes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("notes", [Notes(), Notes(pinned=True), FULL])
def test_what_is_written_is_read(notes: Notes) -> None:
    """Every field comes back, entries of later versions included."""
    assert decode_notes(encode_notes(notes)) == notes
    assert sealed(fields_of(notes)) == encode_notes(notes)


def test_the_document_says_the_bytes() -> None:
    """docs/format.md names every key, and the bytes it shows are those written."""
    section = DOCUMENT.read_text(encoding="utf-8").split("## 8. Notes")[1]
    shown = re.findall(r"^(?:[0-9a-f]{2} ?)+$", section, re.MULTILINE)
    assert bytes.fromhex(" ".join(shown)) == encode_notes(Notes(pinned=True))
    fields = fields_of(replace(FULL, others={}))
    for key in [*fields, *fields["verified"], *fields["deleting"]]:
        assert f"`{key}`" in section, key


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
@settings(max_examples=60, deadline=None)
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
@settings(max_examples=200, deadline=None)
def test_any_bytes_with_a_right_checksum_are_notes_or_an_error(data: bytes) -> None:
    """Hostile files raise nothing but the documented errors."""
    body = data + b"\xa5crc32\xce"
    try:
        decode_notes(body + struct.pack(">I", zlib.crc32(body)))
    except (CheckpointFormatError, CorruptCheckpointError):
        return
    raise AssertionError("random bytes were taken for notes")


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
    "too deep": lambda f: f | {"x": _nested(100)},
}


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_writer_produces_is_refused(name: str) -> None:
    """Wrong types and missing entries are format errors, not later surprises."""
    with pytest.raises(CheckpointFormatError):
        decode_notes(sealed(HOSTILE[name](fields_of(FULL))))


def test_a_crc_that_is_no_entry_of_the_map() -> None:
    """The mark and the checksum inside of the last string: still notes, or an error, but no crash."""
    fields = {**fields_of(Notes()), "x": b"\xa5crc32\xce\0\0\0\0"}
    body = msgpack.packb(fields)[:-4]
    data = body + struct.pack(">I", zlib.crc32(body))
    assert decode_notes(data).others.keys() == {"x"}


def test_sizes_and_versions() -> None:
    """Too large is refused both ways; a newer minor version is read, another major one is not."""
    with pytest.raises(ValueError, match="1048576 bytes"):
        encode_notes(Notes(others={"x": "y" * MAX_NOTES_BYTES}))
    with pytest.raises(CheckpointFormatError, match="limit"):
        decode_notes(bytes(MAX_NOTES_BYTES + 1))
    assert decode_notes(sealed(fields_of(FULL) | {"version": [1, 9]})) == FULL
    with pytest.raises(UnsupportedFormatError, match="newer dcphub"):
        decode_notes(sealed(fields_of(FULL) | {"version": [2, 0]}))


def test_about_which_commit() -> None:
    """Verification and tombstone mean one commit; the pin is the folder's."""
    assert FULL.verified_of("0a1b2c3d") == FULL.verified
    assert FULL.verified_of("another") is None
    assert FULL.is_deleting("0a1b2c3d")
    assert not FULL.is_deleting("another")
    assert Notes().verified_of("") is None
    assert not Notes().is_deleting("")


# -- in a folder ---------------------------------------------------------------------------------------------


def test_changes_are_published(store: MemoryStore) -> None:
    """None at first; each change sees the one before; a change to nothing new writes nothing."""
    assert read_notes(store) == Notes()
    assert update_notes(store, lambda notes: replace(notes, pinned=True)) == Notes(pinned=True)
    update_notes(store, lambda notes: replace(notes, verified=FULL.verified))
    assert read_notes(store) == Notes(pinned=True, verified=FULL.verified)
    watched = FaultInjectingStore(store)
    update_notes(watched, lambda notes: replace(notes, pinned=True))
    assert watched.counts["publish"] == 0


def test_no_change_is_lost_to_another(tmp_path: Path) -> None:
    """Threads that note at once, each with a store of its own, all find their change in the end."""

    def note(number: int) -> None:
        for turn in range(4):
            key = f"{number}-{turn}"
            update_notes(
                PosixStore(tmp_path),
                lambda notes: replace(notes, others={**notes.others, key: 1}),  # noqa: B023 - called at once
                durable=False,
            )

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(note, range(4)))
    assert len(read_notes(PosixStore(tmp_path)).others) == 16


def test_a_change_that_others_always_overtake_gives_up(store: MemoryStore) -> None:
    """It ends with an error instead of trying for ever."""
    count = iter(range(1000))

    def overtake(_: object) -> None:
        store.publish(NOTES_NAME, encode_notes(Notes(others={"n": next(count)})), durable=False)

    rival = FaultInjectingStore(store, Fault("publish", onwards=True, hook=overtake))
    with pytest.raises(CheckpointConflictError, match="replaced by others"):
        update_notes(rival, lambda notes: replace(notes, pinned=True))
    assert not read_notes(store).pinned


def test_damaged_notes_become_a_pin(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    """Reading names the file; a change finds them pinned, because they may have been, and repairs them."""
    store.publish(NOTES_NAME, encode_notes(FULL)[:-1], durable=False)
    with pytest.raises(CorruptCheckpointError) as caught:
        read_notes(store)
    assert caught.value.path == store.path_of(NOTES_NAME)
    update_notes(store, lambda notes: replace(notes, verified=FULL.verified))
    assert read_notes(store) == Notes(pinned=True, verified=FULL.verified)
    assert "counts as pinned" in caplog.text


def test_notes_of_a_newer_major_version_are_not_replaced(store: MemoryStore) -> None:
    """Nobody knows what would be lost."""
    data = sealed(fields_of(FULL) | {"version": [2, 0]})
    store.publish(NOTES_NAME, data, durable=False)
    with pytest.raises(UnsupportedFormatError):
        update_notes(store, lambda notes: replace(notes, pinned=False))
    assert store.read(NOTES_NAME, limit_bytes=1000) == data


def test_notes_disturb_nobody_else(tmp_path: Path) -> None:
    """verify reports no stray, loads work, and a save over the checkpoint leaves them alone."""
    folder = tmp_path / "step-1"
    save_version(folder, 1)
    update_notes(PosixStore(folder), lambda notes: replace(notes, pinned=True))
    assert verify(folder).ok
    assert (seen_by_dcp(folder), seen_by_stock(folder)) == (1, 1)
    save_version(folder, 2)
    assert verify(folder).ok
    assert (seen_by_dcp(folder), seen_by_stock(folder)) == (2, 2)
    assert listing(folder) == {"manifest": 1, "metadata": 1, "data": 1, NOTES_NAME: 1}
    assert read_notes(PosixStore(folder)).pinned


def test_notes_alone_are_no_checkpoint(tmp_path: Path) -> None:
    """What a deletion may leave for a moment loads as nothing."""
    update_notes(PosixStore(tmp_path), lambda notes: replace(notes, pinned=True))
    assert seen_by_dcp(tmp_path) == "absent"
    with pytest.raises(dcp.CheckpointNotFoundError):
        verify(tmp_path)
