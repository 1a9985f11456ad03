"""One process with a manager: what it refuses, tells, restores, and leaves to others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.manager.events import Event
from tests.dcp.manager.manager_support import (
    MODES,
    Failing,
    Gate,
    Recorder,
    data_files,
    loaded_step,
    manager_of,
    state_at,
    writer_with,
)


def test_a_manager_says_what_it_is(tmp_path: Path) -> None:
    """Root, mode, what is under way, and whether it is closed; nothing is asked of the storage."""
    gate = Gate()
    with manager_of(tmp_path / "run", writer=writer_with(lambda operation: gate(operation))) as manager:
        assert repr(manager) == f"CheckpointManager({str(tmp_path / 'run')!r}, mode='thread')"
        manager.save(3, state_at(3))
        assert gate.reached.wait(240)
        assert repr(manager).endswith("mode='thread', saving step 3)")
        gate.open()
    assert repr(manager).endswith(", closed)")


@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_on_where_the_one_before_ended(tmp_path: Path, mode: Any) -> None:
    """Nothing there: None. Else the newest values, per rank ones too, and the interval goes on from there."""
    with manager_of(tmp_path, mode=mode, every_steps=5) as manager:
        assert manager.restore(state_at(-1)) is None
        for step in range(1, 8):
            manager.save(step, state_at(step), metrics={"loss": step / 2}, last=step == 7)
    seen = Recorder()
    with manager_of(tmp_path, mode=mode, every_steps=5, save_first=True, on_event=seen) as manager:
        state = state_at(-1)
        restored = manager.restore(state)
        assert restored is not None
        assert (restored.step, restored.skipped, restored.metrics) == (7, (), {"loss": 3.5})
        assert state["own"].value == {"rank": 0, "step": 7}
        assert state["model"]["weight"].tolist() == [7.0] * 64
        saved = [step for step in range(8, 21) if manager.save(step, state_at(step))]
        assert saved == [10, 15, 20]
        back = manager.restore(state, 5)
        assert back is not None
        assert (back.step, state["step"]) == (5, 5)
        assert [step for step in range(6, 12) if manager.save(step, state_at(step + 100))] == [10]
    assert seen.steps("restored") == [7, 5]
    assert [loaded_step(manager.checkpoint_id(step)) for step in (5, 7, 10, 15)] == [5, 7, 110, 15]


def test_a_part_of_the_state_under_other_names(tmp_path: Path) -> None:
    """What `dcp.load` can leave out and rename, the manager can."""
    with manager_of(tmp_path) as manager:
        manager.save(3, state_at(3))
        state = {"net": {"weight": torch.zeros(64), "bias": torch.zeros(4)}, "step": -1}
        restored = manager.restore(state, only="net", exclude="net.bias", rename={"^net": "model"})
        assert restored is not None
        assert state["step"] == -1
        assert state["net"]["weight"].tolist() == [3.0] * 64  # type: ignore[index]  # a nested dict
        assert state["net"]["bias"].tolist() == [0.0] * 4  # type: ignore[index]  # a nested dict


def test_a_damaged_newest_step_is_noted_and_an_older_one_restored(tmp_path: Path) -> None:
    """Told as events, noted for retention, which keeps the good one although it wants only the last."""
    with manager_of(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step))
    (file,) = data_files(tmp_path / "step-00000003")
    data = bytearray(file.read_bytes())
    offset = data.index(torch.full((64,), 3.0).numpy().tobytes())
    data[offset] ^= 0x01
    file.write_bytes(data)
    seen = Recorder()
    with manager_of(tmp_path, on_event=seen, keep=dcp.Retention(last=1)) as manager:
        state = state_at(-1)
        restored = manager.restore(state)
        assert restored is not None
        assert (restored.step, state["step"]) == (2, 2)
        assert manager.wait(240)
        told = [("restored", 2), ("skipped_damaged", 3), ("verify_failed", 3)]
        assert sorted(seen.kinds()) == told
        noted = manager._folders.notes(3).verified
        assert noted is not None
        assert not noted.ok
        assert file.name in noted.what
        with pytest.raises(dcp.CorruptCheckpointError):
            manager.restore(state, 3)
        manager.save(3, state_at(30), force=True)
        manager.save(4, state_at(4), force=True)
    assert manager.all_steps() == [4]


def test_a_step_that_only_another_host_cannot_read_is_not_noted_as_damaged(tmp_path: Path) -> None:
    """A mount that is missing somewhere must not make retention delete what is good."""
    seen = Recorder()
    with manager_of(tmp_path, on_event=seen, verify_saved="off") as manager:
        manager.save(1, state_at(1))
        assert manager.wait(240)
        assert manager._post_commit is not None
        manager._post_commit.doubt(1, dcp.CorruptCheckpointError("no such file, as rank 5 sees it"))
        assert manager.wait(240)
        noted = manager._folders.notes(1).verified
        assert noted is not None
        assert noted.ok
        assert noted.what == "full"
    assert ("verified", 1) in seen.kinds()


def test_events_go_to_log_monitor_and_callbacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same facts everywhere, phases included; a listener that fails is logged, and harms nobody."""
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
    assert saved.size_bytes == 64 * 4 + 4 * 8
    assert (saved.rank, saved.error, saved.data["reason"]) == (0, None, "call")
    (record,) = [record for record in caplog.records if getattr(record, "dcp_event", "") == "saved"]
    assert vars(record)["dcp_step"] == 5
    assert vars(record)["dcp_seconds"] == saved.seconds
    assert "a listener failed on the event 'saved' of step 5" in caplog.text
    (torchs,) = [event for event in monitored if event.name == "dcp.saved"]
    assert torchs.data["step"] == 5
    assert torchs.data["seconds.write"] == saved.seconds["write"]


