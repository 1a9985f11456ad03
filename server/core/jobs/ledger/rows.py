"""Rows of the ledger: jobs, tasks and claims, and shared steps of transitions.

Every change of a job or task locks the row of the job first: the last two tasks cannot both miss the end,
and events are numbered in commit order.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from sqlalchemy import (
    ColumnElement,
    Connection,
    Row,
    Select,
    case,
    delete,
    func,
    insert,
    null,
    select,
    update,
)

from dcp.server.core.problems import NotFoundError
from dcp.server.database.documents import ensure_document
from dcp.server.database.mapping import record_of_row
from dcp.server.database.tables import job_events, jobs, roots, tasks
from dcp.server.records.declaring import moment
from dcp.server.records.jobs import FINAL_STATES, Job, JobEvent, JobProgress, JobState, JobTask

Json = Mapping[str, Any]
"""A JSON object."""

Phase = Literal["plan", "task", "publish", "discard"]
"""Claimable phases: planning, a task, publishing, and clean-up of an abandoned job."""

MAX_DEDUP_KEY_CHARACTERS: Final = 100


class StaleFenceError(Exception):
    """The claim is invalid: another worker took the work after the lease, or the work is complete.

    The refused call wrote nothing, and the worker must not repeat it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job to submit. A higher ``priority`` (-100 to 100) runs first.

    Limits count the account ``owner`` and the key ``key_id``; without an owner the job belongs to the
    service. ``root`` is the written root, or else the read one. ``checkpoint_id`` is the main checkpoint,
    ``subjects`` are further ones, ``other_roots`` further read roots: only keys that see all of their roots
    see the job. At most one unfinished job has a given ``dedup_key``. ``result_key`` (default: ``dedup_key``)
    finds the last of jobs whose results replace each other.
    """

    kind: str
    params: Json
    created_by: str
    owner: str | None = None
    key_id: int | None = None
    priority: int = 0
    root: str | None = None
    checkpoint_id: int | None = None
    subjects: Sequence[int] = ()
    other_roots: Sequence[str] = ()
    dedup_key: str | None = None
    result_key: str | None = None
    max_attempts: int = 3
    not_before_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One task of a plan. ``payload`` extends the shared data; ``weight_bytes`` is the share of the
    progress."""

    payload: Json
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Held:
    """The name of a claim for renewals; ``task_id`` is None for phases of the job."""

    job_id: int
    task_id: int | None
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Work of a worker during a lease."""

    phase: Phase
    job: Job
    task: JobTask | None
    fence: int

    @property
    def held(self) -> Held:
        """The name of the claim."""
        return Held(self.job.id, None if self.task is None else self.task.id, self.fence)


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pause after failed attempt n: doubled each time, with up to half more by task to spread
    repetitions.

    ``patience_seconds`` bounds consecutive environmental failures.
    """

    first_seconds: float = 2.0
    most_seconds: float = 300.0
    patience_seconds: float = 86_400.0

    def seconds(self, attempt: int, salt: int = 0) -> float:
        """Return the pause; ``attempt`` counts from 1."""
        plain = min(self.most_seconds, self.first_seconds * 2.0 ** min(attempt - 1, 30))
        return plain * (1.0 + (zlib.crc32(f"{salt}/{attempt}".encode()) % 1000) / 2000.0)


NO_LEASE: Final[dict[str, Any]] = {"lease_owner": None, "lease_until_seconds": None}
NEXT_PHASE: Final[dict[str, Any]] = {
    "attempt": 0,
    "not_before_seconds": 0.0,
    "waiting": null(),
    **NO_LEASE,
}
"""Column values of a job whose next phase can be claimed."""
_TASK_COLUMNS: Final = [column for column in tasks.c if column is not tasks.c.result]
_MAX_RESULT_BYTES: Final = 2048
_MAX_VALUE_BYTES: Final = 256


