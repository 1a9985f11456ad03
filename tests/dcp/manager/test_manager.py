"""One process with a manager: what is saved, kept, told and raised."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, SupportsFloat

import numpy as np
import pytest
import torch

import dcp
from dcp.manager.events import Event
from dcp.manager.notes import Deleting, read_notes, update_notes
from dcp.manager.steps import read_commit
from dcp.storage.commit_names import MANIFEST_NAME
from dcp.storage.formats.native.manifest import decode_manifest
from dcp.storage.stores.posix import PosixStore
from tests.dcp.manager.manager_support import (
    Failing,
    Gate,
    Recorder,
    data_files,
    loaded_step,
    plain_writer,
    state_at,
    writer_with,
)

MODES = ["thread", "sync"]


def manager_of(root: Path, **options: Any) -> dcp.CheckpointManager:
    """A manager with a fast writer."""
    options.setdefault("writer", plain_writer)
    return dcp.CheckpointManager(root, retry_pause_seconds=0.01, **options)


def user_of(root: Path, step: int) -> dict[str, Any]:
    """The user metadata of a step."""
    data = (root / f"step-{step:08d}" / MANIFEST_NAME).read_bytes()
    return dict(decode_manifest(data).user)


# -- what is saved -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["thread", "process", "sync"])
def test_each_checkpoint_has_the_values_of_its_step(tmp_path: Path, mode: Any) -> None:
    """The state changes right after each save; what is loaded is what it was when it was saved."""
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
        assert manager.all_steps() == [3, 6, 9, 10]
        assert manager.latest() == 10
        assert manager.failures == 0
    assert [loaded_step(manager.checkpoint_id(step)) for step in (3, 6, 9, 10)] == [3, 6, 9, 10]


def test_copies_that_overlap_are_complete_inside_of_the_lock(tmp_path: Path) -> None:
    """``save(overlap=True)`` returns at once; what changes inside of `lock` is not in the checkpoint."""
    weight = torch.zeros(1 << 20)
    with manager_of(tmp_path) as manager:
        for step in (1, 2, 3):
            with manager.lock():
                weight.fill_(step)
            manager.save(step, {"weight": weight}, overlap=True)
            with manager.lock():
                weight.fill_(-1.0)
    assert manager.failures == 0
    for step in (1, 2, 3):
        state = {"weight": torch.zeros(1 << 20)}
        dcp.load(state, checkpoint_id=manager.checkpoint_id(step), no_dist=True)
        assert torch.equal(state["weight"], torch.full((1 << 20,), float(step)))


def test_should_save_says_what_save_does_and_asking_changes_nothing(tmp_path: Path) -> None:
    """Asked any number of times, with save in between; a step is not saved twice unless forced."""
    with manager_of(tmp_path, every_steps=2, save_first=True) as manager:
        answers = []
        for step in (1, 2, 3):
            answers.append([manager.should_save(step), manager.should_save(step)])
            assert (manager.save(step, state_at(step)) is not None) == answers[-1][0]
            assert not manager.should_save(step, last=step == 2)
        assert answers == [[True, True], [True, True], [False, False]]
        assert manager.save(2, state_at(2)) is None
        assert manager.save(3, state_at(30), force=True) is not None
        assert manager.save(3, state_at(31), force=True) is not None
    assert manager.all_steps() == [1, 2, 3]
    assert loaded_step(manager.checkpoint_id(3)) == 31


def test_without_an_interval_each_call_saves(tmp_path: Path) -> None:
    """For loops that decide themselves; names and run are the user's, metadata is stored beside."""
    with manager_of(tmp_path, name=lambda step: f"epoch_{step}", run="tuesday") as manager:
        manager.save(7, state_at(7), user_metadata={"tags": ["good"]}, metrics={"loss": 0.5})
        manager.save(9, state_at(9))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_7", "epoch_9"]
    user = decode_manifest((tmp_path / "epoch_7" / MANIFEST_NAME).read_bytes()).user
    assert user == {"step": 7, "metrics": {"loss": 0.5}, "run": "tuesday", "tags": ["good"]}


