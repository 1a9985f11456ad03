"""Several ranks with a manager: all ranks act alike at the same step, even if only one sees a cause."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import StorageError
from tests.support.manager_runs import (
    Recorder,
    StoreCall,
    data_files,
    loaded_step,
    manager_of,
    plain_writer,
    state_at,
    steps_on_disk,
    truncate,
    until,
    writer_with,
)
from tests.support.rank_acts import warned
from tests.support.ranks import run_ranks, wait_for_all_ranks


def ranked_state(step: int, rank: int) -> dict[str, Any]:
    """Return `state_at` with an additional tensor that only this rank has."""
    return state_at(step, rank) | {f"part{rank}": torch.full((100,), step + rank / 10)}


# -- the loop ------------------------------------------------------------------------------------------------


def _train(rank: int, world_size: int, root: str, mode: str) -> dict[str, Any]:
    seen = Recorder()
    keep = dcp.Retention(last=2, best=dcp.Best("loss"))
    with manager_of(root, mode=mode, every_steps=2, keep=keep, on_event=seen) as manager:
        assert manager.restore(ranked_state(-1, rank)) is None
        saved = []
        for step in range(1, 12):
            state = ranked_state(step, rank)
            if manager.save(step, state, metrics={"loss": abs(step - 4)}, last=step == 11):
                saved.append(step)
            state["model"]["weight"].fill_(-1.0)
            state[f"part{rank}"].fill_(-1.0)
        assert manager.wait(240) and manager.failures == 0
    state = ranked_state(-1, rank)
    with manager_of(root, mode=mode) as manager:
        restored = manager.restore(state)
    assert restored is not None
    return {
        "saved": saved,
        "restored": (restored.step, restored.world_size, restored.metrics),
        "own": state["own"].value,
        "part": state[f"part{rank}"].unique().tolist(),
        "events": set(seen.kinds("saved", "deleted", "verified")),
        "phases": sorted(seen.events[0].seconds),
    }


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.exhaustive), "sync"])
def test_ranks_save_the_same_steps_and_restore_their_own(tmp_path: Path, mode: str) -> None:
    """Each step has the values at the time of its save, and rank 0 alone verifies and deletes."""
    world_size = 2 if mode == "process" else 3
    results = run_ranks(world_size, _train, str(tmp_path), mode)
    commits = {("saved", step) for step in (2, 4, 6, 8, 10, 11)}
    others = {("verified", step) for _, step in commits} | {("deleted", step) for step in (2, 6, 8)}
    for rank, result in enumerate(results):
        assert result["saved"] == [2, 4, 6, 8, 10, 11]
        assert result["restored"] == (11, world_size, {"loss": 7.0})
        assert result["own"] == {"rank": rank, "step": 11}
        assert result["part"] == pytest.approx([11 + rank / 10])
        assert result["events"] == (commits | others if rank == 0 else commits)
        if mode != "sync":
            assert {"blocked", "staging", "local_plan", "write", "save"} <= set(result["phases"])
    assert steps_on_disk(tmp_path) == [4, 10, 11]
    assert loaded_step(tmp_path / "step-00000004") == 4
    by_rank = dcp.open_index(tmp_path / "step-00000011").provenance["rank_seconds"]
    assert len(by_rank) == world_size and all({"local_plan", "write"} <= set(one) for one in by_rank)


# -- other numbers of ranks ----------------------------------------------------------------------------------


def _resume(rank: int, world_size: int, root: str, first: int, last: int) -> list[Any]:
    """Restore, train to step ``last``, and return the restored step, world size and `PerRank` value."""
    state = state_at(-1, rank)
    with manager_of(root, every_steps=2) as manager:
        restored = manager.restore(state, per_rank="keep")
        own = dict(state["own"].value)
        for step in range(restored.step + 1 if restored else first, last + 1):
            state = state_at(step, rank)
            manager.save(step, state)
    return [None if restored is None else (restored.step, restored.world_size), own]


def test_a_run_resumes_with_another_number_of_ranks(tmp_path: Path) -> None:
    """A run of 3 ranks is resumed by 2, 1 and 3; per_rank="keep" leaves a `PerRank` if the number differs."""
    fresh = {"rank": 0, "step": -1}
    assert run_ranks(3, _resume, str(tmp_path), 1, 4)[0] == [None, fresh]
    assert run_ranks(2, _resume, str(tmp_path), 1, 6) == [
        [(4, 3), {"rank": rank, "step": -1}] for rank in range(2)
    ]
    assert run_ranks(1, _resume, str(tmp_path), 1, 8) == [[(6, 2), fresh]]
    assert run_ranks(3, _resume, str(tmp_path), 1, 10)[2] == [(8, 1), {"rank": 2, "step": -1}]
    assert loaded_step(str(tmp_path / "step-00000010")) == 10


# -- agreement between ranks ---------------------------------------------------------------------------------


def _terminated(rank: int, world_size: int, root: str, mode: str, how: str) -> tuple[Any, ...]:
    seen = Recorder()
    before = signal.getsignal(signal.SIGTERM)
    ended = 0
    with manager_of(root, mode=mode, every_steps=1000, on_event=seen) as manager:
        for step in range(1, 100):
            if step == 5 and rank == 1:
                if how == "signal":
                    os.kill(os.getpid(), signal.SIGTERM)
                else:
                    manager.request_stop()
            future = manager.save(step, state_at(step, rank))
            ended = step
            if manager.stop_requested:
                assert future is not None
                assert future.done()
                assert manager.all_steps() == [step]  # committed, although the manager is not closed
                break
        assert manager.save(ended + 1, state_at(ended + 1, rank)) is None
    return (
        ended,
        seen.steps("stop_requested"),
        seen.steps("saved"),
        signal.getsignal(signal.SIGTERM) == before,
    )


@pytest.mark.parametrize(("mode", "how"), [("thread", "signal"), ("sync", "request")])
def test_a_stop_on_one_rank_saves_and_stops_all(tmp_path: Path, mode: str, how: str) -> None:
    """After a stop on rank 1 of 3 at step 5, all ranks save step 6, wait for the commit, and stop."""
    assert run_ranks(3, _terminated, str(tmp_path), mode, how) == [(6, [6], [6], True)] * 3
    assert loaded_step(str(tmp_path / "step-00000006")) == 6


def _clock(rank: int, world_size: int, root: str) -> list[int]:
    # Only rank 0's clock counts. On the others the interval has always passed, or never passes.
    seconds = {0: 0.3, 1: 1e-9, 2: 1e9}[rank]
    saved = []
    with manager_of(root, every_seconds=seconds) as manager:
        for step in range(1, 41):
            time.sleep(0.02)
            if manager.save(step, state_at(step, rank)):
                saved.append(step)
    return saved


def test_saves_by_time_use_the_clock_of_rank_0(tmp_path: Path) -> None:
    """All ranks save the steps that are due by the clock of rank 0."""
    saved = run_ranks(3, _clock, str(tmp_path))
    assert saved[0] == saved[1] == saved[2]
    assert saved[0]
    assert 1 not in saved[0]
    assert steps_on_disk(tmp_path) == saved[0]


# -- failures ------------------------------------------------------------------------------------------------


def _failing_on(rank: int, failing_rank: int, times: int) -> Callable[[str], dcp.FileSystemWriter]:
    calls = [0]

    def fail(operation: StoreCall) -> None:
        calls[0] += 1
        if rank == failing_rank and calls[0] <= times:
            raise StorageError("injected: the disk of this rank is away", path=operation.name, op="create")

    return writer_with(fail, op="create", name="*.distcp")


def _one_rank_fails(rank: int, world_size: int, root: str, on_failure: str) -> list[Any]:
    seen = Recorder()
    options: dict[str, Any] = {"writer": _failing_on(rank, 1, 3), "retries": 1, "every_steps": 3}
    raised: list[tuple[int, str]] = []
    manager = manager_of(root, on_failure=on_failure, on_event=seen, **options)
    for step in range(1, 13):
        try:
            manager.save(step, ranked_state(step, rank))
        except dcp.errors.StorageError as error:
            raised.append((step, str(error).split("\n")[0]))
        if step == 3:
            until(lambda: seen.steps("save_failed"), "the failure")
            until(lambda: "saving" not in repr(manager), "the end of the save")  # at a known step
    manager.close()
    steps = manager.all_steps()
    return [seen.steps("save_failed"), seen.steps("save_retried"), manager.failures, steps, raised]


@pytest.mark.parametrize("on_failure", ["warn", "raise"])
def test_a_failure_on_one_rank_fails_all_ranks(tmp_path: Path, on_failure: str) -> None:
    """If both attempts at step 3 and one at step 6 fail on rank 1, all ranks report it and training
    continues. With on_failure="raise" the ranks agree at step 4, and all raise at step 5."""
    for *reported, raised in run_ranks(3, _one_rank_fails, str(tmp_path), on_failure):
        assert reported == [[3], [6], 1, [6, 9, 12]]
        assert [step for step, _ in raised] == ([5] if on_failure == "raise" else [])
        assert all("failed on rank 1" in message for _, message in raised)


def _only_rank_0_saves(rank: int, world_size: int, root: str) -> list[str]:
    with warned() as logged:
        manager = dcp.CheckpointManager(root, writer=plain_writer, timeout_seconds=2.0)
        if rank == 0:
            with pytest.raises(dcp.errors.CollectiveTimeoutError):
                for step in range(1, 4):
                    manager.save(step, {"w": torch.ones(1)})
        else:
            time.sleep(2.5)
        with contextlib.suppress(dcp.CheckpointError):
            manager.close()
    return [text for text in logged if "has not reached" in text]


def test_ranks_that_do_not_save_are_warned_of(tmp_path: Path) -> None:
    """With ``if rank == 0:`` around save(), a warning comes after 30 s, or a quarter of a short timeout."""
    first, second = run_ranks(2, _only_rank_0_saves, str(tmp_path))
    assert second == []
    assert {text.partition(" of 2 ")[0] for text in first} == {
        "CheckpointManager.save: rank 1",
        "save: rank 1",
    }
    assert all("All ranks must call the operation, not only rank 0" in text for text in first)


def _damaged(rank: int, world_size: int, root: str) -> str:
    def lose(_: StoreCall) -> None:
        for file in data_files(Path(root) / "step-00000001"):
            truncate(file)

    seen = Recorder()
    options: dict[str, Any] = {"on_failure": "raise", "every_steps": 100, "on_event": seen}
    options["timeout_seconds"] = 30.0  # a rank left alone must raise before `run_ranks` times out
    with manager_of(root, writer=writer_with(lose), **options) as manager:
        manager.save(1, state_at(1, rank), force=True)
        until(lambda: seen.steps("saved"), "the commit")
        if rank == 0:
            until(lambda: manager.failures, "the verdict")  # the others wait for rank 0 at their third step
        try:
            for step in range(2, 10):
                manager.save(step, state_at(step, rank))
        except dcp.CheckpointError as error:
            return f"{type(error).__name__} {step} {error}"
    return "nothing"


def test_damage_found_by_rank_0_is_raised_on_all_ranks(tmp_path: Path) -> None:
    """Rank 0 alone verifies a checkpoint; with on_failure="raise" all ranks raise at the same step."""
    results = run_ranks(3, _damaged, str(tmp_path))
    assert results[0].startswith("CorruptCheckpointError ")
    assert "is damaged after its commit" in results[0]
    steps = {result.split()[1] for result in results}
    assert len(steps) == 1
    assert all("failed on another rank" in result for result in results[1:])


# -- calls by all ranks, groups and mistakes -----------------------------------------------------------------


def _by_all(rank: int, world_size: int, root: str) -> list[Any]:
    with manager_of(root, keep=dcp.Retention(last=1)) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step, rank))
            if step < 3:
                assert manager.wait(240)
                manager.pin(step)
        assert manager.wait(240)
        torch.distributed.barrier()
        pinned = manager.pinned()
        torch.distributed.barrier()
        manager.unpin(1)
        manager.delete(1)
        assert manager.wait(240)
        torch.distributed.barrier()
        return [pinned, manager.all_steps()]


def test_pins_and_deletions_may_be_called_on_all_ranks(tmp_path: Path) -> None:
    """If all ranks call pin(), unpin() or delete(), rank 0 acts once and the other calls do nothing."""
    assert run_ranks(2, _by_all, str(tmp_path)) == [[[1, 2], [2, 3]]] * 2


def _group_after_manager(rank: int, world_size: int, root: str) -> list[str]:
    """Make a manager before init_process_group(), save after it, and return the errors."""
    group = torch.distributed.distributed_c10d._get_default_store()
    torch.distributed.destroy_process_group()
    messages = []
    try:
        manager_of(f"{root}/early")  # with the environment of torchrun
    except dcp.CheckpointError as error:
        messages.append(str(error))
    del os.environ["WORLD_SIZE"]
    early = manager_of(f"{root}/early")
    os.environ["WORLD_SIZE"] = str(world_size)
    store = torch.distributed.PrefixStore("again", group)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    wait_for_all_ranks(store, rank, world_size)
    try:
        early.save(1, state_at(1, rank))
    except dcp.CheckpointError as error:
        messages.append(str(error))
    early.close()
    return messages


def test_a_save_before_init_process_group_is_refused(tmp_path: Path) -> None:
    """Before init_process_group() every rank seems to be the only one, so the manager refuses to save."""
    for refused, before in run_ranks(2, _group_after_manager, str(tmp_path)):
        assert "one of 2 processes" in refused
        assert "created before init_process_group()" in before
    assert not list(tmp_path.iterdir())


def _no_writer_of_1(place: str) -> dcp.FileSystemWriter:
    if place.endswith("1"):
        raise ValueError("no writer for this one")
    return plain_writer(place)


_MISTAKES: dict[str, dict[str, Any]] = {
    "metric": {"metrics": {"loss": "low"}},
    "metadata": {"user_metadata": {"run": object()}},
    "state": {"state_dict": [1]},
    "step": {"step": 1.5},
    "other step": {"step": 7},
    "writer": {},
}
_NO_EXCHANGE = {"handle_sigterm": False}


def _one_is_mistaken(
    rank: int, world_size: int, root: str, mistake: str, at: int, options: dict[str, Any], stops: bool
) -> list[str]:
    """Save three steps, step ``at`` with wrong arguments on rank 1; return the result of each save."""
    if rank == 1 and mistake == "writer":
        options = options | {"writer": _no_writer_of_1}
    manager = manager_of(root, retries=0, **options)
    endings = []
    for step in (1, 2, 3):
        given: dict[str, Any] = {"step": step, "state_dict": state_at(step, rank)}
        if step == at and rank == 1:
            given |= _MISTAKES[mistake]
        if step == at and stops:
            manager.request_stop()
            manager.should_save(0)
        try:
            future = manager.save(**given)
            assert future is None or future.result()
            endings.append("fine")
        except (dcp.CheckpointError, TypeError, ValueError) as error:
            endings.append(str(error))
    manager.close()
    return endings


@pytest.mark.parametrize(
    ("mistake", "at", "options", "stops"),
    [
        ("metric", 1, {}, False),
        ("step", 1, {}, True),
        ("step", 1, _NO_EXCHANGE, False),
        ("other step", 1, _NO_EXCHANGE, False),
        *(
            pytest.param(mistake, 1, {}, False, marks=pytest.mark.exhaustive)
            for mistake in ("metadata", "state", "writer")
        ),
    ],
)
def test_a_wrong_argument_on_one_rank_fails_all_ranks(
    tmp_path: Path, mistake: str, at: int, options: dict[str, Any], stops: bool
) -> None:
    """A wrong argument on one rank fails the save on all ranks at once with the reason, where the other ranks
    would wait. Nothing is left of the save, and the next step is saved."""
    found = run_ranks(2, _one_is_mistaken, str(tmp_path), mistake, at, options, stops)
    other, own = (ending.pop(at - 1) for ending in found)
    assert own != "fine" and own.split(": ")[-1][:30] in other and "rank 1" in other
    assert found == [["fine", "fine"]] * 2
    assert mistake == "other step" or "rank" not in own
