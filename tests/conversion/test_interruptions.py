"""Conversions that are killed, fail or lose power at any instant: the target is the old one or the new one,
whole, what is done is not done again, and nothing of another conversion is ever taken for it."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import signal
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch

import dcp
from dcp.errors import CheckpointConflictError, CheckpointError, StorageError
from tests.support.conversion import command, folder_of, names_in
from tests.support.crashes import Child, Ending, in_lab, observe_calls
from tests.support.power_cuts import Recording
from tests.support.refused_calls import refuse

_TARGETS = {"torch": "m.pt", "safetensors": "folder", "dcp": "m"}
_SIZE = 300


def _save(path: Path, value: int, tensors: int = 1) -> Path:
    state = {f"t{n}": torch.full((_SIZE,), value, dtype=torch.int32) for n in range(tensors)}
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def _values(target: Path) -> set[int]:
    """All numbers in it; of a zip the checksums are right as well."""
    if target.suffix == ".pt":
        with zipfile.ZipFile(target) as archive:
            assert archive.testzip() is None
    return {value for tensor in dcp.read(target).values() for value in tensor.tolist()}


def _convert(source: Path, target: Path, to: str, **options: Any) -> dcp.ConversionReport:
    given: dict[str, Any] = {"to": to, "executor": "inline", "overwrite": True}
    return dcp.convert(source, target, **given | options)


class _Stopped(BaseException):
    """Ends a conversion as a signal would, and lets go of its locks."""


def _stop(_: object) -> None:
    raise _Stopped


def _stop_when_done(source: Path, target: Path, to: str) -> Path:
    """A conversion that is stopped when all is written and nothing has its name; the file that says so."""
    with pytest.raises(_Stopped):
        _convert(source, target, to, progress=_stop)
    (work,) = target.parent.glob(".tmp-convert-*")
    (ledger,) = (path for path in work.iterdir() if path.is_file())
    return ledger


# -- killed anywhere -----------------------------------------------------------------------------------------


def _killed_anywhere(place: str, kind: str, every: int, is_there: bool) -> tuple[list[str], int]:
    """In the laboratory: what is wrong where a merge, or a conversion to a folder of Hugging Face, is killed
    before every so many of its calls, and called again; and how many there are."""
    root, wrong = Path(place), list[str]()
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
        if kind == "merge":
            dcp.merge([source, source], folder / "target", map=rules, shard_bytes=4 * _SIZE, **given)
        else:
            dcp.convert(source, folder / "target", hf=root / "template", **given)

    def seen(folder: Path) -> tuple[set[int], list[str]]:
        target = folder / "target"
        return (_values(target), names_in(target)) if target.exists() else (set(), [])

    make(root / "first", 1)
    names = seen(root / "first")[1]
    old = ({1}, names) if is_there else (set(), [])
    for step in itertools.count(1, every):
        folder = root / f"step {step}"
        shutil.copytree(root / "first", folder) if is_there else folder.mkdir()
        ending, left = Child(make, folder, 2, step).wait(), seen(folder)
        assert ending.raised is None, ending.raised.traceback_text
        Child(make, folder, 2).wait()
        if left not in (old, ({2}, names)) or seen(folder) != ({2}, names) or names_in(folder) != ["target"]:
            wrong.append(f"{step}: {left}, then {seen(folder)} beside {names_in(folder)}")
        if not ending.killed:
            return wrong, step
    raise AssertionError


@pytest.mark.parametrize(
    ("kind", "is_there", "every"),
    [
        ("merge", True, 5),
        ("hf", False, 5),
        *(
            pytest.param(kind, is_there, 1, marks=pytest.mark.exhaustive)
            for kind in ("merge", "hf")
            for is_there in (True, False)
        ),
    ],
)
def test_killed_anywhere_it_is_whole_or_not_there(
    kind: str, is_there: bool, every: int, tmp_path: Path
) -> None:
    """What was there is whole until the new one is, with all its files; called again it ends, and leaves
    nothing else."""
    wrong, steps = in_lab(_killed_anywhere, str(tmp_path), kind, every, is_there)
    assert wrong == [] and steps > 10


# -- killed between two tasks, and after the last ------------------------------------------------------------

_FOUR: dict[str, dict[str, Any]] = {"safetensors": {"shard_bytes": 4 * _SIZE}, "dcp": {"files": 4}}
"""Options by format with which a conversion of four tensors is four tasks."""


def _killed_after_one(source: Path, target: Path, to: str) -> None:
    def kill(_: object) -> None:  # progress is said at once, and then ten times a second
        os.kill(os.getpid(), signal.SIGKILL)

    _convert(source, target, to, progress=kill, overwrite=False, **_FOUR[to])


def _each_death(place: str, to: str) -> list[Any]:
    """(death, was there a target, tasks that were resumed, share of the bytes that was read) of each."""
    root, found = Path(place), []
    source = _save(root / "source", 5, tensors=4)
    whole = _convert(source, root / "whole", to, **_FOUR[to]).bytes_read
    for tasks in range(1, 5):
        target = root / str(tasks) / "target"
        deaths = [Child(_killed_after_one, source, target, to).wait().killed for _ in range(tasks)]
        was_there = target.exists()
        report = _convert(source, target, to, overwrite=False, **_FOUR[to])
        assert (_values(target), folder_of(target)) == ({5}, ["target"])
        found.append((all(deaths), was_there, report.tasks_resumed, round(4 * report.bytes_read / whole)))
    return found


@pytest.mark.parametrize("to", list(_FOUR))
def test_what_is_done_is_never_read_again(to: str, tmp_path: Path) -> None:
    """Killed after one task, once or again and again, all runs together read the source once."""
    assert in_lab(_each_death, str(tmp_path), to) == [(True, False, n, 4 - n) for n in range(1, 5)]


def _killed_when_it_is_there(source: Path, target: Path, to: str) -> None:
    real = os.unlink

    def unlink(path: Any, **options: Any) -> None:
        if target.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, **options)

    os.unlink = unlink
    _convert(source, target, to, overwrite=False)


def _published_and_killed(source: str, target: str, to: str) -> bool:
    return Child(_killed_when_it_is_there, Path(source), Path(target), to).wait().killed


@pytest.mark.parametrize("to", list(_TARGETS))
def test_what_a_killed_run_has_published_is_its_own(to: str, tmp_path: Path) -> None:
    """Killed when the target has its name, and called again, it reads nothing and clears up; called once more
    it compares, and with resume=False it is refused."""
    source, target = _save(tmp_path / "source", 1), tmp_path / "made" / _TARGETS[to]
    assert in_lab(_published_and_killed, str(source), str(target), to) and target.exists()
    again = _convert(source, target, to, overwrite=False)
    assert (again.tasks_resumed, again.bytes_read) == (again.tasks, 0)
    assert (folder_of(target), _values(target)) == ([target.name], {1})
    compared = _convert(source, target, to, overwrite=False)
    assert compared.tasks_resumed == compared.tasks
    with pytest.raises(CheckpointConflictError, match="exists; give another target"):
        _convert(source, target, to, overwrite=False, resume=False)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("x.pt", {"to": "torch"}),
        ("x.safetensors", {"to": "safetensors", "only": "m", "dtype": "float16"}),
        ("folder", {"to": "safetensors", "only": "m"}),
        ("dcp", {"to": "dcp", "only": "m", "rename": {"^m": "n"}}),
        ("memory://resume-finished/dcp", {"to": "dcp"}),
    ],
)
def test_one_that_was_finished_is_compared(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Run again it is done, and writes nothing; what is not its result, by options or a bit, is refused."""
    for which, number in (("a", 1.0), ("b", 2.0)):
        state = {"m": {"w": torch.full((10, 3), number), "v": torch.ones(2)}, "step": 3, "none": {}}
        dcp.save(state, checkpoint_id=tmp_path / which)
    target = name if "://" in name else str(tmp_path / name)
    first = dcp.convert(tmp_path / "a", target, **options)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = dcp.convert(tmp_path / "a", target, **options)
    assert (again.tasks_resumed, again.files) == (again.tasks, first.files)
    assert (first.tasks_resumed, again.checksums) == (0, first.checksums)
    for source, changed in (("b", {}), ("a", {"exclude": "m.v"}), ("a", {"resume": False})):
        with pytest.raises(CheckpointConflictError, match="exists"):
            dcp.convert(tmp_path / source, target, **options | changed)
    if "://" not in target:
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
def test_another_conversion_begins_anew(change: Any, tmp_path: Path) -> None:
    """What was done with other options or of other bytes is thrown away; so is all with resume=False."""
    source, target = tmp_path / "source", tmp_path / "m.pt"
    dcp.save({"t0": torch.ones(9), "t1": torch.zeros(9)}, checkpoint_id=source, no_dist=True)
    _stop_when_done(source, target, "torch")
    if change == "source":
        data, change = next(source.glob("*.distcp")), {}
        os.utime(data, ns=(1, data.stat().st_mtime_ns + 1_000_000_000))
    assert _convert(source, target, "torch", **change).tasks_resumed == 0
    assert folder_of(target) == ["m.pt", "source"]


