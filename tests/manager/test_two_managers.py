"""Several managers in one process or one root: plans, locks, failures and ends are independent."""

from __future__ import annotations

from pathlib import Path

import pytest

import dcp
from tests.support.manager_runs import PATIENCE_SECONDS, loaded_step, manager_of, state_at


def test_two_named_runs_in_one_root(tmp_path: Path) -> None:
    """Two runs with different names share a folder; steps, pins, retention and resumes do not mix."""
    options = [("teacher-{step}", dcp.Retention(last=1)), ("student-{step}", dcp.Retention(last=2))]
    teacher, student = (manager_of(tmp_path, name=name, keep=keep) for name, keep in options)
    for step in range(1, 5):
        teacher.save(step, state_at(step))
        student.save(step, state_at(step + 10))
        if step == 1:
            assert student.wait(PATIENCE_SECONDS)
            student.pin(1)
    assert teacher.wait(PATIENCE_SECONDS) and student.wait(PATIENCE_SECONDS)
    assert (teacher.all_steps(), student.all_steps()) == ([4], [1, 3, 4])
    assert (teacher.pinned(), student.pinned()) == ([], [1])
    state = state_at(-1)
    restored = teacher.restore(state)
    assert restored is not None and restored.step == state["step"] == 4
    teacher.close()
    student.close()
    assert loaded_step(student.checkpoint_id(4)) == 14
    assert {path.name for path in tmp_path.iterdir()} == {"student-1", "student-3", "student-4", "teacher-4"}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log messages about another run."""
    return [text for text in caplog.messages if "another run" in text]


@pytest.mark.parametrize("step", [1, 2])
def test_two_live_runs_in_one_folder_are_logged(
    tmp_path: Path, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A step of another run between steps of this run, or in place of one, is logged once."""
    with manager_of(tmp_path) as one:
        one.save(1, state_at(1))
        assert one.wait(PATIENCE_SECONDS)
        with manager_of(tmp_path) as other:
            other.save(step, state_at(step))
        assert warnings_of(caplog) == []
        for each in (3, 4):
            one.save(each, state_at(each))
            assert one.wait(PATIENCE_SECONDS)
        (message,) = warnings_of(caplog)
    assert f"step-0000000{step} was committed by another run" in message


@pytest.mark.parametrize("keep", [dcp.Retention(last=2), dcp.Retention(optimizer=dcp.Keep(last=1))])
def test_a_run_after_an_ended_run_is_not_logged(
    tmp_path: Path, keep: dcp.Retention, caplog: pytest.LogCaptureFixture
) -> None:
    """A run that continues an ended run, and saves and drops its steps, logs no other run."""
    for first in (1, 3):
        with manager_of(tmp_path, keep=keep) as manager:
            for each in (first, first + 1, first + 1):
                manager.save(each, {"optimizer": {"state": state_at(each)}, **state_at(each)}, force=True)
                assert manager.wait(PATIENCE_SECONDS)
    assert warnings_of(caplog) == []
