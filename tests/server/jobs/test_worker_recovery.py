"""Workers, their subprocesses and the database die at the worst moment: each job is completed once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from sqlalchemy import func, select, update

from dcp.server.database.engine import Database
from dcp.server.database.tables import audit, jobs, tasks
from dcp.server.jobs.ledger import job_events_after, list_tasks
from tests.support.job_kinds import log_lines
from tests.support.job_workers import (
    WorkerProcess,
    cancel,
    job_settings,
    put,
    state_of,
    until,
    wait_for_end,
    working,
)
from tests.support.processes import lives, parent_of


def _started(folder: Path, what: str) -> list[int]:
    """The processes that have begun with it."""
    return [int(line.split()[-1]) for line in log_lines(folder) if line.startswith(what)]


def _let_leases_end(database: Database) -> None:
    """As if their time had passed; for whoever does not renew them any more."""
    for table in (jobs, tasks):
        late = update(table).where(table.c.lease_owner.is_not(None)).values(lease_until_seconds=1.0)
        database.transact(lambda connection, late=late: connection.execute(late))  # type: ignore[misc]


def _succeeded(database: Database, job_id: int) -> int:
    with database.read() as connection:
        return sum(task.state == "succeeded" for task in list_tasks(connection, job_id))


def _records(database: Database) -> int:
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(audit)).scalar_one()


@pytest.mark.parametrize("where", [pytest.param("plan", marks=pytest.mark.exhaustive), "task", "publish"])
def test_a_killed_worker_takes_its_subprocesses_with_it_and_another_goes_on(
    database: Database, tmp_path: Path, where: str
) -> None:
    """Wherever it was: the job is completed by the next one, and one target is published."""
    acts = {"plan": {"plan_act": "wait:go"}, "publish": {"publish_act": "wait:go"}}.get(where, {})
    job_id = put(database, tmp_path, "write", "wait:go" if where == "task" else "write", **acts)
    begun = {"plan": "plan", "task": "task 1", "publish": "publish"}[where]
    with WorkerProcess(job_settings(database, tmp_path)) as first:
        until(lambda: any(line.startswith(begun) for line in log_lines(tmp_path)), f"the {where}")
        until(lambda: where == "plan" or _succeeded(database, job_id) >= 1, "the first task")
        pids = _started(tmp_path, "task") + _started(tmp_path, "publish ")
        first.kill()
    until(lambda: not any(map(lives, pids)), "the end of its subprocesses")
    _let_leases_end(database)
    (tmp_path / "go").touch()
    with working(job_settings(database, tmp_path)):
        job = wait_for_end(database, job_id)
    assert job.state == "succeeded" and job.result == {"parts": 2, "text": "0\n1"}
    assert log_lines(tmp_path).count("published") == 1 and _records(database) == 1
    assert len(_started(tmp_path, "task 0")) == 1, "what was done is not done again"


def test_a_publisher_that_died_behind_its_commit_is_found_to_be_done(
    database: Database, tmp_path: Path
) -> None:
    """Published, and nobody heard of it: the next one sees that, and the job is recorded once."""
    job_id = put(database, tmp_path, "write", publish_act="die_after")
    with working(job_settings(database, tmp_path)):
        assert wait_for_end(database, job_id).state == "succeeded"
    lines = log_lines(tmp_path)
    assert (lines.count("published"), lines.count("was published")) == (1, 1)
    assert _records(database) == 1


@pytest.mark.exhaustive  # the ledger's own test of it is quick
def test_publishers_that_are_lost_never_end_a_job(database: Database, tmp_path: Path) -> None:
    """Whether it is published only another attempt can tell, however many workers were lost with it."""
    job_id = put(database, tmp_path, "write", publish_act="wait:go", max_attempts=1)
    for attempt in range(1, 3):
        with WorkerProcess(job_settings(database, tmp_path)):
            until(lambda n=attempt: len(_started(tmp_path, "publish ")) == n, "it is published")  # type: ignore[misc]
        _let_leases_end(database)
    (tmp_path / "go").touch()
    with working(job_settings(database, tmp_path)):
        assert wait_for_end(database, job_id).state == "succeeded"
    assert log_lines(tmp_path).count("published") == 1


def test_a_worker_that_slept_through_its_lease_changes_nothing(database: Database, tmp_path: Path) -> None:
    """It wakes up, completes what another one has done by then, and is refused."""
    job_id = put(database, tmp_path, "wait:go")
    with WorkerProcess(job_settings(database, tmp_path)) as sleeper:
        until(lambda: len(_started(tmp_path, "task 0")) == 1, "the task")
        sleeper.pause()
        _let_leases_end(database)
        with working(job_settings(database, tmp_path)):
            until(lambda: len(_started(tmp_path, "task 0")) == 2, "the second attempt")
            (tmp_path / "go").touch()
            job = wait_for_end(database, job_id)
            until(lambda: log_lines(tmp_path).count("done 0") == 2, "the first attempt, which runs on")
        sleeper.go_on()
        after = put(database, tmp_path, "write")
        assert wait_for_end(database, after).state == "succeeded"  # so it has looked around since
        assert sleeper.stop() == 0
    assert state_of(database, job_id) == job
    assert _records(database) == 2


def test_the_warm_process_is_killed(database: Database, tmp_path: Path) -> None:
    """All that runs dies with it, and is done again by another one."""
    job_id = put(database, tmp_path, "wait:go", "wait:go")
    with working(job_settings(database, tmp_path), own_executor=True):
        until(lambda: len(_started(tmp_path, "task")) == 2, "both tasks")
        pids = _started(tmp_path, "task")
        warm = parent_of(pids[0])
        assert warm is not None
        os.kill(warm, signal.SIGKILL)
        until(lambda: not any(map(lives, pids)), "their end")
        (tmp_path / "go").touch()
        assert wait_for_end(database, job_id).state == "succeeded"
    assert len(_started(tmp_path, "task")) == 4


def test_a_cancelled_job_of_a_dead_worker_is_cleared_away(database: Database, tmp_path: Path) -> None:
    """Its tasks end with their leases; then the next worker discards what they left, work folders too."""
    job_id = put(database, tmp_path, "keep", "wait:never")
    with WorkerProcess(job_settings(database, tmp_path)):
        until(lambda: len(_started(tmp_path, "task 1")) == 1 and "done 0" in log_lines(tmp_path), "the tasks")
        folder = next(line.split()[1] for line in log_lines(tmp_path) if line.startswith("work"))
        until(lambda: not Path(folder).exists(), "the removal of the first one's work folder")
    assert list(tmp_path.glob("part-*")) and list((tmp_path / "work").glob("*/task-*"))
    assert cancel(database, job_id).is_ending
    _let_leases_end(database)
    with working(job_settings(database, tmp_path), own_executor=True):
        assert wait_for_end(database, job_id).state == "cancelled"
    assert not list(tmp_path.glob("part-*")) and log_lines(tmp_path)[-1] == "discard"
    assert not list((tmp_path / "work").iterdir())


def test_a_lease_is_renewed_for_as_long_as_the_task_takes(database: Database, tmp_path: Path) -> None:
    """A task of several leases runs once."""
    job_id = put(database, tmp_path, "sleep:3")
    settings = job_settings(database, tmp_path, lease_seconds=1.0)
    with working(settings):
        assert wait_for_end(database, job_id).state == "succeeded"
    with database.read() as connection:
        assert [task.attempt for task in list_tasks(connection, job_id)] in (
            [0],
            [1],
        )  # 1: a very slow machine
        assert any(event.kind == "state" for event in job_events_after(connection, job_id))


@pytest.mark.exhaustive
def test_two_workers_share_the_work(database: Database, tmp_path: Path) -> None:
    """Each task is done once, whoever does it."""
    folders = [tmp_path / str(n) for n in range(4)]
    for folder in folders:
        folder.mkdir()
    job_ids = [put(database, folder, *["write"] * 3) for folder in folders]
    settings = job_settings(database, tmp_path)
    with working(settings), WorkerProcess(settings) as other:
        ends = [wait_for_end(database, job_id) for job_id in job_ids]
        assert other.stop() == 0
    assert {job.state for job in ends} == {"succeeded"}
    for folder in folders:
        lines = log_lines(folder)
        assert sorted(line for line in lines if line.startswith("done")) == ["done 0", "done 1", "done 2"]
        assert lines.count("published") == 1
    assert _records(database) == 4
