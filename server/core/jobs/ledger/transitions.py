"""Transitions of a job: submit, plan, complete, publish, release, cancel, retry.

queued -> planning -> running (its tasks) -> publishing -> succeeded, failed or cancelled.

Each function is a step within a transaction of the caller. Completions name their claim; an invalid claim
raises StaleFenceError without changes. A cancelled or failed job is *ending*: no task is claimed, running
tasks are stopped, the output of tasks and plans is discarded, and then the job ends. Publishing cannot be
cancelled, because the outcome would be unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, func, insert, literal, null, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError

from dcp.server.core.allowances import SERVICE
from dcp.server.core.jobs.ledger.failures import (
    clear_away,
    give_up,
)
from dcp.server.core.jobs.ledger.rows import (
    MAX_DEDUP_KEY_CHARACTERS,
    NEXT_PHASE,
    NO_LEASE,
    Held,
    JobSpec,
    Json,
    StaleFenceError,
    TaskSpec,
    emit,
    finish,
    forget_tasks,
    held_job,
    held_task,
    is_large,
    lock_job,
    release_phase,
    set_job,
    set_task,
    unfinished_job,
)
from dcp.server.core.problems import ConflictError, NotFoundError
from dcp.server.database.documents import ensure_document
from dcp.server.database.engine import Encoded
from dcp.server.database.mapping import document_of
from dcp.server.database.tables import checkpoints, job_roots, jobs, roots, tasks
from dcp.server.records.declaring import moment
from dcp.server.records.jobs import Job, JobWaiting

_FENCE_SHIFT: Final = 20


def submit(connection: Connection, spec: JobSpec, now: float) -> int:
    """Return the id of the new job, or of the unfinished one with the same ``dedup_key``."""
    return submit_or_join(connection, spec, now)[0]


def submit_behind(connection: Connection, spec: JobSpec, now: float) -> int:
    """Submit like `submit`, but never join a begun job, which may have read outdated data.

    Such a job is followed by one more, shared by all later submissions.
    """
    behind = spec
    while True:
        number, is_new = submit_or_join(connection, behind, now)
        waits = (jobs.c.id == number) & (jobs.c.state == "queued") & ~jobs.c.is_ending
        if is_new or connection.execute(select(jobs.c.id).where(waits)).first() is not None:
            return number
        behind = replace(spec, dedup_key=f"{spec.dedup_key}:{number}")


def submit_or_join(connection: Connection, spec: JobSpec, now: float) -> tuple[int, bool]:
    """Return the id, and True for a new job. Raises NotFoundError for an unknown root."""
    if spec.dedup_key is not None and len(spec.dedup_key) > MAX_DEDUP_KEY_CHARACTERS:
        raise ValueError(f"a dedup_key may have at most {MAX_DEDUP_KEY_CHARACTERS} characters")
    root_id = _root_id(connection, spec.root)
    owner = spec.owner or f"{SERVICE}{spec.created_by}"
    values = {
        "kind": spec.kind,
        "state": "queued",
        "priority": spec.priority,
        "params": dict(spec.params),
        "root_id": root_id,
        "checkpoint_id": spec.checkpoint_id,
        "created_by": spec.created_by,
        "owner": owner,
        "key_id": spec.key_id,
        "created_seconds": now,
        "not_before_seconds": spec.not_before_seconds,
        "max_attempts": spec.max_attempts,
        "dedup_key": spec.dedup_key,
        "result_key": spec.result_key or spec.dedup_key,
        "turn": _turn(connection, owner, root_id, spec.priority, now),
    }
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    while True:  # until no unfinished job has the key, or only an ending one
        new = connection.execute(
            dialect.insert(jobs).values(**values).on_conflict_do_nothing().returning(jobs.c.id)
        ).scalar_one_or_none()
        if new is not None:
            _note_roots(connection, new, root_id, spec)
            emit(connection, new, "submitted", now, kind=spec.kind, created_by=spec.created_by)
            return int(new), True
        if (joined := unfinished_job(connection, spec.dedup_key)) is not None:
            return joined, False


def _note_roots(connection: Connection, job_id: int, root_id: int | None, spec: JobSpec) -> None:
    named = {*spec.subjects, spec.checkpoint_id} - {None}
    if not named and not spec.other_roots:
        return
    within = select(checkpoints.c.root_id).where(checkpoints.c.id.in_(named))
    is_named = or_(roots.c.id.in_(within), roots.c.name.in_(spec.other_roots))
    others = select(literal(job_id), roots.c.id).where(is_named, roots.c.id.is_distinct_from(root_id))
    connection.execute(insert(job_roots).from_select(["job_id", "root_id"], others))


def _turn(connection: Connection, owner: str, root_id: int | None, priority: int, now: float) -> int:
    """Return the place of a new job within its priority: after the last turn of its account and root, and at
    least the current turn.

    Accounts and roots therefore take turns, however many jobs one has queued: start-time fair queuing
    (Goyal, Vin and Cheng, SIGCOMM 1996) with equal costs.
    """
    turn, is_queued = jobs.c.turn, jobs.c.state == "queued"
    is_at_work = jobs.c.state.in_(("planning", "running", "publishing"))
    is_own = jobs.c.owner == owner, jobs.c.root_id.is_not_distinct_from(root_id)

    def first(order: ColumnElement[int], *conditions: ColumnElement[bool]) -> int | None:
        query = select(turn).where(jobs.c.priority == priority, *conditions).order_by(order).limit(1)
        return connection.execute(query).scalar_one_or_none()

    now_served = first(turn.desc(), is_at_work)
    if now_served is None:
        now_served = first(turn.asc(), is_queued, jobs.c.not_before_seconds <= now) or 0
    last = first(turn.desc(), is_queued, *is_own)
    if last is None:
        last = first(turn.desc(), is_at_work, *is_own)
    return now_served if last is None else max(now_served, last + 1)


def _root_id(connection: Connection, name: str | None) -> int | None:
    if name is None:
        return None
    found = connection.execute(select(roots.c.id).where(roots.c.name == name)).scalar_one_or_none()
    if found is None:
        raise NotFoundError(f"root {name!r} not found")
    return int(found)


# -- completion ----------------------------------------------------------------------------------------------


def add_tasks(connection: Connection, held: Held, specs: Sequence[TaskSpec], first: int) -> None:
    """Add tasks of a plan from number ``first`` on; `complete_plan` makes them claimable.

    Repetition is safe, since a lost connection hides a successful write.
    """
    job = held_job(connection, held)
    forget_tasks(connection, job, first)
    # Higher than all fences of earlier plans: row numbers may be reused, claims never.
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
        for number, spec in enumerate(specs, first)
    ]
    if rows:
        connection.execute(insert(tasks), rows)


def complete_plan(
    connection: Connection,
    held: Held,
    plan_data: Json | Encoded,
    specs: Sequence[TaskSpec],
    now: float,
    after: int = 0,
) -> None:
    """Make the tasks claimable; without tasks, publish next. ``after``: number of tasks added before."""
    job = held_job(connection, held)
    plan_data = plan_data if isinstance(plan_data, Encoded) else dict(plan_data)
    if job.is_ending:
        clear_away(connection, job, plan=plan_data)
        return
    add_tasks(connection, held, specs, after)
    count = after + len(specs)
    state = "running" if count else "publishing"
    _move(connection, job, state, now, {"plan": plan_data}, tasks=count)


def complete_task(
    connection: Connection, held: Held, result: Json, now: float, document: int | None = None
) -> None:
    """Complete a task; after the last task the job is published. ``document``: see `complete_publish`."""
    job, task = held_task(connection, held)
    values: dict[str, Any] = {"result": dict(result)}
    if is_large(result):
        values = {"result": null(), "document_id": ensure_document(connection, result, document)}
    values |= {"state": "succeeded", "done_bytes": task.weight_bytes, "error": null()}
    set_task(connection, task.id, **values, **NO_LEASE)
    waiting = job.waiting
    if waiting is not None and (moment(now) >= waiting.next_attempt_at or waiting.task == task.number):
        set_job(connection, job.id, waiting=null())
    left = select(func.count()).where(tasks.c.job_id == job.id, tasks.c.state != "succeeded")
    if not job.is_ending and connection.execute(left).scalar_one() == 0:
        _move(connection, job, "publishing", now, {})


def complete_publish(
    connection: Connection, held: Held, result: Json, now: float, document: int | None = None
) -> Job:
    """Complete the job; `Kind.record` writes in the same transaction.

    ``document`` has a large result, prepared or shared with a task. Without it the result is written here,
    while other writers wait.
    """
    job = held_job(connection, held)
    if job.state != "publishing" or job.is_ending:
        raise StaleFenceError(f"job {job.id} is not being published")
    finish(connection, job, "succeeded", now, result=result, document=document)
    return lock_job(connection, job.id)


def complete_discard(connection: Connection, held: Held, now: float) -> None:
    """End an abandoned job after its clean-up."""
    give_up(connection, held_job(connection, held), now)


def _move(
    connection: Connection, job: Job, state: str, now: float, values: Mapping[str, Any], **event: Any
) -> None:
    set_job(connection, job.id, state=state, **NEXT_PHASE, **values)
    emit(connection, job.id, "state", now, state=state, **event)


# -- release, cancellation, retry ----------------------------------------------------------------------------


def release(connection: Connection, held: Held, now: float) -> None:
    """Return a stopped claim without using up an attempt."""
    if held.task_id is not None:
        job, task = held_task(connection, held)
        state = "cancelled" if job.is_ending else "queued"
        set_task(connection, task.id, state=state, done_bytes=0, **NO_LEASE)
        return
    job = held_job(connection, held)
    if job.state == "planning" and job.is_ending:
        clear_away(connection, job)
        return
    values: dict[str, Any] = {}
    if job.state == "publishing" and not job.is_ending:
        values["attempt"] = max(job.attempt, 1)  # counts as begun, so it can no longer be cancelled
    release_phase(connection, job, **values)
    if job.state == "planning":
        emit(connection, job.id, "state", now, state="queued")


def request_cancel(connection: Connection, job_id: int, now: float, actor: str) -> Job:
    """Cancel a job: at once if not begun, else when its workers notice.

    A stopping or cancelled job stays unchanged. Raises ConflictError for an ended job, and during
    publishing.
    """
    job = lock_job(connection, job_id)
    if job.state == "cancelled" or job.is_ending:
        return job
    if job.is_final:
        raise ConflictError(f"job {job_id} has {job.state} already", state=job.state)
    lease = connection.execute(select(jobs.c.lease_owner).where(jobs.c.id == job_id)).scalar_one()
    if job.state == "publishing" and (lease is not None or job.attempt > 0):
        raise ConflictError(f"job {job_id} is being published and cannot be cancelled", state=job.state)
    soon = {"is_ending": True, "cancel_requested_seconds": now, "not_before_seconds": 0.0, "waiting": null()}
    set_job(connection, job_id, **soon)
    emit(connection, job_id, "cancel_requested", now, actor=actor)
    if job.state == "queued" and job.started_at is None:
        finish(connection, job, "cancelled", now)
    elif job.state == "queued":
        clear_away(connection, job)
    return lock_job(connection, job_id)


def retry(connection: Connection, job_id: int, now: float, actor: str) -> Job:
    """Restart a failed or cancelled job from planning; a waiting job is due now.

    Raises ConflictError for other states, and if another job does the same.
    """
    job = lock_job(connection, job_id)
    if not job.is_final and job.waiting is not None:
        return _hasten(connection, job, job.waiting, now, actor)
    if job.state not in ("failed", "cancelled"):
        raise ConflictError(
            f"job {job_id} is {job.state}; only failed, cancelled and waiting jobs can be retried"
        )
    if job.dedup_key is not None:
        other = unfinished_job(connection, job.dedup_key)
        if other is not None:
            raise ConflictError(f"job {other} already does the same work", job_id=other)
    forget_tasks(connection, job)
    nothing = dict.fromkeys(("plan", "progress", "result", "document_id", "error"), null())
    nothing |= {"finished_seconds": null(), "cancel_requested_seconds": null()}
    turn = _turn(connection, job.owner, _root_id(connection, job.root), job.priority, now)
    try:
        set_job(connection, job_id, state="queued", turn=turn, **NEXT_PHASE, **nothing)
    except IntegrityError as error:  # submitted concurrently
        raise ConflictError("another job already does the same work") from error
    emit(connection, job_id, "state", now, state="queued", retried_by=actor)
    return lock_job(connection, job_id)


def _hasten(connection: Connection, job: Job, waiting: JobWaiting, now: float, actor: str) -> Job:
    due = document_of(replace(waiting, next_attempt_at=moment(now)))
    values: dict[str, Any] = {"not_before_seconds": 0.0, "waiting": due}
    set_job(connection, job.id, **values)
    queued = (tasks.c.job_id == job.id) & (tasks.c.state == "queued")
    connection.execute(update(tasks).where(queued).values(not_before_seconds=0.0))
    emit(connection, job.id, "retry", now, retried_by=actor, delay_seconds=0.0)
    return lock_job(connection, job.id)
