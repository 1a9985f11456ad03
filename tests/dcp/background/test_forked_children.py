"""Children that a training process forks end, whatever saves it has under way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.programs import run_program

_SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
import dcp

how, folder = sys.argv[1:]
store = dist.FileStore(folder + "/store", 1)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
state = {"w": torch.ones(1 << 20)}
kind = dcp.AsyncCheckpointerType.PROCESS if how == "process" else dcp.AsyncCheckpointerType.THREAD
manager = dcp.CheckpointManager(folder + "/run") if how == "manager" else None
for number in range(2):
    future = None
    if how == "save":
        dcp.save(state, checkpoint_id=f"{folder}/{number}")
    elif manager is not None:
        manager.save(number, state)
    else:
        future = dcp.async_save(state, checkpoint_id=f"{folder}/{number}", async_checkpointer_type=kind)
    child = os.fork()
    if child == 0:
        if number % 2:
            break  # to the end of the program
        sys.exit(0)
    deadline = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, 9)
        sys.exit(f"child {number} did not end")
    if ended[1] != 0:
        sys.exit(f"child {number} ended with {ended[1]}")
    if future is not None:
        future.result(120)
else:
    if manager is not None:
        manager.close()
    dist.destroy_process_group()
"""


_SLOW = [pytest.param(how, marks=pytest.mark.exhaustive) for how in ("save", "thread", "process")]


@pytest.mark.parametrize("how", ["manager", *_SLOW])
def test_a_forked_child_ends(how: str, tmp_path: Path) -> None:
    """By sys.exit and at the end of the program, with process groups that its parent had threads for."""
    done = run_program("-c", _SCRIPT, how, tmp_path, finalizes=True)
    assert done.returncode == 0, done.stderr