def test_another_target_in_place_of_a_killed_runs_is_refused_at_once(tmp_path: Path) -> None:
    """Before anything is read; without it the run goes on where it was."""
    source, target = _save(tmp_path / "source", 5, tensors=4), tmp_path / "target"
    given: dict[str, Any] = {"overwrite": False, **_FOUR["safetensors"]}
    with pytest.raises(_Stopped):
        _convert(source, target, "safetensors", progress=_stop, **given)
    target.mkdir()
    (target / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointConflictError, match="exists; give another target"):
        _convert(source, target, "safetensors", **given)
    (target / "model.safetensors").unlink()
    assert _convert(source, target, "safetensors", **given).tasks_resumed == 1
    assert _values(target) == {5}


def test_two_at_once_are_told_apart(tmp_path: Path) -> None:
    """The second one to the same target is refused while the first is at it."""
    source, target, refused = _save(tmp_path / "source", 1), tmp_path / "m.pt", []

    def another(_: object) -> None:
        with pytest.raises(CheckpointConflictError, match="another process"):
            _convert(source, target, "torch")
        refused.append(True)

    _convert(source, target, "torch", progress=another)
    assert refused and _values(target) == {1}


def _at_once(place: str) -> list[Any]:
    """In the laboratory: how several processes end that convert to one target, in a few rounds."""
    source, endings = _save(Path(place, "source"), 1), []
    for number in range(4):
        target = Path(place, str(number), "m")
        running = [Child(_converted, source, target) for _ in range(5)]
        endings.append([child.wait() for child in running])
        assert (_values(target), folder_of(target)) == ({1}, ["m"])
    return endings


