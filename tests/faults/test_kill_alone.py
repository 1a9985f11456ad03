"""SIGKILL before every single step that a save takes on storage: the old checkpoint stands, or the new."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.inspection.verification import verify
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME
from dcp.storage.stores import PosixStore
from tests.support.crashes import Child, in_lab, kill_at_each_step
from tests.support.versions import (
    ABSENT,
    MIXED,
    TOGETHER,
    listing,
    save_version,
    seen_by_dcp,
    seen_by_stock,
    stock_save_version,
    version_apart,
    version_state,
)

OLD, NEW, NEXT = 1, 2, 3
CLEAN = {"manifest": 1, "metadata": 1, "data": 1}
COMMITTED = (MANIFEST_NAME, METADATA_NAME)


class ObjectPlanner(dcp.DefaultSavePlanner):
    """A planner that overrides a step, so that the save runs by torch's protocol."""

    def create_local_plan(self) -> Any:
        """As it was."""
        return super().create_local_plan()


def save(folder: Path, how: str, version: int, large: int, observe: Any = None) -> None:
    """One save of a scenario's kind."""
    options: dict[str, Any] = {"open_store": partial(PosixStore, observe=observe)}
    arguments: dict[str, Any] = {}
    if how == "bare":
        options["torch_compatible"] = False
    elif how == "no fsync":
        options["sync_files"] = False
    elif how == "file per tensor":
        options["single_file_per_rank"] = False
    elif how == "two threads":
        options["thread_count"] = 2
    elif how == "objects":
        arguments["planner"] = ObjectPlanner()
    elif how == "no collectives":
        arguments["use_collectives"] = False
    elif how == "mapped":
        arguments["map"] = TOGETHER
    dcp.save(
        (version_apart if how == "mapped" else version_state)(version, large=large),
        storage_writer=dcp.FileSystemWriter(folder, **options),
        no_dist=True,
        **arguments,
    )


def half_published(folder: Path) -> None:
    """A folder as a save leaves it that was killed between its manifest and its `.metadata`."""
    save_version(folder, 4)

    def observe(op: str, name: str) -> None:
        if (op, name) == ("rename", ".metadata"):
            os.kill(os.getpid(), signal.SIGKILL)

    Child(save, folder, "plain", OLD, 0, observe).wait()


@dataclass(frozen=True)
class Scenario:
    """What is there before, and how it is replaced. ``old`` and ``old_stock`` are what dcp and stock see."""

    how: str
    before: Callable[[Path], None] | None = None
    old: int | str = ABSENT
    old_stock: int | str = ABSENT
    new_stock: int | str = NEW
    large: int = 0
    least_steps: int = 14


def ours(large: int = 0, **options: Any) -> Callable[[Path], None]:
    """Version OLD, saved by dcp."""
    return partial(save_version, version=OLD, large=large, **options)


LARGE = (4 << 20) + 1000
"""Elements of 4 bytes: more than two of the buffers that a background thread writes."""

by_stock = partial(stock_save_version, version=OLD)

SCENARIOS = {
    "first": Scenario("plain"),
    "first, no fsync": Scenario("no fsync", least_steps=8),
    "first, large": Scenario("plain", large=LARGE),
    "first, two files": Scenario("two threads"),
    "overwrite": Scenario("plain", ours(), OLD, OLD),
    "overwrite, by torch's protocol": Scenario("objects", ours(), OLD, OLD),
    "overwrite, file per tensor": Scenario("file per tensor", ours(), OLD, OLD, least_steps=30),
    "overwrite, no fsync": Scenario("no fsync", ours(), OLD, OLD, least_steps=8),
    "bare over compatible": Scenario("bare", ours(), OLD, OLD, new_stock=ABSENT, least_steps=12),
    "bare over bare": Scenario("bare", ours(torch_compatible=False), OLD, new_stock=ABSENT, least_steps=10),
    "compatible over bare": Scenario("plain", ours(torch_compatible=False), OLD),
    "over stock": Scenario("plain", by_stock, OLD, OLD),
    "bare over stock": Scenario("bare", by_stock, OLD, OLD, new_stock=ABSENT, least_steps=12),
    "over a killed save": Scenario("plain", half_published, OLD, 4),
    "overwrite, through a map": Scenario("mapped", ours(), OLD, OLD),
}


@dataclass
class Crash:
    """What one kill left: who sees which version, what is damaged, and how the next save went."""

    step: str
    killed: bool
    dcp: int | str
    stock: int | str
    findings: set[str]
    next_seen: tuple[int | str, int | str] = (MIXED, MIXED)
    next_listing: dict[str, int] = field(default_factory=dict)
    next_findings: int = 0


Killed = tuple[Scenario, list[Crash]]


