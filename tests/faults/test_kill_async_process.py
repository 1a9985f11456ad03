"""SIGKILL of trainers and of writer processes around asynchronous saves: what commits, and who is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dcp
from dcp.background.future import SaveFuture
from dcp.background.process.writer import ProcessWriter
from dcp.background.session import AsyncSession
from dcp.storage.stores import PosixStore, Store
from dcp.storage.stores.faults import Fault, FaultInjectingStore, Operation
from tests.support.crashes import Ending, Group, in_lab, run_groups
from tests.support.values import leaves
from tests.support.versions import listing, save_version, seen_by_dcp, version_state

OLD, NEW, NEXT = 1, 2, 3
CLEAN = {"manifest": 1, "metadata": 1, "data": 2}
TIMEOUT_SECONDS = 200.0


pytestmark = pytest.mark.timeout(900)


def strike(operation: Operation) -> None:
    """A fault's hook that kills its process."""
    os.kill(os.getpid(), signal.SIGKILL)


def deadly_store(path: Any, operation: str, at: int, victim: int) -> Store:
    """A store that kills the writer process of one rank at its ``at``-th ``operation``."""
    store = FaultInjectingStore(PosixStore(path))
    if dist.get_rank() == victim:
        store.add(Fault(operation, at=at, hook=strike))
    return store


def slow_store(path: Any) -> Store:
    """A store with time for a trainer to die while its writer writes."""
    return FaultInjectingStore(PosixStore(path), Fault("write", onwards=True, delay_seconds=0.1))


class Run:
    """One rank's training: saves versions, and leaves the ids of its writer processes in a file."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.session = AsyncSession(
            kind=dcp.AsyncCheckpointerType.PROCESS, in_flight=2, timeout_seconds=TIMEOUT_SECONDS
        )

    @property
    def pid(self) -> int:
        """This rank's writer process."""
        worker = self.session._worker
        assert isinstance(worker, ProcessWriter)
        return worker.pid

    def save(self, name: str, version: int, open_store: Callable[[Any], Store] = PosixStore) -> SaveFuture:
        """A save whose tensors change at once."""
        state = version_state(version)
        writer = dcp.FileSystemWriter(self.root / name, open_store=open_store)
        future = self.session.save(state, storage_writer=writer)
        for _, value in leaves(state):
            if hasattr(value, "zero_"):
                value.zero_()
        self.note_pid()
        return future

    def note_pid(self) -> None:
        """For `pids_of`, when nobody is left to ask."""
        with (self.root / f"pids-{dist.get_rank()}").open("a") as file:
            file.write(f"{self.pid}\n")


def pids_of(root: Path) -> set[int]:
    """All writer processes that runs in ``root`` had."""
    return {int(line) for path in root.glob("pids-*") for line in path.read_text().split()}


def all_gone(pids: set[int]) -> bool:
    """Whether all processes have ended, within a while."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def leave_data_loader(path: Path) -> None:
    """A fork that holds all that its trainer had open, and does not notice its end."""
    pid = os.fork()
    if pid == 0:
        time.sleep(2 * TIMEOUT_SECONDS)
        os._exit(0)
    path.write_text(str(pid))


def die_while_writing(rank: int, world_size: int, root: Path, victims: tuple[int, ...]) -> list[str]:
    """Trainers that die with one save being written and one behind it; the survivors' results."""
    run = Run(root)
    run.save("old", OLD).result(TIMEOUT_SECONDS)
    futures = [run.save("x", NEW, slow_store), run.save("y", NEXT)]
    if rank in victims:
        if len(victims) == world_size:  # else it would hide the trainer's end from the survivor's gloo, too
            leave_data_loader(root / f"data-loader-{rank}")
        os.kill(os.getpid(), signal.SIGKILL)
    results = [type(future.exception(TIMEOUT_SECONDS)).__name__ for future in futures]
    run.session.close(240)
    return results