def _converted(source: Path, target: Path) -> None:
    _convert(source, target, "dcp", overwrite=False)


def test_several_at_once_make_one_target(tmp_path: Path) -> None:
    """Whoever begins, waits for a lock or clears up at the same instant: one makes it, and others compare it
    or are refused."""
    for endings in in_lab(_at_once, str(tmp_path)):
        refused = [ending.raised.type_name for ending in endings if ending.raised is not None]
        assert set(refused) <= {"CheckpointConflictError"} and len(refused) < len(endings)


def _where_removed_files_stay(place: str) -> list[str]:
    """In the laboratory: what is left where a file that is removed stays until it is closed, as on NFS."""
    unlink, close = os.unlink, os.close
    hidden: list[Path] = []

    def renaming(path: Any, **options: Any) -> None:
        if Path(path).parent.name.startswith(".tmp-convert-") and not Path(path).name.startswith(".nfs"):
            hidden.append(Path(path).with_name(".nfs0001"))
            Path(path).rename(hidden[-1])
        else:
            unlink(path, **options)

    def closing(descriptor: int) -> None:
        close(descriptor)
        while hidden:
            unlink(hidden.pop())

    source = _save(Path(place, "source"), 1)
    os.unlink, os.close = renaming, closing  # type: ignore[assignment]
    _convert(source, Path(place, "m.pt"), "torch")
    os.unlink, os.close = unlink, close
    return names_in(Path(place))


def test_a_mount_that_keeps_removed_files_keeps_no_folder(tmp_path: Path) -> None:
    """NFS and FUSE have them under another name, in the folder, until they are closed."""
    assert in_lab(_where_removed_files_stay, str(tmp_path)) == ["m.pt", "source"]