@pytest.mark.parametrize("mode", MODES)
def test_a_callback_that_would_wait_for_itself_is_refused(tmp_path: Path, mode: Any) -> None:
    """Rather than hang; it may list and pin. One that wants to end the program does not end the writer."""
    refused: list[str] = []

    def callback(event: Event) -> None:
        if event.kind not in ("saved", "verified"):
            return
        assert event.step in manager.all_steps()
        manager.pin(event.step)
        for call in (manager.wait, manager.close, lambda: manager.save(9, {}), lambda: manager.restore({})):
            with pytest.raises(dcp.CheckpointError, match="would wait for itself") as caught:
                call()
            refused.append(str(caught.value))
        raise SystemExit(3)

    with manager_of(tmp_path, mode=mode, on_event=callback) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step))
        assert manager.wait(240)
    assert manager.pinned() == [1, 2]
    assert len(refused) == 16


def test_two_managers_do_not_influence_each_other(tmp_path: Path) -> None:
    """Schedules, failures, futures, retention and stopping are each manager's own."""
    gate = Gate()
    one_options: dict[str, Any] = {"every_steps": 2, "writer": writer_with(Failing()), "retries": 0}
    other_options: dict[str, Any] = {"every_steps": 3, "keep": dcp.Retention(last=1)}
    with (
        pytest.raises(dcp.CheckpointError, match="nothing was saved"),  # by one
        manager_of(tmp_path / "one", **one_options) as one,
        manager_of(tmp_path / "other", on_failure="raise", **other_options) as other,
        manager_of(tmp_path / "slow", writer=writer_with(gate)) as slow,
    ):
        slow.save(1, state_at(100))
        assert gate.reached.wait(240)
        for step in range(1, 7):
            one.save(step, state_at(step))
            other.save(step, state_at(step + 10))
        assert other.wait(240)
        one.wait(240)
        assert (one.failures, one.all_steps()) == (3, [])
        assert (other.failures, other.all_steps()) == (0, [6])
        assert (slow.failures, slow.all_steps()) == (0, [])
        one.request_stop()
        one.save(7, state_at(7))
        other.save(7, state_at(17))
        assert (one.stop_requested, other.stop_requested) == (True, False)
        gate.open()
    assert loaded_step(other.checkpoint_id(6)) == 16
    assert loaded_step(slow.checkpoint_id(1)) == 100


def test_a_closed_manager_says_so(tmp_path: Path) -> None:
    """Closing twice is fine; saving, asking and pinning are not; listing still works."""
    manager = manager_of(tmp_path)
    manager.save(1, state_at(1))
    manager.close()
    manager.close()
    for call in (
        lambda: manager.save(2, state_at(2)),
        lambda: manager.should_save(2),
        lambda: manager.delete(1),
        lambda: manager.pin(1),
        lambda: manager.request_stop(),
    ):
        with pytest.raises(dcp.CheckpointError, match="is closed; make another one"):
            call()
    assert manager.all_steps() == [1]


def test_arguments_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    """By name, when the manager is made."""
    choices: tuple[dict[str, Any], ...] = (
        {"mode": "async"},
        {"when_busy": "no"},
        {"on_failure": "ignore"},
        {"verify_saved": "some"},
        {"every_steps": 0},
        {"name": "constant"},
        {"keep": 3},
    )
    for wrong in choices:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            dcp.CheckpointManager(tmp_path, **wrong)
