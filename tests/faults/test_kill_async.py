"""SIGKILL of trainers and writer processes around asynchronous saves: commits stay, survivors raise."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp
from dcp.staging import DefaultStager, StagedState
from dcp.storage.stores import PosixStore, Store
from tests.support.crashes import Ending, Group, in_lab, kill_rank, run_groups, wait_for_end
from tests.support.fault_doors import NOTES_NAME, Fault, FaultInjectingStore, StoreCall, findings
from tests.support.processes import open_files
from tests.support.rank_acts import Acting
from tests.support.values import leaves
from tests.support.versions import listing, seen_by_dcp, version_of, version_state

OLD, NEW, NEXT = 1, 2, 3
TIMEOUT_SECONDS = 60.0
NEVER = -1

pytestmark = pytest.mark.timeout(900)

Kill = Callable[[], None]


def die() -> None:
    """Kill this process with SIGKILL, unless it has a file in /dev/shm, which nothing would remove."""
    if "/dev/shm/" not in Path("/proc/self/maps").read_text() + "\n".join(open_files()):
        os.kill(os.getpid(), signal.SIGKILL)


def _state_of(version: int, rank: int) -> dict[str, Any]:
    return {**version_state(version), "own": dcp.PerRank({"rank": rank, "version": version})}


def _change(state: dict[str, Any]) -> None:
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor):
            value.zero_()


class DeadlyStager(DefaultStager):
    """Stager that calls ``kill`` before or after the copies, once ``armed``."""

    def __init__(self, phase: str | int, kill: Kill) -> None:
        super().__init__()
        self.phase, self.kill, self.armed = phase, kill, False

    def stage_local(self, *args: Any, **options: Any) -> StagedState:
        """Copy, unless the phase kills before."""
        if self.armed and self.phase == "before the copies":
            self.kill()
        staged = super().stage_local(*args, **options)
        if self.armed and self.phase == "after the copies":
            staged.done.add_done_callback(lambda _: self.kill())
        return staged


class KillingManager:
    """A manager that calls ``kill`` in a phase, or before a numbered storage step, of its save of NEW."""

    def __init__(self, root: Path, phase: str | int, kill: Kill, **options: Any) -> None:
        self.steps: list[str] = []
        self.phase, self.kill, self.armed = phase, kill, False
        self.stager = DeadlyStager(phase, kill)
        options = {"writer": self.writer, "timeout_seconds": TIMEOUT_SECONDS, **options}
        self.manager = dcp.CheckpointManager(root, stager=self.stager, retries=0, **options)

    def writer(self, checkpoint_id: str) -> dcp.FileSystemWriter:
        """Return a writer whose store reports its steps to `observe`."""
        return dcp.FileSystemWriter(checkpoint_id, open_store=partial(PosixStore, observe=self.observe))

    def observe(self, op: str, name: str) -> None:
        """Count a storage step, and kill at the chosen one."""
        if self.armed:
            self.steps.append(op)
            if len(self.steps) == self.phase:
                self.kill()

    def train(self, rank: int) -> str:
        """Save OLD, then NEW with overlap, and change the state. Return the second save's error, or ""."""
        first = self.manager.save(OLD, _state_of(OLD, rank))
        assert first is not None
        first.result(TIMEOUT_SECONDS)
        state = _state_of(NEW, rank)
        self.armed = self.stager.armed = True
        if self.phase == "state_dict":
            state["deadly"] = Acting(self.kill)
        future = self.manager.save(NEW, state, overlap=True)
        assert future is not None
        with self.manager.lock():
            _change(state)
        if self.phase == "staged":
            self.kill()
        error = future.exception(TIMEOUT_SECONDS)
        if self.phase == "done":
            self.kill()
        self.armed = self.stager.armed = False
        return "" if error is None else f"{type(error).__name__}: {error}"

    def train_on(self, rank: int) -> list[str]:
        """Return the errors of `train`, of two further saves and of closing."""
        ends = [self.train(rank)]
        for step in (NEXT, NEXT + 1):
            ends.append(_error_of(partial(self.manager.save, step, _state_of(step, rank))))
        return [*ends, _error_of(self.manager.close)]


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except dcp.CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