def _with_a_close_that_fails(place: str) -> list[Any]:
    """In the laboratory: how a conversion ends, and what is there, where a mount says only when a file is
    closed that it could not be written, and once that is over."""
    source, target, close = _save(Path(place, "source"), 1), Path(place, "m.pt"), os.close

    def closing(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        close(descriptor)
        if path.name == "m.pt":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    os.close = closing  # type: ignore[assignment]
    ending = Child(_convert, source, target, "torch").wait()
    os.close = close
    was_there = target.exists()
    _convert(source, target, "torch")
    return [
        ending.raised is not None and ending.raised.class_names,
        was_there,
        _values(target),
        names_in(Path(place)),
    ]


def test_a_file_that_could_not_be_closed_is_not_published(tmp_path: Path) -> None:
    """A typed error, and the next call makes it."""
    raised, *rest = in_lab(_with_a_close_that_fails, str(tmp_path))
    assert "CheckpointError" in raised and rest == [False, {1}, ["m.pt", "source"]]


@pytest.mark.parametrize("verify", ["blocks", "none"])
def test_a_source_replaced_meanwhile_is_not_mixed(verify: Any, tmp_path: Path) -> None:
    """Where no checksum would tell, too: nothing of it is published or resumed."""
    for version in (1, 2):
        _save(tmp_path / "saved", version, tensors=2)
        _convert(tmp_path / "saved", tmp_path / str(version), "safetensors", **_FOUR["safetensors"])

    def replace(_: object) -> None:
        for file in (tmp_path / "2").glob("*.safetensors"):
            file.rename(tmp_path / "1" / file.name)

    given: dict[str, Any] = {"verify": verify, **_FOUR["safetensors"]}
    with pytest.raises(CheckpointConflictError, match="has changed while it was converted"):
        _convert(tmp_path / "1", tmp_path / "made", "safetensors", progress=replace, **given)
    assert not (tmp_path / "made").exists()
    assert _convert(tmp_path / "1", tmp_path / "made", "safetensors", **given).tasks_resumed == 0
    assert _values(tmp_path / "made") == {2}


# -- power cuts ----------------------------------------------------------------------------------------------

_INSTANTS = [
    pytest.param(to, every, marks=() if every > 1 else pytest.mark.exhaustive, id=f"{to}-{every}")
    for every in (5, 1)
    for to in _TARGETS
]
"""For each format, every fifth instant, of which there are two kinds in turn; or all of them."""


@pytest.mark.parametrize(("to", "every"), _INSTANTS)
def test_what_is_done_of_one_source_is_never_taken_for_another_s(to: str, every: int, tmp_path: Path) -> None:
    """a to m is stopped with its work done; b to m begins, and the power goes: a to m, called again, has the
    values of a, whatever of b's beginning, middle and end has reached the disk."""
    a, b, target = _save(tmp_path / "a", 1), _save(tmp_path / "b", 2), tmp_path / "work" / _TARGETS[to]
    target.parent.mkdir()
    _stop_when_done(a, target, to)
    with Recording(target.parent) as recording:
        _convert(b, target, to)
    images = list(recording.images())
    assert len(images) > 20
    for what, make in images[::every]:
        make(target.parent)
        _convert(a, target, to)
        assert _values(target) == {1}, what


@pytest.mark.parametrize(("to", "every"), _INSTANTS)
def test_a_new_target_is_whole_or_not_there(to: str, every: int, tmp_path: Path) -> None:
    """And the same call makes it, whatever is left of the first."""
    a, target = _save(tmp_path / "a", 1), tmp_path / "work" / _TARGETS[to]
    target.parent.mkdir()
    with Recording(target.parent) as recording:
        _convert(a, target, to)
    for what, make in [*list(recording.images())[::every], *recording.images(at_end=True)]:
        make(target.parent)
        assert not target.exists() or _values(target) == {1}, what
        _convert(a, target, to)
        assert _values(target) == {1}, what


def _replaced_at_each_instant(place: str, to: str, every: int) -> list[str]:
    """In the laboratory: what is wrong after cuts of a replacement, by two renames where it is a folder."""
    refuse("renameat2", errno.EINVAL)
    a, b, target = _save(Path(place, "a"), 1), _save(Path(place, "b"), 2), Path(place, "work", _TARGETS[to])
    _convert(a, target, to)
    others = {"config.json": "{}"} if to == "safetensors" else {}
    for name, text in others.items():
        (target / name).write_text(text)
    with Recording(target.parent) as recording:
        _convert(b, target, to)
    images, wrong = list(recording.images()), []
    assert any("rename" in what for what, _ in images)
    for what, make in [*images[::every], *recording.images(at_end=True)]:
        make(target.parent)
        before = _values(target) if target.exists() else {1}
        _convert(b, target, to)
        kept = {name: (target / name).read_text() for name in others}
        if before not in ({1}, {2}) or _values(target) != {2} or kept != others:
            wrong.append(f"{what}: {before}, then {_values(target)} beside {kept}")
    return wrong


@pytest.mark.parametrize(("to", "every"), _INSTANTS)
def test_a_replaced_target_is_the_old_one_or_the_new_one(to: str, every: int, tmp_path: Path) -> None:
    """Each of both whole, and done by another call; a folder's other files stay with it."""
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
    "zeros after the header": lambda data: data[:60] + bytes(len(data)),
    "another's file": lambda data: b"not of ours at all, but long enough for the head of an entry",
    "an entry that is a number": lambda data: _framed(b"\x07") + data,
    "an entry that is no msgpack": lambda data: _framed(b"\xc1") + data,
    "a save id that is a path": _with_another_save_id,
    "results that are none": lambda data: data + _framed(b"\x07") + _framed(b"\xc1"),
}


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("rubbish", list(_RUBBISH))
def test_a_ledger_that_cannot_be_read_is_none(rubbish: str, resume: bool, tmp_path: Path) -> None:
    """Its size has survived, and its bytes have not: the conversion begins anew, and is right."""
    a, target = _save(tmp_path / "a", 1), tmp_path / "m.pt"
    ledger = _stop_when_done(a, target, "torch")
    ledger.write_bytes(_RUBBISH[rubbish](ledger.read_bytes()))
    assert _convert(a, target, "torch", resume=resume).tasks_resumed == 0
    assert (_values(target), names_in(tmp_path)) == ({1}, ["a", "m.pt"])


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_place_that_is_none_is_a_typed_error(kind: str, tmp_path: Path) -> None:
    """It says where, instead of a plain OSError, and waits for nothing."""
    a, target = _save(tmp_path / "a", 1), tmp_path / "m.pt"
    ledger = _stop_when_done(a, target, "torch")
    if kind == "folder":
        ledger.unlink()
        ledger.mkdir()
    else:
        shutil.rmtree(ledger.parent)
        ledger.parent.touch() if kind == "file" else ledger.parent.symlink_to(tmp_path / "nothing")
    with pytest.raises(StorageError, match="tmp-convert"):
        _convert(a, target, "torch")


