"""A trainer that dies while it copies its state for its writer process, and one that hangs in a save."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import dcp
from dcp.background.process.writer import ProcessWriter
from dcp.manager.saving.executor import _BackgroundExecutor
from tests.faults.test_kill_async_thread import (
    NEXT,
    NOBODY,
    OLD,
    KillingManager,
    die,
    error_of,
    resume,
    state_of,
)
from tests.support.crashes import Ending, Group, in_lab, kill_rank, run_groups, wait_for_end

LATE_SECONDS = 6.0
"""How long the others wait for a rank that hangs; and in which all come together on a busy machine."""


def writer_of(manager: dcp.CheckpointManager) -> int:
    """The id of a manager's writer process."""
    saves = manager._executor
    assert isinstance(saves, _BackgroundExecutor)
    worker = saves._session._worker
    assert isinstance(worker, ProcessWriter)
    return worker.pid


def train(rank: int, killing: KillingManager) -> tuple[list[str], float]:
    """How the save ended, two further calls and closing; how long all that took."""
    begun = time.monotonic()
    ends = [killing.train(rank)]
    for step in (NEXT, NEXT + 1):
        ends.append(error_of(partial(killing.manager.save, step, state_of(step, rank))))
    ends.append(error_of(killing.manager.close))
    return ends, time.monotonic() - begun


def die_while_copying(rank: int, world_size: int, root: Path) -> tuple[list[str], float]:
    """Rank 0 is killed when its copies begin; rank 1's writer process has its part of that save by then."""
    options = {"mode": "process", "writer": partial(dcp.FileSystemWriter, sync_files=False)}
    killing = KillingManager(root, "before the copies" if rank == 0 else NOBODY, die, **options)
    (root / f"pid-{rank}").write_text(str(writer_of(killing.manager)))
    return train(rank, killing)


def stop_while_writing(rank: int, world_size: int, root: Path) -> tuple[list[str], float]:
    """Rank 1 is stopped in the middle of its write, and killed only when the other has given up."""

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)  # a busy machine stops the main thread first, and this one some writes later

    killing = KillingManager(root, 2 if rank == 1 else NOBODY, stop, timeout_seconds=LATE_SECONDS)
    try:
        return train(rank, killing)
    finally:
        if rank == 0:
            kill_rank(1)


def run_both(root: Path) -> list[list[Ending]]:
    """Both, side by side, and the next runs."""
    folders = [root / "copying", root / "stopped"]
    for folder in folders:
        folder.mkdir()
    functions = (die_while_copying, stop_while_writing)
    endings = run_groups([Group(2, f, (folder,)) for f, folder in zip(functions, folders, strict=True)])
    return endings + run_groups([Group(2, resume, (folder,)) for folder in folders])


def test_trainers_that_die_or_hang_in_a_save(tmp_path: Path) -> None:
    """The survivors' saves fail in time with the rank's number, closing does not hang, no writer process is
    left, and the next run goes on from the last commit."""
    copying, stopped, *resumed = in_lab(run_both, tmp_path)
    assert [copying[0].killed, stopped[1].killed] == [True, True]
    for victim, ending in ((0, copying[1]), (1, stopped[0])):
        assert ending.value is not None, ending
        (saved, *following, closed), seconds = ending.value
        assert f"rank {victim}" in saved, saved
        assert any(f"rank {victim}" in end for end in following), following
        assert closed == ""
        assert seconds < 150
    for rank in (0, 1):
        wait_for_end(int((tmp_path / "copying" / f"pid-{rank}").read_text()))
    for group in resumed:
        assert [ending.value and ending.value[0] for ending in group] == [OLD, OLD], group
