"""The clean-up: forgetting jobs that ended long ago, documents and drafts."""

from __future__ import annotations

from functools import partial
from typing import Final

from sqlalchemy import ColumnElement, Connection, Table, delete, func, select

from dcp.server.core.jobs.schedules import PeriodicWork, ScheduleContext
from dcp.server.core.security.principal import SYSTEM
from dcp.server.database.documents import abandon_documents, forget_drafts
from dcp.server.database.tables import (
    job_events,
    jobs,
    lineage,
    statistics,
    tasks,
    verifications,
)
from dcp.server.records.jobs import FINAL_STATES

__all__ = ["CLEAN_UP", "forget_jobs", "forget_scans"]

_KEEP_SCANS_SECONDS: Final = 3600.0
_KEEP_DRAFTS_SECONDS: Final = 86_400.0

_REFERRING: Final[tuple[Table, ...]] = (lineage, verifications, statistics)


def forget_jobs(connection: Connection, before: float, *, limit: int = 500) -> int:
    """Remove what is known of jobs that ended before that time; of those that the catalog refers to, only
    their tasks and events. How many that were; at 0 nothing is left to do.

    The newest job stays in any case, so that no number is given out twice.
    """
    return _forget(connection, limit, jobs.c.state.in_(FINAL_STATES), jobs.c.finished_seconds < before)


def forget_scans(connection: Connection, before: float, *, limit: int = 500) -> int:
    """Remove periodic scans that succeeded: there is one a minute. Otherwise as `forget_jobs`."""
    return _forget(
        connection,
        500,
        jobs.c.kind == "scan",
        jobs.c.created_by == SYSTEM.name,
        jobs.c.state == "succeeded",
        jobs.c.finished_seconds < before,
    )


def _forget(connection: Connection, limit: int, *conditions: ColumnElement[bool]) -> int:
    newest = select(func.max(jobs.c.id)).scalar_subquery()
    has_events = select(job_events.c.id).where(job_events.c.job_id == jobs.c.id).exists()
    query = (
        select(jobs.c.id)
        .where(*conditions, jobs.c.id != newest, has_events)
        .order_by(jobs.c.finished_seconds)
        .limit(limit)
    )
    old = list(connection.execute(query).scalars())
    if not old:
        return 0
    for table in (job_events, tasks):
        connection.execute(delete(table).where(table.c.job_id.in_(old)))
    referred = [select(table.c.job_id).where(table.c.job_id.in_(old)).distinct() for table in _REFERRING]
    unused = [jobs.c.id.not_in(query) for query in referred]
    connection.execute(delete(jobs).where(jobs.c.id.in_(old), *unused))
    return len(old)


def _clean_up(context: ScheduleContext) -> None:
    context.database.transact(partial(abandon_documents, now=context.now))
    forget_drafts(context.database, context.now - _KEEP_DRAFTS_SECONDS)
    before = context.now - context.settings.keep_jobs_seconds
    context.repeat(partial(forget_jobs, before=before))
    context.repeat(partial(forget_scans, before=max(before, context.now - _KEEP_SCANS_SECONDS)))


CLEAN_UP: Final = PeriodicWork("clean-up", 600.0, _clean_up)
