"""Pages of jobs: the list of all, and one, which follows the stream of its events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Query

from dcp.server import features
from dcp.server.catalog.details import keys_of
from dcp.server.catalog.inputs import Name
from dcp.server.catalog.verifications import outcomes_of_jobs
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.http.dependencies import PageParams, PageQuery
from dcp.server.features.jobs import feature, web
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.jobs import Job, JobState

_MAX_TASKS: Final = 100
_LINES: Final = 30
_ON_PAGE: Final = 5


@feature.page("/jobs", "jobs.html")
def jobs_page(
    ask: Ask,
    params: PageQuery,
    state: JobState | None = None,
    kind: Annotated[Name | None, Query()] = None,
    scans: bool = False,
) -> dict[str, Any]:
    """List jobs, newest first; scheduled scans only on demand."""
    asked = {"state": state, "kind": kind, "scans": "true" if scans else None}
    given = {name: value for name, value in asked.items() if value}
    found = web.list_jobs(ask, params, [state] if state else None, [kind] if kind else None, scans=scans)
    return {
        "twin": f"/api/v1/jobs?{urlencode(given)}" if given else "/api/v1/jobs",
        "jobs": found.items,
        "names": _names(found.items, ask),
        "outcomes": _outcomes(found.items, ask),
        "next_cursor": found.next_cursor,
        "kinds": sorted(features.kinds()),
        "state": state,
        "kind": kind,
        "scans": scans,
    }


@feature.page("/jobs/{job_id}", "job.html")
def job_page(job_id: IdPath, ask: Ask) -> dict[str, Any]:
    """Show a job: its state, progress, subject, result and tasks."""
    job = web.get_job(job_id, ask)
    tasks = web.list_job_tasks(job_id, ask, PageParams(_MAX_TASKS, None))
    kind = features.kinds().get(job.kind)
    sources = _sources_of(job)
    is_active = job.state in web.ACTIVE
    return {
        "twin": f"/api/v1/jobs/{job_id}",
        "job": job,
        "about": "" if kind is None else kind.about,
        "sources": sources,
        "names": _names([job], ask, sources),
        "outcomes": _outcomes([job], ask),
        "tasks": tasks.items,
        "has_more_tasks": tasks.next_cursor is not None,
        "log": web.get_job_log(job_id, ask, PageParams(_LINES, None)).items,
        "pace": web.get_job_throughput(job_id, ask) if is_active else None,
        "target": _target_of(job),
        "is_active": is_active,
        "may_change": ask.caller.may("admin" if kind is None else kind.scope),
    }


@feature.panel("checkpoint.notices", "active.html", order=40)
def active_panel(ask: Ask, found: CheckpointDetail) -> dict[str, Any]:
    """Show the progress of jobs of the checkpoint that have not ended."""
    return {"jobs": web.active_jobs(ask, _ON_PAGE, found.id)}


@feature.form("/jobs/{job_id}/cancel", scope="read")
def cancel_form(job_id: IdPath, ask: Ask) -> str:
    """Cancel the job; the scope is that of its kind."""
    web.cancel_job(job_id, ask)
    return f"/jobs/{job_id}"


@feature.form("/jobs/{job_id}/retry", scope="read")
def retry_form(job_id: IdPath, ask: Ask) -> str:
    """Begin the job anew."""
    web.retry_job(job_id, ask)
    return f"/jobs/{job_id}"


def _sources_of(job: Job) -> list[int]:
    """The checkpoints that a merge joins."""
    if job.kind != "merge":
        return []
    made_of = (job.result or {}).get("sources", ())  # those of a run are not known before it is planned
    return [one["id"] for one in made_of] or [*job.params.get("sources", ()), *job.params.get("adapters", ())]


def _names(jobs: Sequence[Job], ask: Ask, also: Sequence[int] = ()) -> dict[int, str]:
    """The names of the jobs' checkpoints and of those in ``also``."""
    numbers = [*also, *(job.checkpoint_id for job in jobs if job.checkpoint_id is not None)]
    return ask.find(keys_of, numbers, ask.visible)


def _outcomes(jobs: Sequence[Job], ask: Ask) -> dict[int, str]:
    """The outcomes of verifications by job: "good" or "damaged"."""
    return ask.find(outcomes_of_jobs, [job.id for job in jobs if job.kind == "verify"])


def _target_of(job: Job) -> str | None:
    """The page of the checkpoint that a conversion or merge has made."""
    result = job.result or {}
    if job.kind not in ("convert", "merge") or not {"root", "key"} <= result.keys():
        return None
    return f"/lookup?{urlencode({'root': result['root'], 'key': result['key']})}"
