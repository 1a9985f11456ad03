"""Saves before a deadline, and saves that are called off: committed by then, or gone without a trace."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import MissingKeyError, OptionError
from dcp.manager.cleanup.retention import plan
from dcp.steps.states import StepState
from dcp.storage.stores import PosixStore
from dcp.storage.stores.faults import Fault, FaultInjectingStore, Operation
from tests.dcp.manager.manager_support import Gate, Recorder, Writer, manager_of, plain_writer, writer_with
from tests.support.ranks import run_ranks

TENSORS = 40
"""Of the optimizer; each is a write of its own."""


class Weights:
    """A training's state, as one object with parts in it."""

    def __init__(self, version: float) -> None:
        self.version = version

    def state_dict(self) -> dict[str, Any]:
        """Weights that are one write, an optimizer that is many."""
        optimizer = {f"{number}": torch.full((4096,), self.version) for number in range(TENSORS)}
        return {"net": {"model": {"w": torch.full((2048,), self.version)}}, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the version that all of it tells."""
        values = [state["net"]["model"]["w"], *state["optimizer"].values()]
        assert len({float(value.min()) for value in values}) == 1
        self.version = float(values[0].min())


def state_of(version: float) -> dict[str, Any]:
    """What the manager is given; ``app.net.model`` are the weights."""
    return {"app": Weights(float(version)), "epoch": int(version)}


class Slow:
    """A hook before each write that takes time once it was told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, operation: Operation) -> None:
        """Take it."""
        time.sleep(self.seconds)


def slow_writer(slow: Slow) -> Writer:
    """Each tensor above some KiB is a write."""
    return writer_with(slow, "write", "*")


class _Delaying:
    """Writers whose every write takes a while, in any process."""

    def __init__(self, delay_seconds: float) -> None:
        self.delay_seconds = delay_seconds

    def __call__(self, checkpoint_id: str) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(checkpoint_id, sync_files=False, open_store=self.open_store)

    def open_store(self, path: Any) -> FaultInjectingStore:
        """Local, and slow."""
        fault = Fault("write", onwards=True, delay_seconds=self.delay_seconds)
        return FaultInjectingStore(PosixStore(path), fault)


def deadline_manager(root: Path | str, **options: Any) -> dcp.CheckpointManager:
    """A manager with two seconds, of which a tenth is kept."""
    settings: dict[str, Any] = {"grace_seconds": 2.0, "weights": "app.net.model", "every_steps": 100}
    return manager_of(Path(root), **(settings | options))


def stop(manager: dcp.CheckpointManager, step: int) -> float:
    """SIGTERM, and the next step; how long that took."""
    os.kill(os.getpid(), signal.SIGTERM)
    begun = time.monotonic()
    manager.save(step, state_of(step))
    assert manager.stop_requested
    return time.monotonic() - begun


def contents(root: Path) -> dict[str, list[str]]:
    """What is in each folder of a run: data files as "data"."""
    return {
        folder.name[-2:]: sorted(
            {"data" if path.suffix == ".distcp" else path.name for path in folder.iterdir()}
            - {"notes.msgpack"}
        )
        for folder in sorted(root.iterdir())
    }


WHOLE = [".metadata", "data", "manifest.msgpack"]


# -- before a deadline ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["thread", pytest.param("sync", marks=pytest.mark.exhaustive)])
def test_what_fits_is_saved_whole_at_once(tmp_path: Path, mode: Any) -> None:
    """By what the last saves took there is time; where none was before, the weights are committed first, and
    then all over them."""
    for number, root in enumerate((tmp_path / "known", tmp_path / "unknown")):
        seen = Recorder()
        with deadline_manager(root, mode=mode, on_event=seen, grace_seconds=20) as manager:
            if number == 0:
                manager.save(7, state_of(7), force=True)
                assert manager.wait(240)
            assert stop(manager, 8) < 10
        kept = [
            event.data.get("partial") for event in seen.events if event.kind == "saved" and event.step == 8
        ]
        assert kept == ([None], ["app.net.model", None])[number]
        state = state_of(0)
        with manager_of(root) as other:
            restored = other.restore(state)
        assert restored is not None
        assert (restored.step, state["app"].version, "partial" in restored.user_metadata) == (8, 8.0, False)
        assert contents(root)["08"] == WHOLE


