"""Failed and lost claims: a later repetition, or the end of the job.

A failure of machine, network or storage (`JobFailure.is_environment`) uses up no attempt. The whole job
waits with growing pauses for up to a day, with the reason; `retry` continues at once. Failures that are
neither environmental nor retryable end the job.
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
_LOST: Final = JobFailure(type="WorkerLostError", detail="the worker stopped responding")


def fail(
    connection: Connection, held: Held, error: JobFailure, now: float, backoff: Backoff = DEFAULT_BACKOFF
) -> None:
    """Record a failure: repeat later, or abandon the job."""
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
        # The outcome is unknown, and only another attempt can find out, so this attempt is never the last.
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
    """Schedule the clean-up of an ending job whose plan has begun; none of its tasks has begun."""
    forget_tasks(connection, job)
    set_job(connection, job.id, state="running", **NEXT_PHASE, **found)


def _end(connection: Connection, job: Job, error: JobFailure, now: float, task: int | None = None) -> None:
    document = asdict(replace(error, task=task))
    set_job(connection, job.id, is_ending=True, error=document, **NEXT_PHASE)
    emit(connection, job.id, "ending", now, error=document)


def _wait(
    connection: Connection, job: Job, error: JobFailure, now: float, backoff: Backoff, **where: Any
) -> None:
    """Pause the whole job, since all tasks need the unreachable resource."""
    waiting = job.waiting if job.waiting is not None and job.waiting.is_environment else None
    count = 0 if waiting is None else waiting.count
    if waiting is None or job.not_before is None or moment(now) >= job.not_before:
        count += 1
        next_seconds = now + backoff.seconds(count, job.id)
    else:  # another task has already reported the failure
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
    """Note the reason and end of the pause. ``where``: the ``task``, or the ``state``."""
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
    """Return True if the failure is environmental and within the patience."""
    if not error.is_environment:
        return False
    waiting = job.waiting
    since = waiting.since.timestamp() if waiting is not None and waiting.is_environment else now
    return now - since < backoff.patience_seconds


def _is_tried_again(job: Job, error: JobFailure, attempt: int) -> bool:
    """Return True if another attempt remains."""
    return error.is_retryable and not error.is_environment and attempt < job.max_attempts


def give_up(connection: Connection, job: Job, now: float) -> None:
    """End the job after its clean-up."""
    if not job.is_ending:
        raise StaleFenceError(f"job {job.id} was not abandoned")
    finish(connection, job, "cancelled" if job.error is None else "failed", now)


def has_expired(connection: Connection, now: float) -> bool:
    """Return True if `expire_leases` would find expired leases; reads without a lock."""
    return bool(_expired(connection, now))


def expire_leases(connection: Connection, now: float, backoff: Backoff = DEFAULT_BACKOFF) -> int:
    """Record expired leases as failures, and return their number."""
    count = 0
    for held in _expired(connection, now):
        lock_job(connection, held.job_id)
        if _is_over(connection, held, now):  # check again: possibly renewed while waiting for the lock
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
