"""SIGKILL of a trainer at every step of a save that a thread of it carries out: the last commit stays."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.inspection.verification import verify
from dcp.staging.copies import HostCopier, HostCopies
from dcp.staging.stager import DefaultStager
from dcp.storage.commit_names import NOTES_NAME
from dcp.storage.formats.index import Int64
from dcp.storage.stores import PosixStore
from tests.support.crashes import Child, Ending, Group, in_lab, kill_rank, run_groups
from tests.support.processes import open_files
from tests.support.values import leaves
from tests.support.versions import listing, version_of, version_state

OLD, NEW, NEXT = 1, 2, 3
TIMEOUT_SECONDS = 60.0
SURVIVAL_SECONDS = 150.0
"""Three of them are spent on waiting for the killed rank; the rest is room for a busy machine."""

pytestmark = pytest.mark.timeout(900)

NOBODY = -1
Kill = Callable[[], None]


def die() -> None:
    """SIGKILL for this process; what has a name in /dev/shm by then would stay there."""
    if "/dev/shm/" not in Path("/proc/self/maps").read_text() + "\n".join(open_files()):
        os.kill(os.getpid(), signal.SIGKILL)


class DeadlyState:
    """A Stateful that kills when it is asked for its state."""

    def __init__(self, kill: Kill) -> None:
        self.kill = kill

    def state_dict(self) -> dict[str, Any]:
        """The end."""
        self.kill()
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Never called."""


class DeadlyCopier(HostCopier):
    """Kills before or after it copies."""

    def __init__(self, before: Kill | None, after: Kill | None) -> None:
        super().__init__(1)
        self.before, self.after = before, after

    def copy(self, copies: HostCopies, rows: Int64) -> None:
        """Copy, if it comes to that."""
        if self.before is not None:
            self.before()
        super().copy(copies, rows)
        if self.after is not None:
            self.after()


class KillingManager:
    """A manager in whose save of NEW ``kill`` is called, in a phase or before a numbered step on storage."""

    def __init__(self, root: Path, phase: str | int, kill: Kill, **options: Any) -> None:
        self.steps: list[str] = []
        self.phase, self.kill = phase, kill
        self.armed = False
        self.stager = DefaultStager(process=options.get("mode") == "process")
        options = {"writer": self.writer, "timeout_seconds": TIMEOUT_SECONDS, **options}
        self.manager = dcp.CheckpointManager(root, stager=self.stager, retries=0, **options)

    def writer(self, checkpoint_id: str) -> dcp.FileSystemWriter:
        """A writer whose store tells its steps."""
        return dcp.FileSystemWriter(checkpoint_id, open_store=partial(PosixStore, observe=self.observe))

    def observe(self, op: str, name: str) -> None:
        """A step of the storage is about to begin."""
        if self.armed:
            self.steps.append(op)
            if len(self.steps) == self.phase:
                self.kill()

    def train(self, rank: int) -> str:
        """Save OLD; then NEW, with overlap, and change the state as soon as that is allowed. How that save
        ended."""
        first = self.manager.save(OLD, state_of(OLD, rank))
        assert first is not None
        first.result(TIMEOUT_SECONDS)
        state = state_of(NEW, rank)
        self.armed = True
        if self.phase == "state_dict":
            state["deadly"] = DeadlyState(self.kill)
        before = self.kill if self.phase == "before the copies" else None
        after = self.kill if self.phase == "after the copies" else None
        self.stager._copier.host = DeadlyCopier(before, after)
        future = self.manager.save(NEW, state, overlap=True)
        assert future is not None
        with self.manager.lock():
            for _, value in leaves(state):
                if isinstance(value, torch.Tensor):
                    value.zero_()
        if self.phase == "staged":
            self.kill()
        error = future.exception(TIMEOUT_SECONDS)
        if self.phase == "done":
            self.kill()
        self.armed = False
        return "" if error is None else f"{type(error).__name__}: {error}"


def state_of(version: int, rank: int) -> dict[str, Any]:
    """A version, and what is the rank's own of it."""
    return {**version_state(version), "own": dcp.PerRank({"rank": rank, "version": version})}


