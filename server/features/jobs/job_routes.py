"""Jobs by the API and as pages: submit, list, watch, cancel and retry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Union
from urllib.parse import urlencode

from fastapi import Body, Query, Response
from pydantic import Field, create_model
from sqlalchemy import Connection

from dcp.server.catalog import audit
from dcp.server.catalog.cursors import query_mark
from dcp.server.catalog.details import keys_of
from dcp.server.catalog.filters import check_root
from dcp.server.catalog.inputs import MAX_ID, Name, Request
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.http.dependencies import PageParams, PageQuery
from dcp.server.core.jobs.kind import Kind
from dcp.server.core.jobs.ledger import reading, rows, transitions
from dcp.server.core.jobs.ledger.reading import JobFilter, with_offers
from dcp.server.core.problems import ForbiddenError, NotFoundError, UnprocessableError
from dcp.server.core.security.principal import SYSTEM, Principal, Scope
from dcp.server.core.streams import described_stream
from dcp.server.features import kinds
from dcp.server.features.jobs import feature
from dcp.server.features.jobs.following import LastEventId, all_jobs_stream, job_stream
from dcp.server.features.verify import outcomes_of_jobs
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.jobs import Job, JobEvent, JobLogLine, JobProgress, JobState, JobTask, JobThroughput
from dcp.server.records.lists import Page

ACTIVE: Final[tuple[JobState, ...]] = ("queued", "planning", "running", "publishing")


# -- submission ----------------------------------------------------------------------------------------------


class _AnyJob(Request):
    """Common fields of new jobs; each kind has its own ``kind`` and ``params``."""

    priority: int = Field(
        default=0, ge=-100, le=100, description="The higher the sooner; above 0 needs the scope admin."
    )

    if TYPE_CHECKING:
        kind: str
        params: Any


def _new_job(kind: Kind[Any]) -> type[_AnyJob]:
    title = kind.name.replace("_", " ").title().replace(" ", "")
    fields: dict[str, Any] = {"kind": (Literal[kind.name], ...), "params": (kind.params, ...)}
    doc = kind.about or f"A job of the kind {kind.name}."
    return create_model(f"New{title}Job", __base__=_AnyJob, __doc__=doc, **fields)


if TYPE_CHECKING:
    NewJob = _AnyJob
else:
    _MODELS: Final = tuple(map(_new_job, kinds().values()))
    NewJob = Annotated[Union[_MODELS], Field(discriminator="kind")]  # noqa: UP007 - of a tuple


# Submitting, cancelling, and retrying a job need the scope of its kind: see `_check_scope`.
@feature.post("/jobs", tag="jobs", scope="read", status=202, errors=(403, 404, 409, 410))
def submit_job(body: Annotated[NewJob, Body()], ask: Ask) -> Job:
    """Submit a job. If an unfinished job has the same parameters, the answer is this job."""
    _check_scope(ask.caller, body.kind)
    return ask.submit(kinds()[body.kind], body.params, body.priority)


@feature.post("/jobs/{job_id}/cancel", tag="jobs", scope="read", status=202, errors=(403, 404, 409))
def cancel_job(job_id: IdPath, ask: Ask) -> Job:
    """Cancel the job and remove partial results. Repetitions are allowed; publication is not interrupted."""

    def cancel(connection: Connection) -> Job:
        job = _found(connection, job_id, ask)
        after = transitions.request_cancel(connection, job_id, ask.now, ask.caller.name)
        if not job.is_ending and job.state != "cancelled":
            _note(connection, "job.cancel", job_id, ask)
        return after

    return ask.transact(cancel)


@feature.post("/jobs/{job_id}/retry", tag="jobs", scope="read", status=202, errors=(403, 404, 409))
def retry_job(job_id: IdPath, ask: Ask) -> Job:
    """Restart a failed or cancelled job."""

    def retry(connection: Connection) -> Job:
        _found(connection, job_id, ask)
        _note(connection, "job.retry", job_id, ask)
        job = transitions.retry(connection, job_id, ask.now, ask.caller.name)
        ask.check_queue(connection, job_id)
        return job

    return ask.transact(retry)


def _found(connection: Connection, job_id: int, ask: Ask) -> Job:
    job = reading.get_job(connection, job_id, ask.visible)
    _check_scope(ask.caller, job.kind, job)
    return job


def may_change(caller: Principal, job: Job) -> bool:
    """Return True if the caller may cancel and retry the job."""
    scope = _scope_of(job.kind)
    return caller.may_everywhere(scope) if job.root is None else caller.may(scope, job.root)


def _scope_of(kind: str) -> Scope:
    return kinds()[kind].scope if kind in kinds() else "admin"


def _check_scope(caller: Principal, kind: str, job: Job | None = None) -> None:
    scope = _scope_of(kind)
    if not (caller.may(scope) if job is None else may_change(caller, job)):
        raise ForbiddenError(f"the job kind {kind!r} needs a key with the scope {scope!r}", scope=scope)


def _note(connection: Connection, action: str, job_id: int, ask: Ask) -> None:
    audit.record(
        connection,
        ask.caller.name,
        action,
        f"job:{job_id}",
        now=ask.now,
        request_id=ask.request_id,
        address=ask.address,
    )


# -- lists ---------------------------------------------------------------------------------------------------


@feature.get("/jobs", tag="jobs", errors=())
def list_jobs(
    ask: Ask,
    page: PageQuery,
    state: Annotated[
        list[JobState] | None, Query(max_length=7, description="States; any of them matches.")
    ] = None,
    kind: Annotated[
        list[Name] | None, Query(max_length=16, description="Kinds, such as verify; any of them matches.")
    ] = None,
    root: Annotated[Name | None, Query(description="Name of a root.")] = None,
    checkpoint_id: Annotated[
        int | None, Query(ge=1, le=MAX_ID, description="The `id` of the checkpoint of the job.")
    ] = None,
    created_by: Annotated[
        Name | None, Query(description="Account or key that submitted the job, such as key:alice.")
    ] = None,
    scans: Annotated[bool, Query(description="Include scheduled scans, one per minute.")] = False,
) -> Page[Job]:
    """List jobs, newest first. Several states or kinds match any of them."""
    wanted = JobFilter(
        states=frozenset(state or ()),
        kinds=frozenset(kind or ()),
        root=root,
        checkpoint_id=checkpoint_id,
        created_by=created_by,
        own_scans=scans or "scan" in (kind or ()) or created_by == SYSTEM.name,
    )
    given = (sorted(wanted.states), sorted(wanted.kinds), root, checkpoint_id, created_by)
    mark = query_mark("jobs", *given, *([scans] if scans else []))
    with ask.reading() as connection:
        check_root(connection, root, ask.visible)
        _check_kinds(connection, wanted.kinds, ask)
        return _listed(connection, wanted, ask, mark=mark, cursor=page.cursor, limit=page.limit)


def active_jobs(ask: Ask, limit: int, checkpoint_id: int | None = None) -> Sequence[Job]:
    """Find the newest unfinished jobs, of all checkpoints or one."""
    with ask.reading() as connection:
        wanted = JobFilter(states=frozenset(ACTIVE), checkpoint_id=checkpoint_id, own_scans=False)
        return _listed(connection, wanted, ask, limit=limit).items


def _listed(connection: Connection, wanted: JobFilter, ask: Ask, **page: Any) -> Page[Job]:
    found = reading.list_jobs(connection, wanted, ask.visible, **page)
    progress = rows.progress_of(connection, [job.id for job in found.items if not job.is_final])
    shown = [replace(job, progress=progress.get(job.id, job.progress)) for job in found.items]
    return Page(tuple(with_offers(connection, shown, ask.now)), found.next_cursor)


def _check_kinds(connection: Connection, wanted: Iterable[str], ask: Ask) -> None:
    """Refuse unknown kinds, except kinds of stored jobs."""
    for kind in wanted:
        old = JobFilter(kinds=frozenset({kind}))
        if kind not in kinds() and not reading.list_jobs(connection, old, ask.visible, limit=1).items:
            raise UnprocessableError(
                f"unknown job kind {kind!r}; kinds are {', '.join(sorted(kinds()))}", field="kind"
            )


# -- event streams -------------------------------------------------------------------------------------------

_STREAM: Final = described_stream(
    "Events as they come; the last one of a job is `end`.", "of `JobEvent` where it has an `id`"
)
_OVER: Final[dict[int | str, dict[str, Any]]] = {
    204: {"description": "The job is over, and nothing happened since Last-Event-ID."}
}


@feature.get("/jobs/events", tag="jobs", responses=_STREAM, errors=(503,))
def watch_jobs(
    ask: Ask,
    scans: Annotated[bool, Query(description="Also the scheduled scans.")] = False,
    last_event_id: LastEventId = None,
) -> Response:
    """Follow events of all jobs as server-sent events, from now on or after Last-Event-ID.

    The first event is `ready`; its `id` is the start of the stream. Each event has an `id`, and a `job_id` in
    `data`. `progress` events of running jobs have no `id`. Comments keep the connection alive. The stream can
    end at any time: reconnect with Last-Event-ID.
    """
    return all_jobs_stream(ask, last_event_id, own_scans=scans)


@feature.get("/jobs/{job_id}/events", tag="jobs", responses=_STREAM | _OVER)
def watch_job(job_id: IdPath, ask: Ask, last_event_id: LastEventId = None) -> Response:
    """Follow events of the job as server-sent events, from the first event or after Last-Event-ID.

    Each event has an `id`, and JSON as `data`. `progress` events have no `id`. Comments keep the connection
    alive. After the job has finished, `end` follows, and the stream ends. The stream can also end earlier:
    reconnect with Last-Event-ID.
    """
    return job_stream(ask, job_id, last_event_id or 0)


# -- one job -------------------------------------------------------------------------------------------------


@feature.get("/jobs/{job_id}", tag="jobs")
def get_job(job_id: IdPath, ask: Ask) -> Job:
    """Return a job with its progress, and the result after success."""
    return ask.job(job_id)


@feature.get("/jobs/{job_id}/throughput", tag="jobs")
def get_job_throughput(job_id: IdPath, ask: Ask) -> JobThroughput:
    """Return the speed of the tasks, and the estimated remaining time."""
    with ask.reading() as connection:
        job = reading.get_job(connection, job_id, ask.visible)
        progress = rows.progress_of(connection, [job_id]).get(job_id)
        begun = reading.tasks_begun_seconds(connection, job_id)
    return _throughput_of(job, progress, begun, ask.now)


@feature.get("/jobs/{job_id}/log", tag="jobs")
def get_job_log(job_id: IdPath, ask: Ask, page: PageQuery) -> Page[JobLogLine]:
    """Return the last events of the job as sentences in order; the next page has earlier events."""
    with ask.reading() as connection:
        reading.get_job(connection, job_id, ask.visible)
        found = reading.latest_events(connection, job_id, cursor=page.cursor, limit=page.limit)
    return Page(tuple(map(_log_line, reversed(found.items))), found.next_cursor)


@feature.get("/jobs/{job_id}/tasks", tag="jobs")
def list_job_tasks(job_id: IdPath, ask: Ask, page: PageQuery) -> Page[JobTask]:
    """List the tasks of a planned job by number."""
    with ask.reading() as connection:
        reading.get_job(connection, job_id, ask.visible)
        return reading.list_tasks(connection, job_id, cursor=page.cursor, limit=page.limit)


# -- the throughput of a job ---------------------------------------------------------------------------------


def _throughput_of(
    job: Job, progress: JobProgress | None, begun_seconds: float | None, now: float
) -> JobThroughput:
    """Return the throughput of a job with tasks started at ``begun_seconds``."""
    found = progress or JobProgress()
    until = now if job.finished_at is None else job.finished_at.timestamp()
    seconds = None if begun_seconds is None else max(0.0, until - begun_seconds)
    rate = found.done_bytes / seconds if seconds and found.done_bytes else None
    left = None if rate is None or job.is_final else (found.total_bytes - found.done_bytes) / rate
    return JobThroughput(job.id, job.state, found.done_bytes, found.total_bytes, seconds, rate, left)


def _log_line(event: JobEvent) -> JobLogLine:
    """Return the event as a sentence."""
    text = _sentence(event.kind, event.data)
    return JobLogLine(event.id, event.at, event.kind, text, dict(event.data))


def _sentence(kind: str, data: Mapping[str, Any]) -> str:
    head = {
        "submitted": f"submitted by {data.get('created_by')}",
        "state": str(data.get("state")),
        "retry": f"again in {float(data.get('delay_seconds') or 0):.3g} s",
        "cancel_requested": f"cancellation requested by {data.get('actor')}",
        "ending": "stopping, and removing leftovers",
        "discard_failed": "leftovers of the job cannot be removed yet: try again later",
    }.get(kind, kind)
    if data.get("retried_by"):
        head += f", by {data['retried_by']}"
    error = data.get("error")
    if isinstance(error, Mapping):
        task = "" if error.get("task") is None else f"task {error['task']}: "
        head += f": {task}{error.get('type')}: {error.get('detail')}"
    return head


# -- pages of jobs -------------------------------------------------------------------------------------------


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
    found = list_jobs(ask, params, [state] if state else None, [kind] if kind else None, scans=scans)
    return {
        "twin": f"/api/v1/jobs?{urlencode(given)}" if given else "/api/v1/jobs",
        "jobs": found.items,
        "names": _names(found.items, ask),
        "outcomes": _outcomes(found.items, ask),
        "next_cursor": found.next_cursor,
        "kinds": sorted({*kinds(), *([kind] if kind else ())}),
        "state": state,
        "kind": kind,
        "scans": scans,
    }


@feature.page("/jobs/{job_id}", "job.html")
def job_page(job_id: IdPath, ask: Ask) -> dict[str, Any]:
    """Show a job: state, progress, subject, result, and tasks."""
    job = get_job(job_id, ask)
    tasks = list_job_tasks(job_id, ask, PageParams(_MAX_TASKS, None))
    kind = kinds().get(job.kind)
    sources = _sources_of(job)
    is_active = job.state in ACTIVE
    return {
        "twin": f"/api/v1/jobs/{job_id}",
        "job": job,
        "about": "" if kind is None else kind.about,
        "sources": sources,
        "names": _names([job], ask, sources),
        "outcomes": _outcomes([job], ask),
        "tasks": tasks.items,
        "has_more_tasks": tasks.next_cursor is not None,
        "log": get_job_log(job_id, ask, PageParams(_LINES, None)).items,
        "pace": get_job_throughput(job_id, ask) if is_active else None,
        "target": _target_of(job),
        "is_active": is_active,
        "may_change": may_change(ask.caller, job),
    }


@feature.panel("checkpoint.notices", "active.html", order=40)
def active_panel(ask: Ask, found: CheckpointDetail) -> dict[str, Any]:
    """Show the progress of unfinished jobs of the checkpoint."""
    return {"jobs": active_jobs(ask, _ON_PAGE, found.id)}


@feature.panel("checkpoint.actions", "buttons.html", order=10)
def buttons_panel(ask: Ask, found: CheckpointDetail) -> dict[str, Any] | None:
    """Offer the kinds of jobs with a button that the caller may submit."""
    offered = [kind for kind in kinds().values() if kind.button and ask.caller.may(kind.scope, found.root)]
    return {"kinds": offered} if offered else None


@feature.form("/checkpoints/{checkpoint_id}/jobs/{kind}", scope="read")
def button_form(checkpoint_id: IdPath, kind: str, ask: Ask) -> str:
    """Submit a job for the checkpoint with the scope of its kind."""
    found = kinds().get(kind)
    if found is None or not found.button:
        raise NotFoundError("the job kind has no button")
    _check_scope(ask.caller, kind)
    return f"/jobs/{ask.submit(found, found.params(checkpoint_id=checkpoint_id)).id}"


@feature.form("/jobs/{job_id}/cancel", scope="read")
def cancel_form(job_id: IdPath, ask: Ask) -> str:
    """Cancel the job with the scope of its kind."""
    cancel_job(job_id, ask)
    return f"/jobs/{job_id}"


@feature.form("/jobs/{job_id}/retry", scope="read")
def retry_form(job_id: IdPath, ask: Ask) -> str:
    """Begin the job anew."""
    retry_job(job_id, ask)
    return f"/jobs/{job_id}"


def _sources_of(job: Job) -> list[int]:
    """Return the source checkpoints of a merge."""
    if job.kind != "merge":
        return []
    made_of = (job.result or {}).get("sources", ())  # sources of a run are unknown before the plan
    return [one["id"] for one in made_of] or [*job.params.get("sources", ()), *job.params.get("adapters", ())]


def _names(jobs: Sequence[Job], ask: Ask, also: Sequence[int] = ()) -> dict[int, str]:
    """Return the names of checkpoints of the jobs and in ``also``."""
    numbers = [*also, *(job.checkpoint_id for job in jobs if job.checkpoint_id is not None)]
    return ask.find(keys_of, numbers, ask.visible)


def _outcomes(jobs: Sequence[Job], ask: Ask) -> dict[int, str]:
    """Return the outcomes of verifications by job: "good" or "damaged"."""
    return ask.find(outcomes_of_jobs, [job.id for job in jobs if job.kind == "verify"])


def _target_of(job: Job) -> str | None:
    """Return the page of the checkpoint made by a conversion or merge."""
    result = job.result or {}
    if job.kind not in ("convert", "merge") or not {"root", "key"} <= result.keys():
        return None
    return f"/lookup?{urlencode({'root': result['root'], 'key': result['key']})}"
