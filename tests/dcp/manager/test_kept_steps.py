"""Which steps a manager keeps, and what it deletes."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.steps.folders import read_commit
from dcp.steps.notes import Deleting, update_notes
from dcp.storage.stores.posix.store import PosixStore
from tests.dcp.manager.manager_support import (
    MODES,
    Gate,
    Recorder,
    loaded_step,
    manager_of,
    state_at,
    writer_with,
)


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