def select_jobs() -> Select[Any]:
    """Select jobs with root names, without the large plans."""
    columns = [column for column in jobs.c if column is not jobs.c.plan]
    named = select(*columns, roots.c.name.label("root"))
    return named.outerjoin_from(jobs, roots, jobs.c.root_id == roots.c.id)


def select_tasks() -> Select[Any]:
    """Select tasks with progress, without payloads and results."""
    return select(*(null().label(one.name) if one.name == "payload" else one for one in _TASK_COLUMNS))


def by_priority(query: Select[Any]) -> Select[Any]:
    """Select jobs of one state by descending priority, along the index of both columns."""
    return query.order_by(jobs.c.state.desc(), jobs.c.priority.desc())


def is_planned() -> ColumnElement[bool]:
    """Return the condition that all tasks are written."""
    return select(jobs.c.id).where(jobs.c.id == tasks.c.job_id, jobs.c.state != "planning").exists()


def job_of_row(row: Row[Any]) -> Job:
    """Return the job of a row of `select_jobs`."""
    return record_of_row(
        Job,
        row,
        not_before=moment(row.not_before_seconds) if row.not_before_seconds else None,
        is_result_whole=row.document_id is None,
        is_unserved=False,  # set by `with_offers`
    )


def task_of_row(row: Row[Any]) -> JobTask:
    """Return the task of a row of `select_tasks`."""
    not_before = moment(row.not_before_seconds) if row.not_before_seconds else None
    return record_of_row(JobTask, row, not_before=not_before, payload=row.payload or {})


def event_of_row(row: Row[Any]) -> JobEvent:
    """Return the event of a row of ``job_events``."""
    return record_of_row(JobEvent, row)


def lock_job(connection: Connection, job_id: int) -> Job:
    """Return the job, locked until the transaction ends. Raises NotFoundError."""
    connection.execute(select(jobs.c.id).where(jobs.c.id == job_id).with_for_update())
    row = connection.execute(select_jobs().where(jobs.c.id == job_id)).one_or_none()
    if row is None:
        raise NotFoundError(f"job {job_id} not found")
    return job_of_row(row)


def unfinished_job(connection: Connection, dedup_key: str | None) -> int | None:
    """Return the id of the unfinished job with this key."""
    query = select(jobs.c.id).where(jobs.c.dedup_key == dedup_key, jobs.c.finished_seconds.is_(None))
    return connection.execute(query).scalar_one_or_none()


def _locked(connection: Connection, held: Held) -> Job:
    try:
        return lock_job(connection, held.job_id)
    except NotFoundError as error:
        raise StaleFenceError(f"job {held.job_id} no longer exists") from error


def held_job(connection: Connection, held: Held) -> Job:
    """Return the locked job of a valid claim. Raises StaleFenceError."""
    job = _locked(connection, held)
    lease = connection.execute(select(jobs.c.fence, jobs.c.lease_owner).where(jobs.c.id == job.id)).one()
    if lease.lease_owner is None or lease.fence != held.fence:
        raise StaleFenceError(f"job {job.id}: the claim {held.fence} has ended; the job is at {lease.fence}")
    return job


def held_task(connection: Connection, held: Held) -> tuple[Job, JobTask]:
    """Return the locked job and the task of a valid claim. Raises StaleFenceError."""
    job = _locked(connection, held)
    row = connection.execute(select_tasks().where(tasks.c.id == held.task_id)).one_or_none()
    if (
        row is None
        or row.job_id != job.id
        or row.state != "running"
        or row.lease_owner is None
        or row.fence != held.fence
    ):
        raise StaleFenceError(f"task {held.task_id} of job {held.job_id}: the claim {held.fence} has ended")
    return job, task_of_row(row)


def set_job(connection: Connection, job_id: int, **values: Any) -> None:
    """Set columns of a job."""
    connection.execute(update(jobs).where(jobs.c.id == job_id).values(**values))


def set_task(connection: Connection, task_id: int, **values: Any) -> None:
    """Set columns of a task."""
    connection.execute(update(tasks).where(tasks.c.id == task_id).values(**values))


