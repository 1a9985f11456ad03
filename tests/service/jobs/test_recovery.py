"""Workers, their processes and their storage die at the worst moment: each job is completed once."""

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
from safetensors.torch import load as load_safetensors
from sqlalchemy import Engine, event

import dcp
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
    events_of,
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
from tests.support.s3 import S3Server, raw_s3


@pytest.mark.parametrize("where", [pytest.param("plan", marks=pytest.mark.exhaustive), "task", "publish"])
def test_a_killed_worker_takes_its_processes_along_and_another_goes_on(
    database: Database, tmp_path: Path, where: str
) -> None:
    """Completes the job once, wherever its worker was, and does nothing again that was done."""
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


def test_a_publisher_that_died_behind_its_commit_is_found_to_be_done(
    database: Database, tmp_path: Path
) -> None:
    """Publishes and records once where the first publisher died before anybody heard of it."""
    job_id = put(database, tmp_path, "write", publish_act="die_after")
    with working(job_settings(database, tmp_path)):
        assert wait_for_end(database, job_id).state == "succeeded"
    lines = log_lines(tmp_path)
    assert (lines.count("published"), lines.count("was published")) == (1, 1)
    assert records_of(database) == 1


def test_a_worker_that_slept_through_its_lease_changes_nothing(database: Database, tmp_path: Path) -> None:
    """Refuses what it completes when it wakes up, since another one has done it by then."""
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
        sleeper.go_on()
        after = put(database, tmp_path, "write")
        assert wait_for_end(database, after).state == "succeeded"  # so it has looked around since
        assert sleeper.stop() == 0
    assert state_of(database, job_id) == job
    assert records_of(database) == 2


@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
def test_the_warm_process_is_killed(database: Database, tmp_path: Path) -> None:
    """Does all tasks again that die with the process that they were forked from."""
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


def test_a_cancelled_job_of_a_dead_worker_is_cleared_away(database: Database, tmp_path: Path) -> None:
    """Discards what its tasks left, work folders too, once their leases have ended."""
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
def test_a_lease_is_renewed_for_as_long_as_the_task_takes(database: Database, tmp_path: Path) -> None:
    """Runs a task of several leases without another attempt."""
    job_id = put(database, tmp_path, "sleep:3")
    with working(job_settings(database, tmp_path, lease_seconds=1.0)):
        assert wait_for_end(database, job_id).state == "succeeded"
    (task,) = tasks_of(database, job_id)
    assert task.attempt <= 1, "1 on a machine that is very slow"


