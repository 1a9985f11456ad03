"""Jobs: the list of all, and the page of one, which follows the stream of its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final
from urllib.parse import urlencode

from fastapi import Query, Request, Response
from fastapi.responses import RedirectResponse

from dcp.server import features
from dcp.server.catalog.details import keys_of
from dcp.server.catalog.verifications import outcomes_of_jobs
from dcp.server.core.answers import IdPath
from dcp.server.core.http.dependencies import Author, Caller, Db, Page, PageParams, ServiceDep, requires
from dcp.server.core.http.idempotent_transaction import IdempotentDep
from dcp.server.core.inputs import Name
from dcp.server.core.jobs.answers import JobAnswer
from dcp.server.core.pages.queries import READ, pages_router
from dcp.server.core.pages.rendering import page
from dcp.server.core.pages.tokens import FormDep
from dcp.server.features.jobs import api
from dcp.server.records.jobs import JobState

__all__ = ["router"]

router = pages_router()

_ACTIVE: Final = ("queued", "planning", "running", "publishing")
_MAX_TASKS: Final = 100
_LINES: Final = 30


@router.get("/jobs", dependencies=READ)
def jobs_page(
    request: Request,
    database: Db,
    caller: Caller,
    params: Page,
    state: JobState | None = None,
    kind: Annotated[Name | None, Query()] = None,
    scans: bool = False,
) -> Response:
    """The newest first; scans that the service makes by itself only if they are asked for."""
    asked = {"state": state, "kind": kind, "scans": "true" if scans else None}
    given = {name: value for name, value in asked.items() if value}
    states = [state] if state else None
    kinds = [kind] if kind else None
    found = api.list_jobs(database, caller, params, states, kinds, scans=scans)
    return page(
        request,
        "jobs.html",
        twin=f"/api/v1/jobs?{urlencode(given)}" if given else "/api/v1/jobs",
        jobs=found.items,
        names=_names(found.items, database, caller),
        outcomes=_outcomes(found.items, database),
        next_cursor=found.next_cursor,
        kinds=sorted(features.kinds()),
        state=state,
        kind=kind,
        scans=scans,
    )


@router.get("/jobs/{job_id}", dependencies=READ)
def job_page(job_id: IdPath, request: Request, service: ServiceDep, database: Db, caller: Caller) -> Response:
    """One job: state, progress, what it is about, what came of it, its tasks."""
    job = api.get_job(job_id, database, caller)
    tasks = api.list_job_tasks(job_id, database, caller, PageParams(_MAX_TASKS, None))
    kind = features.kinds().get(job.kind)
    sources = _sources_of(job)
    return page(
        request,
        "job.html",
        twin=f"/api/v1/jobs/{job_id}",
        job=job,
        sources=sources,
        names=_names([job], database, caller, sources),
        outcomes=_outcomes([job], database),
        tasks=tasks.items,
        has_more_tasks=tasks.next_cursor is not None,
        log=api.get_job_log(job_id, database, caller, PageParams(_LINES, None)).items,
        pace=api.get_job_throughput(job_id, service, caller) if job.state in _ACTIVE else None,
        target=_target_of(job),
        is_active=job.state in _ACTIVE,
        may_change=caller.may("admin" if kind is None else kind.scope),
    )


def _sources_of(job: JobAnswer) -> list[int]:
    """The checkpoints that a merge joins."""
    if job.kind != "merge":
        return []
    made_of = (job.result or {}).get("sources", ())  # of a run nobody knows them before it is planned
    return [one["id"] for one in made_of] or [*job.params.get("sources", ()), *job.params.get("adapters", ())]


def _names(
    jobs: Sequence[JobAnswer], database: Db, caller: Caller, also: Sequence[int] = ()
) -> dict[int, str]:
    """The names of the checkpoints that these jobs are about, and of those in ``also``."""
    numbers = [*also, *(job.checkpoint_id for job in jobs if job.checkpoint_id is not None)]
    with database.read() as connection:
        return keys_of(connection, numbers, caller.roots)


def _outcomes(jobs: Sequence[JobAnswer], database: Db) -> dict[int, str]:
    """What those of these jobs found that verified a checkpoint: "good" or "damaged"."""
    with database.read() as connection:
        return outcomes_of_jobs(connection, [job.id for job in jobs if job.kind == "verify"])


def _target_of(job: JobAnswer) -> str | None:
    """The page of the checkpoint that a conversion or merge has made."""
    result = job.result or {}
    if job.kind not in ("convert", "merge") or not {"root", "key"} <= result.keys():
        return None
    return f"/lookup?{urlencode({'root': result['root'], 'key': result['key']})}"


@router.post("/jobs/{job_id}/cancel", dependencies=[requires("read")])
def cancel_form(job_id: IdPath, form: FormDep, author: Author, transact: IdempotentDep) -> Response:
    """Stop it; the scope is that of its kind."""
    api.cancel_job(job_id, author, transact)
    return RedirectResponse(f"/jobs/{job_id}", 303)


@router.post("/jobs/{job_id}/retry", dependencies=[requires("read")])
def retry_form(
    job_id: IdPath, form: FormDep, author: Author, service: ServiceDep, transact: IdempotentDep
) -> Response:
    """Begin it anew."""
    api.retry_job(job_id, author, service, transact)
    return RedirectResponse(f"/jobs/{job_id}", 303)