def test_metrics_are_numbers(tmp_path: Path) -> None:
    """Whatever is a number is stored as a float, NaN too; anything else is refused before it is saved."""
    with manager_of(tmp_path) as manager:
        given = {"a": torch.tensor(2, dtype=torch.bfloat16), "b": 3, "c": math.nan, "d": torch.tensor(0.25)}
        manager.save(1, state_at(1), metrics=given)  # type: ignore[arg-type]  # tensors are allowed
        for wrong in ({"x": "0.5"}, {"x": torch.zeros(2)}, {"x": True}, {5: 1.0}, {"x": 1j}):
            with pytest.raises(TypeError, match=r"metrics: .*(x|5)"):
                manager.save(2, state_at(2), metrics=wrong)  # type: ignore[arg-type]  # on purpose
        with pytest.raises(ValueError, match="may not have 'step'"):
            manager.save(2, state_at(2), user_metadata={"step": 9})
    assert manager.all_steps() == [1]
    stored = user_of(tmp_path, 1)["metrics"]
    assert math.isnan(stored.pop("c"))
    assert stored == {"a": 2.0, "b": 3.0, "d": 0.25}


def test_seconds_save_by_the_clock(tmp_path: Path) -> None:
    """An interval that has always passed saves at each step, one that never passes at none."""
    with manager_of(tmp_path / "often", every_seconds=1e-9) as manager:
        assert [manager.save(step, state_at(step)) is not None for step in (1, 2)] == [True, True]
    with manager_of(tmp_path / "seldom", every_seconds=1e9) as manager:
        assert [manager.save(step, state_at(step)) is not None for step in (1, 2)] == [False, False]


def test_a_step_that_is_saved_again_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once a step, and so is a save of the step that was restored; not at a last call after the loop."""

    def told() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "already" in record.getMessage()]
        caplog.clear()
        return found

    with manager_of(tmp_path, mode="sync", every_steps=2) as manager:
        for step in (1, 1, 2):
            manager.save(step, state_at(step))
        assert told() == []
        assert [manager.save(2, state_at(2)) for _ in range(3)] == [None] * 3
        (message,) = told()
        assert "step 2" in message and "force=True" in message
        assert manager.save(2, state_at(2), last=True) is None
        assert manager.save(2, state_at(2), force=True) is not None
        assert told() == []
    with manager_of(tmp_path, mode="sync", every_steps=2) as manager:
        manager.restore(state_at(0))
        manager.save(2, state_at(2))
        assert len(told()) == 1


def test_metrics_are_numbers_of_any_kind(tmp_path: Path) -> None:
    """Losses as training has them; what is no number yet, or not of all ranks, is refused with the reason."""
    loss = torch.nn.functional.mse_loss(torch.ones(2, requires_grad=True), torch.zeros(2))
    metrics: dict[str, SupportsFloat] = {
        "loss": loss,
        "bf16": torch.tensor(0.5, dtype=torch.bfloat16),
        "count": torch.tensor(3),
        "scalar": np.float32(0.25),
        "array": np.array(2.0),
        "int": 7,
    }
    with manager_of(tmp_path, mode="sync") as manager:
        manager.save(1, state_at(1), metrics=metrics)
        for wrong in (
            torch.ones(2),
            torch.ones(1, 1),
            np.ones(3),
            "0.5",
            None,
            True,
            1j,
            torch.ones(100, 100),
        ):
            with pytest.raises(TypeError, match="'x' must be a number or a 0-d tensor") as caught:
                manager.save(2, state_at(2), metrics={"x": wrong})  # type: ignore[dict-item]
            assert len(str(caught.value)) < 300
    assert user_of(tmp_path, 1)["metrics"] == {
        "loss": 1.0,
        "bf16": 0.5,
        "count": 3.0,
        "scalar": 0.25,
        "array": 2.0,
        "int": 7.0,
    }


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


# -- what is kept --------------------------------------------------------------------------------------------


def test_a_misspelt_metric_deletes_nothing_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All steps stay as long as no step has what `Best` goes by; the log says so, with the near name."""
    keep = dcp.Retention(last=1, best=dcp.Best("val_loss"))
    with manager_of(tmp_path, mode="sync", keep=keep) as manager:
        for step in range(1, 6):
            manager.save(step, state_at(step), metrics={"valloss": 1.0 / step})
        assert manager.wait(240)
        assert manager.all_steps() == [1, 2, 3, 4, 5]
    told = [record.getMessage() for record in caplog.records if "val_loss" in record.getMessage()]
    assert len(told) == 1
    assert "did you mean 'valloss'" in told[0] and "all steps are kept" in told[0]


