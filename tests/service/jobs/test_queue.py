"""The queue of jobs, its workers, and the processes of tasks, on this machine and on a real Dask cluster."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import astuple
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.app import running_app
from tests.support.dask_cluster import dask_cluster
from tests.support.job_kinds import log_lines
from tests.support.job_workers import (
    Database,
    WorkerProcess,
    cancel,
    close_executor,
    events_of,
    job_settings,
    pids_of,
    put,
    records_of,
    state_of,
    tasks_of,
    until,
    wait_for_end,
    working,
)
from tests.support.processes import environment_of, lives, parent_of


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Start a scheduler and two worker processes, restarted when they die."""
    with dask_cluster(threads=2) as made:
        yield made
        close_executor(address_of(made))


def address_of(cluster: Any) -> str:
    """Return the address of the cluster as a setting."""
    return str(cluster.scheduler_address).replace("tcp://", "dask://")


BOTH = pytest.mark.parametrize("executor", ["processes", "dask"], indirect=True)
ONE = pytest.mark.parametrize(
    "executor", ["processes", pytest.param("dask", marks=pytest.mark.exhaustive)], indirect=True
)


@pytest.fixture
def executor(request: pytest.FixtureRequest) -> str:
    """Return the setting of the executor: processes on this machine or a Dask cluster."""
    return "processes" if request.param == "processes" else address_of(request.getfixturevalue("cluster"))


# -- one contract for both executors -------------------------------------------------------------------------


@ONE
def test_a_job_from_its_plan_to_its_record(database: Database, tmp_path: Path, executor: str) -> None:
    """A job runs its tasks, publishes their results once, and records them when it completes."""
    job_id = put(database, tmp_path, "write", "sleep:0.1", "write")
    settings = job_settings(database, tmp_path, executor=executor)
    with working(settings):
        job = wait_for_end(database, job_id)
    assert (job.state, job.result) == ("succeeded", {"parts": 3, "text": "0\n1\n2"})
    assert job.progress is not None and [*astuple(job.progress)] == [3, 3, 300, 300]
    assert (tmp_path / "target").read_text() == "0\n1\n2"
    assert log_lines(tmp_path)[0] == "plan 3" and log_lines(tmp_path).count("published") == 1
    states = [event.data["state"] for event in events_of(database, job_id) if event.kind == "state"]
    assert states == ["planning", "running", "publishing", "succeeded"]
    assert records_of(database) == 1


@BOTH
def test_temporary_errors_are_retried(database: Database, tmp_path: Path, executor: str) -> None:
    """Storage errors and killed processes are retried; completed tasks are kept."""
    job_id = put(database, tmp_path, "fail_once", "die_once", "write", plan_act="fail_once")
    settings = job_settings(database, tmp_path, executor=executor)
    with working(settings):
        assert wait_for_end(database, job_id).state == "succeeded"
    lines = log_lines(tmp_path)
    assert lines.count("plan 3") == 2
    assert [sum(line.startswith(f"task {n} ") for line in lines) for n in range(3)] == [2, 2, 1]
    assert [task.attempt for task in tasks_of(database, job_id)] == [1, 1, 0]
    assert [event.kind for event in events_of(database, job_id)].count("retry") == 3


@ONE
def test_a_final_error_ends_the_job(database: Database, tmp_path: Path, executor: str) -> None:
    """A final error ends the job with this error, stops the other tasks and deletes their files."""
    job_id = put(database, tmp_path, "write", "fail", "sleep:1000")
    settings = job_settings(database, tmp_path, executor=executor, concurrency=3)
    with working(settings):
        job = wait_for_end(database, job_id)
    assert job.state == "failed" and job.error is not None
    assert (job.error.type, job.error.detail, job.error.task) == ("PermanentJobError", r"never \udc80", 1)
    assert not list(tmp_path.glob("part-*")) and not (tmp_path / "target").exists()
    assert log_lines(tmp_path)[-1] == "discard"


@ONE
def test_cancelling_kills_tasks_that_ignore_it(database: Database, tmp_path: Path, executor: str) -> None:
    """Cancellation kills tasks that ignore it, drops queued tasks, and leaves no process."""
    settings = job_settings(database, tmp_path, executor=executor, concurrency=7, poll_seconds=1.0)
    with working(settings):
        job_id = put(database, tmp_path, *["hold:1000"] * 5)
        until(lambda: len(pids_of(tmp_path)) >= 4, "four tasks")
        begun = time.monotonic()
        cancel(database, job_id)
        assert wait_for_end(database, job_id).state == "cancelled"
        assert time.monotonic() - begun < 60 and not any(map(lives, pids_of(tmp_path)))
        lines = log_lines(tmp_path)
    assert "discard" in lines and not any("done" in line for line in lines)
    assert not list(tmp_path.glob("part-*"))


