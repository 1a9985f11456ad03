"""Ctrl-C on a rank during a save, load or proof: the other ranks stop waiting for it."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dcp
from tests.support.fault_doors import HARMLESS, Fault, OpenWithFaults, findings
from tests.support.rank_acts import Acting
from tests.support.ranks import run_ranks
from tests.support.versions import save_version, seen_by_dcp, version_state

OLD, NEW = 1, 2


MOMENTS = {
    "save": ("state", "make_root", "write", "finish", "lock", "publish"),
    "load": ("state", "read", "open_read", "preadv"),
    "prove": ("state",),
}
"""Moments of each operation at which rank 0 interrupts the victim, which waits in an exchange. All but
"state" are storage operations."""


def _act(root: Path, operation: str, moment: str, strike: Any) -> None:
    state: dict[str, Any] = version_state(NEW)
    if moment == "state":
        state["strikes"] = Acting(strike)
    opener = OpenWithFaults(Fault(moment, hook=lambda _: strike()))
    if operation == "save":
        writer = dcp.FileSystemWriter(root, open_store=opener)
        dcp.save(state, storage_writer=writer, timeout_seconds=60)
    elif operation == "load":
        reader = dcp.FileSystemReader(root, open_store=opener)
        dcp.load(state, storage_reader=reader, timeout_seconds=60)
    else:
        dcp.prove(state, root, timeout_seconds=60)


def struck(rank: int, world_size: int, root: Path, operation: str, moment: str, victim: int) -> str:
    """Run an operation in which rank 0, at the moment, interrupts ``victim``. Return this rank's outcome."""
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    done: list[bool] = []

    def strike() -> None:
        if rank == 0 and not done:
            done.append(True)
            os.kill(pids[victim], signal.SIGINT)

    ended = "done"
    try:
        dist.barrier()
        _act(root, operation, moment, strike)
    except KeyboardInterrupt:
        ended = "interrupted"
    except (dcp.CheckpointError, RuntimeError) as error:
        ended = str(error)
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    store.set(f"done/{rank}", "1")  # an early exit closes connections, which others notice
    store.wait([f"done/{other}" for other in range(world_size)], timedelta(seconds=120))
    return ended


def _cases(operations: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(operation, moment) for operation in operations for moment in MOMENTS[operation]]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "some",
    [
        [("save", "publish"), ("load", "preadv")],
        pytest.param(_cases(("save", "load", "prove")), marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_an_interrupt_of_a_waiting_rank_ends_all_ranks(tmp_path: Path, some: Any) -> None:
    """The rank is interrupted, the others fail naming it or complete, and the checkpoint is whole."""
    for operation, moment in some:
        root = tmp_path / f"{operation} {moment}"
        save_version(root, OLD)
        results = run_ranks(3, struck, root, operation, moment, 1)
        assert results[1] == "interrupted", (operation, moment, results)
        for ended in (results[0], results[2]):
            assert ended == "done" or "rank 1" in ended, (operation, moment, ended)
        version = seen_by_dcp(root)
        assert version in ((OLD, NEW) if operation == "save" else (OLD,)), (operation, moment)
        assert version == NEW or operation != "save" or "done" not in results, (operation, moment, results)
        assert findings(root) <= HARMLESS, (operation, moment)