@pytest.mark.parametrize("mode", ["thread", pytest.param("sync", marks=pytest.mark.exhaustive)])
def test_what_does_not_fit_leaves_the_weights(tmp_path: Path, mode: Any) -> None:
    """The whole save is called off in time, the checkpoint of the weights stands, and says what it is;
    resuming takes the one before, unless it is asked for what there is."""
    slow, seen = Slow(), Recorder()
    manager = deadline_manager(tmp_path, mode=mode, writer=slow_writer(slow), on_event=seen)
    manager.save(1, state_of(1), force=True)
    assert manager.wait(240)
    manager._ledger._seconds.append(10.0)
    slow.seconds = 0.1
    assert stop(manager, 2) < 3.0
    manager.close()
    assert manager.failures == 0
    kinds = seen.kinds("saved", "save_cancelled")
    assert kinds == [("saved", 1), ("saved", 2), ("save_cancelled", 2)]
    assert contents(tmp_path) == {"01": WHOLE, "02": WHOLE}
    state = state_of(0)
    found = Recorder()
    with manager_of(tmp_path, on_event=found) as other:
        assert other.all_steps() == [1, 2]
        restored = other.restore(state)
        assert restored is not None
        assert (restored.step, state["app"].version) == (1, 1.0)
        ((step, why),) = restored.skipped
        assert (step, "has only app.net.model" in why) == (2, True)
        assert restored.skipped_partial == (2,)
        assert found.kinds("skipped_damaged", "skipped_partial") == [("skipped_partial", 2)]
        assert other.restore(state_of(0), allow_partial_load=True).step == 1  # type: ignore[union-attr]
        weights = {"app": {"net": {"model": {"w": torch.zeros(2048)}}}}
        newest = other.restore(weights, only="app.net.model")
        assert newest is not None
        assert (newest.step, weights["app"]["net"]["model"]["w"][0].item()) == (2, 2.0)
        assert newest.user_metadata["partial"] == ["app.net.model"]
        with pytest.raises(MissingKeyError, match="optimizer"):
            other.restore(state_of(0), 2)
        other.save(2, state_of(22), force=True)
        assert other.wait(240)
        assert other.restore(state) is not None
    assert state["app"].version == 22.0


def test_without_time_for_the_weights_nothing_is_left(tmp_path: Path) -> None:
    """Neither folder nor files; and once the deadline has passed nothing is begun."""
    slow, seen = Slow(), Recorder()
    manager = deadline_manager(tmp_path, writer=slow_writer(slow), on_event=seen)
    manager.save(1, state_of(1), force=True)
    assert manager.wait(240)
    manager._ledger._seconds.append(10.0)
    slow.seconds = 1.0
    assert stop(manager, 2) < 5
    assert contents(tmp_path) == {"01": WHOLE}
    manager._coordinator._stop_saved = False
    assert manager.save(3, state_of(3)) is None
    assert seen.events[-1].error == "the deadline has passed"
    manager.close()
    assert contents(tmp_path) == {"01": WHOLE}


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_what_is_under_way_is_called_off_though_no_step_comes(tmp_path: Path, mode: Any) -> None:
    """Training is in a long step when the notice comes and when the time is over."""
    manager = deadline_manager(tmp_path, mode=mode, writer=_Delaying(0.3))
    future = manager.save(1, state_of(1), force=True)
    assert future is not None
    os.kill(os.getpid(), signal.SIGTERM)
    begun = time.monotonic()
    future.exception(240)
    assert time.monotonic() - begun < 4
    assert future.cancelled()
    manager.close()
    assert contents(tmp_path) == {}


def test_weights_never_replace_a_whole_state(tmp_path: Path) -> None:
    """A run that has gone back comes to a step that was saved whole: only the whole may replace it."""
    slow = Slow()
    manager = deadline_manager(tmp_path, writer=slow_writer(slow))
    for step in (1, 2, 3):
        manager.save(step, state_of(step), force=True)
    assert manager.restore(state_of(0), 1) is not None
    manager._ledger._seconds.append(10.0)
    slow.seconds = 0.1
    assert stop(manager, 2) < 3.0
    manager.close()
    state = state_of(0)
    with manager_of(tmp_path) as other:
        assert other.restore(state, 2) is not None
    assert state["app"].version == 2.0


