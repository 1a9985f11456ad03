"""Two managers in one process: buffers, plans, locks, signals, folders, writers and ends are each one's own.

What two managers do on several ranks is in test_manager_ranks.py.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.background.process.writer import ProcessWriter
from dcp.manager.cleanup.other_runs import OtherRuns
from dcp.manager.saving.executor import _BackgroundExecutor
from dcp.staging.copies import HostCopier, HostCopies
from dcp.staging.stager import DefaultStager
from dcp.steps.folders import StepFolders
from dcp.storage.formats.index import Int64
from tests.dcp.manager.manager_support import (
    Failing,
    Gate,
    Recorder,
    loaded_step,
    plain_writer,
    state_at,
    writer_with,
)

TIMEOUT_SECONDS = 240.0


def manager_of(root: Path, **options: Any) -> dcp.CheckpointManager:
    """A manager with a fast writer."""
    options.setdefault("writer", plain_writer)
    return dcp.CheckpointManager(root, retry_pause_seconds=0.01, timeout_seconds=TIMEOUT_SECONDS, **options)


def shaped(step: int, rows: int) -> dict[str, Any]:
    """A state whose structure depends on ``rows`` and whose values on ``step``; the names are the same."""
    layers = [torch.full((rows, 3), step + row) for row in range(rows)]
    return {"model": {"w": torch.arange(rows * 5) + step, "layers": layers}, "step": step, "rows": rows}


def is_saved(manager: dcp.CheckpointManager, step: int, rows: int) -> bool:
    """Whether the manager's checkpoint of ``step`` is that state."""
    state, wanted = shaped(-1, rows), shaped(step, rows)
    dcp.load(state, checkpoint_id=manager.checkpoint_id(step), no_dist=True)
    pairs = zip(state["model"]["layers"], wanted["model"]["layers"], strict=True)
    return (
        torch.equal(state["model"]["w"], wanted["model"]["w"])
        and all(torch.equal(got, expected) for got, expected in pairs)
        and (state["step"], state["rows"]) == (step, rows)
    )


