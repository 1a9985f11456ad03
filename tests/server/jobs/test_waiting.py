"""Errors of the environment: a job waits for what is away, for hours, says so, and goes on by itself."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Final

import pytest
import torch

import dcp
from dcp.server.database.engine import Database
from dcp.server.jobs import ledger
from dcp.server.jobs.kind import PermanentJobError, TransientJobError, UnavailableJobError, is_environment
from dcp.server.jobs.ledger import Backoff, FailureFacts
from dcp.server.jobs.worker import DEFAULT_KINDS, Worker
from dcp.server.problems import ConflictError, NotFoundError, ProblemError, UnavailableError
from dcp.server.roots import storage_problem
from dcp.server.schemas.jobs import JobAnswer
from dcp.server.settings import Settings
from dcp.storage.errors import CorruptCheckpointError, StorageError, StorageFullError
from tests.server.jobs.test_ledger import NOW, add, job_of, planned, step, take, taken
from tests.support.forking import forkserver_context
from tests.support.job_workers import HANG_SECONDS, until, wait_for_end
from tests.support.kind_runs import KindRuns
from tests.support.outages import limited_files

FULL_DISK_KINDS: Final = "tests.support.full_disk:KINDS"  # importing them changes the process
HOUR: Final = 3600.0
FULL = FailureFacts(type="StorageFullError", detail="the storage of root x is full", is_environment=True)
BROKEN = FailureFacts(type="TransientJobError", detail="not this time")
FILE_BYTES: Final = 5 << 20
"""Room for the database's files, not for the 6 MiB that are converted."""


def problem_of(error: Exception) -> ProblemError:
    """As kinds raise it."""
    problem = storage_problem(error)
    problem.__cause__ = error
    return problem


