"""Conversions that are killed, fail or lose power at any instant: the target is the old one or the new one,
whole. A rerun resumes finished tasks, and never those of another conversion."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

import dcp
from dcp.errors import CheckpointConflictError
from tests.support.conversion import command, folder_of, names_in
from tests.support.crashes import Child, in_lab, observe_calls
from tests.support.power_cuts import Recording
from tests.support.refused_calls import refuse

_TARGETS = {"torch": "m.pt", "safetensors": "folder", "dcp": "m"}
_SIZE = 300


def _save(path: Path, value: int, tensors: int = 1) -> Path:
    state = {f"t{n}": torch.full((_SIZE,), value, dtype=torch.int32) for n in range(tensors)}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def _values(target: Path) -> set[int]:
    """Return all values of the target, and check the checksums of a zip."""
    if target.suffix == ".pt":
        with zipfile.ZipFile(target) as archive:
            assert archive.testzip() is None
    return {value for tensor in dcp.read(target).values() for value in tensor.tolist()}


def _convert(source: Path, target: Path, to: str, **options: Any) -> dcp.ConversionReport:
    given: dict[str, Any] = {"to": to, "executor": "inline", "overwrite": True}
    return dcp.convert(source, target, **given | options)


class _Stopped(BaseException):
    """Exception that ends a conversion as a signal would, with its locks released."""


def _stop(_: object) -> None:
    raise _Stopped


def _stop_when_done(source: Path, target: Path, to: str) -> Path:
    """Stop a conversion after all is written and before the renames. Return the path of its ledger."""
    with pytest.raises(_Stopped):
        _convert(source, target, to, progress=_stop)
    (work,) = target.parent.glob(".tmp-convert-*")
    (ledger,) = (path for path in work.iterdir() if path.is_file())
    return ledger


# -- killed anywhere -----------------------------------------------------------------------------------------


def _killed_anywhere(place: str, kind: str, every: int, has_old: bool) -> tuple[list[str], int]:
    """Kill a merge or a conversion to a Hugging Face folder before every ``every``-th call; then run it
    again, or run ``dcp gc``. Return the wrong states and the number of calls. ("two renames": a folder is
    replaced without renameat2.)"""
    root, wrong = Path(place), list[str]()
    if kind == "two renames":
        refuse("renameat2", errno.EINVAL)
    for version in (1, 2):
        state = {f"t{n}": torch.full((_SIZE,), float(version)) for n in range(4)}
        dcp.save(state, checkpoint_id=root / str(version), no_dist=True)
    (root / "template").mkdir()
    (root / "template" / "config.json").write_text("{}")
    rules = {"rules": [{"from": {"t{n}": "(a two)"}, "to": {"w{n}": "(two a)"}}], "sizes": {"two": 2}}
    given: dict[str, Any] = {"executor": "inline", "overwrite": True, "to": "safetensors"}

    def make(folder: Path, version: int, step: int = 0) -> None:
        left = iter(range(step - 1))
        if step:
            observe_calls(folder, lambda *_: None if next(left, step) < step else os.kill(os.getpid(), 9))
        source = root / str(version)
        if kind == "hf":
            dcp.convert(source, folder / "target", hf=root / "template", **given)
        else:
            dcp.merge([source, source], folder / "target", map=rules, shard_bytes=4 * _SIZE, **given)

    def seen(folder: Path) -> tuple[set[int], list[str]]:
        target = folder / "target"
        return (_values(target), names_in(target)) if target.exists() else (set(), [])

    make(root / "first", 1)
    (root / "first" / "target" / "config.json").write_text("{}")  # the user's, unless a template has one
    new = {2}, (names := seen(root / "first")[1])
    old = ({1}, names) if has_old else (set[int](), list[str]())
    new = new if has_old or kind == "hf" else ({2}, [name for name in names if name != "config.json"])
    for step in itertools.count(1, every):
        folder = root / f"step {step}"
        shutil.copytree(root / "first", folder) if has_old else folder.mkdir()
        ending, left = Child(make, folder, 2, step).wait(), seen(folder)
        assert ending.raised is None, ending.raised.traceback_text
        shutil.copytree(folder, collected := root / f"collected {step}")
        _collect(collected)
        Child(make, folder, 2).wait()
        fine = [old, new] + ([(set[int](), list[str]())] if kind == "two renames" else [])
        if left not in fine or seen(folder) != new or names_in(folder) != ["target"]:
            wrong.append(f"{step}: {left}, then {seen(folder)} beside {names_in(folder)}")
        if seen(collected) not in (old, new) or any(map(names_in, collected.glob(".tmp-*"))):
            wrong.append(f"{step}: {left}, collected {seen(collected)} beside {names_in(collected)}")
        if not ending.killed:
            return wrong, step
    raise AssertionError


def _collect(root: Path) -> None:
    """Run ``dcp gc`` without a waiting time."""
    done = command("gc", root, "--hours", "0", "--yes")
    assert (done.status, done.err) == (0, "")


@pytest.mark.parametrize(
    ("kind", "has_old", "every"),
    [
        ("two renames", True, 6),
        ("hf", False, 9),
        *(
            pytest.param(kind, has_old, 1, marks=pytest.mark.exhaustive)
            for kind in ("merge", "two renames", "hf")
            for has_old in (True, False)
        ),
    ],
)
def test_a_kill_leaves_a_whole_target_or_none(kind: str, has_old: bool, every: int, tmp_path: Path) -> None:
    """The old target is whole until the new one is, with all other files. A rerun completes and leaves no
    other file. So does ``dcp gc``, which also restores a folder that was moved aside."""
    wrong, steps = in_lab(_killed_anywhere, str(tmp_path), kind, every, has_old)
    assert wrong == [] and steps > 10


# -- killed between two tasks, and after the last ------------------------------------------------------------

_FOUR: dict[str, dict[str, Any]] = {"safetensors": {"shard_bytes": 4 * _SIZE}, "dcp": {"files": 4}}
"""Options by format that make a conversion of four tensors four tasks."""


def _killed_after_one(source: Path, target: Path, to: str) -> None:
    def kill(_: object) -> None:  # progress is reported at once, and then ten times a second
        os.kill(os.getpid(), signal.SIGKILL)

    _convert(source, target, to, progress=kill, overwrite=False, **_FOUR[to])


def _each_death(place: str, to: str) -> list[Any]:
    """Return (killed, target existed, resumed tasks, quarters of the bytes read again) after each death."""
    root, found = Path(place), []
    source = _save(root / "source", 5, tensors=4)
    whole = _convert(source, root / "whole", to, **_FOUR[to]).bytes_read
    for tasks in range(1, 5):
        target = root / str(tasks) / "target"
        deaths = [Child(_killed_after_one, source, target, to).wait().killed for _ in range(tasks)]
        was_present = target.exists()
        report = _convert(source, target, to, overwrite=False, **_FOUR[to])
        assert (_values(target), folder_of(target)) == ({5}, ["target"])
        found.append((all(deaths), was_present, report.tasks_resumed, round(4 * report.bytes_read / whole)))
    return found


@pytest.mark.parametrize("to", ["safetensors", pytest.param("dcp", marks=pytest.mark.exhaustive)])
def test_finished_tasks_are_not_repeated(to: str, tmp_path: Path) -> None:
    """Killed after one task, once or repeatedly, all runs together read the source once."""
    assert in_lab(_each_death, str(tmp_path), to) == [(True, False, n, 4 - n) for n in range(1, 5)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("x.safetensors", {"to": "safetensors", "only": "m", "dtype": "float16"}),
        ("dcp", {"to": "dcp", "only": "m", "rename": {"^m": "n"}}),
    ],
)
def test_a_finished_conversion_is_compared(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """A finished conversion that runs again writes nothing. A target that differs is refused."""
    for which, number in (("a", 1.0), ("b", 2.0)):
        state = {"m": {"w": torch.full((10, 3), number), "v": torch.ones(2)}, "step": 3, "none": {}}
        dcp.save(state, checkpoint_id=tmp_path / which)
    target = str(tmp_path / name)
    first = dcp.convert(tmp_path / "a", target, **options)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = dcp.convert(tmp_path / "a", target, **options)
    assert (again.tasks_resumed, again.files) == (again.tasks, first.files)
    assert (first.tasks_resumed, again.checksums) == (0, first.checksums)
    for source, changed in (("b", {}), ("a", {"exclude": "m.v"}), ("a", {"resume": False})):
        with pytest.raises(CheckpointConflictError, match="exists"):
            dcp.convert(tmp_path / source, target, **options | changed)
    (written,) = [path for path in tmp_path.rglob(first.files[0]) if path.parent.name not in "ab"]
    data = written.read_bytes()
    at = data.index(torch.ones(2, dtype=torch.float16 if "dtype" in options else None).numpy().tobytes())
    written.write_bytes(data[:at] + b"\x01" + data[at + 1 :])
    with pytest.raises(CheckpointConflictError, match="exists"):
        dcp.convert(tmp_path / "a", target, **options)
    written.write_bytes(data)
    files.pop(written)
    assert all(path.stat().st_mtime_ns == when for path, when in files.items())


@pytest.mark.parametrize("change", [{"only": "t0"}, {"resume": False}, {"dtype": {"*": "float16"}}, "source"])
def test_changed_options_discard_finished_tasks(change: Any, tmp_path: Path) -> None:
    """Work done with other options or from other bytes is discarded, and so is all work with resume=False."""
    source, target = tmp_path / "source", tmp_path / "m.pt"
    dcp.save({"t0": torch.ones(9), "t1": torch.zeros(9)}, checkpoint_id=source, no_dist=True)
    _stop_when_done(source, target, "torch")
    if change == "source":
        data, change = next(source.glob("*.distcp")), {}
        os.utime(data, ns=(1, data.stat().st_mtime_ns + 1_000_000_000))
    assert _convert(source, target, "torch", **change).tasks_resumed == 0
    assert folder_of(target) == ["m.pt", "source"]


def test_a_second_conversion_at_once_is_refused(tmp_path: Path) -> None:
    """A second conversion to the same target is refused during the first."""
    source, target, refused = _save(tmp_path / "source", 1), tmp_path / "m.pt", []

    def another(_: object) -> None:
        with pytest.raises(CheckpointConflictError, match="another process"):
            _convert(source, target, "torch")
        refused.append(True)

    _convert(source, target, "torch", progress=another)
    assert refused and _values(target) == {1}


def _at_once(place: str) -> list[Any]:
    """Run several processes that convert to one target at once, in a few rounds. Return their endings."""
    source, endings = _save(Path(place, "source"), 1), []
    for number in range(4):
        target = Path(place, str(number), "m")
        running = [Child(_converted, source, target) for _ in range(5)]
        endings.append([child.wait() for child in running])
        assert (_values(target), folder_of(target)) == ({1}, ["m"])
    return endings


def _converted(source: Path, target: Path) -> None:
    _convert(source, target, "dcp", overwrite=False)


def test_concurrent_conversions_make_one_target(tmp_path: Path) -> None:
    """Of several conversions at once one makes the target; the others compare it or are refused."""
    for endings in in_lab(_at_once, str(tmp_path)):
        refused = [ending.raised.type_name for ending in endings if ending.raised is not None]
        assert set(refused) <= {"CheckpointConflictError"} and len(refused) < len(endings)


@pytest.mark.parametrize("verify", ["blocks", "none"])
def test_a_replaced_source_is_an_error(verify: Any, tmp_path: Path) -> None:
    """A source replaced during a conversion is an error, also without checksums; its work is not resumed."""
    for version in (1, 2):
        _save(tmp_path / "saved", version, tensors=2)
        _convert(tmp_path / "saved", tmp_path / str(version), "safetensors", **_FOUR["safetensors"])

    def replace(_: object) -> None:
        for file in (tmp_path / "2").glob("*.safetensors"):
            file.rename(tmp_path / "1" / file.name)

    given: dict[str, Any] = {"verify": verify, **_FOUR["safetensors"]}
    with pytest.raises(CheckpointConflictError, match="changed during the conversion"):
        _convert(tmp_path / "1", tmp_path / "made", "safetensors", progress=replace, **given)
    assert not (tmp_path / "made").exists()
    assert _convert(tmp_path / "1", tmp_path / "made", "safetensors", **given).tasks_resumed == 0
    assert _values(tmp_path / "made") == {2}


# -- power cuts ----------------------------------------------------------------------------------------------

_INSTANTS = [("torch", 15), ("safetensors", 5), ("dcp", 15)] + [
    pytest.param(to, 1, marks=pytest.mark.exhaustive) for to in _TARGETS
]
"""For each format some instants, of alternating kinds; or all of them."""


@pytest.mark.parametrize(("to", "every"), _INSTANTS)
def test_tasks_of_one_source_do_not_serve_another(to: str, every: int, tmp_path: Path) -> None:
    """A conversion of a to m is stopped with its work done, and one of b to m loses power at any instant. A
    rerun of a to m has the values of a."""
    a, b, target = _save(tmp_path / "a", 1), _save(tmp_path / "b", 2), tmp_path / "work" / _TARGETS[to]
    target.parent.mkdir()
    _stop_when_done(a, target, to)
    with Recording(target.parent) as recording:
        _convert(b, target, to)
    images = list(recording.images())
    assert len(images) > 20
    for point, make in images[::every]:
        make(target.parent)
        _convert(a, target, to)
        assert _values(target) == {1}, point


@pytest.mark.parametrize(("to", "every"), _INSTANTS)
def test_a_power_cut_leaves_a_whole_target_or_none(to: str, every: int, tmp_path: Path) -> None:
    """A target after a power cut is whole or absent, and a rerun makes it."""
    a, target = _save(tmp_path / "a", 1), tmp_path / "work" / _TARGETS[to]
    target.parent.mkdir()
    with Recording(target.parent) as recording:
        _convert(a, target, to)
    for point, make in [*list(recording.images())[::every], *recording.images(at_end=True)]:
        make(target.parent)
        assert not target.exists() or _values(target) == {1}, point
        _convert(a, target, to)
        assert _values(target) == {1}, point


def _replaced_at_each_instant(place: str, to: str, every: int) -> list[str]:
    """Cut the power during a replacement, by two renames for a folder. Return the wrong states."""
    refuse("renameat2", errno.EINVAL)
    a, b, target = _save(Path(place, "a"), 1), _save(Path(place, "b"), 2), Path(place, "work", _TARGETS[to])
    _convert(a, target, to)
    unrelated = {"config.json": "{}"} if to == "safetensors" else {}
    for name, text in unrelated.items():
        (target / name).write_text(text)
    with Recording(target.parent) as recording:
        _convert(b, target, to)
    images, wrong = list(recording.images()), []
    assert any("rename" in point for point, _ in images)
    for point, make in [*images[::every], *recording.images(at_end=True)]:
        make(target.parent)
        before = _values(target) if target.exists() else {1}
        _convert(b, target, to)
        kept = {name: (target / name).read_text() for name in unrelated}
        if before not in ({1}, {2}) or _values(target) != {2} or kept != unrelated:
            wrong.append(f"{point}: {before}, then {_values(target)} beside {kept}")
    return wrong


@pytest.mark.parametrize(("to", "every"), _INSTANTS)
def test_a_power_cut_leaves_the_old_or_new_target(to: str, every: int, tmp_path: Path) -> None:
    """Each of both is whole, a rerun completes, and a folder's other files are kept."""
    assert in_lab(_replaced_at_each_instant, str(tmp_path), to, every) == []


