"""A worker on a real ledger: jobs from their plan to their end, in real subprocesses."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import select

from dcp.server.database.engine import Database
from dcp.server.database.tables import audit, job_events
from dcp.server.jobs.kinds import KINDS
from dcp.server.jobs.ledger import job_events_after, list_tasks, progress_of
from dcp.server.settings import Settings
from tests.support.job_kinds import log_lines, note
from tests.support.job_workers import (
    HANG_SECONDS,
    cancel,
    job_settings,
    put,
    seconds_to_cancel,
    state_of,
    until,
    wait_for_end,
    working,
)


def test_a_job_from_its_plan_to_its_record(database: Database, tmp_path: Path) -> None:
    """Tasks run, their results are published once, and recorded with the completion."""
    job_id = put(database, tmp_path, "write", "sleep:0.1", "write")
    with working(job_settings(database, tmp_path)):
        job = wait_for_end(database, job_id)
    assert job.state == "succeeded"
    assert job.result == {"parts": 3, "text": "0\n1\n2"}
    assert job.progress == {"done_tasks": 3, "total_tasks": 3, "done_bytes": 300, "total_bytes": 300}
    assert (tmp_path / "target").read_text() == "0\n1\n2"
    lines = log_lines(tmp_path)
    assert lines[0] == "plan 3" and lines.count("published") == 1
    with database.read() as connection:
        recorded = connection.execute(select(audit.c.target, audit.c.detail)).all()
        states = [
            event.data["state"] for event in job_events_after(connection, job_id) if event.kind == "state"
        ]
    assert recorded == [(f"job {job_id}", {"parts": 3, "text": "0\n1\n2"})]
    assert states == ["planning", "running", "publishing", "succeeded"]


def test_long_jobs_leave_a_slot_for_scans(database: Database, tmp_path: Path) -> None:
    """With all slots taken by jobs that last, one that has a slot of its own is done, one after the other;
    and of the others there are never more than `concurrency`."""
    folders = {name: tmp_path / name for name in ("long", "brief", "more")}
    for folder in folders.values():
        folder.mkdir()
    job_id = put(database, folders["long"], "wait:go", "wait:go", "wait:go")
    with working(job_settings(database, tmp_path, concurrency=2)):
        until(lambda: len(log_lines(folders["long"])) == 3, "two of them")  # the plan, and two tasks
        briefs = [put(database, folders["brief"], "write", kind="brief") for _ in range(3)]
        more = put(database, folders["more"], "write", priority=100)
        for brief in briefs:
            assert wait_for_end(database, brief).state == "succeeded"
        assert state_of(database, more).state == "queued"
        assert len(log_lines(folders["long"])) == 3
        (folders["long"] / "go").touch()
        assert wait_for_end(database, more).state == "succeeded"
        assert wait_for_end(database, job_id).state == "succeeded"
    assert KINDS["scan"].has_own_slot


def test_a_job_without_tasks_is_published(database: Database, tmp_path: Path) -> None:
    """A plan may find that nothing is to be done."""
    job_id = put(database, tmp_path)
    with working(job_settings(database, tmp_path)):
        assert wait_for_end(database, job_id).state == "succeeded"


def test_what_fails_in_passing_is_tried_again(database: Database, tmp_path: Path) -> None:
    """Errors of storage and killed subprocesses are retried, and the others' work is kept."""
    job_id = put(database, tmp_path, "fail_once", "die_once", "write", plan_act="fail_once")
    with working(job_settings(database, tmp_path)):
        job = wait_for_end(database, job_id)
    assert job.state == "succeeded"
    lines = log_lines(tmp_path)
    assert lines.count("plan 3") == 2
    assert [sum(line.startswith(f"task {n} ") for line in lines) for n in range(3)] == [2, 2, 1]
    with database.read() as connection:
        attempts = [task.attempt for task in list_tasks(connection, job_id)]
        kinds = [event.kind for event in job_events_after(connection, job_id)]
    assert attempts == [1, 1, 0] and kinds.count("retry") == 3


def test_what_fails_for_good_ends_the_job(database: Database, tmp_path: Path) -> None:
    """The error is kept, the others are stopped, and what they left is cleared away."""
    job_id = put(database, tmp_path, "write", "fail", "sleep:1000")
    with working(job_settings(database, tmp_path, concurrency=3)):
        job = wait_for_end(database, job_id)
    assert job.state == "failed" and job.error is not None
    assert job.error["type"] == "PermanentJobError" and job.error["detail"] == "never"
    assert job.error["task"] == 1
    assert not list(tmp_path.glob("part-*")) and not (tmp_path / "target").exists()
    assert log_lines(tmp_path)[-1] == "discard"
    with database.read() as connection:
        assert {task.state for task in list_tasks(connection, job_id)} <= {"succeeded", "failed", "cancelled"}


def test_attempts_are_bounded_and_errors_tell_no_secrets(database: Database, tmp_path: Path) -> None:
    """After the last attempt the job has failed; what storage said of itself stays out of the ledger."""
    job_id = put(database, tmp_path, "secret", max_attempts=2)
    with working(job_settings(database, tmp_path)):
        job = wait_for_end(database, job_id)
    assert job.state == "failed" and job.error is not None and job.error["type"] == "FileNotFoundError"
    with database.read() as connection:
        events = connection.execute(select(job_events.c.data)).scalars().all()
    assert "SECRET" not in f"{job.error}{events}"
    assert sum(line.startswith("task 0") for line in log_lines(tmp_path)) == 2