def test_which_errors_are_of_the_environment() -> None:
    """Space, permission, what is away or busy; not data, requests, or what may be the job's own doing."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
    passing: list[Exception] = [OSError(code, os.strerror(code)) for code in codes]
    passing += [
        StorageFullError("full"),
        StorageError("503 of the service"),
        ConnectionError(),
        TimeoutError(),
    ]
    passing += [problem_of(error) for error in passing]
    passing += [UnavailableError("the folder of root x is not there"), UnavailableJobError("the database")]
    assert all(map(is_environment, passing)), [error for error in passing if not is_environment(error)]
    lasting: list[Exception] = [IsADirectoryError(errno.EISDIR, ""), FileNotFoundError(errno.ENOENT, "")]
    lasting += [problem_of(StorageError("x", errno=errno.ENAMETOOLONG)), CorruptCheckpointError("flipped")]
    lasting += [
        NotFoundError("x"),
        PermanentJobError("x"),
        TransientJobError("x"),
        ValueError(),
        MemoryError(),
    ]
    assert not any(map(is_environment, lasting)), [error for error in lasting if is_environment(error)]


@pytest.mark.parametrize(
    "phase", ["task", *(pytest.param(phase, marks=pytest.mark.exhaustive) for phase in ("plan", "publish"))]
)
def test_a_job_waits_for_hours(phase: str, database: Database) -> None:
    """With growing pauses up to minutes; then it goes on where it was, with all attempts that it has."""
    job_id = add(database) if phase == "plan" else planned(database, 1 if phase == "task" else 0)
    now = NOW
    pauses: list[float] = []
    while now < NOW + 20 * HOUR:
        made = taken(database, now)
        assert made.phase == phase
        step(database, ledger.fail, made.held, FULL, now)
        job = job_of(database, job_id)
        assert not job.is_ending and job.waiting is not None
        shown = JobAnswer.of(job).waiting
        assert shown is not None and shown.detail == FULL.detail and shown.is_environment
        assert job.waiting["since_seconds"] == NOW and job.waiting["count"] == len(pauses) + 1
        pauses.append(job.waiting["next_seconds"] - now)
        assert take(database, now + pauses[-1] - 0.1) is None
        now += pauses[-1]
    assert pauses[0] <= 3.0 and 300.0 <= max(pauses) <= 450.0 and len(pauses) > 100
    made = taken(database, now)
    assert made.phase == phase
    done: Any = {"plan": ({}, []), "task": ({},), "publish": ({},)}[phase]
    step(database, getattr(ledger, f"complete_{phase}"), made.held, *done, now)
    assert job_of(database, job_id).waiting is None


def test_a_job_does_not_wait_for_ever(database: Database) -> None:
    """After a day in a row it has failed, with the reason; then it can be retried by hand as any other."""
    job_id, now = planned(database, 1), NOW
    while not job_of(database, job_id).is_ending:
        step(database, ledger.fail, taken(database, now).held, FULL, now, Backoff(60.0, HOUR))
        now += HOUR * 1.6
    assert 24 * HOUR <= now - NOW < 28 * HOUR
    step(database, ledger.complete_discard, taken(database, now).held, now)
    job = job_of(database, job_id)
    assert (job.state, job.waiting) == ("failed", None)
    assert job.error is not None and job.error["detail"] == FULL.detail
    assert step(database, ledger.retry, job_id, now, "me").state == "queued"


def test_all_tasks_of_a_job_wait_together(database: Database) -> None:
    """What is away for one is away for all: none is begun before the pause is over, and one that was at work
    already and meets it too does not make it longer. Other jobs go on."""
    job_id = planned(database, 4)
    first, second = taken(database), taken(database)
    for made in (first, second):
        step(database, ledger.fail, made.held, FULL, NOW, Backoff(60.0, HOUR))
    job = job_of(database, job_id)
    assert job.waiting is not None and job.waiting["count"] == 1
    assert job.not_before_seconds == job.waiting["next_seconds"] <= NOW + 90.0
    other = planned(database, 1)
    made = taken(database)
    assert made.job.id == other and take(database) is None
    assert taken(database, NOW + 91.0).job.id == job_id


def test_by_hand_it_goes_on_at_once(database: Database) -> None:
    """Whoever has made space need not wait; nor for what failed in passing. What does not wait is refused."""
    job_id = planned(database, 2)
    with pytest.raises(ConflictError, match="those that wait"):
        step(database, ledger.retry, job_id, NOW, "me")
    for error in (FULL, BROKEN):
        made = taken(database)
        step(database, ledger.fail, made.held, error, NOW, Backoff(60.0, HOUR))
        waiting = job_of(database, job_id).waiting
        assert waiting is not None and waiting["next_seconds"] > NOW
        job = step(database, ledger.retry, job_id, NOW, "me")
        assert job.state == "running" and job.waiting is not None and job.waiting["next_seconds"] == NOW
        again = taken(database)
        assert again.held.task_id == made.held.task_id
        step(database, ledger.release, again.held, NOW)


def test_a_waiting_job_is_cancelled_at_once(database: Database) -> None:
    """It need not wait to be cleared away."""
    job_id = planned(database, 1)
    step(database, ledger.fail, taken(database).held, FULL, NOW, Backoff(HOUR, HOUR))
    step(database, ledger.request_cancel, job_id, NOW, "me")
    made = taken(database)
    assert made.phase == "discard"
    step(database, ledger.complete_discard, made.held, NOW)
    assert job_of(database, job_id).state == "cancelled"


def make(database: Database, tmp_path: Path) -> KindRuns:
    """A checkpoint of 6 MiB to convert."""
    (tmp_path / "export").mkdir()
    state = {"w": torch.ones(3 << 19)}
    dcp.save(state, checkpoint_id=tmp_path / "main/run/step-1", no_dist=True)
    roots: dict[str, Any] = {
        name: {"url": str(tmp_path / name), "scan_seconds": 0} for name in ("main", "export")
    }
    runs = KindRuns(database, tmp_path / "runs", roots, poll_seconds=0.05, work_folder=tmp_path / "work")
    runs.scan("main")
    return runs


def serve(settings: Settings, full: bool, gate: str) -> None:
    """Be a worker until SIGTERM; with ``full``, one to whom the disk is full until ``gate`` is there.

    The limit on the size of files holds for its subprocesses too, and any user may have one.
    """
    if full:
        limits = limited_files(os.getpid(), FILE_BYTES, with_children=True)
        limits.__enter__()

        def free() -> None:
            while not Path(gate).exists():
                time.sleep(0.01)
            limits.__exit__(None, None, None)

        threading.Thread(target=free, daemon=True).start()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    kinds = FULL_DISK_KINDS if full else DEFAULT_KINDS
    Worker(settings, kinds=kinds, schedules=(), backoff=Backoff(0.05, 0.2)).run(stop)


@pytest.mark.parametrize("what", ["full", "away"])
def test_a_conversion_waits_for_its_storage(what: str, database: Database, tmp_path: Path) -> None:
    """A write that the system really refuses for want of space, and a root that is really away, for more
    attempts than a job has: it tells why and when, and succeeds once that is over."""
    runs, gate = make(database, tmp_path), tmp_path / "gate"
    number = runs.id("main", "run/step-1")
    job_id = runs.submit("convert", checkpoint_id=number, to="dcp", target_root="export", target_key="x")
    if what == "away":
        (tmp_path / "export").rename(tmp_path / "elsewhere")
    process = forkserver_context().Process(target=serve, args=(runs.settings, what == "full", str(gate)))
    process.start()
    try:
        until(lambda: _count(runs, job_id) >= 6, "six attempts")
        waiting = JobAnswer.of(runs.job(job_id)).waiting
        assert waiting is not None and waiting.is_environment and waiting.next_attempt_at
        assert ("is full" if what == "full" else "is not there") in waiting.detail
        gate.touch()
        if what == "away":
            (tmp_path / "elsewhere").rename(tmp_path / "export")
        job = wait_for_end(database, job_id)
        assert job.state == "succeeded" and job.waiting is None, job.error
    finally:
        process.kill()
        process.join(HANG_SECONDS)


def _count(runs: KindRuns, job_id: int) -> int:
    waiting = runs.job(job_id).waiting
    return 0 if waiting is None else int(waiting["count"])