def _framed(data: bytes) -> bytes:
    return struct.pack("<II", len(data), zlib.crc32(data)) + data


def _with_another_save_id(ledger: bytes) -> bytes:
    (size,) = struct.unpack_from("<I", ledger)
    return _framed(msgpack.packb({**msgpack.unpackb(ledger[8 : 8 + size]), "save_id": "../../../x"}))


_RUBBISH: dict[str, Callable[[bytes], bytes]] = {
    "zeros": lambda data: bytes(len(data)),
    "empty": lambda data: b"",
    "a torn header": lambda data: data[:20],
    "an entry that is not msgpack": lambda data: _framed(b"\xc1") + data,
    "a save id that is a path": _with_another_save_id,
}


@pytest.mark.parametrize("rubbish", list(_RUBBISH))
def test_an_unreadable_ledger_is_ignored(rubbish: str, tmp_path: Path) -> None:
    """A ledger with the right size and wrong bytes, as after a power cut, is ignored, and all work redone."""
    a, target = _save(tmp_path / "a", 1), tmp_path / "m.pt"
    ledger = _stop_when_done(a, target, "torch")
    ledger.write_bytes(_RUBBISH[rubbish](ledger.read_bytes()))
    assert _convert(a, target, "torch").tasks_resumed == 0
    assert (_values(target), names_in(tmp_path)) == ({1}, ["a", "m.pt"])