PHASES = ["state_dict", "before the copies", "after the copies", "staged", "done"]
"""Phases of a save, besides its storage steps."""


def resume(rank: int, world_size: int, root: Path) -> tuple[int, list[int]]:
    """Run the next run of the job: restore, save NEW (again) and NEXT. Return (restored step, all steps)."""
    with dcp.CheckpointManager(root, timeout_seconds=TIMEOUT_SECONDS) as manager:
        state = _state_of(0, -1)
        restored = manager.restore(state)
        assert restored is not None
        own = state.pop("own").value
        assert version_of(state) == restored.step
        assert own == {"rank": rank, "version": restored.step}
        for version in (NEW, NEXT):
            manager.save(version, _state_of(version, rank), force=True)
        assert manager.wait(TIMEOUT_SECONDS)
        assert manager.failures == 0
        return restored.step, manager.all_steps()


@dataclass
class Crash:
    """A kill and its effects: ``resumed`` has the next run by rank, ``left`` the folder of NEW afterwards."""

    victims: tuple[int, ...]
    phase: str | int
    endings: list[Ending]
    resumed: list[Ending]
    left: tuple[set[str], dict[str, int]]


def _left_in(root: Path) -> tuple[set[str], dict[str, int]]:
    folder = root / f"step-{NEW:08d}"
    return findings(folder), listing(folder)


def resumed_from(crash: Crash, world_size: int) -> int:
    """Return the restored version. Assert that the victims were killed and NEW was finally saved cleanly."""
    killed = [ending.killed for ending in crash.endings]
    assert killed == [rank in crash.victims for rank in range(world_size)], crash
    assert all(ending.value is not None for ending in crash.resumed), crash
    assert all(ending.value[1] == [OLD, NEW, NEXT] for ending in crash.resumed), crash
    (version,) = {ending.value[0] for ending in crash.resumed}
    files = {"manifest": 1, "metadata": 1, "data": world_size, NOTES_NAME: 1}
    assert crash.left == (set(), files), crash
    return int(version)


# -- a thread of one rank ------------------------------------------------------------------------------------


# -- threads of two ranks ------------------------------------------------------------------------------------


def train_together(
    rank: int, world_size: int, root: Path, victims: tuple[int, ...], observer: int, phase: str | int
) -> tuple[list[str], list[str]]:
    """Train, and kill ``victims`` when ``observer`` reaches a phase of its save. Return the storage steps of
    the save and the errors of all calls."""

    def kill() -> None:
        for victim in victims:
            if victim != rank:
                kill_rank(victim)
        if rank in victims:
            die()

    killing = KillingManager(root, phase if rank == observer else NEVER, kill)
    ends = killing.train_on(rank)
    return killing.steps, ends


Case = tuple[tuple[int, ...], int, str | int]
"""(victims, observer, phase)"""


def cases_of(steps: list[list[str]], *, exhaustive: bool) -> list[Case]:
    """Return cases: a rank killed at its own steps, or both at steps of rank 0. With ``exhaustive``: at all
    steps, in all other phases, and at steps of the other rank."""
    numbers = [range(1, len(own) + 1) for own in steps]
    if not exhaustive:
        return [((0,), 0, numbers[0][-2]), ((1,), 1, "after the copies"), ((0, 1), 0, "staged")]
    phases = [[*PHASES, *own] for own in numbers]
    cases: list[Case] = [((0, 1), 0, phase) for phase in phases[0]]
    cases += [((victim,), victim, phase) for victim in (0, 1) for phase in phases[victim]]
    return cases + [((victim,), 1 - victim, number) for victim in (0, 1) for number in numbers[1 - victim]]


