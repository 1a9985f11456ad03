"""Preemption notices: by the deadline each save is committed, or cancelled without leftovers."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import CorruptCheckpointError, MissingKeyError, OptionError
from tests.support.manager_runs import (
    PATIENCE_SECONDS,
    Fault,
    FaultyWriter,
    Gate,
    Recorder,
    contents,
    manager_of,
    plain_writer,
    writer_with,
)
from tests.support.ranks import run_ranks

TENSORS = 40
"""Tensors of the optimizer, each large enough for a write of its own."""
WHOLE = [".metadata", "data", "manifest.msgpack"]


class Weights:
    """A `Stateful` with weights and an optimizer."""

    def __init__(self, version: float) -> None:
        self.version = version

    def state_dict(self) -> dict[str, Any]:
        """Return weights that need one write, and an optimizer that needs many."""
        optimizer = {f"{number}": torch.full((196_608,), self.version) for number in range(TENSORS)}
        return {"net": {"model": {"w": torch.full((2048,), self.version)}}, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the version, which all tensors must agree on."""
        values = [state["net"]["model"]["w"], *state["optimizer"].values()]
        assert len({float(value.min()) for value in values}) == 1
        self.version = float(values[0].min())


def state_of(version: float) -> dict[str, Any]:
    """Return the state to save, whose weights are ``app.net.model``."""
    return {"app": Weights(float(version)), "epoch": int(version)}