def test_a_storage_that_hangs_does_not_keep_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step returns soon after the deadline, and so does closing; nothing is committed."""
    monkeypatch.setattr("dcp.manager.saving.step_saver.HANG_SECONDS", 0.2)
    gate = Gate()
    manager = deadline_manager(tmp_path, writer=writer_with(gate, "create", "*"), grace_seconds=0.5)
    assert stop(manager, 1) < 6
    begun = time.monotonic()
    manager.close()
    assert time.monotonic() - begun < 10
    gate.open()
    assert manager.all_steps() == []


def test_weights_that_the_state_has_not(tmp_path: Path) -> None:
    """They are missed at the first step, not at the preemption; deeper ones fail their own save alone."""
    with (
        manager_of(tmp_path, grace_seconds=30) as manager,
        pytest.raises(OptionError, match="'app', 'epoch'"),
    ):
        manager.save(1, state_of(1))
    with deadline_manager(tmp_path / "x", weights="app.net.nothing", grace_seconds=20) as manager:
        stop(manager, 1)
        assert manager.all_steps() == [1]
    with deadline_manager(tmp_path / "y", weights=(), grace_seconds=20) as manager:
        stop(manager, 1)
        assert manager.all_steps() == [1]


def test_partial_steps_do_not_count_for_retention() -> None:
    """They push no whole one out, and go once enough whole ones are newer."""
    steps = [StepState(1), StepState(2, health="partial")]
    assert plan(dcp.Retention(last=1), steps, 0.0).delete == ()
    assert plan(dcp.Retention(last=1), [*steps, StepState(3)], 0.0).delete == (1, 2)


def _ranks_before_a_deadline(rank: int, world_size: int, root: str, mode: Any) -> list[Any]:
    """Rank 1 alone is told, by a file; rank 0 is the slow one."""
    delay = 0.1 if rank == 0 else 0.0
    notice = Path(root) / f"notice-{rank}"
    seen = Recorder()
    manager = dcp.CheckpointManager(
        f"{root}/run",
        mode=mode,
        every_steps=100,
        grace_seconds={str(notice): 4.0},
        on_event=seen,
        writer=_Delaying(delay),
    )
    if rank == 1:
        notice.touch()
    step = 0
    while not manager.stop_requested:
        step += 1
        manager.save(step, _ranked(rank, float(step)))
        time.sleep(0.02)
    begun = time.monotonic()
    manager.close()
    kinds = [kind for kind, at in seen.kinds("saved", "save_cancelled") if at == step]
    return [step > 1, kinds, manager.failures, time.monotonic() - begun < 5]


def _ranked(rank: int, version: float) -> dict[str, Any]:
    optimizer = {f"{rank}.{number}": torch.full((4096,), version) for number in range(60)}
    return {"model": {f"w{rank}": torch.full((2048,), version)}, "optimizer": optimizer}


def _restored(rank: int, world_size: int, root: str) -> list[Any]:
    with manager_of(Path(root) / "run") as manager:
        weights = {"model": _ranked(rank, 0.0)["model"]}
        newest = manager.restore(weights, only="model")
        assert newest is not None
        with pytest.raises(dcp.CorruptCheckpointError, match="has only model"):
            manager.restore(_ranked(rank, 0.0))
        return [newest.step == weights["model"][f"w{rank}"][0].item()]


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_all_ranks_hold_the_same_of_a_deadline(tmp_path: Path, mode: str) -> None:
    """One rank's notice is all ranks' deadline: the weights of all are committed, and the whole state, which
    one rank has no time for, is called off on all."""
    found = run_ranks(2, _ranks_before_a_deadline, str(tmp_path), mode)
    assert found == [[True, ["saved", "save_cancelled"], 0, True]] * 2
    (folder,) = (tmp_path / "run").iterdir()
    assert len(list(folder.glob("*.distcp"))) == 2
    assert run_ranks(2, _restored, str(tmp_path)) == [[True], [True]]


# -- cancelling ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_failure", ["warn", "raise"])
def test_a_cancelled_save_is_no_failure(tmp_path: Path, on_failure: Any) -> None:
    """It is told as what it is, the older step stays, and the next one is saved."""
    gate, seen = Gate(), Recorder()
    steps = {"2": gate}

    def writer(checkpoint_id: str) -> dcp.FileSystemWriter:
        held = steps.get(checkpoint_id[-1:])
        return (writer_with(held, "create", "*") if held else plain_writer)(checkpoint_id)

    with manager_of(tmp_path, writer=writer, on_failure=on_failure, on_event=seen) as manager:
        assert not manager.cancel()
        manager.save(1, state_of(1))
        assert manager.wait(240)
        manager.save(2, state_of(2))
        assert gate.reached.wait(240)
        threading.Timer(0.2, gate.open).start()
        assert manager.cancel()
        assert not manager.cancel()
        manager.save(3, state_of(3))
        assert manager.wait(240)
        assert (manager.all_steps(), manager.failures) == ([1, 3], 0)
    assert seen.kinds("saved", "save_failed", "save_cancelled") == [
        ("saved", 1),
        ("save_cancelled", 2),
        ("saved", 3),
    ]
    assert contents(tmp_path).keys() == {"01", "03"}


def test_another_thread_cancels_a_save_in_the_loop(tmp_path: Path) -> None:
    """In mode "sync", too."""
    gate = Gate()
    answers: list[bool] = []
    with manager_of(tmp_path, mode="sync", writer=writer_with(gate, "create", "*")) as manager:

        def cancel() -> None:
            assert gate.reached.wait(240)
            threading.Timer(0.2, gate.open).start()
            answers.append(manager.cancel())

        thread = threading.Thread(target=cancel)
        thread.start()
        future = manager.save(1, state_of(1))
        thread.join(240)
        assert (answers, future is not None and future.cancelled()) == ([True], True)
        assert manager.all_steps() == []
    assert contents(tmp_path) == {}
