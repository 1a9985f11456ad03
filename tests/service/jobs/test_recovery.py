"""Recovery of jobs after the death of workers, processes and storage: each job completes once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

import dcp
from tests.support.command import run as command
from tests.support.databases import MakeDatabase
from tests.support.forking import forkserver_context
from tests.support.hard_kinds import serve
from tests.support.job_kinds import log_lines
from tests.support.job_site import JobSite, running_jobs
from tests.support.job_workers import (
    HANG_SECONDS,
    Database,
    WorkerProcess,
    cancel,
    job_settings,
    let_leases_end,
    pids_of,
    put,
    records_of,
    state_of,
    tasks_of,
    until,
    wait_for_end,
    working,
)
from tests.support.processes import lives, parent_of


@pytest.mark.parametrize(
    "where", ["task", *(pytest.param(phase, marks=pytest.mark.exhaustive) for phase in ("plan", "publish"))]
)
def test_another_worker_completes_a_killed_workers_job(
    database: Database, tmp_path: Path, where: str
) -> None:
    """Processes of a killed worker end; another worker completes the job and repeats no completed task."""
    acts = {"plan": {"plan_act": "wait:go"}, "publish": {"publish_act": "wait:go"}}.get(where, {})
    job_id = put(database, tmp_path, "write", "wait:go" if where == "task" else "write", **acts)
    begun = {"plan": "plan", "task": "task 1", "publish": "publish"}[where]
    with WorkerProcess(job_settings(database, tmp_path)) as first:
        until(lambda: any(line.startswith(begun) for line in log_lines(tmp_path)), f"the {where}")
        until(
            lambda: where == "plan" or "succeeded" in {task.state for task in tasks_of(database, job_id)},
            "the first task",
        )
        pids = pids_of(tmp_path) + pids_of(tmp_path, "publish ")
        first.kill()
    until(lambda: not any(map(lives, pids)), "the end of its processes")
    let_leases_end(database)
    (tmp_path / "go").touch()
    with working(job_settings(database, tmp_path)):
        job = wait_for_end(database, job_id)
    assert (job.state, job.result) == ("succeeded", {"parts": 2, "text": "0\n1"})
    assert log_lines(tmp_path).count("published") == 1 and records_of(database) == 1
    assert len(pids_of(tmp_path, "task 0")) == 1


def test_publishers_killed_after_their_commit_are_done(database: Database, tmp_path: Path) -> None:
    """A publisher that dies after its commit is recognized: the job publishes and records once."""
    job_id = put(database, tmp_path, "write", publish_act="die_after")
    with working(job_settings(database, tmp_path)):
        assert wait_for_end(database, job_id).state == "succeeded"
    lines = log_lines(tmp_path)
    assert (lines.count("published"), lines.count("was published")) == (1, 1)
    assert records_of(database) == 1


def test_results_after_the_end_of_a_lease_are_refused(database: Database, tmp_path: Path) -> None:
    """Results of a worker that slept beyond its lease are refused: another worker has done the task."""
    job_id = put(database, tmp_path, "wait:go")
    with WorkerProcess(job_settings(database, tmp_path)) as sleeper:
        until(lambda: len(pids_of(tmp_path, "task 0")) == 1, "the task")
        sleeper.pause()
        let_leases_end(database)
        with working(job_settings(database, tmp_path)):
            until(lambda: len(pids_of(tmp_path, "task 0")) == 2, "the second attempt")
            (tmp_path / "go").touch()
            job = wait_for_end(database, job_id)
            until(lambda: log_lines(tmp_path).count("done 0") == 2, "the first attempt, which runs on")
        sleeper.resume()
        after = put(database, tmp_path, "write")
        assert wait_for_end(database, after).state == "succeeded"  # the woken worker has polled since
        assert sleeper.stop() == 0
    assert state_of(database, job_id) == job
    assert records_of(database) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
def test_the_warm_process_is_killed(database: Database, tmp_path: Path) -> None:
    """Tasks that die with the process they were forked from are retried."""
    job_id = put(database, tmp_path, "wait:go", "wait:go")
    with working(job_settings(database, tmp_path), own_executor=True):
        until(lambda: len(pids_of(tmp_path)) == 2, "both tasks")
        pids = pids_of(tmp_path)
        warm = parent_of(pids[0])
        assert warm is not None
        os.kill(warm, signal.SIGKILL)
        until(lambda: not any(map(lives, pids)), "their end")
        (tmp_path / "go").touch()
        assert wait_for_end(database, job_id).state == "succeeded"
    assert len(pids_of(tmp_path)) == 4


@pytest.mark.exhaustive
def test_a_cancelled_job_of_a_dead_worker_is_cleaned_up(database: Database, tmp_path: Path) -> None:
    """A cancelled job of a dead worker is cleaned up after the leases end, work folders included."""
    job_id = put(database, tmp_path, "keep", "wait:never")
    with WorkerProcess(job_settings(database, tmp_path)):
        until(lambda: pids_of(tmp_path, "task 1") and "done 0" in log_lines(tmp_path), "the tasks")
        folder = next(line.split()[1] for line in log_lines(tmp_path) if line.startswith("work"))
        until(lambda: not Path(folder).exists(), "the removal of the first one's work folder")
    assert list(tmp_path.glob("part-*")) and list((tmp_path / "work").glob("*/task-*"))
    assert cancel(database, job_id).is_ending
    let_leases_end(database)
    with working(job_settings(database, tmp_path), own_executor=True):
        assert wait_for_end(database, job_id).state == "cancelled"
    assert not list(tmp_path.glob("part-*")) and log_lines(tmp_path)[-1] == "discard"
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
def test_leases_are_renewed_while_a_task_runs(database: Database, tmp_path: Path) -> None:
    """A task longer than several leases runs in a single attempt."""
    job_id = put(database, tmp_path, "sleep:2.5")
    with working(job_settings(database, tmp_path, lease_seconds=1.0)):
        assert wait_for_end(database, job_id).state == "succeeded"
    (task,) = tasks_of(database, job_id)
    assert task.attempt <= 1, "1 on a machine that is very slow"


def test_a_worker_waits_for_the_tables(empty_database: Database, tmp_path: Path) -> None:
    """A worker without tables names `dcp db upgrade` once, fails in no step, and begins after the upgrade."""
    settings = job_settings(empty_database, tmp_path)
    with capture_logs() as logs, working(settings):
        time.sleep(3.0)  # the worker looks twice
        command("db", "upgrade", "--database", settings.database_url.get_secret_value())
        job_id = put(empty_database, tmp_path, "write")
        assert wait_for_end(empty_database, job_id).state == "succeeded"
    first, second = (one["error"] for one in logs if one["log_level"] != "info")
    assert "run dcp db upgrade" in first and second is None


# -- conversions ---------------------------------------------------------------------------------------------

_STATE = {f"t{number}": torch.full((1 << 18,), float(number)) for number in range(12)}  # 12 MiB
_QUICK: dict[str, Any] = {"poll_seconds": 0.05, "lease_seconds": 4.0, "shutdown_seconds": 1.0}


@contextmanager
def worker(*given: Any) -> Iterator[None]:
    """Run a worker in another process, and kill it at the end."""
    process = forkserver_context().Process(target=serve, args=given)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join(HANG_SECONDS)


@contextmanager
def catalog(url: str, tmp_path: Path, place: str, options: dict[str, Any] | None = None) -> Iterator[JobSite]:
    """Start a catalog with a checkpoint in the root "main", beside the root "export"."""
    roots = {
        name: {"url": f"{place}/{name}", "storage_options": options or {}} for name in ("main", "export")
    }
    step = f"{place}/main/run/step-1"
    dcp.save(_STATE, checkpoint_id=step, no_dist=True, storage_options=options)
    if options is None:
        (tmp_path / "export").mkdir()
    with running_jobs(url, tmp_path, roots, **_QUICK, work_folder=str(tmp_path / "work")) as site:
        site.scan("main")
        yield site


def ended(site: JobSite, number: int) -> str:
    """Wait for the end of a job, and return its state."""
    until(lambda: site.job(number).state in ("succeeded", "failed", "cancelled"), f"the end of job {number}")
    return str(site.job(number).state)


@pytest.mark.parametrize("is_cancelled", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_files_of_a_killed_worker_are_deleted(
    make_database: MakeDatabase, tmp_path: Path, is_cancelled: bool
) -> None:
    """Files of a killed worker are deleted; only the target is left, or nothing after a cancellation."""
    gate = tmp_path / "gate"
    gate.touch()
    with catalog(make_database(), tmp_path, str(tmp_path)) as site:
        given: dict[str, Any] = {"checkpoint_id": site.id("main", "run/step-1"), "to": "safetensors"}
        number = site.submit("convert", target_root="export", target_key="a/x", shard_bytes=1 << 20, **given)
        with worker(site.worker.settings, "halt", str(gate)):
            until(gate.with_suffix(".reached").exists, "the reservation")
        assert list((tmp_path / "export/a").glob(".tmp-convert-*"))
        if is_cancelled:
            site.cancel(number)
        gate.unlink()
        let_leases_end(site.app.service.database)
        with worker(site.worker.settings, "halt", str(gate)):
            assert ended(site, number) == ("cancelled" if is_cancelled else "succeeded")
    left = [path.name for path in (tmp_path / "export/a").iterdir()]
    assert left == ([] if is_cancelled else ["x"])


def test_a_conversion_waits_for_its_storage(make_database: MakeDatabase, tmp_path: Path) -> None:
    """A conversion without its storage shows the reason, waits longer than its attempts, and succeeds."""
    with catalog(make_database(), tmp_path, str(tmp_path)) as site:
        source, export = site.id("main", "run/step-1"), tmp_path / "export"
        number = site.submit("convert", checkpoint_id=source, to="dcp", target_root="export", target_key="x")
        export.rename(tmp_path / "elsewhere")
        with worker(site.worker.settings, ""):
            until(lambda: (site.job(number).waiting or {}).get("count", 0) >= 4, "four attempts")
            waiting = site.job(number).waiting
            assert waiting["is_environment"] and waiting["next_attempt_at"]
            assert "does not exist" in waiting["detail"]
            (tmp_path / "elsewhere").rename(export)
            assert ended(site, number) == "succeeded"
            assert site.job(number).waiting is None
