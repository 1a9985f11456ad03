"""The durable ledger of jobs: each is completed once, whoever dies meanwhile.

queued -> planning -> running (its tasks) -> publishing -> succeeded, failed or cancelled.

Each function is a step of one transaction of the caller's. Whoever completes something names the claim under
which it was done; if that is not valid any more, StaleFenceError, and nothing changes. A job that was
cancelled or has failed is *ending*: none of its tasks is claimed any more, those that run are stopped, then
what they left is discarded, and what its plans left, too; only then it is over. Publishing cannot be
cancelled once it has begun, because nobody could say any more whether it took place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Connection, delete, func, insert, null, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from dcp.server.database.tables import jobs, roots, tasks
from dcp.server.jobs.ledger_claims import NO_LIMITS, Limits, claim, has_work, renew, stopped
from dcp.server.jobs.ledger_reading import (
    JobFilter,
    find_job,
    get_job,
    job_events_after,
    list_jobs,
    list_tasks,
)
from dcp.server.jobs.ledger_rows import (
    NO_LEASE,
    by_priority,
    emit,
    finish,
    held_job,
    held_task,
    lock_job,
    progress_of,
)
from dcp.server.jobs.states import (
    MAX_DEDUP_KEY_CHARACTERS,
    Backoff,
    Claim,
    Held,
    Job,
    JobError,
    JobEvent,
    JobSpec,
    Json,
    Progress,
    StaleFenceError,
    Task,
    TaskSpec,
)
from dcp.server.problems import ConflictError, NotFoundError

__all__ = [
    "DEFAULT_BACKOFF",
    "NO_LIMITS",
    "Backoff",
    "Claim",
    "Held",
    "Job",
    "JobError",
    "JobEvent",
    "JobFilter",
    "JobSpec",
    "Limits",
    "Progress",
    "StaleFenceError",
    "Task",
    "TaskSpec",
    "claim",
    "complete_discard",
    "complete_plan",
    "complete_publish",
    "complete_task",
    "expire_leases",
    "fail",
    "find_job",
    "get_job",
    "has_expired",
    "has_work",
    "job_events_after",
    "list_jobs",
    "list_tasks",
    "progress_of",
    "release",
    "renew",
    "request_cancel",
    "retry",
    "stopped",
    "submit",
    "submit_or_join",
]

DEFAULT_BACKOFF: Final = Backoff()
_FENCE_SHIFT: Final = 20
_MOST_EXPIRED: Final = 1000
_LOST: Final = JobError(type="WorkerLostError", detail="the worker that had it was not heard of any more")


def submit(connection: Connection, spec: JobSpec, now: float) -> int:
    """The id of the new job, or of the unfinished one with the same ``dedup_key``."""
    return submit_or_join(connection, spec, now)[0]


def submit_or_join(connection: Connection, spec: JobSpec, now: float) -> tuple[int, bool]:
    """The id, and whether it is a new job. Raises NotFoundError if there is no such root."""
    if spec.dedup_key is not None and len(spec.dedup_key) > MAX_DEDUP_KEY_CHARACTERS:
        raise ValueError(f"a dedup_key has at most {MAX_DEDUP_KEY_CHARACTERS} characters")
    values = {
        "kind": spec.kind,
        "state": "queued",
        "priority": spec.priority,
        "params": dict(spec.params),
        "root_id": _root_id(connection, spec.root),
        "checkpoint_id": spec.checkpoint_id,
        "created_by": spec.created_by,
        "created_seconds": now,
        "not_before_seconds": spec.not_before_seconds,
        "max_attempts": spec.max_attempts,
        "dedup_key": spec.dedup_key,
    }
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    while True:  # until there is no job with that key, or one that does not end in this instant
        new = connection.execute(
            dialect.insert(jobs).values(**values).on_conflict_do_nothing().returning(jobs.c.id)
        ).scalar_one_or_none()
        if new is not None:
            emit(connection, new, "submitted", now, kind=spec.kind, created_by=spec.created_by)
            return int(new), True
        query = select(jobs.c.id).where(jobs.c.dedup_key == spec.dedup_key)
        if (joined := connection.execute(query).scalar_one_or_none()) is not None:
            return int(joined), False


def _root_id(connection: Connection, name: str | None) -> int | None:
    if name is None:
        return None
    found = connection.execute(select(roots.c.id).where(roots.c.name == name)).scalar_one_or_none()
    if found is None:
        raise NotFoundError(f"there is no root {name!r}")
    return int(found)


# -- what is done --------------------------------------------------------------------------------------------


def complete_plan(
    connection: Connection, held: Held, plan_data: Json, specs: Sequence[TaskSpec], now: float
) -> None:
    """The job's tasks may be claimed; without any it is published next."""
    job = held_job(connection, held)
    if job.is_ending:
        _clear_away(connection, job, plan=dict(plan_data))
        return
    if specs:
        # Higher than all fences of earlier plans: a row's number may be given out again, a claim never.
        first_fence = held.fence << _FENCE_SHIFT
        rows = [
            {
                "job_id": job.id,
                "number": number,
                "state": "queued",
                "payload": dict(spec.payload),
                "weight_bytes": spec.weight_bytes,
                "fence": first_fence,
            }
            for number, spec in enumerate(specs)
        ]
        connection.execute(insert(tasks), rows)
    _move(connection, job, "running" if specs else "publishing", now, plan=dict(plan_data), tasks=len(specs))


