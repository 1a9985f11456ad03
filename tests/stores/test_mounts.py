"""Mounts that lack an operation, or fail in one: fallbacks, errors, and leftover files."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.errors import CheckpointError, StorageError
from tests.support.bad_mount import bad_mount
from tests.support.crashes import in_lab
from tests.support.rank_acts import warned
from tests.support.versions import save_version, seen_by_dcp, version_state

REFUSALS = {
    "fsync": ("EINVAL", "EBADF", "EOPNOTSUPP", "ENOSYS", "EACCES", "EPERM"),
    "link": ("EINVAL", "EACCES", "EPERM", "EOPNOTSUPP", "ENOSYS", "EMLINK", "EXDEV", "ENOENT"),
    "flock": ("EINVAL", "EBADF", "EPERM", "EOPNOTSUPP", "ENOSYS", "ENOLCK"),
}
"""fsync is refused for folders only; link fails with ENOENT where files have no link count."""

FAILURES = [
    (call, name)
    for call in REFUSALS
    for name in ("EIO", "ENOSPC", "EDQUOT", "ESTALE", "ETIMEDOUT")
    if (call, name) != ("flock", "ESTALE")  # another host removed the lock file, which is opened again
]


def _refusing(call: str, name: str) -> Callable[[str, Path], int]:
    number = getattr(errno, name)

    def errno_of(called: str, path: Path) -> int:
        return number if called == call and (call != "fsync" or path.is_dir()) else 0

    return errno_of


def _odd_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob(".*") if path.name != ".metadata")


def saves_where_refused(root: Path, count: int) -> tuple[list[Any], list[str]]:
    """Save, replace and convert under each refusal; return the results and the log."""
    seen, logged = [], list[str]()
    for call, names in REFUSALS.items():
        for name in names[:count]:
            folder = root / f"{call}-{name}"
            with bad_mount(root, _refusing(call, name)), warned() as warnings:
                save_version(folder / "x", 1)
                save_version(folder / "x", 2)
                dcp.convert(folder / "x", folder / "x.pt", to="torch", executor="inline")
            logged += warnings
            is_made = (folder / "x.pt").is_file()
            seen.append((call, name, seen_by_dcp(folder / "x"), is_made, _odd_files(root)))
    return seen, logged


@pytest.mark.parametrize("count", [1, pytest.param(9, marks=pytest.mark.exhaustive)])
def test_saves_work_on_mounts_without_some_operations(tmp_path: Path, count: int) -> None:
    """Saves and conversions work and leave nothing behind, and one log line names each missing operation."""
    seen, logged = in_lab(saves_where_refused, tmp_path, count)
    assert seen == [(call, name, 2, True, []) for call, names in REFUSALS.items() for name in names[:count]]
    missing = ["a file system without fsync of folders", "a file system without hard links"]
    for operation in (*missing, "a file system without locks"):
        assert sum(operation in line for line in logged) == 1, logged
    assert len(logged) == 3


@pytest.mark.parametrize(("call", "name"), FAILURES)
def test_a_failure_is_raised_not_worked_around(tmp_path: Path, call: str, name: str) -> None:
    """A failure is raised with operation, path and errno; old files stay, and no others are left."""
    folder = tmp_path / "x"
    save_version(folder, 1)
    target = tmp_path / "new" if call == "link" else folder
    with bad_mount(tmp_path, _refusing(call, name)), pytest.raises(StorageError) as caught:
        save_version(target, 2)
    assert caught.value.errno == getattr(errno, name)
    assert caught.value.op in ("fsync_folder", "link", "lock") and str(tmp_path) in caught.value.path
    assert seen_by_dcp(folder) == 1
    assert _odd_files(tmp_path) == []


def test_missing_operations_name_the_option(tmp_path: Path) -> None:
    """Without fsync of files, or without link and rename, the error names the option to use."""

    def no_sync(call: str, path: Path) -> int:
        return errno.EINVAL if call == "fsync" else 0

    def no_names(call: str, path: Path) -> int:
        return errno.ENOSYS if call in ("link", "rename") else 0

    state = {"w": [1.0]}
    with bad_mount(tmp_path, no_sync):
        with pytest.raises(StorageError, match=r"save with FileSystemWriter\(path, sync_files=False\)"):
            dcp.save(state, checkpoint_id=tmp_path / "a")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "a", sync_files=False))
    with bad_mount(tmp_path, no_names), pytest.raises(StorageError, match=r"save to the URL of the store"):
        dcp.save(state, checkpoint_id=tmp_path / "b")
    assert dcp.read(tmp_path / "a") == state
    assert _odd_files(tmp_path) == []


ACTS: dict[str, Callable[[Path], object]] = {
    "load": lambda root: dcp.load(version_state(0), checkpoint_id=root / "x", no_dist=True),
    "read": lambda root: dcp.read(root / "x"),
    "save": lambda root: save_version(root / "new", 1),
    "replace": lambda root: save_version(root / "x", 2),
    "convert": lambda root: dcp.convert(root / "x", root / "x.pt", to="torch", executor="inline"),
    "manager": lambda root: dcp.CheckpointManager(root / "run").all_steps(),
}


def fail_at_each_call(root: Path, act: str) -> list[str]:
    """Fail each system call of ``act`` once; return the errors without operation and path."""
    faults = []
    for at in itertools.count(1):
        folder = root / str(at)
        save_version(folder / "x", 1)
        calls: list[tuple[str, str]] = []

        def errno_of(call: str, path: Path, calls: list[tuple[str, str]] = calls, at: int = at) -> int:
            if path.name.endswith(" (deleted)"):  # a lock file: the outcome is known before the unlock
                return 0
            calls.append((call, path.name))
            return errno.EIO if len(calls) == at else 0

        try:
            with bad_mount(folder, errno_of):
                ACTS[act](folder)
        except CheckpointError as error:
            path = getattr(error, "path", "")
            if not isinstance(error, StorageError) or not error.op or not path or path not in str(error):
                faults.append(f"{calls[at - 1]}: {error!r}")
        except OSError as error:
            faults.append(f"{calls[at - 1]}: {error!r}")
        if len(calls) < at:
            return faults
    return faults


@pytest.mark.parametrize(
    "act",
    [act if act in ("load", "read") else pytest.param(act, marks=pytest.mark.exhaustive) for act in ACTS],
)
def test_all_failures_are_typed(tmp_path: Path, act: str) -> None:
    """A failure of any system call is a StorageError with operation and path."""
    assert in_lab(fail_at_each_call, tmp_path, act) == []
