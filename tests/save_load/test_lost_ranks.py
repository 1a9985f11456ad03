"""Ranks that die, leave or fail in a save: all others get an error that says so, and none waits for long."""

from __future__ import annotations

import os
import signal
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
from tests.support.ranks import RankRaised, run_ranks


class Acts:
    """Does something on one rank when it is asked for its state."""

    def __init__(self, act: Any) -> None:
        self.act = act

    def state_dict(self) -> dict[str, Any]:
        """After it has acted."""
        self.act()
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is loaded."""


def store_of_group() -> Any:
    """By which ranks tell each other what they have done."""
    group = dist.group.WORLD
    assert group is not None
    return group.get_group_store()


def all_have(rank: int, world_size: int, word: str) -> None:
    """Return when all ranks have come so far: who ends takes its connections along."""
    store_of_group().set(f"{word}/{rank}", "1")
    store_of_group().wait([f"{word}/{other}" for other in range(world_size)], timedelta(seconds=120))


def kill_one(rank: int, world_size: int, root: Path, lost: int) -> None:
    """One rank is killed while the state is collected."""
    dies = Acts(lambda: os.kill(os.getpid(), signal.SIGKILL) if rank == lost else None)
    try:
        dcp.save({"app": dies}, checkpoint_id=root, timeout_seconds=120)
    finally:
        store_of_group().set(f"done/{rank}", "1")
        others = [f"done/{other}" for other in range(world_size) if other != lost]
        store_of_group().wait(others, timedelta(seconds=120))


def two_saves(rank: int, world_size: int, root: Path) -> None:
    """Rank 2 takes no part in the first save, and knows nothing of its end when the second begins."""
    if rank < 2:
        with pytest.raises(CollectiveTimeoutError, match="rank 2 of 3 died or did not answer"):
            dcp.save({"w": torch.zeros(2)}, checkpoint_id=root, timeout_seconds=4)
    all_have(rank, world_size, "first")
    try:
        dcp.save({"w": torch.zeros(2)}, checkpoint_id=root, timeout_seconds=600)
    finally:
        all_have(rank, world_size, "second")


def give_up_and_destroy(rank: int, world_size: int, root: Path) -> str:
    """Rank 1 never comes to the save of rank 0, which then destroys its group."""
    store = store_of_group()
    if rank == 1:
        store.wait(["done/0"], timedelta(seconds=120))
        return "waited"
    with pytest.raises(CollectiveTimeoutError):
        dcp.save({"w": torch.zeros(2)}, checkpoint_id=root, timeout_seconds=1)
    dist.destroy_process_group()
    store.set("done/0", "1")
    return "destroyed"


def break_groups(root: Path) -> dict[str, list[Ending]]:
    """Ranks that wait for some that do not come, side by side: each takes seconds, and little work."""
    groups = {
        "killed 0": Group(4, kill_one, (root / "a", 0)),
        "killed 2": Group(4, kill_one, (root / "b", 2)),
        "two saves": Group(3, two_saves, (root / "d",)),
        "destroyed": Group(2, give_up_and_destroy, (root / "e",)),
    }
    return dict(zip(groups, run_groups([*groups.values()], at_once=len(groups)), strict=True))


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Ending]]:
    """How the ranks of each group ended."""
    endings: dict[str, list[Ending]] = in_lab(break_groups, tmp_path_factory.mktemp("broken"))
    return endings


def raised(ending: Ending) -> RankRaised:
    """The error that a rank got."""
    assert ending.raised is not None, ending
    return ending.raised


@pytest.mark.parametrize("lost", [0, 2])
def test_a_killed_rank_is_named_by_all_others(broken: dict[str, list[Ending]], lost: int) -> None:
    """SIGKILL of any rank, the coordinator too, makes the others raise, naming it."""
    for rank, ending in enumerate(broken[f"killed {lost}"]):
        if rank == lost:
            assert ending.killed
            continue
        error = raised(ending)
        assert "CollectiveTimeoutError" in error.class_names, error.traceback_text
        assert error.facts["ranks"] == [lost], error.message


def test_a_group_that_is_out_of_step_says_so_at_once(broken: dict[str, list[Ending]]) -> None:
    """After a save that some ranks left, the next one fails on all ranks, long before its timeout."""
    for ending in broken["two saves"]:
        error = raised(ending)
        assert "CollectiveTimeoutError" in error.class_names, error.traceback_text
        assert "an earlier" in error.message and "not in" in error.message, error.message


def test_a_group_whose_save_was_given_up_is_destroyed_at_once(broken: dict[str, list[Ending]]) -> None:
    """Torch's timeout of the collective that is under way need not have passed."""
    endings = broken["destroyed"]
    assert [ending.value for ending in endings] == ["destroyed", "waited"], endings


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