def complete_task(connection: Connection, held: Held, result: Json, now: float) -> None:
    """One task is done; behind the last one the job is published."""
    job, task = held_task(connection, held)
    connection.execute(
        update(tasks)
        .where(tasks.c.id == task.id)
        .values(
            state="succeeded", result=dict(result), done_bytes=task.weight_bytes, error=null(), **NO_LEASE
        )
    )
    left = select(func.count()).where(tasks.c.job_id == job.id, tasks.c.state != "succeeded")
    if not job.is_ending and connection.execute(left).scalar_one() == 0:
        _move(connection, job, "publishing", now)


def complete_publish(connection: Connection, held: Held, result: Json, now: float) -> Job:
    """The job has succeeded; what `Kind.record` writes belongs into the same transaction."""
    job = held_job(connection, held)
    if job.state != "publishing" or job.is_ending:
        raise StaleFenceError(f"job {job.id} is not being published")
    finish(connection, job, "succeeded", now, result=result)
    return lock_job(connection, job.id)


def complete_discard(connection: Connection, held: Held, now: float) -> None:
    """Nothing is left of the job that was given up: it is over."""
    _give_up(connection, held_job(connection, held), now)


def _give_up(connection: Connection, job: Job, now: float) -> None:
    if not job.is_ending:
        raise StaleFenceError(f"job {job.id} was not given up")
    finish(connection, job, "cancelled" if job.error is None else "failed", now)


def _move(connection: Connection, job: Job, state: str, now: float, **found: Any) -> None:
    values: dict[str, Any] = {"state": state, "attempt": 0, "not_before_seconds": 0.0, **NO_LEASE}
    event: dict[str, Any] = {"state": state}
    if "plan" in found:
        values["plan"] = found["plan"]
        event["tasks"] = found["tasks"]
    connection.execute(update(jobs).where(jobs.c.id == job.id).values(**values))
    emit(connection, job.id, "state", now, **event)


# -- what failed ---------------------------------------------------------------------------------------------


def fail(
    connection: Connection, held: Held, error: JobError, now: float, backoff: Backoff = DEFAULT_BACKOFF
) -> None:
    """It did not work: it is tried again later, or the job is given up."""
    if held.task_id is None:
        _fail_phase(connection, held_job(connection, held), error, now, backoff)
    else:
        _fail_task(connection, *held_task(connection, held), error, now, backoff)


def _fail_task(
    connection: Connection, job: Job, task: Task, error: JobError, now: float, backoff: Backoff
) -> None:
    attempt = task.attempt + 1
    values: dict[str, Any] = {"attempt": attempt, "error": error.document(), "done_bytes": 0, **NO_LEASE}
    if job.is_ending:
        values["state"] = "cancelled"
    elif error.is_retryable and attempt < job.max_attempts:
        delay = backoff.seconds(attempt, task.id)
        values |= {"state": "queued", "not_before_seconds": now + delay}
        _tell_retry(connection, job, error, now, delay, task=task.number, attempt=attempt)
    else:
        values["state"] = "failed"
        _end(connection, job, error, now, task=task.number)
    connection.execute(update(tasks).where(tasks.c.id == task.id).values(**values))


def _fail_phase(connection: Connection, job: Job, error: JobError, now: float, backoff: Backoff) -> None:
    attempt = job.attempt + 1
    is_last = attempt >= job.max_attempts or not error.is_retryable
    if error is _LOST and job.state == "publishing" and not job.is_ending:
        # Nobody knows whether it is published: only another attempt finds out, so this is never the last.
        attempt, is_last = max(1, min(attempt, job.max_attempts - 1)), False
    if job.is_ending and job.state == "planning":
        _clear_away(connection, job)
    elif job.is_ending and is_last:
        emit(connection, job.id, "discard_failed", now, error=error.document())
        _give_up(connection, job, now)
    elif not is_last:
        delay = backoff.seconds(attempt, job.id)
        values: dict[str, Any] = {"attempt": attempt, "not_before_seconds": now + delay, **NO_LEASE}
        if job.state == "planning":
            values["state"] = "queued"
        connection.execute(update(jobs).where(jobs.c.id == job.id).values(**values))
        _tell_retry(connection, job, error, now, delay, state=job.state, attempt=attempt)
    else:
        _end(connection, job, error, now)
        if job.state == "planning":
            _clear_away(connection, job)


