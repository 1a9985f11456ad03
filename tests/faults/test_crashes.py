"""SIGKILL before each step of a save, a deletion or a prune: readers find the old or the new state, whole."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.storage.stores import PosixStore
from tests.support.crashes import Child, in_lab, kill_at_each_step, observe_calls
from tests.support.fault_doors import HARMLESS, MANIFEST_NAME, METADATA_NAME, NOTES_NAME, findings, run
from tests.support.rank_acts import ObjectSavePlanner
from tests.support.versions import (
    ABSENT,
    MIXED,
    TOGETHER,
    copy_folder,
    listing,
    names_in,
    save_version,
    seen_by_dcp,
    seen_by_stock,
    stock_save_version,
    version_apart,
    version_state,
)
from tests.support.with_optimizer import present_parts, save_apart, save_mixed, save_stock, stock_sees

OLD, NEW, NEXT = 1, 2, 3
STEP = 7
FOLDER = f"step-{STEP:08d}"
CLEAN = {"manifest": 1, "metadata": 1, "data": 1}
LARGE = (4 << 20) + 1000
"""Number of 4-byte elements: more than two buffers of a background writer thread."""

Seen = int | str


def turns_once(seen: list[Seen], old: Seen, new: Seen) -> int:
    """Return the index of the first ``new``. Assert that all before are ``old`` and all after are ``new``."""
    turn = seen.index(new) if new in seen else len(seen)
    assert seen == [old] * turn + [new] * (len(seen) - turn)
    return turn


def _all_but_the_last(killed: list[bool]) -> bool:
    return killed == [True] * (len(killed) - 1) + [False]


# -- saves ---------------------------------------------------------------------------------------------------


WRITERS: dict[str, dict[str, Any]] = {
    "bare": {"torch_compatible": False},
    "no fsync": {"sync_files": False},
    "file per tensor": {"single_file_per_rank": False},
    "two threads": {"thread_count": 2},
}
CALLS: dict[str, dict[str, Any]] = {
    "objects": {"planner": ObjectSavePlanner()},
    "no collectives": {"use_collectives": False},
    "mapped": {"map": TOGETHER},
}


def _save(folder: Path, how: str, version: int, large: int, observe: Any = None) -> None:
    state = (version_apart if how == "mapped" else version_state)(version, large=large)
    writer = dcp.FileSystemWriter(
        folder, open_store=partial(PosixStore, observe=observe), **WRITERS.get(how, {})
    )
    dcp.save(state, storage_writer=writer, no_dist=True, **CALLS.get(how, {}))


def _save_observed(folder: Path, observe: Any, *, how: str, large: int = 0) -> None:
    _save(folder, how, NEW, large, observe)


def half_published(folder: Path) -> None:
    """Run a save that is killed between the manifest and `.metadata`."""
    save_version(folder, 4)

    def observe(op: str, name: str) -> None:
        if (op, name) == ("rename", METADATA_NAME):
            os.kill(os.getpid(), signal.SIGKILL)

    Child(_save, folder, "plain", OLD, 0, observe).wait()


@dataclass(frozen=True)
class Scenario:
    """A save over an existing state. ``old`` and ``old_stock``: versions that dcp and stock see before."""

    how: str
    before: Callable[[Path], None] | None = None
    old: Seen = ABSENT
    old_stock: Seen = ABSENT
    new_stock: Seen = NEW
    large: int = 0
    least_steps: int = 14


def by_dcp(**options: Any) -> Callable[[Path], None]:
    """Return a function that saves version OLD with dcp."""
    return partial(save_version, version=OLD, **options)


by_stock = partial(stock_save_version, version=OLD)

SAVES = {
    "first": Scenario("plain"),
    "first, no fsync": Scenario("no fsync", least_steps=8),
    "first, large": Scenario("plain", large=LARGE),
    "first, two files": Scenario("two threads"),
    "overwrite": Scenario("plain", by_dcp(), OLD, OLD),
    "overwrite, by torch's protocol": Scenario("objects", by_dcp(), OLD, OLD),
    "overwrite, file per tensor": Scenario("file per tensor", by_dcp(), OLD, OLD, least_steps=30),
    "overwrite, no fsync": Scenario("no fsync", by_dcp(), OLD, OLD, least_steps=8),
    "bare over compatible": Scenario("bare", by_dcp(), OLD, OLD, new_stock=ABSENT, least_steps=12),
    "bare over bare": Scenario("bare", by_dcp(torch_compatible=False), OLD, new_stock=ABSENT, least_steps=10),
    "compatible over bare": Scenario("plain", by_dcp(torch_compatible=False), OLD),
    "over stock": Scenario("plain", by_stock, OLD, OLD),
    "bare over stock": Scenario("bare", by_stock, OLD, OLD, new_stock=ABSENT, least_steps=12),
    "over a killed save": Scenario("plain", half_published, OLD, 4),
    "overwrite, through a map": Scenario("mapped", by_dcp(), OLD, OLD),
}
OFTEN = {"over stock", "over a killed save"}
"""Scenarios of each test run: together they have every feature of the exhaustive scenarios."""


@dataclass
class Crash:
    """State after one kill: versions that readers see, findings of `verify`, and the next save's result."""

    killed: bool
    dcp: Seen
    stock: Seen
    found: set[str]
    next_seen: tuple[Seen, Seen] = (MIXED, MIXED)
    next_listing: dict[str, int] = field(default_factory=dict)
    next_found: set[str] = field(default_factory=set)


