"""Ranks that die, leave or fail in a save: the other ranks raise a clear error without a long wait."""

from __future__ import annotations

import subprocess
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp
from dcp.errors import CollectiveTimeoutError, CorruptCheckpointError
from tests.support.crashes import Ending, Group, in_lab, run_groups
from tests.support.programs import Program
from tests.support.ranks import run_ranks


class _Acts:
    def __init__(self, error: BaseException | None) -> None:
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def store_of_group() -> Any:
    """Return the store through which ranks exchange progress."""
    group = dist.group.WORLD
    assert group is not None
    return group.get_group_store()


def all_have(rank: int, world_size: int, word: str) -> None:
    """Wait until all ranks have called this; a rank that exits closes its connections."""
    store_of_group().set(f"{word}/{rank}", "1")
    store_of_group().wait([f"{word}/{other}" for other in range(world_size)], timedelta(seconds=120))


def two_saves(rank: int, world_size: int, root: Path) -> None:
    """Save twice; rank 2 does not call the first save, and does not know its end in the second."""
    if rank < 2:
        with pytest.raises(CollectiveTimeoutError, match="rank 2 of 3 died or did not answer"):
            dcp.save({"w": torch.zeros(2)}, checkpoint_id=root, timeout_seconds=4)
    all_have(rank, world_size, "first")
    try:
        dcp.save({"w": torch.zeros(2)}, checkpoint_id=root, timeout_seconds=600)
    finally:
        all_have(rank, world_size, "second")


def give_up_and_destroy(rank: int, world_size: int, root: Path) -> str:
    """Save on rank 0 without rank 1, and destroy the group after the timeout."""
    store = store_of_group()
    if rank == 1:
        store.wait(["done/0"], timedelta(seconds=120))
        return "waited"
    with pytest.raises(CollectiveTimeoutError):
        dcp.save({"w": torch.zeros(2)}, checkpoint_id=root, timeout_seconds=1)
    dist.destroy_process_group()
    store.set("done/0", "1")
    return "destroyed"


def break_groups(root: Path) -> list[list[Ending]]:
    """Run both groups side by side, because each waits for seconds with little work."""
    groups = [Group(3, two_saves, (root / "a",)), Group(2, give_up_and_destroy, (root / "b",))]
    return run_groups(groups, at_once=2)


def test_saves_after_an_abandoned_save_fail_at_once(tmp_path: Path) -> None:
    """After ranks have given up a save, the next fails on all ranks long before its timeout.
    destroy_process_group() does not wait for torch's timeout of the pending collective."""
    out_of_step, destroyed = in_lab(break_groups, tmp_path)
    for ending in out_of_step:
        assert ending.raised is not None, ending
        assert "CollectiveTimeoutError" in ending.raised.class_names, ending.raised.traceback_text
        assert "in different steps after a failed" in ending.raised.message
    assert [ending.value for ending in destroyed] == ["destroyed", "waited"], destroyed


_LEAVING = """
import sys
import torch
import torch.distributed as dist
import dcp

rank, path, root = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
if rank == 1:
    sys.stdin.read()
    sys.exit()
try:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=root, timeout_seconds=1)
except dcp.errors.CollectiveTimeoutError:
    print("gave up")
"""


def test_exit_after_an_abandoned_save_is_immediate(tmp_path: Path) -> None:
    """The interpreter's exit does not wait for the collective, although the other rank still runs."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    store, root = tmp_path / "store", tmp_path / "x"
    ranks = [Program("-c", _LEAVING, str(n), store, root, finalizes=n == 0, **pipes) for n in range(2)]
    try:
        output, _ = ranks[0].communicate(timeout=120)
        printed = [line for line in output.splitlines() if not line.startswith("[Gloo]")]  # torch 2.10 logs
        assert (printed, ranks[0].returncode) == (["gave up"], 0)
    finally:
        ranks[0].kill()
        ranks[1].communicate()


def save_and_fail(rank: int, world_size: int, root: str) -> Any:
    """Save with errors on some ranks, then save on all; repeat for each kind of error."""
    corrupt = CorruptCheckpointError("bits flipped" * 100, path="file-7", fqn="w")
    seen = []
    ways: list[dict[int, BaseException]]
    ways = [
        {0: corrupt},
        {1: corrupt},
        {1: corrupt, 2: ValueError("another one")},
        {2: MemoryError("none left")},
    ]
    for errors in ways:
        with pytest.raises(dcp.RankFailedError) as caught:
            dcp.save({"app": _Acts(errors.get(rank))}, checkpoint_id=root)
        assert caught.value.ranks == [*errors]
        is_corrupt = isinstance(caught.value, CorruptCheckpointError)
        seen.append((is_corrupt, getattr(caught.value, "path", None), str(caught.value)))
        dcp.save({"w": torch.ones(2)}, checkpoint_id=root)
    return seen


def test_errors_of_ranks_are_raised_on_all_ranks(tmp_path: Path) -> None:
    """A single error is raised on all ranks with its class and whole message; several are combined, and a
    MemoryError is named. The group stays usable."""
    for *alone, several, memory in run_ranks(3, save_and_fail, str(tmp_path / "x")):
        for is_corrupt, path, message in alone:
            assert (is_corrupt, path) == (True, "file-7") and "bits flipped" * 100 in message
        assert "bits flipped" in several[2] and "another one" in several[2]
        assert "MemoryError" in memory[2] and "none left" in memory[2] and "rank 2" in memory[2]


def save_after_a_restart(rank: int, world_size: int, root: str) -> float:
    """Save with a store that has aborts of the same operations from before a restart."""
    for serial in range(8):
        for operation in ("save", "load"):
            store_of_group().set(f"dcp/{operation}/{serial}/abort", "1")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=root)
    state = {"w": torch.zeros(3)}
    dcp.load(state, checkpoint_id=root)
    return state["w"].sum().item()


def test_aborts_from_before_a_restart_are_ignored(tmp_path: Path) -> None:
    """torchrun keeps its store over restarts, so aborts by dead ranks must be ignored."""
    assert run_ranks(3, save_after_a_restart, str(tmp_path / "x")) == [3.0] * 3


def save_with_a_destroyed_group(rank: int, world_size: int, root: str) -> str:
    """Save with a process group that was destroyed."""
    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(dcp.CheckpointError) as caught:
        dcp.save({"w": torch.ones(3)}, checkpoint_id=root, process_group=group)
    return str(caught.value)


def test_a_destroyed_group_is_an_error(tmp_path: Path) -> None:
    """Ranks of a destroyed group raise, instead of each saving alone to the same id."""
    for message in run_ranks(2, save_with_a_destroyed_group, str(tmp_path / "x")):
        assert "no longer initialised" in message
    assert not (tmp_path / "x").exists()
