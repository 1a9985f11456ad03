"""Conversions whose machine loses power at any instant, and with it what was not synced."""

from __future__ import annotations

import ctypes
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

import dcp
from dcp.conversion.copying.sinks import observers
from dcp.conversion.publishing.ledger import LEDGER_NAME
from dcp.conversion.run import convert
from dcp.storage.errors import StorageError
from dcp.storage.formats.checksums import crc32
from tests.support.power_cuts import Recording

_SIZE = 300


def _framed(data: bytes) -> bytes:
    return struct.pack("<II", len(data), crc32(data)) + data


def _header(ledger: bytes) -> dict[str, Any]:
    (size,) = struct.unpack_from("<I", ledger)
    header: dict[str, Any] = msgpack.unpackb(ledger[8 : 8 + size])
    return header


class _Killed(BaseException):
    """Ends a conversion as a signal would: nothing is cleared away."""


def _save(path: Path, value: int) -> Path:
    dcp.save({"w": torch.full((_SIZE,), value, dtype=torch.int32)}, checkpoint_id=path, no_dist=True)
    return path


def _values(target: Path) -> set[int]:
    state = {"w": torch.zeros(_SIZE, dtype=torch.int32)}
    dcp.load(state, checkpoint_id=target, no_dist=True)
    return set(state["w"].tolist())


def _convert(source: Path, target: Path, to: str) -> None:
    convert(source, target, to=to, executor="inline", overwrite=True)


def _kill_before(source: Path, target: Path, to: str, step: str) -> None:
    """A conversion that is killed there, by itself, and leaves what it has on a disk that keeps it."""

    def observe(op: str, name: str) -> None:
        if op == step:
            raise _Killed

    observers.append(observe)
    try:
        with pytest.raises(_Killed):
            _convert(source, target, to)
    finally:
        observers.remove(observe)


_TARGETS = {"torch": "m.pt", "safetensors": "m.safetensors", "dcp": "m"}
_INSTANTS = [
    pytest.param(to, every, marks=() if every > 1 else pytest.mark.exhaustive, id=f"{to}-{every}")
    for every in (5, 1)
    for to in _TARGETS
]
"""For each format, every fifth instant, of which there are two kinds in turn; or all of them."""


@pytest.mark.parametrize(("to", "every"), _INSTANTS)
def test_what_is_done_of_one_source_is_never_taken_for_another_s(to: str, every: int, tmp_path: Path) -> None:
    """a to m is killed with its work done; b to m begins, and the power goes: a to m, called again, has the
    values of a, whatever of b's beginning, middle and end has reached the disk."""
    a, b = _save(tmp_path / "a", 1), _save(tmp_path / "b", 2)
    work = tmp_path / "work"
    work.mkdir()
    _kill_before(a, work / _TARGETS[to], to, "holes")
    with Recording(work) as recording:
        _convert(b, work / _TARGETS[to], to)
    images = list(recording.images())
    assert len(images) > 20
    for what, make in images[::every]:
        make(work)
        _convert(a, work / _TARGETS[to], to)
        assert _values(work / _TARGETS[to]) == {1}, what


@pytest.mark.parametrize(("to", "every"), _INSTANTS)
def test_a_target_is_the_old_one_or_the_new_one(to: str, every: int, tmp_path: Path) -> None:
    """A replacement that loses power is one of both, whole, and done by another call; a folder's other files
    stay with it."""
    a, b = _save(tmp_path / "a", 1), _save(tmp_path / "b", 2)
    work = tmp_path / "work"
    work.mkdir()
    target = work / ("folder" if to == "safetensors" else _TARGETS[to])
    _convert(a, target, to)
    if to == "safetensors":
        (target / "config.json").write_text("{}")
    with Recording(work) as recording:
        _convert(b, target, to)
    images = list(recording.images())
    assert len(images) > 20
    for what, make in images[::every]:
        make(work)
        assert _values(target) in ({1}, {2}), what
        _convert(b, target, to)
        assert _values(target) == {2}, what
        assert to != "safetensors" or (target / "config.json").read_text() == "{}", what


@pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_folder_replaced_by_two_renames_is_not_lost(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a C library that cannot exchange two folders. What is at the target after a power cut is whole, if
    anything is; another call makes it the new one, and the folder's other files are there."""
    a, b = _save(tmp_path / "a", 1), _save(tmp_path / "b", 2)
    work = tmp_path / "work"
    work.mkdir()
    target = work / "folder"
    _convert(a, target, "safetensors")
    (target / "config.json").write_text("{}")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: None)
    with Recording(work) as recording:
        _convert(b, target, "safetensors")
    images = list(recording.images())
    assert any("rename" in what for what, _ in images)
    for what, make in images[::every]:
        make(work)
        assert not target.exists() or _values(target) in ({1}, {2}), what
        _convert(b, target, "safetensors")
        assert _values(target) == {2}, what
        assert (target / "config.json").read_text() == "{}", what


def test_another_folder_with_the_inode_of_a_copied_one_is_not_taken_for_it(tmp_path: Path) -> None:
    """A killed conversion is restored from a copy, where inodes are others, and the old target has the one
    that is noted, by chance: it is replaced all the same, and by what was done."""
    a, b = _save(tmp_path / "a", 1), _save(tmp_path / "b", 2)
    work = tmp_path / "work"
    target = work / "folder"
    _convert(a, target, "safetensors")
    old = (target / "model.safetensors").read_bytes()
    _kill_before(b, target, "safetensors", "holes")
    (output,) = work.glob("*/output-*")
    shutil.copytree(output, tmp_path / "copy")
    shutil.rmtree(target)
    output.rename(target)
    (target / "model.safetensors").write_bytes(old)
    (tmp_path / "copy").rename(output)
    report = convert(b, target, to="safetensors", executor="inline", overwrite=True)
    assert (_values(target), report.tasks_resumed > 0) == ({2}, True)


@pytest.mark.parametrize(("to", "every"), _INSTANTS)
def test_a_new_target_is_whole_or_not_there(to: str, every: int, tmp_path: Path) -> None:
    """And the same call makes it, whatever is left of the first."""
    a, work = _save(tmp_path / "a", 1), tmp_path / "work"
    work.mkdir()
    target = work / _TARGETS[to]
    with Recording(work) as recording:
        _convert(a, target, to)
    for what, make in list(recording.images())[::every]:
        make(work)
        if target.exists():
            assert _values(target) == {1}, what
        _convert(a, target, to)
        assert _values(target) == {1}, what


_RUBBISH: dict[str, Callable[[bytes], bytes]] = {
    "zeros": lambda data: bytes(len(data)),
    "empty": lambda data: b"",
    "a torn header": lambda data: data[:20],
    "zeros after the header": lambda data: data[:60] + bytes(len(data)),
    "another's file": lambda data: b"not of ours at all, but long enough for the head of an entry",
    "an entry that is a number": lambda data: _framed(b"\x07") + data,
    "an entry that is no msgpack": lambda data: _framed(b"\xc1") + data,
    "a save id that is a path": lambda data: _framed(
        msgpack.packb({**_header(data), "save_id": "../../../x"})
    ),
    "results that are none": lambda data: data + _framed(b"\x07") + _framed(b"\xc1"),
}


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("rubbish", list(_RUBBISH))
def test_a_ledger_that_cannot_be_read_is_none(rubbish: str, resume: bool, tmp_path: Path) -> None:
    """Its size has survived, and its bytes have not: the conversion begins anew, and is right."""
    a, target = _save(tmp_path / "a", 1), tmp_path / "m.pt"
    _kill_before(a, target, "torch", "holes")
    (ledger,) = tmp_path.glob(f".tmp-convert-*/{LEDGER_NAME}")
    ledger.write_bytes(_RUBBISH[rubbish](ledger.read_bytes()))
    report = convert(a, target, to="torch", executor="inline", resume=resume)
    assert report.tasks_resumed == 0
    assert _values(target) == {1}
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_ledger_that_is_no_file_is_a_typed_error(tmp_path: Path) -> None:
    """It says where, instead of a plain OSError."""
    a, target = _save(tmp_path / "a", 1), tmp_path / "m.pt"
    _kill_before(a, target, "torch", "holes")
    (ledger,) = tmp_path.glob(f".tmp-convert-*/{LEDGER_NAME}")
    ledger.unlink()
    ledger.mkdir()
    with pytest.raises(StorageError, match="ledger"):
        convert(a, target, to="torch", executor="inline")
