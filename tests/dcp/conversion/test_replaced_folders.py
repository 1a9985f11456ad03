"""Folders that are replaced where no system call exchanges two: by two renames, which anything may come
between. No file is lost, whatever fails and whenever."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.conversion.copying.sinks import observers
from dcp.conversion.run import convert
from dcp.manager.cleanup.leftovers import find_leftovers
from dcp.storage.errors import CheckpointConflictError, CheckpointError
from tests.dcp.cli_support import run
from tests.support.crashes import Child, Ending, in_lab
from tests.support.refused_calls import refuse

_MANNERS = ("killed before", "killed after", "fails", "fails though it is done", "fails, and all that follow")
"""What may become of a rename."""


def _prepare(root: Path) -> Path:
    """Two sources, and a folder made of the first, with a file of the user's."""
    for version in (1, 2):
        state = {"w": torch.full((1000,), version, dtype=torch.int32)}
        dcp.save(state, checkpoint_id=root / str(version), no_dist=True)
    _convert(root, 1)
    (root / "target" / "config.json").write_text("{}")
    return root


def _convert(root: Path, version: int) -> None:
    convert(root / str(version), root / "target", to="safetensors", executor="inline", overwrite=True)


def _convert_again(root: Path) -> None:
    _convert(root, 2)


def _weights(version: int) -> bytes:
    return version.to_bytes(4, "little") * 1000


def _versions(folder: Path) -> set[int]:
    """Of weights in the files of a folder that has the user's file as well."""
    if not (folder / "config.json").is_file() or (folder / "config.json").read_text() != "{}":
        return set()
    contents = [path.read_bytes() for path in folder.glob("*.safetensors")]
    return {version for version in (1, 2) for content in contents if content.endswith(_weights(version))}


def _replace(root: Path, rename: Callable[[Any, Any], None]) -> None:
    """With renames by another function, once it is too late to go on from what was done."""

    def observe(op: str, name: str) -> None:
        if op == "forget":
            os.rename = rename  # type: ignore[assignment]

    observers.append(observe)
    _convert(root, 2)


def _renames(root: Path) -> int:
    """How many a replacement takes."""
    real, count = os.rename, itertools.count()

    def rename(one: Any, two: Any) -> None:
        next(count)
        real(one, two)

    _replace(root, rename)
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

    _replace(root, rename)


def _endings(root: Path, manners: Sequence[str]) -> Iterator[tuple[str, Path, Ending]]:
    """Each a copy of a folder in which a replacement was interrupted in another way."""
    before = _prepare(root / "before")
    count = Child(_renames, Path(shutil.copytree(before, root / "counted"))).wait().value
    assert count >= 3  # of what is new, of what was there, of what is new again
    for number, manner in itertools.product(range(count), manners):
        folder = Path(shutil.copytree(before, root / f"{number} {manner}"))
        yield f"rename {number} {manner}", folder, Child(_interrupted, folder, number, manner).wait()


def _collect(root: Path) -> list[str]:
    """``dcp gc``, at once; what it printed."""
    done = run("gc", root, "--hours", "0", "--yes")
    assert (done.status, done.err) == (0, "")
    return done.out.splitlines()


def _matrix(place: str, manners: Sequence[str]) -> list[str]:
    """What is wrong after each ending, and after what may follow it."""
    refuse("renameat2", errno.EINVAL)
    assert find_leftovers(place, 0.0) == []  # imported once, and not by each of the processes below
    problems = []
    for what, folder, ending in _endings(Path(place), manners):
        folders = [folder / "target", *folder.glob(".tmp-convert-*/*/target")]
        if not any(map(_versions, folders)):
            problems.append(f"{what}: nothing is whole: {sorted(folder.rglob('*'))}")
        if not (ending.killed or what.endswith("follow") or _versions(folder / "target")):
            problems.append(f"{what}: an error was caught, and there is no target")
        copy = shutil.copytree(folder, folder.with_name(f"{folder.name}-copy"))
        for then, root, act, fine in (("gc", copy, _collect, {1, 2}), ("again", folder, _convert_again, {2})):
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


