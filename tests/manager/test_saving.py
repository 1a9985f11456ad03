"""Saves by a manager: the saved values, retries and failures, and the events of each save."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import pytest
import torch

import dcp
from dcp.errors import StorageError
from tests.support.faulty_saves import without_metadata
from tests.support.manager_runs import (
    MODES,
    Event,
    Failing,
    Recorder,
    data_files,
    flip,
    loaded_step,
    manager_of,
    state_at,
    truncate,
    writer_with,
)


def user_of(root: Path, step: int) -> dict[str, Any]:
    """Return the user metadata of a step."""
    return dict(dcp.open_index(root / f"step-{step:08d}").user)


# -- values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [*MODES, pytest.param("process", marks=pytest.mark.exhaustive)])
def test_each_checkpoint_has_the_values_of_its_step(tmp_path: Path, mode: Any) -> None:
    """Each step has the values at the time of its save, although the state changes right afterwards."""
    state = state_at(0)
    with manager_of(tmp_path, mode=mode, every_steps=3) as manager:
        for step in range(1, 11):
            state["model"]["weight"].fill_(step)
            state["model"]["bias"].copy_(torch.arange(4) + step)
            state["step"] = step
            future = manager.save(step, state, last=step == 10)
            assert (future is not None) == (step in (3, 6, 9, 10))
            state["model"]["weight"].fill_(-1.0)
        assert manager.wait(240)
        assert (manager.all_steps(), manager.latest(), manager.failures) == ([3, 6, 9, 10], 10, 0)
    assert [loaded_step(manager.checkpoint_id(step)) for step in (3, 6, 9, 10)] == [3, 6, 9, 10]


def test_overlapping_copies_are_complete_inside_the_lock(tmp_path: Path) -> None:
    """``save(overlap=True)`` returns at once; changes made within `lock` are not in the checkpoint."""
    weight = torch.zeros(1 << 22)
    with manager_of(tmp_path) as manager:
        for step in (1, 2, 3):
            with manager.lock():
                weight.fill_(step)
            manager.save(step, {"weight": weight}, overlap=True)
            with manager.lock():
                weight.fill_(-1.0)
    assert manager.failures == 0
    for step in (1, 2, 3):
        assert torch.equal(
            dcp.read(manager.checkpoint_id(step))["weight"], torch.full((1 << 22,), float(step))
        )


def test_metrics_are_numbers_of_any_kind(tmp_path: Path) -> None:
    """Metrics are numbers or 0-d tensors, NaN too, and are stored as floats; others raise TypeError."""
    loss = torch.nn.functional.mse_loss(torch.ones(2, requires_grad=True), torch.zeros(2))
    metrics: dict[str, SupportsFloat] = {"loss": loss, "bf16": torch.tensor(0.5, dtype=torch.bfloat16)}
    metrics |= {"count": torch.tensor(3), "scalar": np.float32(0.25), "array": np.array(2.0), "nan": math.nan}
    wrong: list[Any] = [np.ones(3), "0.5", None, True, torch.ones(99, 99)]
    with manager_of(tmp_path, mode="sync") as manager:
        manager.save(1, state_at(1), metrics=metrics)
        for value in wrong:
            with pytest.raises(TypeError, match="'x' must be a number or a 0-d tensor") as caught:
                manager.save(2, state_at(2), metrics={"x": value})
            assert len(str(caught.value)) < 300
    stored = user_of(tmp_path, 1)["metrics"]
    assert math.isnan(stored.pop("nan"))
    assert stored == {"loss": 1.0, "bf16": 0.5, "count": 3.0, "scalar": 0.25, "array": 2.0}


def test_metadata_stored_beside_the_state(tmp_path: Path) -> None:
    """A step stores its number, run, metrics and user metadata; invalid metadata raises at the call."""
    with manager_of(tmp_path, run="tuesday") as manager:
        manager.save(7, state_at(7), user_metadata={"tags": ["good"]}, metrics={"loss": 0.5})
        wrong: list[dict[str, Any]] = [
            {"metrics": [1.0]},
            {"metrics": {5: 1.0}},
            {"user_metadata": {"config": object()}},
            {"user_metadata": {"weights": torch.ones(1)}},
        ]
        for described in wrong:
            with pytest.raises(TypeError, match=r"must|not a string"):
                manager.save(8, state_at(8), **described)
        with pytest.raises(ValueError, match="must not contain 'step'"):
            manager.save(8, state_at(8), user_metadata={"step": 9})
    assert manager.all_steps() == [7]
    expected = {"step": 7, "metrics": {"loss": 0.5}, "run": "tuesday", "tags": ["good"]}
    assert user_of(tmp_path, 7) == expected


# -- failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_save_is_retried(tmp_path: Path, mode: Any) -> None:
    """If the storage fails twice, the third attempt commits the same copy, an event reports it, and no extra
    files are left."""
    seen, failing = Recorder(), Failing(times=2)
    with manager_of(tmp_path, mode=mode, writer=writer_with(failing), on_event=seen) as manager:
        manager.save(1, state := state_at(1))
        state["model"]["weight"].fill_(-1.0)
        assert manager.wait(240)
        assert (manager.failures, manager.all_steps()) == (0, [1])
    assert seen.one("save_retried").data["attempts"] == 3
    assert seen.steps("saved") == [1]
    assert loaded_step(manager.checkpoint_id(1)) == 1
    assert len(data_files(tmp_path / "step-00000001")) == 1


@pytest.mark.parametrize("mode", [*MODES, pytest.param("process", marks=pytest.mark.exhaustive)])
def test_a_save_that_fails_after_its_commit_counts(tmp_path: Path, mode: Any) -> None:
    """If `.metadata` cannot be written after the commit, every mode reports the same error, and the step
    counts as saved and sound."""
    seen = Recorder()

    def writer(checkpoint_id: str) -> dcp.FileSystemWriter:
        return dcp.FileSystemWriter(checkpoint_id, sync_files=False, open_store=without_metadata)

    with manager_of(tmp_path, writer=writer, mode=mode, on_event=seen, verify_saved="full") as manager:
        future = manager.save(1, state_at(1))
        assert manager.wait(240)
        assert (manager.failures, manager.all_steps()) == (0, [1])
    assert future is not None
    error = future.exception()
    assert isinstance(error, StorageError) and error.committed
    assert "is committed and loads with dcp, but .metadata" in str(error)
    assert seen.kinds("saved", "save_failed", "verified") == [("saved", 1), ("verified", 1)]
    assert "the storage is away" in str(seen.one("saved").error)
    assert loaded_step(manager.checkpoint_id(1)) == 1


def test_a_failure_may_be_raised_at_the_next_call(tmp_path: Path) -> None:
    """With on_failure="raise" the next call raises the error once; afterwards the manager works again."""
    failing = Failing()
    options: dict[str, Any] = {"on_failure": "raise", "retries": 0, "writer": writer_with(failing)}
    with manager_of(tmp_path, **options) as manager:
        future = manager.save(1, state_at(1))
        assert future is not None and isinstance(future.exception(240), StorageError)
        with pytest.raises(StorageError, match="the storage is away"):
            manager.save(2, state_at(2))
        manager.save(2, state_at(2))
        with pytest.raises(StorageError, match="the storage is away"):
            manager.wait(240)
        failing.times = 0
        manager.save(3, state_at(3))
    assert (manager.failures, manager.all_steps()) == (2, [3])


def test_close_raises_if_all_saves_failed(tmp_path: Path) -> None:
    """`close` raises once if all saves failed, but not after a commit, nor over the loop's own exception."""
    options: dict[str, Any] = {"writer": writer_with(Failing()), "retries": 0}
    manager = manager_of(tmp_path, **options)
    for step in (1, 2):
        manager.save(step, state_at(step))
    with pytest.raises(
        dcp.CheckpointError, match=r"no checkpoint was saved: .* and 2 failed.*the storage is away"
    ):
        manager.close()
    manager.close()
    with pytest.raises(ZeroDivisionError), manager_of(tmp_path, **options) as other:
        other.save(3, state_at(3))
        1 / 0  # noqa: B018
    with manager_of(tmp_path, writer=writer_with(Failing(times=1)), retries=0) as other:
        for step in (4, 5):
            other.save(step, state_at(step))
    assert (other.failures, other.all_steps()) == (1, [5])