def test_a_cancelled_job_is_stopped_and_leaves_nothing(database: Database, tmp_path: Path) -> None:
    """A task that is deaf to everything is killed; the job is over once its parts are cleared away."""
    job_id = put(database, tmp_path, "write", "hold:1000")
    with working(job_settings(database, tmp_path)):
        until(lambda: "done 0" in log_lines(tmp_path), "the first task")
        until(lambda: any(line.startswith("task 1") for line in log_lines(tmp_path)), "the second task")
        pid = int(next(line for line in log_lines(tmp_path) if line.startswith("task 1")).split()[2])
        assert cancel(database, job_id).is_ending
        assert wait_for_end(database, job_id).state == "cancelled"
        assert not Path(f"/proc/{pid}").exists()
    assert not list(tmp_path.glob("part-*"))


def test_a_job_is_cancelled_while_it_is_planned(database: Database, tmp_path: Path) -> None:
    """Also a plan that takes for ever ends; there is nothing to clear away."""
    job_id = put(database, tmp_path, "write", plan_act="sleep:1000")
    with working(job_settings(database, tmp_path)):
        until(lambda: log_lines(tmp_path) == ["plan 1"], "the plan")
        cancel(database, job_id)
        assert wait_for_end(database, job_id).state == "cancelled"
    assert log_lines(tmp_path) == ["plan 1"]


def test_progress_is_told_while_a_task_runs(database: Database, tmp_path: Path) -> None:
    """The ledger knows how far a task is before it has ended."""
    job_id = put(database, tmp_path, "sleep:1000000", "wait:go")

    def done_bytes() -> int:
        with database.read() as connection:
            progress = progress_of(connection, [job_id]).get(job_id)
        return 0 if progress is None else progress.done_bytes

    with working(job_settings(database, tmp_path)):
        note(tmp_path, "begin")
        (tmp_path / "go").touch()
        until(lambda: done_bytes() == 100, "the second task")
        cancel(database, job_id)
        assert wait_for_end(database, job_id).state == "cancelled"


def test_the_higher_priority_goes_first(database: Database, tmp_path: Path) -> None:
    """With one place, jobs run by priority, and those of one priority by age."""
    folders = [tmp_path / name for name in ("low", "first", "second", "high")]
    jobs = []
    for folder, priority in zip(folders, (-5, 0, 0, 7), strict=True):
        folder.mkdir()
        jobs.append(put(database, folder, "write", priority=priority))
    with working(job_settings(database, tmp_path, concurrency=1)):
        ends = [wait_for_end(database, job_id) for job_id in jobs]
    order = sorted(range(4), key=lambda n: ends[n].finished_seconds or 0)
    assert order == [3, 1, 2, 0]


def test_a_kind_runs_as_often_as_it_may(database: Database, tmp_path: Path) -> None:
    """`kind_concurrency` bounds the tasks of a kind, however many places there are."""
    job_id = put(database, tmp_path, *["sleep:0.05"] * 4)
    with working(job_settings(database, tmp_path, concurrency=4, kind_concurrency={"made": 1})):
        assert wait_for_end(database, job_id).state == "succeeded"
    acts = [line.split()[0] for line in log_lines(tmp_path) if line.startswith(("task", "done"))]
    assert acts == ["task", "done"] * 4


def test_a_kind_that_the_worker_does_not_know_waits(database: Database, tmp_path: Path) -> None:
    """During an upgrade, older workers leave alone what only newer ones can do."""
    job_id = put(database, tmp_path, "write")
    with working(job_settings(database, tmp_path), kinds="tests.support.job_kinds:NO_KINDS"):
        other = put(database, tmp_path)
        until(lambda: state_of(database, other).state == "queued", "nothing")
        assert state_of(database, job_id).state == "queued"
    assert log_lines(tmp_path) == []


def test_a_worker_that_stops_gives_back_what_it_has(database: Database, tmp_path: Path) -> None:
    """Another one goes on at once, not when a lease is over, and no attempt is counted."""
    job_id = put(database, tmp_path, "write", "wait:go")
    with working(job_settings(database, tmp_path, shutdown_seconds=0.2)):
        until(lambda: any(line.startswith("task 1") for line in log_lines(tmp_path)), "the second task")
    job = state_of(database, job_id)
    assert job.state == "running"
    with database.read() as connection:
        assert [(task.state, task.attempt) for task in list_tasks(connection, job_id)] == [
            ("succeeded", 0),
            ("queued", 0),
        ]
    (tmp_path / "go").touch()
    with working(job_settings(database, tmp_path)):
        assert wait_for_end(database, job_id).state == "succeeded"


@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
def test_a_worker_without_work_stops_at_once(database: Database, tmp_path: Path) -> None:
    """Not when it would have looked for work again; it does what there is first."""
    job_id = put(database, tmp_path)
    with working(job_settings(database, tmp_path, poll_seconds=10 * HANG_SECONDS)):
        assert wait_for_end(database, job_id).state == "succeeded"


@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
def test_cancelling_takes_two_seconds_at_most(database: Database, tmp_path: Path) -> None:
    """Of a job whose tasks run, by a worker with the usual settings: its processes are dead by then."""
    settings = job_settings(database, tmp_path, poll_seconds=Settings().poll_seconds)
    with working(settings):
        assert seconds_to_cancel(database, tmp_path, ["wait:never"] * 3, begun=2, within=2) <= 2