def test_another_folder_with_the_inode_of_a_copied_one_is_not_taken_for_it(tmp_path: Path) -> None:
    """A stopped conversion is restored from a copy, where inodes are others, and the old target has the one
    that is noted, by chance: it is replaced all the same, and by what was done."""
    a, b, target = _save(tmp_path / "a", 1), _save(tmp_path / "b", 2), tmp_path / "work" / "folder"
    _convert(a, target, "safetensors")
    old = (target / "model.safetensors").read_bytes()
    work = _stop_when_done(b, target, "safetensors").parent
    (output,) = (path for path in work.iterdir() if path.is_dir())
    shutil.copytree(output, tmp_path / "copy")
    shutil.rmtree(target)
    output.rename(target)
    (target / "model.safetensors").write_bytes(old)
    (tmp_path / "copy").rename(output)
    report = _convert(b, target, "safetensors")
    assert (_values(target), report.tasks_resumed > 0) == ({2}, True)


# -- folders that are replaced by two renames ----------------------------------------------------------------

_MANNERS = ("killed before", "killed after", "fails", "fails though it is done", "fails, and all that follow")
"""What may become of a rename."""


def _prepare(root: Path) -> Path:
    """Two sources, and a folder made of the first, with a file of the user's."""
    for version in (1, 2):
        _save(root / str(version), version)
    _replace(root, 1)
    (root / "target" / "config.json").write_text("{}")
    return root