# -- folders that are replaced by two renames ----------------------------------------------------------------


def _left_aside(place: str) -> None:
    """Kill a conversion between the two renames that replace a folder."""
    refuse("renameat2", errno.EINVAL)
    root = Path(place)
    for version in (1, 2):
        _save(root / str(version), version)
    _convert(root / "1", root / "target", "safetensors")
    assert Child(_killed_without_target, root).wait().killed


def _killed_without_target(root: Path) -> None:
    observe_calls(root, lambda *_: None if (root / "target").exists() else os.kill(os.getpid(), 9))
    _convert(root / "2", root / "target", "safetensors")


def test_gc_restores_a_folder_that_was_moved_aside(tmp_path: Path) -> None:
    """``dcp gc`` restores a folder moved aside. If a new folder took its place, both stay, with an error."""
    root = tmp_path / "root"
    in_lab(_left_aside, str(root))
    (aside,) = root.glob(".tmp-convert-*/*/target")
    (listed,) = command("gc", root, "--hours", "0", "--json").json
    assert listed["kind"] == "replacement" and listed["files"]
    assert not [name for name in listed["files"] if name.startswith("aside/")]
    assert "the old folder is restored" in command("gc", root, "--hours", "0").out
    assert not (root / "target").exists()
    shutil.copytree(root, copy := tmp_path / "copy")
    _collect(copy)
    assert _values(copy / "target") == {1}
    (root / "target").mkdir()
    (root / "target" / "new").write_text("new")
    with pytest.raises(CheckpointConflictError, match="was created by another process") as refused:
        _convert(root / "2", root / "target", "safetensors")
    done = command("gc", root, "--hours", "0", "--yes")
    assert "not removed" in done.err and str(aside) in done.err and str(aside) in str(refused.value)
    assert ((root / "target" / "new").read_text(), _values(aside)) == ("new", {1})