@ONE
def test_progress_is_shown_while_a_task_runs(database: Database, tmp_path: Path, executor: str) -> None:
    """Bytes of a running task are reported before its end."""
    job_id = put(database, tmp_path, "sleep:30")
    settings = job_settings(database, tmp_path, executor=executor, lease_seconds=1.0)
    with working(settings):
        until(lambda: any(0 < task.done_bytes < 100 for task in tasks_of(database, job_id)), "a part")
        cancel(database, job_id)
        assert wait_for_end(database, job_id).state == "cancelled"


# -- on a cluster --------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_process_of_the_cluster_dies(database: Database, tmp_path: Path, cluster: Any) -> None:
    """If a process of the cluster dies, the other process completes its tasks."""
    job_id = put(database, tmp_path, *["wait:go"] * 4)
    settings = job_settings(database, tmp_path, executor=address_of(cluster), concurrency=4)
    with working(settings, own_executor=True):

        def hosts() -> list[int]:  # of live processes: a lost task may have been repeated
            found = (parent_of(parent_of(pid) or 0) for pid in pids_of(tmp_path) if lives(pid))
            return sorted(host for host in found if host)

        until(lambda: len(hosts()) == 4 and len(set(hosts())) == 2, "two tasks in each process")
        os.kill(hosts()[0], signal.SIGKILL)
        (tmp_path / "go").touch()
        assert wait_for_end(database, job_id).result == {"parts": 4, "text": "0\n1\n2\n3"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
def test_the_cluster_ends_the_tasks_of_a_dead_worker(
    database: Database, tmp_path: Path, cluster: Any
) -> None:
    """The cluster ends processes of a dead worker within the time of a lease."""
    put(database, tmp_path, "hold:1000")
    settings = job_settings(database, tmp_path, executor=address_of(cluster), lease_seconds=2.0)
    with WorkerProcess(settings) as worker:
        until(lambda: pids_of(tmp_path), "the task")
        worker.kill()
        until(lambda: not lives(pids_of(tmp_path)[0]), "its end")


# -- processes of tasks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
def test_memory_is_bounded(database: Database, tmp_path: Path) -> None:
    """A task over its memory limit is killed, also after one large allocation, and not retried."""
    settings = job_settings(database, tmp_path, task_memory_bytes=256 << 20)
    with working(settings):
        for act in ("take:500", "grab:4000"):
            job = wait_for_end(database, put(database, tmp_path, act))
            assert job.state == "failed" and job.error is not None
            assert job.error.type == "TaskMemoryError" and not job.error.is_retryable
        assert wait_for_end(database, put(database, tmp_path, "write")).state == "succeeded"


@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
def test_time_is_bounded(database: Database, tmp_path: Path) -> None:
    """A hanging task is killed, and retried."""
    job_id = put(database, tmp_path, "hold:1000", max_attempts=2)
    with working(job_settings(database, tmp_path, task_seconds=0.5)):
        job = wait_for_end(database, job_id)
    assert job.state == "failed" and job.error is not None and job.error.type == "TaskTimeoutError"
    assert len(pids_of(tmp_path)) == 2


@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
def test_large_plans_and_results_pass(database: Database, tmp_path: Path) -> None:
    """Plans and results larger than a socket buffer pass in both directions."""
    job_id = put(database, tmp_path, *["write"] * 6, payload_bytes=300_000)
    with working(job_settings(database, tmp_path, concurrency=4)):
        job = wait_for_end(database, job_id)
    assert job.result == {"parts": 6, "text": "0\n1\n2\n3\n4\n5"}


@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
def test_errors_hide_secrets_and_attempts_are_bounded(database: Database, tmp_path: Path) -> None:
    """A job fails after its last attempt; secrets in errors of storage stay out of the ledger."""
    job_id = put(database, tmp_path, "secret", max_attempts=2)
    with working(job_settings(database, tmp_path)):
        job = wait_for_end(database, job_id)
    assert job.state == "failed" and job.error is not None and job.error.type == "FileNotFoundError"
    assert "SECRET" not in f"{job.error}{events_of(database, job_id)}"
    assert len(pids_of(tmp_path)) == 2


@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
def test_the_warm_process_has_no_threads_and_no_secrets(database: Database, tmp_path: Path) -> None:
    """Tasks are forked from a process without threads and torch, and without settings in its environment."""
    put(database, tmp_path, "wait:go")
    with working(job_settings(database, tmp_path)):
        until(lambda: pids_of(tmp_path), "the task")
        (pid,) = pids_of(tmp_path)
        warm = parent_of(pid)
        assert len(list(Path(f"/proc/{warm}/task").iterdir())) == 1
        assert b"DCP_SERVER" not in environment_of(pid)
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "libtorch" not in maps and "numpy" in maps
        (tmp_path / "go").touch()


# -- slots and limits ----------------------------------------------------------------------------------------


def test_long_jobs_leave_a_slot_for_scans(database: Database, tmp_path: Path) -> None:
    """Brief jobs have a slot of their own beside long jobs, of which at most `concurrency` tasks run."""
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
        for job in (more, job_id):
            assert wait_for_end(database, job).state == "succeeded"


def test_kind_concurrency_limits_the_tasks(database: Database, tmp_path: Path) -> None:
    """`kind_concurrency` limits the tasks of a kind, however many slots are free."""
    job_id = put(database, tmp_path, *["sleep:0.05"] * 4)
    with working(job_settings(database, tmp_path, concurrency=4, kind_concurrency={"made": 1})):
        assert wait_for_end(database, job_id).state == "succeeded"
    acts = [line.split()[0] for line in log_lines(tmp_path) if line.startswith(("task", "done"))]
    assert acts == ["task", "done"] * 4


@pytest.mark.each_database
def test_other_jobs_pass_an_account_at_its_limit(database: Database, tmp_path: Path) -> None:
    """With a limit of one, jobs of an account run one at a time, in order; jobs of other accounts pass."""
    folders = [tmp_path / name for name in ("a0", "a1", "a2", "b")]
    for folder in folders:
        folder.mkdir()
    *many, other = (
        put(database, folder, "wait:go" if folder.name[0] == "a" else "write", owner=f"key#{folder.name[0]}")
        for folder in folders
    )
    limits = {"features": {"quotas": {"account": {"jobs_running": 1}}}}
    settings = job_settings(database, tmp_path, concurrency=3, **limits)
    with working(settings), working(settings):
        until(lambda: pids_of(folders[0]), "the first task")
        assert wait_for_end(database, other).state == "succeeded"
        assert [state_of(database, job).state for job in many] == ["running", "queued", "queued"]
        assert not log_lines(folders[1]) and not log_lines(folders[2])
        for folder in folders:
            (folder / "go").touch()
        ended = [wait_for_end(database, job) for job in many]
    for before, after in pairwise(ended):
        assert before.finished_at and after.started_at and before.finished_at <= after.started_at


def test_unknown_kinds_wait_for_newer_workers(database: Database, tmp_path: Path) -> None:
    """An older worker leaves an unknown kind to newer workers; the API shows the job as unserved."""
    job_id = put(database, tmp_path, "write", "exit")
    url = database.url.render_as_string(hide_password=False)
    with running_app(url, tmp_path, auth="off") as app:

        def shown(query: str = "kind=made") -> list[tuple[int, bool]]:
            items = app.base.get(f"/api/v1/jobs?{query}").json()["items"]
            return [(one["id"], one["is_unserved"]) for one in items]

        with working(job_settings(database, tmp_path), kinds="tests.support.job_kinds:NO_KINDS"):
            pass
        assert state_of(database, job_id).state == "queued" and log_lines(tmp_path) == []
        assert shown() == shown("") == [(job_id, True)]  # the API need not know the kind
        page = app.base.get(f"/jobs/{job_id}", headers={"Accept": "text/html"}).text
        assert "No worker offers this kind of job." in page
        assert app.base.get("/api/v1/jobs?kind=makes").status_code == 422
        with working(job_settings(database, tmp_path)):
            until(
                lambda: not app.base.get(f"/api/v1/jobs/{job_id}").json()["is_unserved"], "a worker does it"
            )
            failed = wait_for_end(database, job_id)
        assert failed.error is not None and failed.error.type == "SystemExit"
        assert "the kind made called sys.exit(3)" in failed.error.detail


def test_a_stopping_worker_releases_its_tasks(database: Database, tmp_path: Path) -> None:
    """A stopping worker releases its tasks: another worker starts at once, and no attempt is counted."""
    job_id = put(database, tmp_path, "write", "wait:go")
    with working(job_settings(database, tmp_path, shutdown_seconds=0.2)):
        until(lambda: pids_of(tmp_path, "task 1"), "the second task")
        until(lambda: tasks_of(database, job_id)[0].state == "succeeded", "the first one's end")
    assert state_of(database, job_id).state == "running"
    found = [(task.state, task.attempt) for task in tasks_of(database, job_id)]
    assert found == [("succeeded", 0), ("queued", 0)]
    (tmp_path / "go").touch()
    with working(job_settings(database, tmp_path)):
        assert wait_for_end(database, job_id).state == "succeeded"


def test_a_job_is_cancelled_while_planning(database: Database, tmp_path: Path) -> None:
    """A cancelled plan ends, and nothing is discarded."""
    job_id = put(database, tmp_path, "write", plan_act="sleep:1000")
    with working(job_settings(database, tmp_path)):
        until(lambda: log_lines(tmp_path) == ["plan 1"], "the plan")
        cancel(database, job_id)
        assert wait_for_end(database, job_id).state == "cancelled"
    assert log_lines(tmp_path) == ["plan 1"]
