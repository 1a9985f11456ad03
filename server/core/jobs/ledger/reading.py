"""Queries of the ledger: jobs, tasks, progress and events; and kinds offered by workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, delete, func, or_, select

from dcp.server.catalog.cursors import query_mark, read_page
from dcp.server.core.jobs.ledger.rows import (
    Json,
    event_of_row,
    is_planned,
    job_of_row,
    progress_of,
    select_jobs,
    select_tasks,
    task_of_row,
)
from dcp.server.core.problems import NotFoundError
from dcp.server.core.security.principal import SYSTEM
from dcp.server.database.documents import read_document
from dcp.server.database.engine import insert_or_update
from dcp.server.database.tables import job_events, job_roots, jobs, roots, tasks, workers
from dcp.server.records.jobs import Job, JobEvent, JobProgress, JobState, JobTask
from dcp.server.records.lists import Page

_SHOWN: Final = 100
"""Maximum jobs whose progress is shown together."""
NOTE_SECONDS: Final = 15.0
_GONE_SECONDS: Final = 60.0
"""Age of the last note after which a worker counts as ended; workers write every `NOTE_SECONDS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Filter of jobs. ``checkpoint_id``: jobs of this checkpoint. ``own_scans``: include automatic scans."""

    states: frozenset[JobState] = frozenset()
    kinds: frozenset[str] = frozenset()
    root: str | None = None
    checkpoint_id: int | None = None
    created_by: str | None = None
    own_scans: bool = True


def get_job(connection: Connection, job_id: int, visible: frozenset[str] | None = None) -> Job:
    """Return the job. Raises NotFoundError unless all roots of the job are ``visible``."""
    job = find_job(connection, job_id, visible)
    if job is None:
        raise NotFoundError(f"job {job_id} not found")
    return job


def find_job(
    connection: Connection, job_id: int, visible: frozenset[str] | None = None, *, whole: bool = True
) -> Job | None:
    """Return the job like `get_job`, or None. Unless ``whole``, large results have only short members."""
    query = select_jobs().where(jobs.c.id == job_id, *_seen(visible))
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    job = job_of_row(row)
    if job.document_id is None or not whole:
        return job
    return replace(job, result=read_document(connection, job.document_id), is_result_whole=True)


def last_job(
    connection: Connection,
    result_key: str,
    visible: frozenset[str] | None = None,
    *,
    succeeded: bool = False,
    whole: bool = False,
) -> Job | None:
    """Return the newest visible job with this key, optionally the newest that ``succeeded``; ``whole`` as in
    `find_job`."""
    query = select(jobs.c.id).outerjoin_from(jobs, roots, roots.c.id == jobs.c.root_id)
    query = query.where(jobs.c.result_key == result_key, *_seen(visible))
    if succeeded:
        query = query.where(jobs.c.state == "succeeded")
    number = connection.execute(query.order_by(jobs.c.id.desc()).limit(1)).scalar()
    return None if number is None else find_job(connection, number, visible, whole=whole)


def other_roots(connection: Connection, job_id: int) -> list[str]:
    """Return the roots of the checkpoints of a job, without its own root."""
    query = select(roots.c.name).join(job_roots, job_roots.c.root_id == roots.c.id)
    return list(connection.execute(query.where(job_roots.c.job_id == job_id)).scalars())


def list_jobs(
    connection: Connection,
    wanted: JobFilter = JobFilter(),
    visible: frozenset[str] | None = None,
    *,
    mark: str = "jobs",
    cursor: str | None = None,
    limit: int = 50,
) -> Page[Job]:
    """Return a page of jobs, newest first. Large results have only short members."""
    any_of = ((jobs.c.state, wanted.states), (jobs.c.kind, wanted.kinds))
    equal = (
        (roots.c.name, wanted.root),
        (jobs.c.checkpoint_id, wanted.checkpoint_id),
        (jobs.c.created_by, wanted.created_by),
    )
    query = select_jobs().where(
        *_seen(visible),
        *_wanted_scans(wanted.own_scans),
        *(column.in_(sorted(values)) for column, values in any_of if values),
        *(column == value for column, value in equal if value is not None),
    )
    key = jobs.c.id, int
    return read_page(connection, query, job_of_row, mark, key, cursor=cursor, limit=limit, descending=True)


def list_tasks(
    connection: Connection, job_id: int, *, cursor: str | None = None, limit: int = 100
) -> Page[JobTask]:
    """Return a page of the tasks of a job with their progress, by number; empty before planning."""
    query = select_tasks().where(tasks.c.job_id == job_id, is_planned())
    mark, key = query_mark("tasks", job_id), (tasks.c.number, int)
    return read_page(connection, query, task_of_row, mark, key, cursor=cursor, limit=limit)


def plan_of(connection: Connection, job_id: int) -> Json | None:
    """Return the plan for publishing; None before planning."""
    found: Json | None = connection.execute(select(jobs.c.plan).where(jobs.c.id == job_id)).scalar()
    return found


def payload_of(connection: Connection, task: JobTask) -> Json:
    """Return the payload of a claimed task with the shared data of the plan."""
    shared = connection.execute(select(jobs.c.plan["shared"]).where(jobs.c.id == task.job_id)).scalar()
    return {**(shared or {}), **task.payload}


def task_results(connection: Connection, job_id: int) -> tuple[Json, ...]:
    """Return the results of the tasks in order, for publishing. They may be large: read them outside of
    short transactions."""
    query = select(tasks.c.result, tasks.c.document_id).where(tasks.c.job_id == job_id)
    return tuple(
        row.result or {} if row.document_id is None else read_document(connection, row.document_id)
        for row in connection.execute(query.order_by(tasks.c.number)).all()
    )


def task_documents(connection: Connection, job_id: int) -> list[int | None]:
    """Return the documents of `task_results`; None for small results."""
    query = select(tasks.c.document_id).where(tasks.c.job_id == job_id).order_by(tasks.c.number)
    return list(connection.execute(query).scalars())


def job_events_after(
    connection: Connection, job_id: int, after_id: int = 0, *, limit: int = 500
) -> Sequence[JobEvent]:
    """Return events of the job after the event ``after_id``, in order."""
    query = (
        select(job_events)
        .where(job_events.c.job_id == job_id, job_events.c.id > after_id)
        .order_by(job_events.c.id)
        .limit(limit)
    )
    return [event_of_row(row) for row in connection.execute(query)]


def latest_events(
    connection: Connection, job_id: int, *, cursor: str | None = None, limit: int = 100
) -> Page[JobEvent]:
    """Return a page of the events of a job, newest first."""
    query = select(job_events).where(job_events.c.job_id == job_id)
    mark, key = query_mark("log", job_id), (job_events.c.id, int)
    return read_page(connection, query, event_of_row, mark, key, cursor=cursor, limit=limit, descending=True)


def tasks_begun_seconds(connection: Connection, job_id: int) -> float | None:
    """Return the last start of the tasks of the job, or None."""
    begun = job_events.c.data["state"].as_string() == "running"
    query = select(job_events.c.at_seconds).where(
        job_events.c.job_id == job_id, job_events.c.kind == "state", begun
    )
    return connection.execute(query.order_by(job_events.c.id.desc()).limit(1)).scalar()


def last_event_id(connection: Connection) -> int:
    """Return the number of the last event of any job; 0 without events."""
    return connection.execute(select(func.max(job_events.c.id))).scalar() or 0


def all_events_after(
    connection: Connection,
    after_id: int,
    visible: frozenset[str] | None = None,
    *,
    own_scans: bool = False,
    limit: int = 500,
) -> Sequence[JobEvent]:
    """Return events of visible jobs after ``after_id`` by id. On PostgreSQL events of several jobs may
    appear out of order."""
    query = select(job_events).join_from(job_events, jobs, jobs.c.id == job_events.c.job_id)
    query = query.outerjoin(roots, roots.c.id == jobs.c.root_id)
    query = query.where(job_events.c.id > after_id, *_seen(visible), *_wanted_scans(own_scans))
    return [event_of_row(row) for row in connection.execute(query.order_by(job_events.c.id).limit(limit))]


def active_progress(
    connection: Connection,
    visible: frozenset[str] | None = None,
    *,
    own_scans: bool = False,
) -> dict[int, JobProgress]:
    """Return the progress of the newest visible jobs with running tasks."""
    query = select(jobs.c.id).outerjoin_from(jobs, roots, roots.c.id == jobs.c.root_id)
    query = query.where(jobs.c.state == "running", *_seen(visible), *_wanted_scans(own_scans))
    numbers = connection.execute(query.order_by(jobs.c.id.desc()).limit(_SHOWN)).scalars().all()
    return progress_of(connection, numbers)


def _wanted_scans(own_scans: bool) -> list[ColumnElement[Any]]:
    return [] if own_scans else [or_(jobs.c.kind != "scan", jobs.c.created_by != SYSTEM.name)]


def _seen(visible: frozenset[str] | None) -> list[ColumnElement[Any]]:
    """Restrict jobs, outer-joined with their roots, to visible ones."""
    if visible is None:
        return []
    names = sorted(visible)
    inside = select(roots.c.id).where(roots.c.name.in_(names))
    hidden = select(job_roots.c.job_id).where(
        job_roots.c.job_id == jobs.c.id, job_roots.c.root_id.not_in(inside)
    )
    return [roots.c.name.in_(names), ~hidden.exists()]


# -- kinds that workers offer -------------------------------------------------------------------------------


def note_offer(connection: Connection, owner: str, kinds: Iterable[str], now: float) -> None:
    """Record a running worker with its ``kinds``, and delete ended workers."""
    row = {"owner": owner, "kinds": sorted(kinds), "seen_seconds": now}
    insert_or_update(connection, workers, [row])
    connection.execute(delete(workers).where(workers.c.seen_seconds < now - 10 * _GONE_SECONDS))


def withdraw_offer(connection: Connection, owner: str) -> None:
    """Delete a worker that ends."""
    connection.execute(delete(workers).where(workers.c.owner == owner))


def with_offers(connection: Connection, found: Sequence[Job], now: float) -> list[Job]:
    """Return ``found`` with ``is_unserved`` set for unfinished jobs without a suitable worker."""
    if all(job.is_final for job in found):
        return list(found)
    query = select(workers.c.kinds).where(workers.c.seen_seconds >= now - _GONE_SECONDS)
    offered = {kind for kinds in connection.execute(query).scalars() for kind in kinds}
    return [job if job.is_final else replace(job, is_unserved=job.kind not in offered) for job in found]