def release_phase(connection: Connection, job: Job, **values: Any) -> None:
    """End the lease of an incomplete phase; planning starts again."""
    if job.state == "planning":
        values["state"] = "queued"
        forget_tasks(connection, job)
    set_job(connection, job.id, **values, **NO_LEASE)


def forget_tasks(connection: Connection, job: Job, first: int = 0) -> None:
    """Delete tasks from number ``first`` on, before another plan or the end."""
    connection.execute(delete(tasks).where(tasks.c.job_id == job.id, tasks.c.number >= first))


def emit(connection: Connection, job_id: int, event: str, now: float, **data: Any) -> None:
    """Write an event."""
    connection.execute(insert(job_events).values(job_id=job_id, kind=event, data=data, at_seconds=now))


def finish(
    connection: Connection,
    job: Job,
    state: JobState,
    now: float,
    *,
    result: Json | None = None,
    document: int | None = None,
) -> None:
    """End the job and cancel its remaining tasks. ``document``: the prepared large result."""
    if state not in FINAL_STATES:
        raise ValueError(f"{state} is not a final state")
    connection.execute(
        update(tasks)
        .where(tasks.c.job_id == job.id, tasks.c.state.in_(("queued", "running")))
        .values(state="cancelled", **NO_LEASE)
    )
    values = {"state": state, "finished_seconds": now, "is_ending": False, **NO_LEASE}
    values |= {"progress": _progress_document(connection, job.id), "waiting": null()}
    if result is not None:
        values["result"] = short_result(result)
        if is_large(result):
            values["document_id"] = ensure_document(connection, result, document)
            # The plan may contain all task results, which are stored elsewhere.
            nothing = {"result": null(), "document_id": None}
            connection.execute(update(tasks).where(tasks.c.job_id == job.id).values(**nothing))
    set_job(connection, job.id, **values)
    emit(connection, job.id, "state", now, state=state, error=job.error and asdict(job.error))


def short_result(result: Json) -> dict[str, Any]:
    """Return the part of a result shown in lists: a small result, or the short members of a large one."""
    sizes = {name: _size(value) for name, value in result.items()}
    if sum(len(name) + size for name, size in sizes.items()) <= _MAX_RESULT_BYTES:
        return dict(result)
    return {name: value for name, value in result.items() if sizes[name] <= _MAX_VALUE_BYTES}


def is_large(result: Json) -> bool:
    """Return True for a result stored as a document."""
    return len(short_result(result)) < len(result)


def _size(value: Any) -> int:
    if isinstance(value, str | list | tuple | dict) and len(value) > _MAX_RESULT_BYTES:
        return len(value)
    return len(json.dumps(value))


def progress_of(connection: Connection, job_ids: Iterable[int]) -> dict[int, JobProgress]:
    """Return the current progress by job, without jobs that have no tasks or are being planned."""
    is_done = tasks.c.state == "succeeded"
    query = (
        select(
            tasks.c.job_id,
            func.count(),
            func.sum(case((is_done, 1), else_=0)),
            func.sum(tasks.c.weight_bytes),
            func.sum(case((is_done, tasks.c.weight_bytes), else_=tasks.c.done_bytes)),
        )
        .where(tasks.c.job_id.in_(list(job_ids)), is_planned())
        .group_by(tasks.c.job_id)
    )
    return {
        job_id: JobProgress(
            done_tasks=int(done),
            total_tasks=int(total),
            done_bytes=min(int(done_bytes), int(total_bytes)),
            total_bytes=int(total_bytes),
        )
        for job_id, total, done, total_bytes, done_bytes in connection.execute(query)
    }


def _progress_document(connection: Connection, job_id: int) -> Any:
    """Return the final progress of a job; SQL NULL without tasks."""
    progress = progress_of(connection, (job_id,)).get(job_id)
    return null() if progress is None else asdict(progress)