PHASES = ["state_dict", "before the copies", "after the copies", "staged", "done"]
"""Of a save, beside the steps that it takes on storage."""


def resume(rank: int, world_size: int, root: Path) -> tuple[int, list[int]]:
    """The next run: what it restored, and what is there when it has saved NEW (again) and NEXT."""
    with dcp.CheckpointManager(root, timeout_seconds=TIMEOUT_SECONDS) as manager:
        state = state_of(0, -1)
        restored = manager.restore(state)
        assert restored is not None
        own = state.pop("own").value
        assert version_of(state) == restored.step
        assert own == {"rank": rank, "version": restored.step}
        for version in (NEW, NEXT):
            manager.save(version, state_of(version, rank), force=True)
        assert manager.wait(TIMEOUT_SECONDS)
        assert manager.failures == 0
        return restored.step, manager.all_steps()


@dataclass
class Crash:
    """A kill, and what became of it: ``resumed`` by rank."""

    victims: tuple[int, ...]
    phase: str | int
    step: str
    endings: list[Ending]
    resumed: list[Ending]
    findings: int
    kinds: dict[str, int]


def look(root: Path, crash: Crash) -> Crash:
    """Verify what the next run has saved over the leftovers."""
    folder = root / f"step-{NEW:08d}"
    crash.findings = len(verify(folder).findings)
    crash.kinds = listing(folder)
    return crash


def check(crash: Crash, world_size: int) -> int:
    """The killed are killed, the rest is as if NEW had never begun or as if it had ended. Which version."""
    assert [ending.killed for ending in crash.endings] == [r in crash.victims for r in range(world_size)], (
        crash
    )
    versions = set()
    for ending in crash.resumed:
        assert ending.value is not None, (crash.phase, ending)
        version, steps = ending.value
        assert steps == [OLD, NEW, NEXT]
        versions.add(version)
    (version,) = versions
    assert crash.findings == 0
    assert crash.kinds == {"manifest": 1, "metadata": 1, "data": world_size, NOTES_NAME: 1}, crash
    return int(version)


# -- one rank ------------------------------------------------------------------------------------------------


def train_alone(root: Path, phase: str | int) -> list[str]:
    """A trainer of one rank, killed in a phase; the steps of a save that was not."""
    killing = KillingManager(root, phase, die)
    assert killing.train(0) == ""
    killing.manager.close()
    return killing.steps


def every_crash(root: Path, every: int) -> list[Crash]:
    """A kill in each phase, and before each ``every``-th step on storage."""
    steps = Child(train_alone, root / "count", NOBODY).wait().value
    crashes = []
    for phase in (*PHASES, *range(every, len(steps) + 1, every)):
        folder = root / str(phase)
        ending = Child(train_alone, folder, phase).wait()
        resumed = Child(resume, 0, 1, folder).wait()
        step = steps[phase - 1] if isinstance(phase, int) else ""
        crashes.append(look(folder, Crash((0,), phase, step, [ending], [resumed], -1, {})))
    return crashes


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_trainer_killed_at_any_step_leaves_the_last_commit(tmp_path: Path, every: int) -> None:
    """One rank: the next run goes on from the old step until one moment and from the new one after it, and
    saves over what was left. Nothing has a name in /dev/shm."""
    crashes = in_lab(every_crash, tmp_path, every, timeout_seconds=800)
    versions = [check(crash, 1) for crash in crashes]
    assert versions[:3] == [OLD, OLD, OLD]
    assert versions[4] == NEW  # killed once it is staged, the thread is anywhere
    at_steps = versions[len(PHASES) :]
    assert len(at_steps) > 14 // every
    turn = at_steps.index(NEW)
    assert turn > 0
    assert at_steps == [OLD] * turn + [NEW] * (len(at_steps) - turn)


# -- two ranks -----------------------------------------------------------------------------------------------