@pytest.mark.parametrize("mode", MODES)
def test_retention_keeps_the_last_the_best_and_the_pinned(tmp_path: Path, mode: Any) -> None:
    """Rules are combined; NaN is never the best; pinned steps stay until they are unpinned."""
    losses = {1: 5.0, 2: 1.0, 3: math.nan, 4: 2.0, 5: 0.5, 6: 3.0, 7: 4.0, 8: 9.0}
    seen = Recorder()
    keep = dcp.Retention(last=2, best=dcp.Best("loss", 2), every_steps=4)
    with manager_of(tmp_path, mode=mode, keep=keep, on_event=seen) as manager:
        for step, loss in losses.items():
            manager.save(step, state_at(step), metrics={"loss": loss})
            if step == 3:
                assert manager.wait(240)
                manager.pin(3)
        assert manager.wait(240)
        assert manager.all_steps() == [2, 3, 4, 5, 7, 8]  # best 2, 5; every fourth 4, 8; last 7, 8; pinned 3
        assert manager.pinned() == [3]
        manager.unpin(3)
        manager.save(9, state_at(9))
    assert manager.all_steps() == [2, 4, 5, 8, 9]
    assert sorted(step for step in seen.steps("deleted") if step) == [1, 3, 6, 7]
    assert seen.steps("verified") == list(range(1, 10))
    assert [loaded_step(manager.checkpoint_id(step)) for step in manager.all_steps()] == [2, 4, 5, 8, 9]


