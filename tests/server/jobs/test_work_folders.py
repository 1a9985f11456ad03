"""Folders of tasks: kept while their process is there, cleared away after it, made again if removed."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from dcp.server.jobs.executors.work_folders import WorkFolders


def test_what_others_hold_stays_and_what_is_left_goes(tmp_path: Path) -> None:
    """A second process removes nothing of the first; what one has left that was killed it does."""
    first, second = WorkFolders(tmp_path), WorkFolders(tmp_path)
    kept = first.make()
    left = tmp_path / "dcp-work-left"
    left.mkdir()
    (left / ".lock").touch()
    assert second.make().is_dir() and kept.is_dir() and not left.exists()
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_one_taken_for_left_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes of a Dask cluster begin at once: all tasks of one failed, for as long as it lived."""
    lock = fcntl.flock
    other = WorkFolders(tmp_path)

    def locks_late(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        other.make()
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", locks_late)
    folders = WorkFolders(tmp_path)
    assert folders.make().is_dir() and folders.make().is_dir()
    folders.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_was_full_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there was no room for the lock: the next task has a folder, and nothing is left of the first."""
    opened, folders = os.open, WorkFolders(tmp_path)

    def full(path: Path, *args: Any, **options: Any) -> int:
        if Path(path).name == ".lock":
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", full)
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            folders.make()
    monkeypatch.setattr(os, "open", opened)
    assert folders.make().is_dir()
    folders.close()
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_removed_is_made_again(tmp_path: Path) -> None:
    """With all that is above it."""
    folders = WorkFolders(tmp_path / "work")
    shutil.rmtree(folders.make().parents[1])
    assert folders.make().is_dir()
    folders.close()