def every_crash(root: Path, name: str) -> list[Crash]:
    """Kill the save of a scenario before the first step, the second, ... until a save completes."""
    scenario = SAVES[name]
    if scenario.before is not None:
        scenario.before(root / "before")
    seen: dict[Any, Crash] = {}
    act = partial(_save_observed, how=scenario.how, large=scenario.large)

    def look_once(folder: Path, step: str, killed: bool) -> Crash:
        if (left := files_after_crash(folder)) not in seen:
            seen[left] = look(scenario, folder)
        return replace(seen[left], killed=killed)

    return kill_at_each_step(root / "before", root, act, look_once)


def files_after_crash(folder: Path) -> Any:
    """Return equal keys for equivalent crashes: bytes of manifest and `.metadata`, suffix and size of
    others."""
    files = folder.iterdir() if folder.exists() else ()
    committed = (MANIFEST_NAME, METADATA_NAME)
    return frozenset(
        Counter(
            (path.name, path.read_bytes()) if path.name in committed else (path.suffix, path.stat().st_size)
            for path in files
        ).items()
    )


def look(scenario: Scenario, folder: Path) -> Crash:
    """Load with dcp and with stock torch, verify, save again, and check once more."""
    large = scenario.large
    seen, stock = seen_by_dcp(folder, large=large), seen_by_stock(folder, large=large)
    crash = Crash(False, seen, stock, findings(folder) if seen != ABSENT else set())
    save_version(folder, NEXT)
    crash.next_seen = seen_by_dcp(folder), seen_by_stock(folder)
    crash.next_listing, crash.next_found = listing(folder), findings(folder)
    return crash


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.exhaustive) for name in SAVES]
)
def test_a_killed_save_leaves_the_old_or_new_checkpoint(tmp_path: Path, name: str) -> None:
    """Readers, dcp and stock torch, see the whole old version up to one step and the whole new version
    afterwards. The next save commits and removes all leftovers."""
    scenario, crashes = SAVES[name], in_lab(every_crash, tmp_path, name)
    assert len(crashes) > scenario.least_steps
    assert _all_but_the_last([crash.killed for crash in crashes])
    assert turns_once([crash.dcp for crash in crashes], scenario.old, NEW) in range(1, len(crashes))
    turns_once([crash.stock for crash in crashes], scenario.old_stock, scenario.new_stock)
    assert crashes[-1].stock == scenario.new_stock and crashes[-1].found == set()
    for crash in crashes:
        assert crash.found <= HARMLESS, crash
        assert crash.next_seen == (NEXT, NEXT), crash
        assert (crash.next_listing, crash.next_found) == (CLEAN, set()), crash


