"""One of several ranks leaves a save, load or proof by Ctrl-C, or is killed, where the others wait for it; or
cannot say what it has: the others hear of it, and a checkpoint stays."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp
from tests.support.crashes import Group, in_lab, kill_rank, run_groups
from tests.support.fault_doors import HARMLESS, MANIFEST_NAME, Fault, OpenWithFaults, findings
from tests.support.rank_acts import Acting
from tests.support.ranks import run_ranks
from tests.support.versions import save_version, seen_by_dcp, version_state

OLD, NEW = 1, 2

Told = tuple[list[str], list[int], str]
"""Of an exception: its classes, the ranks that it names, its text."""


MOMENTS = {
    "save": ("state", "make_root", "write", "finish", "lock", "publish"),
    "load": ("state", "read", "open_read", "preadv"),
    "prove": ("state",),
}
"""At which rank 0 strikes the victim, which waits for it in an exchange; all but the first are operations."""


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


def struck(
    rank: int, world_size: int, root: Path, operation: str, moment: str, victim: int, kills: bool
) -> str:
    """How one operation ended, which ``victim`` leaves when rank 0 comes to the moment."""
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    done: list[bool] = []

    def strike() -> None:
        if rank == 0 and not done:
            done.append(True)
            kill_rank(victim) if kills else os.kill(pids[victim], signal.SIGINT)

    ended = "done"
    try:
        dist.barrier()
        _act(root, operation, moment, strike)
    except KeyboardInterrupt:
        ended = "interrupted"
    except (dcp.CheckpointError, RuntimeError) as error:
        ended = str(error)
    if not kills:
        store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
        store.set(f"done/{rank}", "1")  # who leaves the group sooner closes connections, which tells as well
        store.wait([f"done/{other}" for other in range(world_size)], timedelta(seconds=120))
    return ended


def _cases(operations: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(operation, moment) for operation in operations for moment in MOMENTS[operation]]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "some",
    [
        [("save", "write"), ("save", "publish"), ("load", "preadv"), ("prove", "state")],
        pytest.param(_cases(("save", "load", "prove")), marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_a_rank_that_is_interrupted_while_it_waits_keeps_nobody(tmp_path: Path, some: Any) -> None:
    """Stays interrupted, the others fail or have all that they need, and what is under the id is whole."""
    for operation, moment in some:
        root = tmp_path / f"{operation} {moment}"
        save_version(root, OLD)
        results = run_ranks(3, struck, root, operation, moment, 1, False)
        assert results[1] == "interrupted", (operation, moment, results)
        for ended in (results[0], results[2]):
            assert ended == "done" or "rank 1" in ended, (operation, moment, ended)
        version = seen_by_dcp(root)
        assert version in ((OLD, NEW) if operation == "save" else (OLD,)), (operation, moment)
        assert version == NEW or operation != "save" or "done" not in results, (operation, moment, results)
        assert findings(root) <= HARMLESS, (operation, moment)


@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_rank_that_is_killed_in_a_proof_is_named(tmp_path: Path, victim: int) -> None:
    """Gives all others its number, and keeps the checkpoint."""
    save_version(tmp_path / "x", OLD)
    groups = [Group(3, struck, (tmp_path / "x", "prove", "state", victim, True))]
    (endings,) = in_lab(run_groups, groups)
    assert endings[victim].killed
    for ending in (each for rank, each in enumerate(endings) if rank != victim):
        assert ending.raised is None, ending.raised
        assert ending.value == "done" or f"rank {victim} of 3 died" in ending.value, ending
    assert any(ending.value != "done" for ending in endings if not ending.killed)
    assert seen_by_dcp(tmp_path / "x") == OLD


def told(root: Path, state: dict[str, Any]) -> Told | bool:
    """What a rank hears of the proof: whether all is the same, or why nobody knows."""
    try:
        return bool(dcp.prove(state, root, timeout_seconds=60).ok)
    except dcp.CheckpointError as error:
        ranks = error.facts.get("ranks") or getattr(error, "ranks", [])
        return [cls.__name__ for cls in type(error).__mro__], list(ranks), str(error)


def spoiled(rank: int, world_size: int, root: Path, what: str) -> Told | bool:
    """Rank 1 has something that cannot be saved, or asks for another place, or the bytes are damaged."""
    state = version_state(OLD)
    if what == "state" and rank == 1:
        state["model"] = {"w": torch.zeros(3, device="meta")}
    return told(root.with_name(what) if what.startswith("other") and rank == 1 else root, state)


@pytest.mark.parametrize(
    ("what", "error", "ranks"),
    [
        ("state", "RankFailedError", [1]),
        ("other", "PlanError", [1]),
        ("other, which is none", "CheckpointNotFoundError", [1]),
        ("nothing", "CheckpointNotFoundError", None),
        ("manifest", "CorruptCheckpointError", None),
    ],
)
def test_what_one_rank_cannot_do_in_a_proof_is_an_error_on_all(
    tmp_path: Path, what: str, error: str, ranks: list[int] | None
) -> None:
    """Raises the same error everywhere, which says which rank has it."""
    root = tmp_path / "x"
    for place in (root, tmp_path / "other"):
        save_version(place, OLD)
    if what == "manifest":
        data = bytearray((root / MANIFEST_NAME).read_bytes())
        data[len(data) // 2] ^= 1
        (root / MANIFEST_NAME).write_bytes(data)
    for one in run_ranks(3, spoiled, tmp_path / "none" if what == "nothing" else root, what):
        assert isinstance(one, tuple), one
        assert error in one[0] and (ranks is None or one[1] == ranks), one
