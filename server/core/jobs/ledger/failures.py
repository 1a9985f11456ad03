"""Failures of claims, and lost ones: they are tried again later, or the job is given up.

A failure of the machine, the network or a storage (`JobFailure.is_environment`) counts as no attempt. The job
waits as a whole, each time for longer, and for a day in all, and says what for; `retry` makes it continue at
once. What is neither that nor retryable ends the job.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, Final

from sqlalchemy import Connection, select

from dcp.server.core.jobs.ledger.rows import (
    NEXT_PHASE,
    NO_LEASE,
    Backoff,
    Held,
    StaleFenceError,
    by_priority,
    emit,
    finish,
    forget_tasks,
    held_job,
    held_task,
    lock_job,
    release_phase,
    set_job,
    set_task,
)
from dcp.server.database.mapping import document_of
from dcp.server.database.tables import jobs, tasks
from dcp.server.records.declaring import moment
from dcp.server.records.jobs import Job, JobFailure, JobTask, JobWaiting

DEFAULT_BACKOFF: Final = Backoff()
_MOST_EXPIRED: Final = 1000
_LOST: Final = JobFailure(type="WorkerLostError", detail="the worker that had it was not heard of any more")


def fail(
    connection: Connection, held: Held, error: JobFailure, now: float, backoff: Backoff = DEFAULT_BACKOFF
) -> None:
    """It did not work: it is tried again later, or the job is given up."""
    if held.task_id is None:
        _fail_phase(connection, held_job(connection, held), error, now, backoff)
    else:
        _fail_task(connection, *held_task(connection, held), error, now, backoff)


def _fail_task(
    connection: Connection, job: Job, task: JobTask, error: JobFailure, now: float, backoff: Backoff
) -> None:
    attempt = task.attempt + 1
    values: dict[str, Any] = {"error": asdict(error), "done_bytes": 0, **NO_LEASE}
    if job.is_ending:
        values |= {"state": "cancelled", "attempt": attempt}
    elif _is_patient(job, error, now, backoff):
        values["state"] = "queued"
        _wait(connection, job, error, now, backoff, task=task.number)
    elif _is_tried_again(job, error, attempt):
        next_seconds = now + backoff.seconds(attempt, task.id)
        values |= {"state": "queued", "attempt": attempt, "not_before_seconds": next_seconds}
        _tell_retry(connection, job, error, now, next_seconds, attempt, task=task.number)
    else:
        values |= {"state": "failed", "attempt": attempt}
        _end(connection, job, error, now, task=task.number)
    set_task(connection, task.id, **values)


def _fail_phase(connection: Connection, job: Job, error: JobFailure, now: float, backoff: Backoff) -> None:
    attempt = job.attempt + 1
    is_last = not _is_tried_again(job, error, attempt)
    if error is _LOST and job.state == "publishing" and not job.is_ending:
        # It may be published or not: only another attempt finds out, so this is never the last.
        attempt, is_last = max(1, min(attempt, job.max_attempts - 1)), False
    if job.is_ending and job.state == "planning":
        clear_away(connection, job)
    elif _is_patient(job, error, now, backoff):
        release_phase(
            connection, job, attempt=max(job.attempt, 1) if job.state == "publishing" else job.attempt
        )
        _wait(connection, job, error, now, backoff, state=job.state)
    elif job.is_ending and is_last:
        emit(connection, job.id, "discard_failed", now, error=asdict(error))
        give_up(connection, job, now)
    elif not is_last:
        next_seconds = now + backoff.seconds(attempt, job.id)
        release_phase(connection, job, attempt=attempt, not_before_seconds=next_seconds)
        _tell_retry(connection, job, error, now, next_seconds, attempt, state=job.state)
    else:
        _end(connection, job, error, now)
        if job.state == "planning":
            clear_away(connection, job)


def clear_away(connection: Connection, job: Job, **found: Any) -> None:
    """Discard an ending job whose plan has begun, and may have left something, as one that runs. What
    there is of its tasks was never begun."""
    forget_tasks(connection, job)
    set_job(connection, job.id, state="running", **NEXT_PHASE, **found)


def _end(connection: Connection, job: Job, error: JobFailure, now: float, task: int | None = None) -> None:
    document = asdict(replace(error, task=task))
    set_job(connection, job.id, is_ending=True, error=document, **NEXT_PHASE)
    emit(connection, job.id, "ending", now, error=document)


def _wait(
    connection: Connection, job: Job, error: JobFailure, now: float, backoff: Backoff, **where: Any
) -> None:
    """Pause the job as a whole: what is away is away for all of its tasks."""
    waiting = job.waiting if job.waiting is not None and job.waiting.is_environment else None
    count = 0 if waiting is None else waiting.count
    if waiting is None or job.not_before is None or moment(now) >= job.not_before:
        count += 1
        next_seconds = now + backoff.seconds(count, job.id)
    else:  # another task has met it a moment ago
        next_seconds = job.not_before.timestamp()
    set_job(connection, job.id, not_before_seconds=next_seconds)
    _tell_retry(connection, job, error, now, next_seconds, count, **where)


def _tell_retry(
    connection: Connection,
    job: Job,
    error: JobFailure,
    now: float,
    next_seconds: float,
    attempt: int,
    **where: Any,
) -> None:
    """Note what the job waits for, and until when. ``where``: its ``task``, or its ``state``."""
    before = job.waiting
    is_same = before is not None and before.is_environment == error.is_environment
    waiting = JobWaiting(
        **asdict(replace(error, task=where.get("task"))),
        since=before.since if before is not None and is_same else moment(now),
        next_attempt_at=moment(next_seconds),
        count=attempt,
    )
    set_job(connection, job.id, waiting=document_of(waiting))
    delay = round(next_seconds - now, 3)
    emit(connection, job.id, "retry", now, error=asdict(error), delay_seconds=delay, **where, attempt=attempt)


def _is_patient(job: Job, error: JobFailure, now: float, backoff: Backoff) -> bool:
    """Return True if the failure is worth waiting for, and has not been waited for too long."""
    if not error.is_environment:
        return False
    waiting = job.waiting
    since = waiting.since.timestamp() if waiting is not None and waiting.is_environment else now
    return now - since < backoff.patience_seconds


def _is_tried_again(job: Job, error: JobFailure, attempt: int) -> bool:
    """Of what is not waited for, or has been for long enough."""
    return error.is_retryable and not error.is_environment and attempt < job.max_attempts


def give_up(connection: Connection, job: Job, now: float) -> None:
    """It has been cleared away, as far as that was possible."""
    if not job.is_ending:
        raise StaleFenceError(f"job {job.id} was not given up")
    finish(connection, job, "cancelled" if job.error is None else "failed", now)


def has_expired(connection: Connection, now: float) -> bool:
    """Return True if `expire_leases` would find something: read without a lock."""
    return bool(_expired(connection, now))


def expire_leases(connection: Connection, now: float, backoff: Backoff = DEFAULT_BACKOFF) -> int:
    """Whatever is not renewed any more has failed; how many that were."""
    count = 0
    for held in _expired(connection, now):
        lock_job(connection, held.job_id)
        if _is_over(connection, held, now):  # still: it may have been renewed while this waited for the lock
            fail(connection, held, _LOST, now, backoff)
            count += 1
    return count


def _expired(connection: Connection, now: float) -> list[Held]:
    over = []
    for state in ("planning", "running", "publishing"):
        query = by_priority(select(jobs.c.id, jobs.c.fence).where(jobs.c.state == state))
        rows = connection.execute(query.where(jobs.c.lease_until_seconds < now).limit(_MOST_EXPIRED))
        over += [Held(row.id, None, row.fence) for row in rows]
    of_tasks = (
        select(tasks.c.job_id, tasks.c.id, tasks.c.fence)
        .where(tasks.c.state == "running", tasks.c.lease_until_seconds < now)
        .order_by(tasks.c.state.desc(), tasks.c.job_id.desc())
        .limit(_MOST_EXPIRED)
    )
    over += [Held(row.job_id, row.id, row.fence) for row in connection.execute(of_tasks)]
    return sorted(over, key=lambda held: (held.job_id, held.task_id or 0))


def _is_over(connection: Connection, held: Held, now: float) -> bool:
    table, row_id = (jobs, held.job_id) if held.task_id is None else (tasks, held.task_id)
    query = select(table.c.fence, table.c.lease_until_seconds).where(table.c.id == row_id)
    row = connection.execute(query.with_for_update()).one_or_none()
    return (
        row is not None
        and row.fence == held.fence
        and row.lease_until_seconds is not None
        and row.lease_until_seconds < now
    )