def test_a_process_that_gave_a_save_up_ends_at_once(tmp_path: Path) -> None:
    """The end of the interpreter does not wait for the collective; the other rank lives on meanwhile."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    store, root = tmp_path / "store", tmp_path / "x"
    ranks = [Program("-c", _LEAVING, str(n), store, root, finalizes=n == 0, **pipes) for n in range(2)]
    try:
        output, _ = ranks[0].communicate(timeout=120)
        said = [line for line in output.splitlines() if not line.startswith("[Gloo]")]  # torch 2.10 greets
        assert (said, ranks[0].returncode) == (["gave up"], 0)
    finally:
        ranks[0].kill()
        ranks[1].communicate()


def fails(error: BaseException) -> Any:
    """An act that raises."""

    def act() -> None:
        raise error

    return act


def save_and_fail(rank: int, world_size: int, root: str, failing: list[int]) -> Any:
    """Some ranks fail, each in its own way; then all save."""
    errors: dict[int, BaseException] = {
        0: CorruptCheckpointError("bits flipped" * 100, path="file-7", fqn="w"),
        1: CorruptCheckpointError("bits flipped" * 100, path="file-7", fqn="w"),
        2: ValueError("another one"),
    }
    act = fails(errors[rank]) if rank in failing else lambda: None
    with pytest.raises(dcp.RankFailedError) as caught:
        dcp.save({"app": Acts(act)}, checkpoint_id=root)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=root)
    error: Any = caught.value
    return isinstance(error, CorruptCheckpointError), error.ranks, str(error), getattr(error, "path", None)


@pytest.mark.parametrize("failing", [0, 1])
def test_one_ranks_error_is_raised_on_all_with_rank_and_facts(tmp_path: Path, failing: int) -> None:
    """The error is of the cause's class and complete, however long it is; the group stays usable."""
    for is_corrupt, ranks, message, path in run_ranks(3, save_and_fail, str(tmp_path / "x"), [failing]):
        assert (is_corrupt, ranks, path) == (True, [failing], "file-7")
        assert "bits flipped" * 100 in message


def test_all_failing_ranks_are_reported_together(tmp_path: Path) -> None:
    """Different errors of several ranks come as one."""
    for _, ranks, message, _ in run_ranks(3, save_and_fail, str(tmp_path / "x"), [1, 2]):
        assert ranks == [1, 2] and "bits flipped" in message and "another one" in message


def save_in_a_later_life(rank: int, world_size: int, root: str) -> float:
    """The store has what ranks posted who died in the same operations before a restart."""
    for serial in range(8):
        for operation in ("save", "load"):
            store_of_group().set(f"dcp/{operation}/{serial}/abort", "1")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=root)
    state = {"w": torch.zeros(3)}
    dcp.load(state, checkpoint_id=root)
    return state["w"].sum().item()


def test_what_an_earlier_life_left_in_the_store_is_not_heeded(tmp_path: Path) -> None:
    """torchrun keeps its store over restarts: aborts of ranks that died are none of today's."""
    assert run_ranks(3, save_in_a_later_life, str(tmp_path / "x")) == [3.0] * 3


def save_after_the_group_has_gone(rank: int, world_size: int, root: str) -> str:
    """The group is passed on, but was destroyed."""
    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(dcp.CheckpointError) as caught:
        dcp.save({"w": torch.ones(3)}, checkpoint_id=root, process_group=group)
    return str(caught.value)


def test_a_destroyed_group_is_not_silently_left_out(tmp_path: Path) -> None:
    """Ranks of a group that is gone do not each save alone to the same id."""
    for message in run_ranks(2, save_after_the_group_has_gone, str(tmp_path / "x")):
        assert "not initialised any more" in message
    assert not (tmp_path / "x").exists()