def train_together(
    rank: int, world_size: int, root: Path, victims: tuple[int, ...], observer: int, phase: str | int
) -> tuple[list[str], list[str]]:
    """Training of which ``victims`` are killed when ``observer`` is in a phase of its save.

    The storage steps of a save; and what it ended with, then two further calls, and closing the manager.
    """

    def kill() -> None:
        for victim in victims:
            if victim != rank:
                kill_rank(victim)
        if rank in victims:
            die()

    killing = KillingManager(root, phase if rank == observer else NOBODY, kill)
    ends = [killing.train(rank)]
    for step in (NEXT, NEXT + 1):
        ends.append(error_of(partial(killing.manager.save, step, state_of(step, rank))))
    ends.append(error_of(killing.manager.close))
    return killing.steps, ends


def error_of(call: Callable[[], object]) -> str:
    """What a call raised."""
    try:
        call()
    except dcp.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


Case = tuple[tuple[int, ...], int, str | int]
"""(victims, observer, phase)"""


def cases_of(steps: list[list[str]], *, exhaustive: bool) -> list[Case]:
    """Either rank killed at steps of its own, both at once at those of rank 0; with ``exhaustive`` at all of
    them, in all other phases, and at the steps of the other rank, too."""
    numbers = [range(1, len(own) + 1) for own in steps]
    if not exhaustive:
        alone: list[Case] = [((0,), 0, number) for number in numbers[0][::8]]
        alone += [((1,), 1, phase) for phase in (*numbers[1][::6], "after the copies")]
        return [*alone, *(((0, 1), 0, phase) for phase in ("staged", *numbers[0][1::12]))]
    phases = [[*PHASES, *own] for own in numbers]
    cases: list[Case] = [((0, 1), 0, phase) for phase in phases[0]]
    cases += [((victim,), victim, phase) for victim in (0, 1) for phase in phases[victim]]
    cases += [((victim,), 1 - victim, number) for victim in (0, 1) for number in numbers[1 - victim]]
    return cases


def every_loss(root: Path, exhaustive: bool) -> list[Crash]:
    """All cases, side by side, and the next run after each."""
    (counted,) = run_groups([Group(2, train_together, (root / "count", (), 0, NOBODY))])
    steps = [ending.value[0] for ending in counted]
    cases = cases_of(steps, exhaustive=exhaustive)
    folders = [root / str(number) for number in range(len(cases))]
    groups = [Group(2, train_together, (f, *case)) for f, case in zip(folders, cases, strict=True)]
    endings = run_groups(groups, at_once=16)
    resumed = run_groups([Group(2, resume, (folder,)) for folder in folders], at_once=4)
    crashes = []
    for folder, (victims, observer, phase), ends, after in zip(folders, cases, endings, resumed, strict=True):
        step = steps[observer][phase - 1] if isinstance(phase, int) else ""
        crashes.append(look(folder, Crash(victims, phase, step, ends, after, -1, {})))
    return crashes


def check_losses(crashes: list[Crash]) -> None:
    """The next runs went on; nobody who was left hung, and all of them were told who is gone."""
    for crash in crashes:
        version = check(crash, 2)
        if crash.phase == "done":
            assert version == NEW
        for ending in crash.endings:
            if ending.killed:
                continue
            assert ending.value is not None, (crash.victims, crash.phase, ending)
            assert ending.seconds < SURVIVAL_SECONDS
            saved, *following, closed = ending.value[1]
            gone = f"rank {crash.victims[0]} of 2 died"
            if saved or version == OLD:
                assert saved.startswith("CollectiveTimeoutError"), (crash, saved)
                assert gone in saved
            assert any(gone in end for end in following), (crash, following)
            assert closed == "" or gone in closed  # of a save that failed behind the last of them


def test_killed_ranks_leave_the_last_commit_and_survivors_who_know(tmp_path: Path) -> None:
    """One of two ranks, or both: the last commit is restored by both ranks of the next run, which saves over
    what was left; the survivor's save and its next step name the rank in time, and closing does not hang."""
    check_losses(in_lab(every_loss, tmp_path, False, timeout_seconds=800))


@pytest.mark.exhaustive
def test_killed_ranks_at_every_step_of_either(tmp_path: Path) -> None:
    """The same, each victim killed at the steps of the other too."""
    check_losses(in_lab(every_loss, tmp_path, True, timeout_seconds=800))
