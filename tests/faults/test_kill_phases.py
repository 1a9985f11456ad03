"""SIGKILL of one of three ranks in every phase of a save and of a load: the other two say who is gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dcp
from dcp.storage.stores import PosixStore
from dcp.storage.stores.faults import Fault, FaultInjectingStore, Operation
from tests.support.crashes import Ending, Group, in_lab, run_groups
from tests.support.ranks import RankDied, RankRaised, run_ranks
from tests.support.versions import (
    ABSENT,
    copy_folder,
    is_version,
    listing,
    save_version,
    seen_by_dcp,
    version_state,
)

OLD, NEW, NEXT = 1, 2, 3
CLEAN = {"manifest": 1, "metadata": 1, "data": 1}
TIMEOUT_SECONDS = 60.0
SURVIVAL_SECONDS = 150.0

pytestmark = pytest.mark.timeout(900)


def die(*args: Any, **kwargs: Any) -> None:
    """SIGKILL for this process, whatever it was called for."""
    os.kill(os.getpid(), signal.SIGKILL)


def strike(operation: Operation) -> None:
    """A fault's hook that kills."""
    die()


class Deadly:
    """A Stateful that kills its process when it is asked for its state."""

    state_dict = die
    load_state_dict = die


class Quiet(dcp.DefaultSavePlanner):
    """Overrides a step without changing it, so that torch's protocol is used."""

    def create_local_plan(self) -> Any:
        """As it was."""
        return super().create_local_plan()


class QuietLoad(dcp.DefaultLoadPlanner):
    """Overrides a step without changing it, so that torch's protocol is used."""

    def create_local_plan(self) -> Any:
        """As it was."""
        return super().create_local_plan()


STORE_OPERATIONS = {
    "prepare": "make_root",
    "write": "write",
    "finish": "finish",
    "sync": "sync",
    "lock": "lock",
    "publish": "publish",
    "index": "read",
    "open": "open_read",
    "read": "preadv",
}


def save_and_die(rank: int, world_size: int, folder: Path, phase: str, victim: int, objects: bool) -> None:
    """A save during which rank ``victim`` is killed in ``phase``."""
    state: dict[str, Any] = version_state(NEW)
    planner = Quiet() if objects else dcp.DefaultSavePlanner()
    store = FaultInjectingStore(PosixStore(folder))
    if rank == victim:
        if phase == "state_dict":
            state["deadly"] = Deadly()
        elif phase in STORE_OPERATIONS:
            store.add(Fault(STORE_OPERATIONS[phase], hook=strike))
        else:
            setattr(planner, phase, die)
    writer = dcp.FileSystemWriter(folder, open_store=lambda path: store)
    dcp.save(state, storage_writer=writer, planner=planner, timeout_seconds=TIMEOUT_SECONDS)


def load_and_die(rank: int, world_size: int, folder: Path, phase: str, victim: int, objects: bool) -> None:
    """A load during which rank ``victim`` is killed in ``phase``."""
    state: dict[str, Any] = version_state(0)
    planner = QuietLoad() if objects else dcp.DefaultLoadPlanner()
    store = FaultInjectingStore(PosixStore(folder))
    if rank == victim:
        if phase == "state_dict":
            state["deadly"] = Deadly()
        elif phase in STORE_OPERATIONS:
            store.add(Fault(STORE_OPERATIONS[phase], hook=strike))
        else:
            setattr(planner, phase, die)
    reader = dcp.FileSystemReader(folder, open_store=lambda path: store)
    dcp.load(state, storage_reader=reader, planner=planner, timeout_seconds=TIMEOUT_SECONDS)


Case = tuple[str, int, bool]
"""(phase, victim, by torch's protocol)"""

SAVES: list[Case] = [
    *[(phase, victim, False) for phase in ("state_dict", "set_up_planner", "write") for victim in (0, 1, 2)],
    *[(phase, 0, False) for phase in ("prepare", "lock", "publish")],
    *[(phase, 1, False) for phase in ("finish", "sync")],
    *[(phase, 0, True) for phase in ("prepare", "create_global_plan", "publish")],
    *[(phase, 2, True) for phase in ("create_local_plan", "finish_plan", "resolve_data")],
]
SOME_SAVES: list[Case] = [
    *[("state_dict", 1, False), ("set_up_planner", 2, False), ("write", 0, False), ("write", 1, False)],
    *[(phase, 0, False) for phase in ("prepare", "lock", "publish")],
    *[(phase, 1, False) for phase in ("finish", "sync")],
    *[("create_global_plan", 0, True), ("create_local_plan", 2, True), ("resolve_data", 2, True)],
]
"""Each phase once, but for what `SAVES` has of victims and of the other protocol."""

