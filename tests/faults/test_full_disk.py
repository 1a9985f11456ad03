"""Saves to a full disk: a small file system of the test, or a limit on the size of files."""

from __future__ import annotations

import ctypes
import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.errors import StorageFullError
from dcp.storage.stores import PosixStore
from tests.support.crashes import in_lab
from tests.support.fault_doors import findings
from tests.support.versions import ABSENT, listing, save_version, seen_by_dcp, seen_by_stock

OLD, NEW, NEXT = 1, 2, 3
CLEAN = {"manifest": 1, "metadata": 1, "data": 1}
PAGE = 4096
DISK_BYTES = 16 << 20
LARGE = 5 << 19  # number of 4-byte elements: 10 MiB, of which the small disk holds one

_CLONE_NEWNS = 0x00020000
_MS_REC_PRIVATE = 0x4000 | 1 << 18

Seen = tuple[int | str, int | str, dict[str, int], int]


def small_disk(folder: Path) -> bool:
    """Mount a small file system on ``folder``, for this process only. Return False without permission."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) or libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None):
        return False
    folder.mkdir(exist_ok=True)
    return not libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=%d" % DISK_BYTES)


def _try_save(folder: Path, version: int, **options: Any) -> str:
    try:
        save_version(folder, version, **options)
    except dcp.CheckpointError as error:
        assert isinstance(error, StorageFullError) and isinstance(error, OSError), repr(error)
        assert error.facts["path"].startswith(str(folder.parent))
        return "committed" if error.facts.get("committed") else type(error).__name__
    return ""


def _fill(folder: Path, free_bytes: int) -> None:
    state = os.statvfs(folder)
    with (folder / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, state.f_bavail * state.f_bsize - free_bytes)


def look(folder: Path, *, large: int = 0) -> Seen:
    """Return the versions that dcp and stock torch see, the files, and the number of findings."""
    seen = seen_by_dcp(folder, large=large)
    found = len(findings(folder)) if seen != ABSENT else 0
    return seen, seen_by_stock(folder, large=large), listing(folder), found


def _large_save_on_a_small_disk(root: Path, before: bool, options: dict[str, Any]) -> Any:
    if not small_disk(root / "disk"):
        return _limited(root, before, 1 << 20)
    folder = root / "disk" / "x"
    if before:
        save_version(folder, OLD, large=LARGE)
    else:
        _fill(root / "disk", 8 << 20)
    raised = _try_save(folder, NEW, large=LARGE, **options)
    after = look(folder, large=LARGE)
    save_version(folder, NEXT)
    return raised, after, look(folder)


def _limited(root: Path, before: bool, limit_bytes: int) -> Any:
    folder = root / "x"
    if before:
        save_version(folder, OLD)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))
    raised = _try_save(folder, NEW, large=LARGE)
    after = look(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    save_version(folder, NEXT)
    return raised, after, look(folder)


def _full_for_one_write(root: Path, before: bool, at: int) -> Any:
    """Fill the disk for one write of an asynchronous save; all later writes fit."""
    folder, writes = root / "x", 0
    if before:
        save_version(folder, OLD)

    def observe(step: str, name: str) -> None:
        nonlocal writes
        writes += step == "pwrite"
        limit = 1 << 20 if (step, writes) == ("pwrite", at) else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    raised = _try_save(folder, NEW, large=LARGE, open_store=partial(PosixStore, observe=observe))
    after = look(folder)
    save_version(folder, NEXT)
    return raised, after, look(folder)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("how", "given"),
    [
        *((_large_save_on_a_small_disk, given) for given in ({}, {"sync_files": False}, {"thread_count": 2})),
        pytest.param(_large_save_on_a_small_disk, {"mapped": True}, marks=pytest.mark.exhaustive),
        *((_limited, limit_bytes) for limit_bytes in (1000, 9 << 20)),
        (_full_for_one_write, 1),
    ],
)
def test_a_save_that_does_not_fit_keeps_old_files(tmp_path: Path, before: bool, how: Any, given: Any) -> None:
    """The save raises StorageFullError with the path, also at a limit on file sizes. It removes its own
    files, so a smaller save fits."""
    raised, after, finally_ = in_lab(how, tmp_path, before, given)
    assert raised == "StorageFullError"
    assert after == ((OLD, OLD, CLEAN, 0) if before else (ABSENT, ABSENT, {}, 0))
    assert finally_ == (NEXT, NEXT, CLEAN, 0)