def _every_loss(root: Path, exhaustive: bool) -> list[Crash]:
    (counted,) = run_groups([Group(2, train_together, (root / "count", (), 0, NEVER))])
    cases = cases_of([ending.value[0] for ending in counted], exhaustive=exhaustive)
    folders = [root / str(number) for number in range(len(cases))]
    groups = [Group(2, train_together, (f, *case)) for f, case in zip(folders, cases, strict=True)]
    endings = run_groups(groups, at_once=16)
    resumed = run_groups([Group(2, resume, (folder,)) for folder in folders], at_once=4)
    return [
        Crash(victims, phase, ends, after, _left_in(folder))
        for folder, (victims, _, phase), ends, after in zip(folders, cases, endings, resumed, strict=True)
    ]


@pytest.mark.parametrize("exhaustive", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_survivors_name_killed_ranks_and_the_commit_stays(tmp_path: Path, exhaustive: bool) -> None:
    """Both ranks restore the last commit. A survivor's saves name the killed rank, and it can close."""
    for crash in in_lab(_every_loss, tmp_path, exhaustive, timeout_seconds=800):
        version = resumed_from(crash, 2)
        assert crash.phase != "done" or version == NEW
        for ending in (each for each in crash.endings if not each.killed):
            assert ending.value is not None, crash
            saved, *following, closed = ending.value[1]
            named = f"rank {crash.victims[0]} of 2 died"
            if saved or version == OLD:
                assert saved.startswith("CollectiveTimeoutError") and named in saved, (crash, saved)
            assert any(named in end for end in following), (crash, following)
            assert closed == "" or named in closed  # error of a failed save after the last one checked


# -- writer processes ----------------------------------------------------------------------------------------


def _strike(operation: StoreCall) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def noted_store(path: Any, *, faults: tuple[Fault, ...], notes: Path, trainer: int) -> Store:
    """Open a store with faults in the writer process, which leaves a file with its id (see `_writers_of`)."""
    if os.getpid() == trainer:
        return PosixStore(path)
    (notes / f"writer-{os.getpid()}").touch()
    return FaultInjectingStore(PosixStore(path), *faults)


def _writers_of(root: Path) -> list[int]:
    return [int(path.name.rpartition("-")[2]) for path in root.glob("writer-*")]


def _writer_of(root: Path, folder: str | Path, *faults: Fault) -> dcp.FileSystemWriter:
    opener = partial(noted_store, faults=faults, notes=root, trainer=os.getpid())
    return dcp.FileSystemWriter(folder, open_store=opener)


def _save_behind(root: Path, name: str, version: int, *faults: Fault) -> Any:
    state = version_state(version)
    future = dcp.async_save(
        state,
        storage_writer=_writer_of(root, root / name, *faults),
        async_checkpointer_type=dcp.AsyncCheckpointerType.PROCESS,
    )
    _change(state)
    return future


def leave_data_loader(path: Path) -> None:
    """Fork a process that inherits all open files and outlives the trainer."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    path.write_text(str(pid))


def die_while_writing(rank: int, world_size: int, root: Path, victims: tuple[int, ...]) -> str:
    """Kill ``victims`` during an asynchronous save. Return the class of the survivor's error."""
    _save_behind(root, "old", OLD).result(TIMEOUT_SECONDS)
    future = _save_behind(root, "x", NEW, Fault("write", onwards=True, delay_seconds=0.1))
    if rank in victims:
        if len(victims) == world_size:  # otherwise it hides the death from the survivor's gloo
            leave_data_loader(root / f"data-loader-{rank}")
        os.kill(os.getpid(), signal.SIGKILL)
    return type(future.exception(TIMEOUT_SECONDS)).__name__


WRITER_PHASES = {
    "during the write": ("write", 1, 1),
    "before the plan": ("make_root", 1, 0),
    "before the commit": ("publish", 1, 0),
}
"""Moment at which the writer is killed: storage operation, its number, and the rank."""


def _failure(future: Any) -> tuple[set[str], str]:
    error = future.exception(TIMEOUT_SECONDS)
    dist.barrier()
    return {cls.__name__ for cls in type(error).__mro__}, str(error)


def kill_writers(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """Kill a writer in each phase, each time in a save over a committed checkpoint."""
    found: dict[str, Any] = {}
    for phase, (operation, at, victim) in WRITER_PHASES.items():
        _save_behind(root, phase, OLD).result(TIMEOUT_SECONDS)
        faults = [Fault(operation, at=at, hook=_strike)] if rank == victim else []
        failed = _failure(_save_behind(root, phase, NEW, *faults))
        seen = seen_by_dcp(root / phase) if rank == 0 else None
        dist.barrier()
        _save_behind(root, phase, NEXT).result(TIMEOUT_SECONDS)
        found[phase] = (failed, seen)
    return found


def die_while_copying(rank: int, world_size: int, root: Path) -> list[str]:
    """Kill rank 0 when its copies begin; by then rank 1's writer process has its part of the save."""
    phase = "before the copies" if rank == 0 else NEVER
    return KillingManager(root, phase, die, mode="process", writer=partial(_writer_of, root)).train_on(rank)


Killed = dict[str, list[Ending]]
SOME = {"all": (1, die_while_writing, (0,))}
ALL = {
    "all": (2, die_while_writing, (0, 1)),
    "writers": (2, kill_writers),
    "one": (2, die_while_writing, (1,)),
    "copying": (2, die_while_copying),
}
RESUMED = {"copying": 0}
"""Rank that is killed, for each run that is continued afterwards."""


def run_all(root: Path, runs: dict[str, Any]) -> tuple[Killed, Killed]:
    """Run all groups of trainers side by side, then the next runs of those in `RESUMED`."""
    for name in runs:
        (root / name).mkdir()
    groups = [Group(ranks, act, (root / name, *args)) for name, (ranks, act, *args) in runs.items()]
    endings = run_groups(groups, timeout_seconds=800)
    resumed = [name for name in RESUMED if name in runs]
    after = run_groups([Group(2, resume, (root / name,)) for name in resumed])
    return dict(zip(runs, endings, strict=True)), dict(zip(resumed, after, strict=True))


@pytest.mark.parametrize("runs", [SOME, pytest.param(ALL, marks=pytest.mark.exhaustive)], ids=["some", "all"])
def test_killed_writer_processes_and_trainers(tmp_path: Path, runs: dict[str, Any]) -> None:
    """A staged save is committed even if the trainers die. A killed writer fails the save on all ranks with
    an error that names the writer's rank. The next run continues from the last commit."""
    try:
        endings, after = in_lab(run_all, tmp_path, runs, timeout_seconds=850)
        for name in runs:
            for pid in _writers_of(tmp_path / name):
                wait_for_end(pid)
    finally:
        for path in tmp_path.glob("*/data-loader-*"):
            os.kill(int(path.read_text()), signal.SIGKILL)
    assert all(ending.killed for ending in endings["all"])
    assert "one" not in runs or (endings["one"][1].killed and endings["one"][0].value == "NoneType"), endings
    for name in ("all", "one") if "one" in runs else ("all",):
        assert [seen_by_dcp(tmp_path / name / step) for step in ("old", "x")] == [OLD, NEW], name
        files = {"manifest": 1, "metadata": 1, "data": runs[name][0]}
        assert listing(tmp_path / name / "x") == files, name
    for rank, ending in enumerate(endings.get("writers", [])):
        check_writers(tmp_path / "writers", rank, ending.value)
    for name in after:
        _check_survivor(endings[name], RESUMED[name])
        assert [ending.value and ending.value[0] for ending in after[name]] == [OLD, OLD]


def check_writers(root: Path, rank: int, found: dict[str, Any]) -> None:
    """Assert that the error names the writer's rank, the old checkpoint stays, and the next save works."""
    for phase, ((classes, message), seen) in found.items():
        assert "WriterProcessError" in classes, (phase, message)
        assert f"rank {WRITER_PHASES[phase][2]} was killed by SIGKILL" in message, (phase, message)
        assert "RankFailedError" in classes and seen == (OLD if rank == 0 else None), phase
        assert seen_by_dcp(root / phase) == NEXT and listing(root / phase)["data"] == 2, phase


def _check_survivor(endings: list[Ending], victim: int) -> None:
    assert endings[victim].killed
    saved, *following, closed = endings[1 - victim].value
    assert f"rank {victim}" in saved, saved
    assert any(f"rank {victim}" in end for end in following), following
    assert closed == ""
