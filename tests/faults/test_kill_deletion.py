"""SIGKILL before every single step that a deletion takes on storage: the checkpoint is whole, or gone."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from dcp.inspection.verification import verify
from dcp.manager.cleanup.deletion import Deleter
from dcp.steps.folders import StepFolders
from dcp.storage.commit_names import NOTES_NAME
from dcp.storage.stores import PosixStore
from dcp.storage.stores.folders import open_parent_folder
from tests.support.crashes import in_lab, kill_at_each_step
from tests.support.versions import (
    ABSENT,
    copy_folder,
    listing,
    save_version,
    seen_by_dcp,
    seen_by_stock,
    stock_save_version,
)

OLD, NEW = 1, 2
STEP = 7
CLEAN = {"manifest": 1, "metadata": 1, "data": 1}


def stock_over_ours(folder: Path) -> None:
    """Version OLD of stock torch's, over another one of ours."""
    save_version(folder, 4)
    stock_save_version(folder, OLD)


def with_strays(folder: Path) -> None:
    """Version OLD, with what killed saves left beside it."""
    save_version(folder, OLD, single_file_per_rank=False)
    for name in ("__0_0.0a1b2c3d.distcp", ".tmp-" + "0" * 32):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (1, 1))


def noted(folder: Path) -> None:
    """Version OLD with notes, which the tombstone is added to."""
    save_version(folder, OLD)
    StepFolders(folder.parent).update_notes(STEP, lambda notes: replace(notes, others={"tag": "x"}))


SCENARIOS: dict[str, tuple[Callable[[Path], None], bool]] = {
    "ours": (partial(save_version, version=OLD), True),
    "bare": (partial(save_version, version=OLD, torch_compatible=False), False),
    "stock": (partial(stock_save_version, version=OLD), True),
    "stock over ours": (stock_over_ours, True),
    "strays": (with_strays, True),
    "noted": (noted, True),
}
"""What is to be deleted, and whether stock sees it before."""


@dataclass(frozen=True)
class Crash:
    """What one kill left, what the next start found and left, and what a save in its place became."""

    killed: bool
    dcp: int | str
    stock: int | str
    sound: bool
    is_listed: bool
    resumed: list[int]
    left: list[str]
    saved: tuple[int | str, int | str, list[int], bool, dict[str, int]]


def delete(root: Path, observe: Callable[[str, str], None]) -> None:
    """Delete the step in the background, as a manager does."""
    folders = StepFolders(open_parent_folder(root, open_store=partial(PosixStore, observe=observe)))
    deleter = Deleter(folders)
    deleter.delete(STEP)
    deleter.close()


def every_crash(base: Path, name: str) -> list[Crash]:
    """Kill the deletion before its first step, its second, and so on until it gets through."""
    template = base / "template" / StepFolders(base).name(STEP)
    SCENARIOS[name][0](template)
    return kill_at_each_step(template.parent, base, delete, look)


def look(root: Path, step: str, killed: bool) -> Crash:
    """Load, verify and list; then start again in one copy, and save over it in another."""
    folders = StepFolders(root)
    folder = Path(folders.checkpoint_id(STEP))
    seen, stock = seen_by_dcp(folder), seen_by_stock(folder)
    sound = seen == ABSENT or {finding.kind for finding in verify(folder).findings} <= {
        "stray-file",
        "metadata",
    }
    is_listed = folders.all_steps() == [STEP]
    copy = root.with_name(f"{root.name}-save")
    copy_folder(root, copy)
    deleter = Deleter(folders)
    resumed = deleter.resume()
    if not deleter.close():
        raise AssertionError("resume did not end")
    left = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    return Crash(killed, seen, stock, sound, is_listed, resumed, left, save_over(copy))


def save_over(root: Path) -> tuple[int | str, int | str, list[int], bool, dict[str, int]]:
    """Save to the step that was being deleted, and go on deleting: the new one must stand."""
    folders = StepFolders(root)
    folder = Path(folders.checkpoint_id(STEP))
    deleter = Deleter(folders)
    deleter.make_way(STEP)
    save_version(folder, NEW)
    deleter.resume()
    deleter.close()
    files = listing(folder)
    files.pop(NOTES_NAME, None)
    return seen_by_dcp(folder), seen_by_stock(folder), folders.all_steps(), verify(folder).ok, files


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in ("stock", "bare", "noted") else ())
        for name in SCENARIOS
    ],
)
def test_a_deletion_killed_before_any_step_leaves_all_or_nothing(tmp_path: Path, name: str) -> None:
    """Whole until one step and gone after it, for dcp and for stock; the next start finishes it.

    And a save to the step comes out right after each of the crashes.
    """
    crashes: list[Crash] = in_lab(every_crash, tmp_path, name)
    assert [crash.killed for crash in crashes] == [True] * (len(crashes) - 1) + [False]
    assert len(crashes) >= 14
    seen = [crash.dcp for crash in crashes]
    cut = seen.index(ABSENT)
    assert seen == [OLD] * cut + [ABSENT] * (len(seen) - cut)
    assert 6 < cut < len(seen) - 4
    assert {crash.stock for crash in crashes} == {ABSENT, OLD} if SCENARIOS[name][1] else {ABSENT}
    assert all(crash.sound for crash in crashes)
    for crash in crashes:
        # From the tombstone on it does not count, and whoever starts next finishes.
        assert crash.is_listed == (crash.dcp == OLD and not crash.resumed), crash
        gone = {"manifest.msgpack", ".metadata"}.isdisjoint(crash.left)
        assert crash.is_listed != gone, crash
        if gone:
            assert crash.left == [], crash
        assert crash.saved == (NEW, NEW, [STEP], True, CLEAN), crash
    assert crashes[0].is_listed
    assert crashes[-1].left == []