def _clear_away(connection: Connection, job: Job, **found: Any) -> None:
    """An ending job whose plan has begun, and may have left something: it is discarded as one that runs."""
    values: dict[str, Any] = {"state": "running", "attempt": 0, "not_before_seconds": 0.0, **NO_LEASE}
    connection.execute(update(jobs).where(jobs.c.id == job.id).values(**values, **found))


def _end(connection: Connection, job: Job, error: JobError, now: float, **where: Any) -> None:
    document = error.document() | where
    values: dict[str, Any] = {"error": document, "attempt": 0, "not_before_seconds": 0.0, **NO_LEASE}
    connection.execute(update(jobs).where(jobs.c.id == job.id).values(**values))
    emit(connection, job.id, "ending", now, error=document)


def _tell_retry(
    connection: Connection, job: Job, error: JobError, now: float, delay: float, **where: Any
) -> None:
    emit(connection, job.id, "retry", now, error=error.document(), delay_seconds=round(delay, 3), **where)


def has_expired(connection: Connection, now: float) -> bool:
    """Whether `expire_leases` would find something: asked without a lock."""
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


def release(connection: Connection, held: Held, now: float) -> None:
    """Give a claim back that was stopped, by no fault of its own: it counts as no attempt."""
    if held.task_id is not None:
        job, task = held_task(connection, held)
        state = "cancelled" if job.is_ending else "queued"
        connection.execute(
            update(tasks).where(tasks.c.id == task.id).values(state=state, done_bytes=0, **NO_LEASE)
        )
        return
    job = held_job(connection, held)
    if job.state == "planning" and job.is_ending:
        _clear_away(connection, job)
        return
    state = "queued" if job.state == "planning" else job.state
    values: dict[str, Any] = {"state": state, **NO_LEASE}
    if job.state == "publishing" and not job.is_ending:
        values["attempt"] = max(job.attempt, 1)  # it counts as begun, and is not cancelled any more
    connection.execute(update(jobs).where(jobs.c.id == job.id).values(**values))
    if state != job.state:
        emit(connection, job.id, "state", now, state=state)


# -- what is asked for ---------------------------------------------------------------------------------------


def request_cancel(connection: Connection, job_id: int, now: float, actor: str) -> Job:
    """Stop it: at once if nothing was begun, else as soon as the workers hear of it.

    A job that is being stopped or was cancelled already is left as it is. Raises ConflictError if it has
    ended otherwise, or if publishing has begun.
    """
    job = lock_job(connection, job_id)
    if job.state == "cancelled" or job.is_ending:
        return job
    if job.is_final:
        raise ConflictError(f"job {job_id} has {job.state} already", state=job.state)
    lease = connection.execute(select(jobs.c.lease_owner).where(jobs.c.id == job_id)).scalar_one()
    if job.state == "publishing" and (lease is not None or job.attempt > 0):
        raise ConflictError(f"job {job_id} is being published, which is not stopped", state=job.state)
    connection.execute(update(jobs).where(jobs.c.id == job_id).values(cancel_seconds=now))
    emit(connection, job_id, "cancel_requested", now, actor=actor)
    if job.state == "queued" and job.started_seconds is None:
        finish(connection, replace(job, cancel_seconds=now), "cancelled", now)
    elif job.state == "queued":
        _clear_away(connection, job)
    return lock_job(connection, job_id)


def retry(connection: Connection, job_id: int, now: float, actor: str) -> Job:
    """Begin a failed or cancelled job anew, from its plan on.

    Raises ConflictError if it has not ended so, or if another job does the same by now.
    """
    job = lock_job(connection, job_id)
    if job.state not in ("failed", "cancelled"):
        raise ConflictError(f"job {job_id} is {job.state}; only failed and cancelled ones are retried")
    if job.dedup_key is not None:
        other = connection.execute(select(jobs.c.id).where(jobs.c.dedup_key == job.dedup_key)).scalar()
        if other is not None:
            raise ConflictError(f"job {other} does the same", job_id=other)
    connection.execute(delete(tasks).where(tasks.c.job_id == job_id))
    nothing = dict.fromkeys(("plan", "progress", "result", "error"), null())
    anew: dict[str, Any] = {"state": "queued", "attempt": 0, "not_before_seconds": 0.0, **nothing}
    anew |= {"finished_seconds": None, "cancel_seconds": None, "dedup_key": job.dedup_key}
    try:
        connection.execute(update(jobs).where(jobs.c.id == job_id).values(**anew))
    except IntegrityError as error:  # one was submitted in this instant
        raise ConflictError("another job does the same") from error
    emit(connection, job_id, "state", now, state="queued", retried_by=actor)
    return lock_job(connection, job_id)