PHASES = {
    "before the plan": ("make_root", 1, 0, OLD),
    "during the write": ("write", 2, 1, OLD),
    "before the commit": ("publish", 1, 0, OLD),
}
"""What kills the writer: operation, which time, of which rank; and the version that is there afterwards."""


def kill_writers(rank: int, world_size: int, root: Path) -> dict[str, Any]:
    """One session whose writers are killed in every phase, each time over a committed checkpoint; at last
    one is stopped instead."""
    run = Run(root)
    found: dict[str, Any] = {}

    def failure(future: SaveFuture) -> tuple[set[str], str]:
        error = future.exception(TIMEOUT_SECONDS)
        dist.barrier()
        return {cls.__name__ for cls in type(error).__mro__}, str(error)

    for phase, (operation, at, victim, _) in PHASES.items():
        run.save(phase, OLD).result(TIMEOUT_SECONDS)
        deadly = partial(deadly_store, operation=operation, at=at, victim=victim)
        failed = failure(run.save(phase, NEW, deadly))
        seen = seen_by_dcp(run.root / phase) if rank == 0 else None
        dist.barrier()
        run.save(phase, NEXT).result(TIMEOUT_SECONDS)
        found[phase] = (failed, seen)
    run.session.timeout_seconds = 8.0  # of saves from now on
    if rank == 1:
        os.kill(run.pid, signal.SIGSTOP)
    begun = time.monotonic()
    found["stopped"] = (failure(run.save("stopped", NEW)), time.monotonic() - begun)
    run.note_pid()
    run.session.close(240)
    return found


def run_all(root: Path) -> list[list[Ending]]:
    """All groups of trainers side by side."""
    names = ("all", "one", "writers")
    for name in names:
        (root / name).mkdir()
    return run_groups(
        [
            Group(2, die_while_writing, (root / "all", (0, 1))),
            Group(2, die_while_writing, (root / "one", (1,))),
            Group(2, kill_writers, (root / "writers",)),
        ],
        timeout_seconds=800,
    )


def test_kills_around_saves_by_processes(tmp_path: Path) -> None:
    """Trainers killed after staging: their writers commit what was staged, and end. Writers killed in any
    phase, or stopped: the save fails in time on all ranks with an error that names the rank, the checkpoint
    before it stands, and the next save works. No process is left."""
    everybody, one, writers = in_lab(run_all, tmp_path, timeout_seconds=850)
    try:
        assert all_gone({pid for name in ("all", "one", "writers") for pid in pids_of(tmp_path / name)})
    finally:
        for path in tmp_path.glob("*/data-loader-*"):
            os.kill(int(path.read_text()), signal.SIGKILL)

    assert all(ending.killed for ending in everybody)
    assert one[1].killed
    assert one[0].value == ["NoneType", "NoneType"], one[0]
    for name in ("all", "one"):
        folder = tmp_path / name
        assert [seen_by_dcp(folder / step) for step in ("old", "x", "y")] == [OLD, NEW, NEXT], name
        assert [listing(folder / step) for step in ("x", "y")] == [CLEAN, CLEAN], name

    for rank, ending in enumerate(writers):
        assert ending.value is not None, ending
        for phase, (_, _, victim, version) in PHASES.items():
            (classes, message), seen = ending.value[phase]
            assert {"RankFailedError", "WriterProcessError"} <= classes, (phase, message)
            assert f"rank {victim} was killed by SIGKILL" in message, (phase, message)
            assert seen == (version if rank == 0 else None), phase
            assert seen_by_dcp(tmp_path / "writers" / phase) == NEXT, phase
            assert listing(tmp_path / "writers" / phase) == CLEAN, phase
        (classes, message), seconds = ending.value["stopped"]
        assert "WriterProcessError" in classes, message
        assert "rank 1 did not react" in message, message
        assert seconds < 150
    save_version(tmp_path / "all" / "x", OLD)
    assert seen_by_dcp(tmp_path / "all" / "x") == OLD