LOADS: list[Case] = [
    *[(phase, victim, False) for phase in ("state_dict", "set_up_planner", "read") for victim in (0, 2)],
    ("index", 0, False),
    ("open", 1, False),
    *[(phase, 1, True) for phase in ("create_local_plan", "finish_plan", "commit_tensor", "index")],
    ("create_global_plan", 0, True),
]


def run_cases(root: Path, cases: list[Case], *, loads: bool) -> list[tuple[list[Ending], Any, Any]]:
    """For each case: how the ranks ended, what is there then, and after one more save."""
    save_version(root / "before", OLD)
    folders = [root / str(number) for number in range(len(cases))]
    for folder in folders:
        copy_folder(root / "before", folder)
    function = load_and_die if loads else save_and_die
    groups = [Group(3, function, (folder, *case)) for folder, case in zip(folders, cases, strict=True)]
    rows = []
    for folder, endings in zip(folders, run_groups(groups, at_once=10), strict=True):
        there = seen_by_dcp(folder), listing(folder)
        save_version(folder, NEXT)
        rows.append((endings, there, (seen_by_dcp(folder), listing(folder))))
    return rows


def check(case: Case, endings: list[Ending]) -> None:
    """The victim was killed; all others raised RankFailedError with its number, in time."""
    victim = case[1]
    for rank, ending in enumerate(endings):
        if rank == victim:
            assert ending.killed, (case, ending)
            continue
        assert ending.raised is not None, (case, rank, ending)
        text = (case, rank, ending.raised.message)
        assert {"RankFailedError", "CheckpointException"} <= set(ending.raised.class_names), text
        assert ending.raised.facts["failed_ranks"] == [victim], text
        assert ending.seconds < SURVIVAL_SECONDS, text


@pytest.mark.parametrize(
    "cases", [SOME_SAVES, pytest.param(SAVES, marks=pytest.mark.exhaustive)], ids=["some", "all"]
)
def test_a_rank_killed_in_any_phase_of_a_save_is_named_by_the_others(
    tmp_path: Path, cases: list[Case]
) -> None:
    """Both survivors name it; the old checkpoint stands; the next save commits and cleans up."""
    rows = in_lab(run_phases, tmp_path, cases, False, timeout_seconds=800)
    for case, (endings, (seen, files), after) in zip(cases, rows, strict=True):
        check(case, endings)
        assert seen == OLD, case
        if case[1] != 0:
            assert files == CLEAN, case
        assert after == (NEXT, CLEAN), case


@pytest.mark.exhaustive
def test_a_rank_killed_in_any_phase_of_a_load_is_named_by_the_others(tmp_path: Path) -> None:
    """Both survivors name it, and the checkpoint is as it was."""
    rows = in_lab(run_phases, tmp_path, LOADS, True, timeout_seconds=800)
    for case, (endings, there, after) in zip(LOADS, rows, strict=True):
        check(case, endings)
        assert there == (OLD, CLEAN), case
        assert after == (NEXT, CLEAN), case


def run_phases(root: Path, cases: list[Case], loads: bool) -> Any:
    """`run_cases`, in the laboratory."""
    return run_cases(root, cases, loads=loads)


def save_in_pool(rank: int, world_size: int, folder: Path, victim: int) -> int | None:
    """A save in the pool of ranks, in which ``victim`` dies; the version that the others can load."""
    store = FaultInjectingStore(PosixStore(folder))
    if rank == victim:
        store.add(Fault("write", hook=strike))
    writer = dcp.FileSystemWriter(folder, open_store=lambda path: store)
    dcp.save(version_state(NEW), storage_writer=writer, timeout_seconds=TIMEOUT_SECONDS)
    state = version_state(0)
    dcp.load(state, checkpoint_id=folder, timeout_seconds=TIMEOUT_SECONDS)
    dist.barrier()
    return NEW if is_version(state, NEW) else None


@pytest.mark.parametrize("victim", [0, 1])
def test_new_ranks_save_and_load_after_a_loss(tmp_path: Path, victim: int) -> None:
    """A job that is restarted with the same world saves to the same id and loads it."""
    lost = run_ranks(2, save_in_pool, tmp_path / "x", victim, failures=True)
    assert isinstance(lost[victim], RankDied)
    assert isinstance(lost[1 - victim], RankRaised)
    assert seen_by_dcp(tmp_path / "x") == ABSENT
    assert run_ranks(2, save_in_pool, tmp_path / "x", -1) == [NEW, NEW]
    assert listing(tmp_path / "x") == {"manifest": 1, "metadata": 1, "data": 2}