def test_what_was_just_saved_stays_after_going_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Newer steps of the run that was given up do not push it out at once, and the user is told of them."""
    keep = dcp.Retention(last=2)
    with manager_of(tmp_path, keep=keep) as manager:
        for step in (8, 9):
            manager.save(step, state_at(step))
        assert manager.restore(state_at(0), step=8) is not None
        for step in (3, 4):
            manager.save(step, state_at(step))
            manager.wait()
            assert manager.all_steps() == [step, 8, 9]
        assert "newer steps, up to 9" in caplog.text
        manager.delete(8)
        manager.delete(9)
        manager.save(5, state_at(5))
    assert manager.all_steps() == [4, 5]


@pytest.mark.parametrize("step", [-1, True, 2.0, "2", 10**18])
def test_steps_that_cannot_be_listed_are_refused_at_once(tmp_path: Path, step: Any) -> None:
    """Not only when one is due: training must not fail hours later, nor save what nobody finds again."""
    with manager_of(tmp_path, every_steps=1000) as manager:
        for call in (manager.should_save, lambda step: manager.save(step, {})):
            with pytest.raises(ValueError, match="step: must be a whole number from 0 to"):
                call(step)


def test_whole_numbers_of_numpy_and_torch_are_steps(tmp_path: Path) -> None:
    """As loops have them that count by arrays, or restore a counter."""
    with manager_of(tmp_path) as manager:
        manager.save(np.int64(2), state_at(2))  # type: ignore[arg-type]
        manager.save(torch.tensor(10**18 - 1), state_at(3))  # type: ignore[arg-type]
        manager.wait()
        manager.pin(np.int64(2))  # type: ignore[arg-type]
        restored = manager.restore(state_at(0), np.int64(2))  # type: ignore[arg-type]
    assert restored is not None
    assert type(restored.step) is int
    assert manager.all_steps() == [2, 10**18 - 1]
    assert manager.pinned() == [2]


def test_deleting_by_hand(tmp_path: Path) -> None:
    """Gone from the listing at once and from the disk after a wait; pinned and absent ones are errors."""
    with manager_of(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step))
        assert manager.wait(240)
        manager.delete(2)
        assert manager.all_steps() == [1, 3]
        manager.pin(1)
        with pytest.raises(dcp.CheckpointError, match="step 1 is pinned"):
            manager.delete(1)
        for absent in (2, 17):
            with pytest.raises(dcp.CheckpointNotFoundError):
                manager.delete(absent)
            with pytest.raises(dcp.CheckpointNotFoundError):
                manager.pin(absent)
        assert manager.wait(240)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]
        manager.save(2, state_at(20))
        assert manager.wait(240)
        assert loaded_step(manager.checkpoint_id(2)) == 20


def test_a_step_being_saved_cannot_be_deleted(tmp_path: Path) -> None:
    """It is replaced while somebody wants it gone: said, rather than a race."""
    gate = Gate()
    with manager_of(tmp_path) as manager:
        manager.save(1, state_at(1))
        assert manager.wait(240)
    with manager_of(tmp_path, writer=writer_with(gate)) as manager:
        manager.save(1, state_at(10))
        assert gate.reached.wait(240)
        with pytest.raises(dcp.CheckpointError, match="step 1 is being saved"):
            manager.delete(1)
        gate.open()
    assert loaded_step(manager.checkpoint_id(1)) == 10


def test_the_next_manager_finishes_what_a_crash_cut_off(tmp_path: Path) -> None:
    """A deletion that has begun is finished, a commit without a verdict is verified, at the first save."""
    with manager_of(tmp_path, verify_saved="off") as manager:
        for step in (1, 2):
            manager.save(step, state_at(step))
    half = PosixStore(tmp_path / "step-00000001")
    commit = read_commit(half)
    assert commit is not None
    tombstone = Deleting(commit.save_id, time.time(), (commit.save_id,), time.time())
    update_notes(half, lambda notes: replace(notes, deleting=tombstone))
    seen = Recorder()
    with manager_of(tmp_path, on_event=seen) as manager:
        assert manager.all_steps() == [2]
        manager.save(3, state_at(3))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    assert sorted(seen.kinds("verified", "deleted"), key=str) == [
        ("deleted", 1),
        ("verified", 2),
        ("verified", 3),
    ]


# -- verification --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("check", "found"), [("sizes", True), ("full", True), ("off", False)])
def test_damage_at_the_commit_is_found_noted_and_not_counted(tmp_path: Path, check: Any, found: bool) -> None:
    """The storage loses half of a file: told, noted, counted as a failure, and retention keeps the older."""

    def truncate(operation: Any) -> None:
        if (tmp_path / "step-00000002").exists():
            (file,) = data_files(tmp_path / "step-00000002")
            with file.open("r+b") as opened:
                opened.truncate(file.stat().st_size // 2)

    seen = Recorder()
    keep = dcp.Retention(last=1)
    writer = writer_with(truncate)
    with manager_of(tmp_path, writer=writer, verify_saved=check, keep=keep, on_event=seen) as manager:
        manager.save(1, state_at(1))
        manager.save(2, state_at(2))
        assert manager.wait(240)
        assert manager.failures == int(found)
        assert manager.all_steps() == ([1, 2] if found else [2])
    if found:
        event = seen.one("verify_failed")
        assert (event.step, event.data["damaged"]) == (2, True)
        assert event.error is not None
        assert "__0_0." in event.error
        noted = read_notes(PosixStore(tmp_path / "step-00000002")).verified
        assert noted is not None
        assert not noted.ok


def test_full_verification_reads_the_bytes(tmp_path: Path) -> None:
    """A flipped byte leaves all sizes as they are: only "full" sees it."""

    def flip(operation: Any) -> None:
        for file in data_files(tmp_path / "full" / "step-00000001") + data_files(
            tmp_path / "sizes" / "step-00000001"
        ):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 0xFF
            file.write_bytes(data)

    failures = {}
    for check in ("sizes", "full"):
        writer = writer_with(flip)
        state = {"w": torch.arange(4096)}
        with manager_of(tmp_path / check, writer=writer, verify_saved=check) as manager:
            manager.save(1, state)
            assert manager.wait(240)
            failures[check] = manager.failures
    assert failures == {"sizes": 0, "full": 1}


# -- failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_save_is_retried(tmp_path: Path, mode: Any) -> None:
    """The storage is away twice: the third attempt commits, and that is told."""
    seen, failing = Recorder(), Failing(times=2)
    with manager_of(tmp_path, mode=mode, writer=writer_with(failing), on_event=seen) as manager:
        manager.save(1, state_at(1))
        assert manager.wait(240)
        assert (manager.failures, manager.all_steps()) == (0, [1])
    assert seen.one("save_retried").data["attempts"] == 3
    assert seen.steps("saved") == [1]
    assert loaded_step(manager.checkpoint_id(1)) == 1
    assert len(data_files(tmp_path / "step-00000001")) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_save_does_not_end_training(tmp_path: Path, mode: Any) -> None:
    """With on_failure="warn" the loop goes on; the failure is told and counted, the next save works."""
    seen, failing = Recorder(), Failing(times=2)
    with manager_of(tmp_path, mode=mode, writer=writer_with(failing), on_event=seen, retries=1) as manager:
        futures = [manager.save(step, state_at(step)) for step in (1, 2, 3)]
        assert manager.wait(240)
        assert (manager.failures, manager.all_steps()) == (1, [2, 3])
    assert isinstance(futures[0], dcp.state_dict_saver.SaveFuture)
    assert isinstance(futures[0].exception(), dcp.errors.StorageError)
    event = seen.one("save_failed")
    assert event.step == 1
    assert "the storage is away" in str(event.error)
    assert data_files(tmp_path / "step-00000001") == []


def test_a_failure_is_raised_at_the_next_call(tmp_path: Path) -> None:
    """With on_failure="raise": once, by whatever is called next; then the manager goes on."""
    failing = Failing()
    options: dict[str, Any] = {"on_failure": "raise", "retries": 0, "every_steps": 1}
    with manager_of(tmp_path, writer=writer_with(failing), **options) as manager:
        future = manager.save(1, state_at(1))
        assert future is not None
        assert isinstance(future.exception(240), dcp.errors.StorageError)
        with pytest.raises(dcp.errors.StorageError, match="the storage is away"):
            manager.save(2, state_at(2))
        assert manager.should_save(2)
        manager.save(2, state_at(2))
        with pytest.raises(dcp.errors.StorageError, match="the storage is away"):
            manager.wait(240)
        failing.times = 0
        manager.save(3, state_at(3))
    assert manager.failures == 2
    assert manager.all_steps() == [3]
    other = manager_of(tmp_path, writer=writer_with(Failing()), **options)
    other.save(4, state_at(4))
    with pytest.raises(dcp.errors.StorageError, match="the storage is away"):
        other.close()
    other.close()


def test_sync_failures_are_raised_at_once(tmp_path: Path) -> None:
    """Nothing is under way, so there is no next call to wait for."""
    options: dict[str, Any] = {"on_failure": "raise", "retries": 0, "mode": "sync"}
    with manager_of(tmp_path, writer=writer_with(Failing()), **options) as manager:
        with pytest.raises(dcp.errors.StorageError, match="the storage is away"):
            manager.save(1, state_at(1))
        assert manager.failures == 1


def test_damage_is_raised_too(tmp_path: Path) -> None:
    """A checkpoint found damaged after its commit is a failure of its save."""

    def truncate(operation: Any) -> None:
        (file,) = data_files(tmp_path / "step-00000001")
        file.write_bytes(b"")

    with manager_of(tmp_path, writer=writer_with(truncate), on_failure="raise") as manager:
        manager.save(1, state_at(1))
        with pytest.raises(dcp.CorruptCheckpointError, match=r"step-00000001 is damaged, right after"):
            manager.wait(240)


@pytest.mark.parametrize("when_busy", ["wait", "skip", "raise"])
def test_a_save_that_comes_too_early(tmp_path: Path, when_busy: Any) -> None:
    """Waits, is left out, or is an error; one that is forced, or the last, always waits."""
    gate, seen = Gate(), Recorder()
    options: dict[str, Any] = {"every_steps": 1, "when_busy": when_busy, "on_event": seen}
    with manager_of(tmp_path, writer=writer_with(gate), **options) as manager:
        manager.save(1, state_at(1))
        assert gate.reached.wait(240)
        if when_busy == "skip":
            assert manager.save(2, state_at(2)) is None
            assert not manager.should_save(2)
        elif when_busy == "raise":
            with pytest.raises(dcp.CheckpointError, match="when_busy='raise'"):
                manager.save(2, state_at(2))
        threading.Timer(0.2, gate.open).start()
        manager.save(3, state_at(3), force=True)
        manager.save(4, state_at(4), last=True)
    assert manager.all_steps() == [1, 3, 4]
    assert seen.steps("save_skipped") == ([2] if when_busy == "skip" else [])


def test_a_step_that_was_left_out_is_saved_as_the_last(tmp_path: Path) -> None:
    """Its interval was skipped while a save was under way, and then the loop turns out to end with it."""
    gate = Gate()
    with manager_of(tmp_path, writer=writer_with(gate), every_steps=2, when_busy="skip") as manager:
        manager.save(2, state_at(2))
        assert gate.reached.wait(240)
        assert manager.save(4, state_at(4)) is None
        gate.open()
        assert manager.save(4, state_at(4)) is None
        assert manager.save(4, state_at(4), last=True) is not None
        assert manager.save(4, state_at(4), last=True) is None
    assert manager.all_steps() == [2, 4]


# -- restoring -----------------------------------------------------------------------------------------------


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
        assert manager._upkeep is not None
        manager._upkeep.doubt(1, dcp.CorruptCheckpointError("no such file, as rank 5 sees it"))
        assert manager.wait(240)
        noted = manager._folders.notes(1).verified
        assert noted is not None
        assert noted.ok
        assert noted.what == "full"
    assert ("verified", 1) in seen.kinds()


# -- events --------------------------------------------------------------------------------------------------


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


# -- the rest ------------------------------------------------------------------------------------------------


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


def test_a_forced_save_of_the_stopping_step_is_waited_for(tmp_path: Path) -> None:
    """A loop that forces each of its saves stops as well as one that does not."""
    with manager_of(tmp_path, every_steps=100) as manager:
        assert manager.save(1, state_at(1)) is None
        manager.request_stop()
        future = manager.save(2, state_at(2), force=True)
        assert future is not None
        assert future.done()
        assert manager.stop_requested
    assert loaded_step(str(tmp_path / "step-00000002")) == 2


def test_two_managers_do_not_influence_each_other(tmp_path: Path) -> None:
    """Schedules, failures, futures, retention and stopping are each manager's own."""
    gate = Gate()
    one_options: dict[str, Any] = {"every_steps": 2, "writer": writer_with(Failing()), "retries": 0}
    other_options: dict[str, Any] = {"every_steps": 3, "keep": dcp.Retention(last=1)}
    with (
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


def test_what_is_no_state_dict_is_refused_at_the_call(tmp_path: Path) -> None:
    """Also at steps that are not due: in the background each save would fail, and training go on without."""
    with manager_of(tmp_path, every_steps=10) as manager:
        for step in (1, 10):
            with pytest.raises(dcp.errors.PlanError, match="put the Linear into one"):
                manager.save(step, torch.nn.Linear(2, 2))  # type: ignore[arg-type]  # on purpose
    assert (manager.all_steps(), manager.failures) == ([], 0)


@pytest.mark.parametrize(
    "described",
    [
        {"metrics": [1.0]},
        {"user_metadata": {"config": object()}},
        {"user_metadata": {"weights": torch.ones(1)}},
    ],
)
def test_what_cannot_be_stored_beside_the_state_is_refused_at_once(tmp_path: Path, described: Any) -> None:
    """It would fail in the background otherwise, with every save."""
    with manager_of(tmp_path) as manager:
        with pytest.raises(TypeError, match="must"):
            manager.save(1, state_at(1), **described)
        assert manager.all_steps() == []