def test_plans_and_buffers_are_each_ones_own(tmp_path: Path) -> None:
    """The same names with other shapes, saved in turn, the one waiting for storage with its copy while the
    other goes on: each checkpoint is its own state."""
    gate = Gate()
    with (
        manager_of(tmp_path / "a", writer=writer_with(gate, op="create", name="*.distcp")) as one,
        manager_of(tmp_path / "b") as other,
    ):
        one.save(1, shaped(1, 4))
        assert gate.reached.wait(TIMEOUT_SECONDS)
        for step in range(1, 5):
            other.save(step, shaped(step, 2 + step // 3))
        assert other.wait(TIMEOUT_SECONDS)
        assert one.latest() is None
        gate.open()
        for step in range(2, 5):
            one.save(step, shaped(step, 4))
            other.save(step + 3, shaped(step + 3, 7))
    assert [is_saved(one, step, 4) for step in one.all_steps()] == [True] * 4
    rows = {1: 2, 2: 2, 3: 3, 4: 3, 5: 7, 6: 7, 7: 7}
    assert {step: is_saved(other, step, rows[step]) for step in other.all_steps()} == dict.fromkeys(
        rows, True
    )


class GatedCopier(HostCopier):
    """Does not copy before it may."""

    def __init__(self) -> None:
        super().__init__(1)
        self.may = threading.Event()
        self.has_copied = False

    def copy(self, copies: HostCopies, rows: Int64) -> None:
        """Wait, then copy."""
        assert self.may.wait(TIMEOUT_SECONDS)
        super().copy(copies, rows)
        self.has_copied = True


def test_locks_hold_off_only_the_managers_own_copies(tmp_path: Path) -> None:
    """One's copy under way does not keep the other's lock, and one's lock not the other's copies."""
    stager = DefaultStager()
    copier = stager._copier.host = GatedCopier()
    with manager_of(tmp_path / "a", stager=stager) as one, manager_of(tmp_path / "b") as other:
        copied = one.save(1, state_at(1), overlap=True)
        assert copied is not None
        with other.lock():
            assert not copied.staging_completion.done()
        saved = other.save(1, state_at(1), overlap=True)
        assert saved is not None
        saved.result(TIMEOUT_SECONDS)
        assert not copied.staging_completion.done()
        copier.may.set()
        with one.lock():
            assert copier.has_copied
            again = other.save(2, state_at(2), overlap=True)
            assert again is not None
            again.result(TIMEOUT_SECONDS)
    stager.close()
    assert [one.all_steps(), other.all_steps()] == [[1], [1, 2]]


@pytest.mark.parametrize("first", ["older", "newer"])
def test_a_signal_reaches_both_and_the_one_that_stays(tmp_path: Path, first: str) -> None:
    """SIGTERM stops all managers of a process; closing one, in whatever order, leaves the other listening."""
    gc.collect()  # what earlier tests dropped may still listen
    before = signal.getsignal(signal.SIGTERM)
    older, newer = manager_of(tmp_path / "a", every_steps=100), manager_of(tmp_path / "b", every_steps=100)
    deaf = manager_of(tmp_path / "c", every_steps=100, handle_sigterm=False)
    closed, open_one = (older, newer) if first == "older" else (newer, older)
    closed.close()
    os.kill(os.getpid(), signal.SIGTERM)
    for manager in (open_one, deaf):
        manager.save(1, state_at(1))
    assert (open_one.stop_requested, closed.stop_requested, deaf.stop_requested) == (True, False, False)
    assert (open_one.all_steps(), deaf.all_steps()) == ([1], [])
    both = manager_of(tmp_path / "d", every_steps=100)
    os.kill(os.getpid(), signal.SIGTERM)
    both.save(1, state_at(1))
    assert both.stop_requested
    for manager in (open_one, both, deaf):
        manager.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_one_closes_or_hangs_while_the_other_saves(tmp_path: Path) -> None:
    """Closing waits for one's own saves only, and calls off only those."""
    gate, hanging = Gate(), Gate()
    one = manager_of(tmp_path / "a", writer=writer_with(gate))
    other = manager_of(tmp_path / "b")
    hung = manager_of(tmp_path / "c", writer=writer_with(hanging))
    saved = one.save(1, state_at(1))
    lost = hung.save(1, state_at(1))
    assert saved is not None
    assert lost is not None
    assert gate.reached.wait(TIMEOUT_SECONDS)
    assert hanging.reached.wait(TIMEOUT_SECONDS)
    other.save(1, state_at(1))
    other.close()
    assert other.all_steps() == [1]
    hung.close(0.2)
    assert not saved.done()
    gate.open()
    one.save(2, state_at(2))
    one.close()
    hanging.open()
    lost.exception(TIMEOUT_SECONDS)
    assert one.all_steps() == [1, 2]
    assert loaded_step(one.checkpoint_id(1)) == 1


def test_failures_and_events_are_each_ones_own(tmp_path: Path) -> None:
    """One's storage is away and it is to raise: the other neither raises, nor counts, nor is told."""
    seen_one, seen_other = Recorder(), Recorder()
    one = manager_of(
        tmp_path / "a", writer=writer_with(Failing()), retries=0, on_failure="raise", on_event=seen_one
    )
    with manager_of(tmp_path / "b", on_failure="raise", on_event=seen_other) as other:
        for step in (1, 2):
            failed = one.save(step, state_at(step))
            assert failed is not None
            assert isinstance(failed.exception(TIMEOUT_SECONDS), dcp.errors.StorageError)
            other.save(step, state_at(step))
            with pytest.raises(dcp.errors.StorageError):
                one.wait(TIMEOUT_SECONDS)
        one.close()
    assert (one.failures, other.failures) == (2, 0)
    assert (one.all_steps(), other.all_steps()) == ([], [1, 2])
    assert seen_one.steps("save_failed") == [1, 2]
    assert seen_other.kinds("save_failed") == []


def test_one_root_with_two_names(tmp_path: Path) -> None:
    """Two runs that share a folder by names: steps, pins, retention and resumes do not mix."""
    names = ("teacher-{step}", "student-{step}")
    with (
        manager_of(tmp_path, name=names[0], keep=dcp.Retention(last=1)) as teacher,
        manager_of(tmp_path, name=names[1], keep=dcp.Retention(last=2)) as student,
    ):
        for step in range(1, 5):
            teacher.save(step, state_at(step))
            student.save(step, state_at(step + 10))
            if step == 1:
                assert student.wait(TIMEOUT_SECONDS)
                student.pin(1)
        assert teacher.wait(TIMEOUT_SECONDS)
        assert student.wait(TIMEOUT_SECONDS)
        assert (teacher.all_steps(), student.all_steps()) == ([4], [1, 3, 4])
        assert (teacher.pinned(), student.pinned()) == ([], [1])
        state = state_at(-1)
        restored = teacher.restore(state)
        assert restored is not None
        assert (restored.step, state["step"]) == (4, 4)
    assert loaded_step(student.checkpoint_id(4)) == 14
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "student-1",
        "student-3",
        "student-4",
        "teacher-4",
    ]


def pid_of(manager: dcp.CheckpointManager) -> int:
    """A manager's writer process."""
    saves = manager._executor
    assert isinstance(saves, _BackgroundExecutor)
    worker = saves._session._worker
    assert isinstance(worker, ProcessWriter)
    return worker.pid


def test_one_loses_its_writer_process_and_the_other_does_not_notice(tmp_path: Path) -> None:
    """Each has a process of its own; SIGKILL of one fails one save of its manager only."""
    with (
        manager_of(tmp_path / "a", mode="process") as one,
        manager_of(tmp_path / "b", mode="process") as other,
    ):
        for manager in (one, other):
            manager.save(1, state_at(1))
        assert one.wait(TIMEOUT_SECONDS)
        assert other.wait(TIMEOUT_SECONDS)
        pids = pid_of(one), pid_of(other)
        assert len({*pids, os.getpid()}) == 3
        os.kill(pids[0], signal.SIGKILL)
        for step in (2, 3):
            other.save(step, state_at(step))
        lost = one.save(2, state_at(2))
        assert lost is not None
        assert isinstance(lost.exception(TIMEOUT_SECONDS), dcp.errors.WriterProcessError)
        assert other.wait(TIMEOUT_SECONDS)
        assert pid_of(other) == pids[1]
    assert (one.failures, other.failures) == (1, 0)
    assert (one.all_steps(), other.all_steps()) == ([1], [1, 2, 3])


@pytest.mark.parametrize("step", [1, 2])
def test_steps_of_another_live_run_are_told_of(
    tmp_path: Path, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Two jobs that were given one folder: a step between those of this run, or over one of them; once. That
    a run goes on where one has ended, or saves a step again, is none of that."""

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if "another run" in record.getMessage()]

    for first in (1, 3):  # one after the other
        with manager_of(tmp_path / "alone", keep=dcp.Retention(last=2)) as manager:
            for each in (first, first + 1, first + 1):
                manager.save(each, state_at(each), force=True)
                assert manager.wait(TIMEOUT_SECONDS)
    assert told() == []
    parts = dcp.Retention(optimizer=dcp.Keep(last=1))
    for first in (1, 3):  # the second run drops the optimizer of what the first has saved
        with manager_of(tmp_path / "dropped", keep=parts) as manager:
            for each in (first, first + 1):
                manager.save(each, {"optimizer": {"state": state_at(each)}, **state_at(each)}, force=True)
                assert manager.wait(TIMEOUT_SECONDS)
    assert told() == []
    with manager_of(tmp_path / "shared") as one:
        one.save(1, state_at(1))
        assert one.wait(TIMEOUT_SECONDS)
        with manager_of(tmp_path / "shared") as other:
            other.save(step, state_at(step))
        assert told() == []
        for each in (3, 4):
            one.save(each, state_at(each))
            assert one.wait(TIMEOUT_SECONDS)
        (message,) = told()
    assert f"step-0000000{step} was committed by another run" in message


def test_a_listing_that_fails_ends_no_work_behind_a_commit(tmp_path: Path) -> None:
    """The next commit looks for other runs again; retention goes on."""
    root = tmp_path / "a file by now"
    root.touch()
    with pytest.raises(dcp.errors.StorageError):
        StepFolders(root).folders()
    OtherRuns(StepFolders(root)).look(1, ())