def every_crash(root: Path, name: str) -> list[Crash]:
    """Kill the save of a scenario before its first step, its second, and so on until it gets through."""
    scenario = SCENARIOS[name]
    before = root / "before"
    if scenario.before is not None:
        scenario.before(before)

    seen: dict[Any, Crash] = {}

    def act(folder: Path, observe: Any) -> None:
        save(folder, scenario.how, NEW, scenario.large, observe)

    def look_once(folder: Path, step: str, killed: bool) -> Crash:
        if (left := what_is_left(folder)) not in seen:
            seen[left] = look(scenario, folder, step, killed)
        return replace(seen[left], step=step, killed=killed)

    return kill_at_each_step(before, root, act, look_once)


def what_is_left(folder: Path) -> Any:
    """The same for two crashes between which nothing happened that anybody could see: files that say what is
    committed by their bytes, the others by their kind and size."""
    files = folder.iterdir() if folder.exists() else ()
    return frozenset(
        Counter(
            (path.name, path.read_bytes()) if path.name in COMMITTED else (path.suffix, path.stat().st_size)
            for path in files
        ).items()
    )


def look(scenario: Scenario, folder: Path, step: str, killed: bool) -> Crash:
    """Load by dcp and by stock torch, verify, save again and look once more."""
    seen = seen_by_dcp(folder, large=scenario.large)
    kinds = {finding.kind for finding in verify(folder).findings} if seen != ABSENT else set()
    crash = Crash(step, killed, seen, seen_by_stock(folder, large=scenario.large), kinds)
    save_version(folder, NEXT)
    crash.next_seen = seen_by_dcp(folder), seen_by_stock(folder)
    crash.next_listing = listing(folder)
    crash.next_findings = len(verify(folder).findings)
    return crash


COMBINED = (
    "first",
    "first, no fsync",
    "first, two files",
    "overwrite, file per tensor",
    "bare over compatible",
    "bare over bare",
    "compatible over bare",
    "bare over stock",
    "overwrite, through a map",
)
"""What each of them combines, others have, and a large first save takes all steps of a small one. The
commit of one kind over another is interrupted at every operation by
tests/commit/test_interleavings.py."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.exhaustive) if name in COMBINED else name for name in SCENARIOS
    ],
)
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    """A scenario with all of its crashes."""
    root = tmp_path_factory.mktemp("killed")
    yield SCENARIOS[request.param], in_lab(every_crash, root, request.param)
    shutil.rmtree(root)


def test_a_save_killed_before_any_step_leaves_the_old_or_the_new(killed: Killed) -> None:
    """dcp and stock see the old version until one step and the new one after it, whole and verified."""
    scenario, crashes = killed
    assert len(crashes) > scenario.least_steps
    assert [crash.killed for crash in crashes] == [True] * (len(crashes) - 1) + [False]
    for seen, old, new in (
        ([crash.dcp for crash in crashes], scenario.old, NEW),
        ([crash.stock for crash in crashes], scenario.old_stock, scenario.new_stock),
    ):
        turn = seen.index(new) if new in seen else len(seen)
        assert seen == [old] * turn + [new] * (len(seen) - turn)
        assert seen[-1] == new
    assert crashes[0].dcp == scenario.old
    for crash in crashes:
        assert crash.findings <= {"stray-file", "metadata"}, crash
    assert crashes[-1].findings == set()


def test_the_save_after_a_killed_one_works_and_cleans_up(killed: Killed) -> None:
    """Whatever a killed save left behind, the next one to the id commits, and nothing else is there then."""
    _, crashes = killed
    for crash in crashes:
        assert crash.next_seen == (NEXT, NEXT), crash
        assert (crash.next_listing, crash.next_findings) == (CLEAN, 0), crash


def every_crash_without_collectives(root: Path, overwrite: bool) -> list[tuple[bool, int | str, int | str]]:
    """(killed, what dcp sees, what it sees after one more save) for each step of a rank that saves alone."""
    before = root / "before"
    if overwrite:
        save(before, "no collectives", OLD, 0)

    def act(folder: Path, observe: Any) -> None:
        save(folder, "no collectives", NEW, 0, observe)

    def look_alone(folder: Path, step: str, killed: bool) -> tuple[bool, int | str, int | str]:
        seen = seen_by_dcp(folder)
        save(folder, "no collectives", NEXT, 0)
        return killed, seen, seen_by_dcp(folder)

    return kill_at_each_step(before, root, act, look_alone)


@pytest.mark.parametrize("overwrite", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_rank_that_saves_without_the_others_is_killed(tmp_path: Path, overwrite: bool) -> None:
    """With ``use_collectives=False`` each rank commits its own part, by the same rules."""
    rows = in_lab(every_crash_without_collectives, tmp_path, overwrite)
    assert [killed for killed, _, _ in rows] == [True] * (len(rows) - 1) + [False]
    assert len(rows) > 14
    seen = [version for _, version, _ in rows]
    old = OLD if overwrite else ABSENT
    turn = seen.index(NEW)
    assert seen == [old] * turn + [NEW] * (len(seen) - turn)
    assert {after for _, _, after in rows} == {NEXT}