# -- deletions -----------------------------------------------------------------------------------------------


def _stock_over_dcp(folder: Path) -> None:
    save_version(folder, 4)
    stock_save_version(folder, OLD)


def _with_strays(folder: Path) -> None:
    save_version(folder, OLD, single_file_per_rank=False)
    for name in ("__0_0.0a1b2c3d.distcp", ".tmp-" + "0" * 32):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (1, 1))


def noted(folder: Path) -> None:
    """Save version OLD with an existing notes file, to which the deletion adds a note."""
    save_version(folder, OLD)
    with dcp.CheckpointManager(folder.parent, no_dist=True) as manager:
        manager.pin(STEP)
        manager.unpin(STEP)


DELETIONS: dict[str, tuple[Callable[[Path], None], bool]] = {
    "dcp": (by_dcp(), True),
    "bare": (by_dcp(torch_compatible=False), False),
    "stock": (by_stock, True),
    "stock over dcp": (_stock_over_dcp, True),
    "strays": (_with_strays, True),
    "noted": (noted, True),
}
"""Function that makes the checkpoint to delete, and whether stock torch can read the checkpoint."""


@dataclass(frozen=True)
class Deletion:
    """State after one kill, after the next run, and after a save of the same step."""

    killed: bool
    dcp: Seen
    stock: Seen
    sound: bool
    steps: list[int]
    left: list[str]
    saved: tuple[Seen, Seen, list[int], bool, dict[str, int]]


def _delete(root: Path, observe: Callable[[str, str], None]) -> None:
    with dcp.CheckpointManager(root, no_dist=True) as manager:
        observe_calls(root, observe)
        manager.delete(STEP)


def every_deletion(base: Path, name: str) -> list[Deletion]:
    """Kill the deletion before the first step, the second, ... until a deletion completes."""
    DELETIONS[name][0](base / "template" / FOLDER)
    return kill_at_each_step(base / "template", base, _delete, look_at_deletion)


def look_at_deletion(root: Path, step: str, killed: bool) -> Deletion:
    """Load, verify and list. Then continue the run in one copy, and save the same step in another copy."""
    folder, copy = root / FOLDER, root.with_name(f"{root.name}-save")
    seen, stock = seen_by_dcp(folder), seen_by_stock(folder)
    sound = seen == ABSENT or findings(folder) <= HARMLESS
    copy_folder(root, copy)
    if folder.exists():
        os.utime(folder, (1, 1))  # an empty folder is removed only after a day
    with dcp.CheckpointManager(root, no_dist=True) as manager:
        steps = manager.all_steps()
        manager.save(STEP + 1, {"n": 1}, force=True)  # the first save completes cut-off deletions
    left = names_in(folder) or ["."] * folder.exists()
    with dcp.CheckpointManager(copy, no_dist=True) as manager:
        manager.save(STEP, version_state(NEW), force=True)
        manager.wait()
        saved = manager.all_steps()
    files = listing(copy / FOLDER)
    files.pop(NOTES_NAME, None)
    after = seen_by_dcp(copy / FOLDER), seen_by_stock(copy / FOLDER)
    return Deletion(
        killed, seen, stock, sound, steps, left, (*after, saved, findings(copy / FOLDER) == set(), files)
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "strays" else pytest.mark.exhaustive) for name in DELETIONS],
)
def test_a_killed_deletion_leaves_all_or_nothing(tmp_path: Path, name: str) -> None:
    """The checkpoint is whole up to one step and then gone. The next run completes the deletion, or saves."""
    crashes: list[Deletion] = in_lab(every_deletion, tmp_path, name)
    assert _all_but_the_last([crash.killed for crash in crashes])
    cut = turns_once([crash.dcp for crash in crashes], OLD, ABSENT)
    assert 3 < cut < len(crashes) - 3
    assert {crash.stock for crash in crashes} == ({ABSENT, OLD} if DELETIONS[name][1] else {ABSENT})
    for crash in crashes:
        assert crash.sound, crash
        assert crash.steps == ([STEP] if MANIFEST_NAME in crash.left or METADATA_NAME in crash.left else [])
        assert crash.steps or crash.left == [], crash  # a deletion that began is completed
        assert crash.steps == [] or crash.dcp == OLD, crash
        assert crash.saved == (NEW, NEW, [STEP], True, CLEAN), crash
    assert (crashes[0].steps, crashes[-1].left) == ([STEP], [])


