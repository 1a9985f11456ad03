"""SIGKILL of a rank at each step and in each phase: the others raise in time, with the rank and the state."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.storage.stores import PosixStore
from tests.support.crashes import Ending, Group, in_lab, kill_rank, run_groups
from tests.support.fault_doors import HARMLESS, findings
from tests.support.rank_acts import act_in_phase
from tests.support.versions import (
    ABSENT,
    TOGETHER,
    copy_folder,
    listing,
    save_version,
    seen_by_dcp,
    seen_by_stock,
    version_apart,
    version_state,
)
from tests.support.with_optimizer import present_parts, stock_sees

OLD, NEW, NEXT = 1, 2, 3
CLEAN = {"manifest": 1, "metadata": 1, "data": 1}
TIMEOUT_SECONDS = 60.0
NO_RANK = -1

pytestmark = pytest.mark.timeout(900)


def _die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def assert_names_victim(ending: Ending, victim: int) -> None:
    """Assert that a survivor raised an error that names the killed rank alone."""
    assert not ending.hung and ending.signal == 0, ending
    assert ending.raised is not None, ending
    assert {"RankFailedError", "CheckpointException"} <= set(ending.raised.class_names), ending.raised
    assert ending.raised.facts["failed_ranks"] == [victim], ending.raised
    assert f"rank {victim}" in ending.raised.message


# -- at every step on storage --------------------------------------------------------------------------------


def save_together(
    rank: int, world_size: int, folder: Path, victim: int, observer: int, at: int, *, mapped: bool = False
) -> list[str]:
    """Save, and kill ``victim`` before the ``at``-th storage step of ``observer``. Return the steps taken.
    ``mapped``: each rank has a half of some tensors, joined by a weight map."""
    steps: list[str] = []

    def observe(op: str, name: str) -> None:
        steps.append(op)
        if rank == observer and len(steps) == at:
            kill_rank(victim)

    writer = dcp.FileSystemWriter(folder, open_store=partial(PosixStore, observe=observe))
    state = version_apart(NEW, own=rank) if mapped else version_state(NEW)
    weights = TOGETHER if mapped else None
    dcp.save(state, storage_writer=writer, map=weights, timeout_seconds=TIMEOUT_SECONDS)
    return steps


@dataclass
class Loss:
    """State after one rank was killed."""

    victim: int
    observer: int
    endings: list[Ending]
    dcp: int | str
    stock: int | str
    found: set[str]
    left: dict[str, int]
    next_seen: tuple[int | str, int | str]
    next_listing: dict[str, int]


def every_loss(root: Path, old: int | str, mapped: bool, every: int) -> list[Loss]:
    """Kill each victim at each ``every``-th and the last storage step of each observer. Return results."""
    save, before = partial(save_together, mapped=mapped), root / "before"
    if old != ABSENT:
        save_version(before, OLD)
    copy_folder(before, root / "count")
    (counted,) = run_groups([Group(2, save, (root / "count", NO_RANK, NO_RANK, 0))])
    steps = [len(ending.value) for ending in counted]
    cases = [
        (victim, observer, number)
        for victim, observer in ((0, 0), (1, 1), (1, 0), (0, 1))
        for number in range(1, steps[observer] + 1)
        if number % every == victim % every or number == steps[observer]
    ]
    folders = [root / "-".join(map(str, case)) for case in cases]
    for folder in folders:
        copy_folder(before, folder)
    groups = [Group(2, save, (folder, *case)) for folder, case in zip(folders, cases, strict=True)]
    endings = run_groups(groups, at_once=12)
    return [_look(folder, case, ended) for folder, case, ended in zip(folders, cases, endings, strict=True)]


def _look(folder: Path, case: tuple[int, int, int], endings: list[Ending]) -> Loss:
    seen, stock, left = seen_by_dcp(folder), seen_by_stock(folder), listing(folder)
    found = findings(folder) if seen != ABSENT else set()
    save_version(folder, NEXT)
    after = seen_by_dcp(folder), seen_by_stock(folder)
    return Loss(*case[:2], endings, seen, stock, found, left, after, listing(folder))


LOST = [
    pytest.param((OLD, False, 4), id="overwrite"),
    *(
        pytest.param((old, mapped, 1), id=f"{old} {mapped}", marks=pytest.mark.exhaustive)
        for old, mapped in ((OLD, False), (ABSENT, False), (OLD, True))
    ),
]


@pytest.fixture(scope="module", params=LOST)
def lost(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int | str, list[Loss]]]:
    """Yield the old version and the results of killing a rank in the save over it."""
    root = tmp_path_factory.mktemp("lost")
    yield request.param[0], in_lab(every_loss, root, *request.param, timeout_seconds=800)


def test_a_killed_rank_leaves_the_old_or_new_checkpoint(lost: tuple[int | str, list[Loss]]) -> None:
    """Readers, dcp and stock torch, see the whole old or the whole new checkpoint. The next save commits over
    leftovers. A surviving coordinator removes all files of the failed save."""
    old, losses = lost
    assert len(losses) >= 12
    for loss in losses:
        assert loss.dcp in (old, NEW) and loss.stock in (old, NEW), loss
        assert loss.found <= HARMLESS, loss
        assert (loss.next_seen, loss.next_listing) == ((NEXT, NEXT), CLEAN), loss
        if loss.victim == 1 and loss.dcp == old:
            assert loss.left == (CLEAN if old == OLD else {}), loss
    for victim, observer in ((0, 0), (1, 0)):
        seen = [loss.dcp for loss in losses if (loss.victim, loss.observer) == (victim, observer)]
        assert seen == sorted(seen, key=lambda version: version == NEW) and NEW in seen
    # Rank 1 takes no step in the commit, and the commit needs the part of rank 1.
    assert all(loss.dcp == old for loss in losses if (loss.victim, loss.observer) == (1, 1))


def test_the_survivor_names_the_killed_rank(lost: tuple[int | str, list[Loss]]) -> None:
    """The survivor raises an error with the rank of the victim and whether the checkpoint is committed."""
    for loss in lost[1]:
        assert loss.endings[loss.victim].killed, loss
        survivor = loss.endings[1 - loss.victim]
        if survivor.raised is None and loss.dcp == NEW:
            continue  # committed, and the survivor was notified
        assert_names_victim(survivor, loss.victim)
        assert survivor.raised is not None
        is_committed = bool(survivor.raised.facts.get("committed"))
        assert is_committed == (loss.dcp == NEW and loss.victim == 1), loss


# -- in every phase ------------------------------------------------------------------------------------------


Case = tuple[str, int, bool]
"""(phase, victim, whether the ranks use torch's protocol)"""

SAVES: list[Case] = [
    *[(phase, victim, False) for phase in ("state_dict", "set_up_planner", "write") for victim in (0, 1, 2)],
    *[(phase, 0, False) for phase in ("prepare", "lock", "publish")],
    *[(phase, 1, False) for phase in ("finish", "sync")],
    *[(phase, 0, True) for phase in ("prepare", "create_global_plan", "publish")],
    *[(phase, 2, True) for phase in ("create_local_plan", "finish_plan", "resolve_data")],
]
SOME_SAVES: list[Case] = [
    *[("state_dict", 1, False), ("write", 0, False), ("finish", 1, False), ("publish", 0, False)],
    *[("create_global_plan", 0, True), ("resolve_data", 2, True)],
]
LOADS: list[Case] = [
    *[(phase, victim, False) for phase in ("state_dict", "set_up_planner", "read") for victim in (0, 2)],
    *[("index", 0, False), ("open", 1, False), ("create_global_plan", 0, True)],
    *[(phase, 1, True) for phase in ("create_local_plan", "finish_plan", "commit_tensor", "index")],
]


def _act_and_die(rank: int, world_size: int, folder: Path, version: int, *case: Any) -> None:
    phase, victim, by_objects = case
    act_in_phase(folder, phase, _die if rank == victim else None, version=version, by_objects=by_objects)


def run_phases(root: Path, cases: list[Case], saves: bool) -> list[tuple[list[Ending], Any, Any]]:
    """Return for each case: the endings of the ranks, and the folder before and after another save."""
    save_version(root / "before", OLD)
    folders = [root / str(number) for number in range(len(cases))]
    for folder in folders:
        copy_folder(root / "before", folder)
    groups = [
        Group(3, _act_and_die, (f, NEW if saves else 0, *case))
        for f, case in zip(folders, cases, strict=True)
    ]
    rows = []
    for folder, endings in zip(folders, run_groups(groups, at_once=10), strict=True):
        before = seen_by_dcp(folder), listing(folder)
        save_version(folder, NEXT)
        rows.append((endings, before, (seen_by_dcp(folder), listing(folder))))
    return rows


@pytest.mark.parametrize(
    ("cases", "saves"),
    [
        pytest.param(SOME_SAVES, True, id="some saves"),
        pytest.param(SAVES, True, id="saves", marks=pytest.mark.exhaustive),
        pytest.param(LOADS, False, id="loads", marks=pytest.mark.exhaustive),
    ],
)
def test_survivors_name_a_rank_killed_in_any_phase(tmp_path: Path, cases: list[Case], saves: bool) -> None:
    """Both survivors name the killed rank, the old checkpoint stays, and the next save cleans up."""
    rows = in_lab(run_phases, tmp_path, cases, saves, timeout_seconds=800)
    for case, (endings, (seen, files), after) in zip(cases, rows, strict=True):
        victim = case[1]
        assert endings[victim].killed, case
        for ending in (each for rank, each in enumerate(endings) if rank != victim):
            assert_names_victim(ending, victim)
        assert seen == OLD and (files == CLEAN or (saves and victim == 0)), case
        assert after == (NEXT, CLEAN), case


# -- while a part is dropped ---------------------------------------------------------------------------------


def readable_parts(root: Path) -> list[tuple[str, str]]:
    """Return for each checkpoint which parts dcp and stock torch find. Assert that each can be read."""
    folders = [folder for folder in sorted(root.iterdir()) if (folder / "manifest.msgpack").exists()]
    assert all(findings(folder) <= HARMLESS for folder in folders), folders
    return [
        (present_parts(path, number), stock_sees(path, number))
        for number, path in enumerate(folders, start=1)
    ]