class Slow:
    """A hook that delays each write."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, _: object) -> None:
        """Sleep."""
        time.sleep(self.seconds)


def deadline_manager(root: Path | str, slow: Slow | None = None, **options: Any) -> dcp.CheckpointManager:
    """Return a manager with a grace period of 1 s by default, of which a tenth is kept in reserve."""
    settings: dict[str, Any] = {"grace_seconds": 1.0, "weights": "app.net.model", "every_steps": 100}
    settings |= {"writer": plain_writer if slow is None else writer_with(slow, "write", "*")}
    return manager_of(root, **(settings | options))


def stop(manager: dcp.CheckpointManager, step: int) -> dcp.state_dict_saver.SaveFuture | None:
    """Send SIGTERM to this process, and save the next step."""
    os.kill(os.getpid(), signal.SIGTERM)
    future = manager.save(step, state_of(step))
    assert manager.stop_requested
    return future


# -- before a deadline ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["thread", pytest.param("sync", marks=pytest.mark.exhaustive)])
def test_a_state_that_fits_is_saved_whole(tmp_path: Path, mode: Any) -> None:
    """If time remains, judged by earlier saves, the whole state is saved. Without earlier saves the weights
    are committed first, and then replaced by the whole state."""
    for number, root in enumerate((tmp_path / "known", tmp_path / "unknown")):
        seen = Recorder()
        with deadline_manager(root, mode=mode, on_event=seen, grace_seconds=60) as manager:
            if number == 0:
                manager.save(7, state_of(7), force=True)
                assert manager.wait(PATIENCE_SECONDS)
            future = stop(manager, 8)
            assert future is not None and future.done()
        last = [event for event in seen.events if event.kind == "saved" and event.step == 8]
        assert [event.data.get("partial") for event in last] == ([None], ["app.net.model", None])[number]
        state = state_of(0)
        restored = dcp.CheckpointManager(root, mode="sync").restore(state)
        assert restored is not None and "partial" not in restored.user_metadata
        assert (restored.step, state["app"].version, contents(root)[8]) == (8, 8.0, WHOLE)


PartialRun = tuple[Path, Recorder, dcp.CheckpointManager]


@pytest.fixture(scope="module", params=["thread", pytest.param("sync", marks=pytest.mark.exhaustive)])
def partial_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PartialRun:
    """Return a run with a whole step 1, and a step 2 of the weights only, saved before a deadline."""
    root, slow, seen = tmp_path_factory.mktemp("partial"), Slow(0.03), Recorder()
    manager = deadline_manager(root, slow, mode=request.param, on_event=seen)
    manager.save(1, state_of(1), force=True)
    assert manager.wait(PATIENCE_SECONDS)
    slow.seconds = 0.1
    future = stop(manager, 2)
    assert future is not None and future.done()
    manager.close()
    return root, seen, manager


def test_a_save_that_does_not_fit_leaves_the_weights(partial_run: PartialRun) -> None:
    """The save of the whole state is cancelled in time and is no failure; the save of the weights stays."""
    root, seen, manager = partial_run
    assert manager.failures == 0
    assert seen.kinds("saved", "save_cancelled") == [("saved", 1), ("saved", 2), ("save_cancelled", 2)]
    assert contents(root) == {1: WHOLE, 2: WHOLE}


def test_restore_prefers_a_whole_step_to_weights(partial_run: PartialRun) -> None:
    """`restore` prefers an older whole step to newer weights, unless `only=` asks for the weights."""
    state, seen = state_of(0), Recorder()
    with manager_of(partial_run[0], on_event=seen) as manager:
        assert manager.all_steps() == [1, 2]
        restored = manager.restore(state)
        assert restored is not None and (restored.step, state["app"].version) == (1, 1.0)
        ((step, why),) = restored.skipped
        assert (step, "with app.net.model only" in why, restored.skipped_partial) == (2, True, (2,))
        assert seen.kinds("skipped_damaged", "skipped_partial") == [("skipped_partial", 2)]
        loose = manager.restore(state_of(0), allow_partial_load=True)
        assert loose is not None and loose.step == 1
        with pytest.raises(MissingKeyError, match="optimizer"):
            manager.restore(state_of(0), 2)
        weights = {"app": {"net": {"model": {"w": torch.zeros(2048)}}}}
        newest = manager.restore(weights, only="app.net.model")
        assert newest is not None and newest.user_metadata["partial"] == ["app.net.model"]
        assert (newest.step, weights["app"]["net"]["model"]["w"][0].item()) == (2, 2.0)


def test_retention_does_not_count_steps_of_weights(partial_run: PartialRun) -> None:
    """Retention does not count a step with weights only; the step may be saved again as a whole."""
    with manager_of(partial_run[0], keep=dcp.Retention(last=1)) as manager:
        manager.save(2, state_of(22), force=True)
        assert manager.wait(PATIENCE_SECONDS)
        state = state_of(0)
        assert manager.restore(state) is not None and state["app"].version == 22.0
    assert manager.all_steps() == [2]


@pytest.mark.exhaustive
def test_without_time_for_weights_no_files_are_left(tmp_path: Path) -> None:
    """Without time for the weights neither folder nor files are left."""
    slow, seen = Slow(0.03), Recorder()
    manager = deadline_manager(tmp_path, slow, on_event=seen)
    manager.save(1, state_of(1), force=True)
    assert manager.wait(PATIENCE_SECONDS)
    slow.seconds = 1.0
    stop(manager, 2)
    manager.close()
    assert contents(tmp_path) == {1: WHOLE}
    assert seen.steps("saved") == [1]


def test_no_save_begins_after_the_deadline(tmp_path: Path) -> None:
    """After the deadline no save begins, and an event gives the reason."""
    seen = Recorder()
    with deadline_manager(tmp_path, grace_seconds=0.01, on_event=seen) as manager:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)
        assert manager.save(1, state_of(1)) is None
        assert manager.stop_requested
    assert seen.events[-1].error == "the deadline has passed"
    assert contents(tmp_path) == {}


@pytest.mark.exhaustive
def test_weights_never_replace_a_whole_state(tmp_path: Path) -> None:
    """After a restore of an older step, the weights alone never replace a step that was saved whole."""
    slow = Slow(0.0)
    with deadline_manager(tmp_path, slow) as manager:
        for step in (1, 2, 3):
            slow.seconds = 0.03 * (step == 3)
            manager.save(step, state_of(step), force=True)
            assert manager.wait(PATIENCE_SECONDS)
        assert manager.restore(state_of(0), 1) is not None
        slow.seconds = 0.1
        stop(manager, 2)
    with manager_of(tmp_path) as other:
        assert other.restore(state := state_of(0), 2) is not None
    assert state["app"].version == 2.0


def test_a_hanging_storage_does_not_delay_the_end(tmp_path: Path) -> None:
    """A hanging storage does not delay `save` or `close` much beyond the deadline; nothing is committed."""
    gate = Gate()
    writer = writer_with(gate, "create", "*")
    manager = deadline_manager(tmp_path, writer=writer, grace_seconds=0.5)
    stop(manager, 1)
    manager.close()
    gate.open()
    assert manager.all_steps() == []


# -- notices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_the_deadline_cancels_a_save_between_steps(tmp_path: Path, mode: Any) -> None:
    """The deadline cancels a save even if no step is called meanwhile. The notice with the least time counts,
    and a notice file that existed at the start counts only after it is created again."""
    writer = FaultyWriter([Fault("write", onwards=True, delay_seconds=0.3)])
    (notice := tmp_path / "notice").touch()
    grace = {signal.SIGUSR1: 1000.0, notice: 1.0}
    with deadline_manager(tmp_path / "run", mode=mode, writer=writer, grace_seconds=grace) as manager:
        future = manager.save(1, state_of(1), force=True)
        time.sleep(0.4)  # the manager looks for files four times a second
        assert future is not None and manager.save(2, state_of(2)) is None and not manager.stop_requested
        os.kill(os.getpid(), signal.SIGUSR1)
        notice.unlink()
        time.sleep(0.4)
        notice.touch()
        future.exception(PATIENCE_SECONDS)
        assert future.cancelled()
    assert contents(tmp_path / "run") == {} and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


@pytest.mark.parametrize(
    ("grace", "word"),
    [
        *((value, "above 0") for value in (0, -1, math.inf, math.nan, "30", True)),
        ({signal.SIGKILL: 3}, "SIGKILL"),
        ({4711: 3}, "not a signal"),
        *(({key: 3}, "neither") for key in (None, b"/x")),
        *(({key: 3}, "not a file path") for key in ("", "/")),
        ({"/x": "soon"}, "above 0"),
    ],
)
def test_invalid_notices_are_refused(tmp_path: Path, grace: Any, word: str) -> None:
    """An invalid notice, or a grace period without a handled signal, raises OptionError with the reason."""
    with pytest.raises(OptionError, match=word):
        dcp.CheckpointManager(tmp_path, grace_seconds=grace)
    with pytest.raises(OptionError, match="handle_sigterm"):
        dcp.CheckpointManager(tmp_path, grace_seconds=30, handle_sigterm=False)


# -- several ranks -------------------------------------------------------------------------------------------


def _ranked(rank: int, version: float) -> dict[str, Any]:
    optimizer = {f"{rank}.{number}": torch.full((196_608,), version) for number in range(60)}
    return {"model": {f"w{rank}": torch.full((2048,), version)}, "optimizer": optimizer}


def _before_a_deadline(rank: int, world_size: int, root: str, mode: Any) -> list[Any]:
    """Train until stopped, with a notice file on rank 1 only and slow writes on rank 0."""
    notice, seen = Path(root) / f"notice-{rank}", Recorder()
    grace_seconds = 16.0 if mode == "process" else 4.0  # a writer process needs time to start
    delay_seconds = grace_seconds / 20 if rank == 0 else 0.0
    writer = FaultyWriter([Fault("write", onwards=True, delay_seconds=delay_seconds)])
    options: dict[str, Any] = {
        "grace_seconds": {str(notice): grace_seconds},
        "on_event": seen,
        "every_steps": 100,
    }
    manager = manager_of(f"{root}/run", mode=mode, writer=writer, **options)
    if rank == 1:
        notice.touch()
    step = 0
    while not manager.stop_requested:
        step += 1
        manager.save(step, _ranked(rank, float(step)))
        time.sleep(0.02)
    manager.close()
    kinds = [kind for kind, at in seen.kinds("saved", "save_cancelled") if at == step]
    return [step > 1, kinds, manager.failures]


def _resumed(rank: int, world_size: int, root: str) -> bool:
    with manager_of(Path(root) / "run") as manager:
        weights = {"model": _ranked(rank, 0.0)["model"]}
        newest = manager.restore(weights, only="model")
        assert newest is not None
        with pytest.raises(CorruptCheckpointError, match="with model only"):
            manager.restore(_ranked(rank, 0.0))
        return bool(newest.step == weights["model"][f"w{rank}"][0].item())


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_a_notice_on_one_rank_is_for_all_ranks(tmp_path: Path, mode: str) -> None:
    """A notice on one rank is a deadline for all: the weights of all ranks are committed, and the whole
    state, for which one rank has no time, is cancelled on all ranks."""
    found = run_ranks(2, _before_a_deadline, str(tmp_path), mode)
    assert found == [[True, ["saved", "save_cancelled"], 0]] * 2
    (folder,) = (tmp_path / "run").iterdir()
    assert len(list(folder.glob("*.distcp"))) == 2
    assert run_ranks(2, _resumed, str(tmp_path)) == [True, True]
