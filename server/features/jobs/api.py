"""For pages that helper D replaces: deleted when that is merged."""

from __future__ import annotations

from typing import Any

from dcp.server.core.jobs.answers import JobAnswer
from dcp.server.core.jobs.ledger import reading, rows
from dcp.server.core.jobs.ledger.reading import JobFilter


def get_job(job_id: int, database: Any, caller: Any) -> Any:
    """One job."""
    with database.read() as connection:
        job = reading.get_job(connection, job_id, caller.roots)
        progress = {} if job.is_final else rows.progress_of(connection, [job_id])
    return JobAnswer.of(job, progress=progress.get(job.id, job.progress))


class _Jobs:
    def __init__(self, items: list[JobAnswer]) -> None:
        self.items = items


def list_jobs(database: Any, caller: Any, page: Any, state: Any, kind: Any, *, checkpoint_id: int) -> _Jobs:
    """A page of jobs."""
    wanted = JobFilter(
        states=frozenset(state or ()), kinds=frozenset(kind or ()), checkpoint_id=checkpoint_id
    )
    with database.read() as connection:
        found = reading.list_jobs(connection, wanted, limit=page.limit, visible=caller.roots)
        progress = rows.progress_of(connection, [job.id for job in found if not job.is_final])
    return _Jobs([JobAnswer.of(job, progress=progress.get(job.id, job.progress)) for job in found])