def test_a_large_result_on_a_slow_disk_keeps_its_lease(database: Database, tmp_path: Path) -> None:
    """Writes it in parts, which take longer than a lease, once, though another worker looks for work."""
    job_id = put(database, tmp_path, "write", result_rows=1000)
    settings = job_settings(database, tmp_path, lease_seconds=1.0)

    def slow(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("INSERT INTO document_parts"):
            time.sleep(0.3)

    event.listen(Engine, "before_cursor_execute", slow)
    try:
        with working(settings), working(settings):
            job = wait_for_end(database, job_id)
    finally:
        event.remove(Engine, "before_cursor_execute", slow)
    assert job.state == "succeeded" and "retry" not in {one.kind for one in events_of(database, job_id)}
    assert log_lines(tmp_path).count("published") == 1 and records_of(database) == 1


def test_two_workers_share_the_work(database: Database, tmp_path: Path) -> None:
    """Does each task once, whoever does it."""
    folders = [tmp_path / str(n) for n in range(3)]
    for folder in folders:
        folder.mkdir()
    job_ids = [put(database, folder, *["write"] * 3) for folder in folders]
    settings = job_settings(database, tmp_path)
    with working(settings), WorkerProcess(settings) as other:
        assert {wait_for_end(database, job_id).state for job_id in job_ids} == {"succeeded"}
        assert other.stop() == 0
    for folder in folders:
        lines = log_lines(folder)
        assert sorted(line for line in lines if line.startswith("done")) == ["done 0", "done 1", "done 2"]
        assert lines.count("published") == 1
    assert records_of(database) == 3


@pytest.mark.parametrize("make_database", ["sqlite"], indirect=True)
def test_others_write_while_a_large_plan_is_stored(database: Database, tmp_path: Path) -> None:
    """Stores a plan in many transactions, between which others have their turns; half of it is nobody's."""
    job_id = put(database, tmp_path, *["wait:go"] * 60, payload_bytes=200_000)
    between = 0
    with working(job_settings(database, tmp_path, concurrency=1)):
        until(lambda: state_of(database, job_id).state == "planning", "the plan")
        while state_of(database, job_id).state == "planning":
            assert tasks_of(database, job_id) == []
            put(database, tmp_path, kind="unknown")
            between += 1
        cancel(database, job_id)
        assert wait_for_end(database, job_id).state == "cancelled"
    assert between > 2
    assert "retry" not in {event.kind for event in events_of(database, job_id)}


# -- conversions ---------------------------------------------------------------------------------------------

_STATE = {f"t{number}": torch.full((1 << 18,), float(number)) for number in range(12)}  # 12 MiB
_QUICK: dict[str, Any] = {"poll_seconds": 0.05, "lease_seconds": 4.0, "shutdown_seconds": 1.0}


@contextmanager
def worker(*given: Any) -> Iterator[None]:
    """In a process of its own, killed at the end."""
    process = forkserver_context().Process(target=serve, args=given)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join(HANG_SECONDS)


@contextmanager
def catalog(url: str, tmp_path: Path, place: str, options: dict[str, Any] | None = None) -> Iterator[JobSite]:
    """A checkpoint in the root "main", beside "export"."""
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
    """The state of a job, once it has ended."""
    until(lambda: site.job(number).state in ("succeeded", "failed", "cancelled"), f"the end of job {number}")
    return str(site.job(number).state)


@pytest.fixture
def reserving(make_database: MakeDatabase, tmp_path: Path) -> Iterator[tuple[JobSite, int, Path]]:
    """A conversion into shards, and what holds its workers while they reserve the space for them."""
    with catalog(make_database(), tmp_path, str(tmp_path)) as site:
        number = site.submit(
            "convert",
            checkpoint_id=site.id("main", "run/step-1"),
            to="safetensors",
            target_root="export",
            target_key="a/x",
            shard_bytes=1 << 20,
        )
        gate = tmp_path / "gate"
        gate.touch()
        yield site, number, gate


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_what_a_killed_worker_has_reserved_is_cleared_away(
    reserving: tuple[JobSite, int, Path], tmp_path: Path, is_cancelled: bool
) -> None:
    """Leaves the target alone in its folder, or nothing where the job was cancelled since."""
    site, number, gate = reserving
    with worker(site.worker.settings, "halt", str(gate)):
        until(gate.with_suffix(".reached").exists, "the reservation")
    assert list((tmp_path / "export/a").glob(".tmp-convert-*"))
    if is_cancelled:
        site.cancel(number)
    gate.unlink()
    with worker(site.worker.settings, "halt", str(gate)):
        assert ended(site, number) == ("cancelled" if is_cancelled else "succeeded")
    left = [path.name for path in (tmp_path / "export/a").iterdir()]
    assert left == ([] if is_cancelled else ["x"])


def test_a_job_that_is_cancelled_while_it_reserves_leaves_nothing(
    reserving: tuple[JobSite, int, Path], tmp_path: Path
) -> None:
    """Kills what reserves, and clears away behind it."""
    site, number, gate = reserving
    with worker(site.worker.settings, "halt", str(gate)):
        until(gate.with_suffix(".reached").exists, "the reservation")
        site.cancel(number)
        assert ended(site, number) == "cancelled"
    assert list((tmp_path / "export/a").iterdir()) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("store", ["local", "s3"])
def test_killed_again_and_again(
    store: str, make_database: MakeDatabase, s3_server: S3Server, s3_root: str, tmp_path: Path
) -> None:
    """Converts by a rule into a dozen shards, once and whole, while every worker dies a step further."""
    options = s3_server.storage_options if store == "s3" else None
    place = str(tmp_path) if options is None else s3_root
    with catalog(make_database(), tmp_path, place, options) as site:
        convert = {"kind": "convert", "to": "safetensors", "target_root": "export"}
        shards = {"target_key": "{run}/{name}", "shard_bytes": 1 << 20}
        actions = [convert | shards, {"kind": "verify"}]
        rule = {"name": "export", "event": "checkpoint.committed", "condition": {"root": "main"}}
        site.api.post("/rules", {**rule, "actions": actions})
        dcp.save(
            _STATE, checkpoint_id=f"{place}/main/run/step-2", no_dist=True, storage_options=options or {}
        )
        site.scan("main")

        def at(state: str, done: int) -> bool:
            found = site.jobs(kind="convert")
            tasks = found and site.api.get(f"/jobs/{found[0]['id']}/tasks")["items"]
            count = sum(task["state"] == "succeeded" for task in tasks or [])
            return bool(found) and found[0]["state"] in (state, "succeeded") and count >= done

        for state, done in (("running", 0), ("running", 4), ("publishing", 0), ("succeeded", 0)):
            with worker(site.worker.settings, "small"):
                until(lambda state=state, done=done: at(state, done), f"{state} {done}")  # type: ignore[misc]
        with worker(site.worker.settings, "small"):
            until(
                lambda: {job["state"] for job in site.jobs() if job["kind"] != "scan"} == {"succeeded"},
                "the end of all",
            )
        (target,) = site.api.checkpoints(root="export", state="any")
        assert (target["key"], target["state"]) == ("run/step-2", "committed")
        assert len(site.audited("checkpoint.convert")) == 1
    if options is None:
        read = {path.name: path.read_bytes() for path in (tmp_path / "export/run/step-2").iterdir()}
    else:
        with raw_s3(s3_server) as raw:
            names = raw.list(f"{s3_root}/export/run/step-2")
            read = {name: raw.read(f"{s3_root}/export/run/step-2/{name}") for name in names}
    found: dict[str, torch.Tensor] = {}
    for name, data in read.items():
        found |= load_safetensors(data) if name.endswith(".safetensors") else {}
    assert found.keys() == _STATE.keys() and not [name for name in read if ".tmp-" in name]
    assert all(torch.equal(found[name], _STATE[name]) for name in _STATE)


@pytest.mark.parametrize("what", ["full", "away"])
def test_a_conversion_waits_for_its_storage(what: str, make_database: MakeDatabase, tmp_path: Path) -> None:
    """Says why it waits and until when, for more attempts than a job has, and succeeds once that is over."""
    with catalog(make_database(), tmp_path, str(tmp_path)) as site:
        number = site.submit(
            "convert",
            checkpoint_id=site.id("main", "run/step-1"),
            to="dcp",
            target_root="export",
            target_key="x",
        )
        gate, export = tmp_path / "gate", tmp_path / "export"
        if what == "away":
            export.rename(tmp_path / "elsewhere")
        with worker(site.worker.settings, "full" if what == "full" else "", str(gate)):
            until(lambda: (site.job(number).waiting or {}).get("count", 0) >= 6, "six attempts")
            waiting = site.job(number).waiting
            assert waiting["is_environment"] and waiting["next_attempt_at"]
            assert ("is full" if what == "full" else "is not there") in waiting["detail"]
            gate.touch()
            if what == "away":
                (tmp_path / "elsewhere").rename(export)
            assert ended(site, number) == "succeeded"
            assert site.job(number).waiting is None