def test_a_link_that_was_made_though_it_failed_is_not_copied_onto_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a mount whose inode numbers change nobody sees that both names are of one file, which opening it for
    the copy would empty."""
    _prepare(tmp_path)
    real = os.link

    def link(one: Any, two: Any) -> None:
        real(one, two)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(one))

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr(os.path, "samefile", lambda *_: False)
    _convert(tmp_path, 2)
    assert _versions(tmp_path / "target") == {2}


def _left_aside(place: str) -> None:
    refuse("renameat2", errno.EINVAL)
    before = _prepare(Path(place))
    for number in itertools.count():
        assert Child(_interrupted, before, number, "killed after").wait().killed
        if not (before / "target").exists():
            break


def test_what_came_into_the_place_of_a_folder_that_was_moved_aside_stays(tmp_path: Path) -> None:
    """Between the two renames another process makes the target anew: both stay, and it is said where."""
    root = tmp_path / "root"
    in_lab(_left_aside, str(root))
    (aside,) = root.glob(".tmp-convert-*/*/target")
    (root / "target").mkdir()
    (root / "target" / "new").write_text("new")
    with pytest.raises(CheckpointConflictError, match="come into being") as refused:
        _convert(root, 2)
    assert str(aside) in str(refused.value)
    done = run("gc", root, "--hours", "0", "--yes")
    assert "is left alone" in done.err and str(aside) in done.err
    assert ((root / "target" / "new").read_text(), _versions(aside)) == ("new", {1})
    shutil.rmtree(aside)
    _convert(root, 2)
    assert {path.name for path in (root / "target").iterdir()} == {"model.safetensors", "new"}
    assert not list(root.glob(".tmp-*"))


def test_what_is_moved_aside_is_called_what_it_is(tmp_path: Path) -> None:
    """``dcp gc`` says that it puts back what is nowhere else, and counts it among nothing that goes."""
    root = tmp_path / "root"
    in_lab(_left_aside, str(root))
    listed = run("gc", root, "--hours", "0", "--json").json
    (found,) = listed
    assert found["kind"] == "replacement" and found["files"]
    assert not [name for name in found["files"] if name.startswith("aside/")]
    assert "which is put back" in run("gc", root, "--hours", "0").out
    assert not (root / "target").exists()
    _collect(root)
    assert _versions(root / "target") == {1}


def test_a_file_that_comes_while_a_folder_is_replaced_is_kept(tmp_path: Path) -> None:
    """After the user's files were looked for, and before the folder is another one."""
    root = _prepare(tmp_path)

    def observe(op: str, name: str) -> None:
        if op == "exchange":
            (root / "target" / "late").mkdir()
            (root / "target" / "late" / "notes.txt").write_text("late")

    observers.append(observe)
    try:
        _convert(root, 2)
    finally:
        observers.remove(observe)
    assert (root / "target" / "late" / "notes.txt").read_text() == "late"
    assert _versions(root / "target") == {2}


@pytest.mark.parametrize("is_new", [True, False])
def test_nothing_goes_before_the_name_is_durable(
    is_new: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fsync of the folder above fails: the error says that the target is there, and what it replaced is
    kept until a later run."""
    root = _prepare(tmp_path)
    if is_new:
        shutil.rmtree(root / "target")
    fsync, is_exchanged = os.fsync, [False]

    def failing(descriptor: int) -> None:
        if is_exchanged[0] and os.path.samestat(os.fstat(descriptor), root.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    def observe(op: str, name: str) -> None:
        is_exchanged[0] = is_exchanged[0] or op in ("exchange", "publish")

    monkeypatch.setattr(os, "fsync", failing)
    observers.append(observe)
    try:
        with pytest.raises(CheckpointError, match="may not outlast a power cut") as failed:
            _convert(root, 2)
    finally:
        observers.remove(observe)
    assert failed.value.committed
    monkeypatch.undo()
    assert (root / "target" / "model.safetensors").read_bytes().endswith(_weights(2))
    if not is_new:
        assert any(_versions(folder) == {1} for folder in root.glob(".tmp-convert-*/*"))
    _convert(root, 2)
    assert (root / "target" / "model.safetensors").read_bytes().endswith(_weights(2))
    assert not list(root.glob(".tmp-*"))