def _replace(root: Path, version: int = 2) -> None:
    _convert(root / str(version), root / "target", "safetensors")


def _versions(folder: Path) -> set[int]:
    """Of weights in a folder that has the user's file as well."""
    if not (folder / "config.json").is_file() or (folder / "config.json").read_text() != "{}":
        return set()
    contents = [path.read_bytes() for path in folder.glob("*.safetensors")]
    return {n for n in (1, 2) for content in contents if content.endswith(n.to_bytes(4, "little") * _SIZE)}


def _renames(root: Path) -> int:
    """How many a replacement takes."""
    real, count = os.rename, itertools.count()

    def rename(one: Any, two: Any) -> None:
        next(count)
        real(one, two)

    os.rename = rename  # type: ignore[assignment]
    _replace(root)
    return next(count)


def _interrupted(root: Path, number: int, manner: str) -> None:
    """A replacement in which that happens to the rename of this number."""
    real, count = os.rename, itertools.count()

    def rename(one: Any, two: Any) -> None:
        now = next(count)
        if now != number and not (now > number and manner.endswith("follow")):
            return real(one, two)
        if manner in ("killed after", "fails though it is done"):
            real(one, two)
        if manner.startswith("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.EIO, os.strerror(errno.EIO), one)

    os.rename = rename  # type: ignore[assignment]
    _replace(root)


def _endings(root: Path, manners: Sequence[str]) -> Iterator[tuple[str, Path, Ending]]:
    """Each a copy of a folder in which a replacement was interrupted in another way."""
    before = _prepare(root / "before")
    count = Child(_renames, Path(shutil.copytree(before, root / "counted"))).wait().value
    assert count >= 3  # of what is new, of what was there, of what is new again
    for number, manner in itertools.product(range(count), manners):
        folder = Path(shutil.copytree(before, root / f"{number} {manner}"))
        yield f"rename {number} {manner}", folder, Child(_interrupted, folder, number, manner).wait()


def _collect(root: Path) -> None:
    """``dcp gc``, at once."""
    done = command("gc", root, "--hours", "0", "--yes")
    assert (done.status, done.err) == (0, "")


def _matrix(place: str, manners: Sequence[str]) -> list[str]:
    """What is wrong after each ending, and after what may follow it."""
    refuse("renameat2", errno.EINVAL)
    _collect(Path(place))  # imported once, and not by each of the processes below
    problems = []
    for what, folder, ending in _endings(Path(place), manners):
        folders = [folder / "target", *folder.glob(".tmp-convert-*/*/target")]
        if not any(map(_versions, folders)):
            problems.append(f"{what}: nothing is whole: {sorted(folder.rglob('*'))}")
        if not (ending.killed or what.endswith("follow") or _versions(folder / "target")):
            problems.append(f"{what}: an error was caught, and there is no target")
        copy = shutil.copytree(folder, folder.with_name(f"{folder.name}-copy"))
        for then, root, act, fine in (("gc", copy, _collect, {1, 2}), ("again", folder, _replace, {2})):
            ended, found = Child(act, root).wait(), _versions(root / "target")
            if ended.raised is not None:
                problems.append(f"{what}, then {then}: {ended.raised.traceback_text}")
            if not found or not found <= fine or list(root.glob(".tmp-*")):
                problems.append(f"{what}, then {then}: the target is {found}, beside {[*root.iterdir()]}")
    return problems


@pytest.mark.parametrize(
    "manners", [pytest.param(_MANNERS, marks=pytest.mark.exhaustive), ("killed before", "fails")]
)
def test_no_instant_between_two_renames_costs_a_file(manners: Sequence[str], tmp_path: Path) -> None:
    """Killed there, or with EIO from a rename that was done or was not, once or for good: the old folder or
    the new one is whole, with the user's file; the next call makes the new one, and ``dcp gc`` leaves one."""
    assert in_lab(_matrix, str(tmp_path), manners) == []


def _left_aside(place: str) -> None:
    refuse("renameat2", errno.EINVAL)
    before = _prepare(Path(place))
    for number in itertools.count():
        assert Child(_interrupted, before, number, "killed after").wait().killed
        if not (before / "target").exists():
            break


def test_what_is_moved_aside_is_put_back_and_replaces_nothing(tmp_path: Path) -> None:
    """``dcp gc`` says that it puts back what is nowhere else; what has come into its place meanwhile stays,
    and it is said where both are."""
    root = tmp_path / "root"
    in_lab(_left_aside, str(root))
    (aside,) = root.glob(".tmp-convert-*/*/target")
    (listed,) = command("gc", root, "--hours", "0", "--json").json
    assert listed["kind"] == "replacement" and listed["files"]
    assert not [name for name in listed["files"] if name.startswith("aside/")]
    assert "which is put back" in command("gc", root, "--hours", "0").out
    assert not (root / "target").exists()
    shutil.copytree(root, copy := tmp_path / "copy")
    _collect(copy)
    assert _versions(copy / "target") == {1}
    (root / "target").mkdir()
    (root / "target" / "new").write_text("new")
    with pytest.raises(CheckpointConflictError, match="come into being") as refused:
        _replace(root)
    done = command("gc", root, "--hours", "0", "--yes")
    assert "is left alone" in done.err and str(aside) in done.err and str(aside) in str(refused.value)
    assert ((root / "target" / "new").read_text(), _versions(aside)) == ("new", {1})
    shutil.rmtree(aside)
    _replace(root)
    assert names_in(root / "target") == ["model.safetensors", "new"]
    assert not list(root.glob(".tmp-*"))


def _with_calls_that_lie(place: str) -> list[str]:
    """In the laboratory: what is wrong where a file comes late, a link is made though it fails, and the name
    cannot be made durable."""
    root, wrong = _prepare(Path(place, "late")), []
    real: dict[str, Any] = {name: getattr(os, name) for name in ("rename", "link", "fsync")}

    def late(one: Any, two: Any) -> None:
        if not (root / "target" / "late").exists():
            (root / "target" / "late").mkdir()
            (root / "target" / "late" / "notes.txt").write_text("late")
        real["rename"](one, two)

    os.rename = late  # type: ignore[assignment]
    _replace(root)
    if not (root / "target/late/notes.txt").exists() or _versions(root / "target") != {2}:
        wrong.append("what came late is gone")
    os.rename, other = real["rename"], _prepare(Path(place, "link"))

    def link(one: Any, two: Any) -> None:
        real["link"](one, two)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(one))

    os.link, os.path.samefile = link, lambda *_: False  # type: ignore[assignment] # inodes that change
    _replace(other)
    if _versions(other / "target") != {2}:
        wrong.append("a link was copied onto itself")
    os.link = real["link"]
    for name, is_new in (("old", False), ("new", True)):
        wrong += _not_durable(_prepare(Path(place, name)), is_new=is_new)
    return wrong