# -- drops ---------------------------------------------------------------------------------------------------


def _by_dcp_and_then_stock(folder: Path) -> None:
    save_apart(folder, 2)
    save_stock(folder)


DROPS: dict[str, tuple[Callable[[Path], None], tuple[str, ...], bool]] = {
    "files of their own": (save_apart, (), True),
    "one file": (save_mixed, ("--rewrite",), True),
    "stock": (save_stock, ("--rewrite",), True),
    "stock over dcp": (_by_dcp_and_then_stock, ("--rewrite",), True),
    "bare": (partial(save_apart, torch_compatible=False), (), False),
}
"""Function that makes the checkpoint, options of the command, and whether stock torch can read the result."""

WHOLE, LESS = "whole", "weights"


@dataclass(frozen=True)
class Drop:
    """State after one kill, after a second prune, and after a clean-up one day later."""

    killed: bool
    dcp: str
    stock: str
    sound: bool
    again: tuple[str, str, bool, int, dict[str, int]]
    collected: tuple[str, str, bool]


def _drop(folder: Path, observe: Callable[[str, str], None], *, options: tuple[str, ...]) -> None:
    observe_calls(folder, observe)
    assert run("prune", folder, "--yes", *options).status == 0


def every_drop(base: Path, name: str) -> list[Drop]:
    """Kill the prune before the first step, the second, ... until a prune completes."""
    before, options, has_stock = DROPS[name]
    before(base / "template")
    look = partial(look_at_drop, options=options, has_stock=has_stock)
    return kill_at_each_step(base / "template", base, partial(_drop, options=options), look)


def look_at_drop(folder: Path, step: str, killed: bool, *, options: tuple[str, ...], has_stock: bool) -> Drop:
    """Load and verify. Prune again in one copy, and run a clean-up one day later in another copy."""

    def seen(place: Path) -> tuple[str, str]:
        return present_parts(place), stock_sees(place) if has_stock else ""

    again, later = folder.with_name(f"{folder.name}-again"), folder.with_name(f"{folder.name}-later")
    for copy in (again, later):
        copy_folder(folder, copy)
    assert run("prune", again, "--yes", *options).status == 0
    data = listing(again)["data"]
    for copy in (again, later):
        for path in copy.iterdir():
            os.utime(path, (1, 1))
        assert run("gc", copy, "--yes").status == 0
    return Drop(
        killed,
        *seen(folder),
        findings(folder) <= HARMLESS,
        (*seen(again), findings(again) == set(), data if not options else 0, listing(again)),
        (*seen(later), findings(later) <= HARMLESS),
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "files of their own" else pytest.mark.exhaustive)
        for name in DROPS
    ],
)
def test_a_killed_drop_leaves_all_or_the_rest(tmp_path: Path, name: str) -> None:
    """Readers see all parts up to one step, then only the weights. A second prune, or gc, completes it."""
    crashes: list[Drop] = in_lab(every_drop, tmp_path, name)
    assert _all_but_the_last([crash.killed for crash in crashes])
    assert 0 < turns_once([crash.dcp for crash in crashes], WHOLE, LESS) < len(crashes) - 1
    if DROPS[name][2]:  # stock torch switches at a different step
        turns_once([crash.stock for crash in crashes], WHOLE, LESS)
    for crash in crashes:
        assert crash.sound, crash
        assert crash.again == crashes[-1].again, crash
        assert crash.again[0] == LESS and crash.again[2], crash
        assert crash.collected[0] == crash.dcp and crash.collected[2], crash
        assert crash.collected[1] in ("", crash.dcp), crash