# -- damage after the commit ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "spoil", "found"),
    [("sizes", truncate, True), ("sizes", flip, False), ("full", flip, True), ("off", truncate, False)],
)
def test_damage_at_the_commit_is_found_and_not_counted(
    tmp_path: Path, check: Any, spoil: Callable[[Path], object], found: bool
) -> None:
    """Truncation or a flipped bit after the commit is a failure, and retention keeps the older step."""

    def lose(_: object) -> None:
        for file in data_files(tmp_path / "step-00000002"):
            spoil(file)

    seen, keep = Recorder(), dcp.Retention(last=1)
    options: dict[str, Any] = {"verify_saved": check, "keep": keep, "on_event": seen}
    with manager_of(tmp_path, writer=writer_with(lose), **options) as manager:
        for step in (1, 2):
            manager.save(step, {"w": torch.arange(4096) + step})
        assert manager.wait(240)
        assert (manager.failures, manager.all_steps()) == (int(found), [1, 2] if found else [2])
    if found:
        event = seen.one("verify_failed")
        assert (event.step, event.data["damaged"]) == (2, True) and "__0_0." in str(event.error)


# -- events --------------------------------------------------------------------------------------------------


def test_events_go_to_log_monitor_and_callbacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Log, torch.monitor and callbacks get the same facts; an error in a callback is only logged."""
    monitored: list[Any] = []

    def broken(event: Event) -> None:
        raise RuntimeError("a listener that fails")

    seen = Recorder()
    handle = torch.monitor.register_event_handler(monitored.append)
    try:
        with caplog.at_level(logging.INFO), manager_of(tmp_path, on_event=[broken, seen]) as manager:
            manager.save(5, state_at(5))
    finally:
        torch.monitor.unregister_event_handler(handle)
    assert seen.kinds() == [("saved", 5), ("verified", 5)]
    saved = seen.one("saved")
    assert {"blocked", "staging", "local_plan", "global_plan", "write", "save"} <= saved.seconds.keys()
    assert (saved.size_bytes, saved.rank, saved.error) == (64 * 4 + 4 * 8, 0, None)
    assert saved.data["reason"] == "call"
    (record,) = [record for record in caplog.records if getattr(record, "dcp_event", "") == "saved"]
    assert (vars(record)["dcp_step"], vars(record)["dcp_seconds"]) == (5, saved.seconds)
    assert "a listener raised an error for the event 'saved' of step 5" in caplog.text
    (torchs,) = [event for event in monitored if event.name == "dcp.saved"]
    assert (torchs.data["step"], torchs.data["seconds.write"]) == (5, saved.seconds["write"])


def test_a_closed_manager_refuses_all_but_listing(tmp_path: Path) -> None:
    """A closed manager still lists steps, and may be closed again; all other calls raise."""
    manager = manager_of(tmp_path)
    manager.save(1, state_at(1))
    manager.close()
    manager.close()
    for call in (
        lambda: manager.save(2, state_at(2)),
        lambda: manager.should_save(2),
        lambda: manager.delete(1),
        lambda: manager.pin(1),
        lambda: manager.restore(state_at(0)),
        manager.request_stop,
    ):
        with pytest.raises(dcp.CheckpointError, match="is closed; create a new manager"):
            call()
    assert manager.all_steps() == [1]