def _not_durable(root: Path, *, is_new: bool) -> list[str]:
    real, target, wrong = os.fsync, root / "target", list[str]()
    if is_new:
        shutil.rmtree(target)

    def has_new() -> bool:
        weights = target / "model.safetensors"
        return weights.exists() and weights.read_bytes().endswith((2).to_bytes(4, "little") * _SIZE)

    def failing(descriptor: int) -> None:
        if has_new() and os.path.samestat(os.fstat(descriptor), root.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    os.fsync = failing  # type: ignore[assignment]
    try:
        _replace(root)
        wrong.append("nobody was told")
    except CheckpointError as error:
        if not error.committed or "may not outlast a power cut" not in str(error) or not has_new():
            wrong.append(repr(error))
    finally:
        os.fsync = real
    if not is_new and not any(_versions(folder) == {1} for folder in root.glob(".tmp-convert-*/*")):
        wrong.append("what was replaced is gone before the name is durable")
    _replace(root)
    return wrong if has_new() and not list(root.glob(".tmp-*")) else [*wrong, json.dumps(names_in(root))]


def test_calls_that_lie_or_fail_cost_nothing(tmp_path: Path) -> None:
    """A file that comes after the user's files were looked for is kept; a link that was made though it failed
    is not copied onto itself; nothing goes before the name is durable, which the error says."""
    assert in_lab(_with_calls_that_lie, str(tmp_path)) == []
