"""Jobs by the API: submit, list, follow, cancel and retry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Union

from fastapi import Body, Query, Response
from pydantic import Field, create_model
from sqlalchemy import Connection

from dcp.server.catalog import audit
from dcp.server.catalog.cursors import decode_cursor, encode_cursor, query_mark
from dcp.server.catalog.filter_checks import check_root
from dcp.server.catalog.inputs import MAX_ID, Name, Request
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.http.dependencies import PageQuery
from dcp.server.core.jobs.kind import Kind
from dcp.server.core.jobs.ledger import reading, rows, transitions
from dcp.server.core.jobs.ledger.reading import JobFilter
from dcp.server.core.jobs.watching import log_line, throughput_of
from dcp.server.core.problems import ForbiddenError, UnprocessableError
from dcp.server.core.security.principal import SYSTEM, Principal, Scope
from dcp.server.features import kinds
from dcp.server.features.jobs import feature
from dcp.server.features.jobs.streams import LastEventId, all_jobs_stream, job_stream
from dcp.server.records.jobs import Job, JobLogLine, JobState, JobTask, JobThroughput
from dcp.server.records.lists import Page

__all__ = ["ACTIVE", "active_jobs", "cancel_job", "get_job", "get_job_log", "list_jobs", "retry_job"]

ACTIVE: Final[tuple[JobState, ...]] = ("queued", "planning", "running", "publishing")


# -- submission ----------------------------------------------------------------------------------------------


class _AnyJob(Request):
    """Fields of all new jobs; each kind has its own ``kind`` and ``params``."""

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


# Submitting, cancelling and retrying a job need the scope of its kind: see `_check_scope`.
@feature.post("/jobs", tag="jobs", scope="read", status=202, errors=(403, 404, 409, 410))
def submit_job(body: Annotated[NewJob, Body()], ask: Ask) -> Job:
    """Submit a job. If an unfinished job does the same already, the answer is that one."""
    _check_scope(ask.caller, body.kind)
    if body.priority > 0 and not ask.caller.may("admin"):
        raise ForbiddenError("a priority above 0 needs a key with the scope 'admin'", scope="admin")

    return ask.submit(kinds()[body.kind], body.params, body.priority)


@feature.post("/jobs/{job_id}/cancel", tag="jobs", scope="read", status=202, errors=(403, 404, 409))
def cancel_job(job_id: IdPath, ask: Ask) -> Job:
    """Stop the job, and remove what it left. A repetition is fine; publishing is not stopped."""

    def cancel(connection: Connection) -> Job:
        job = _found(connection, job_id, ask)
        after = transitions.request_cancel(connection, job_id, ask.now, ask.caller.name)
        if not job.is_ending and job.state != "cancelled":
            _note(connection, "job.cancel", job_id, ask)
        return after

    return ask.transact(cancel)


@feature.post("/jobs/{job_id}/retry", tag="jobs", scope="read", status=202, errors=(403, 404, 409))
def retry_job(job_id: IdPath, ask: Ask) -> Job:
    """Begin a job anew that has failed or was cancelled."""

    def retry(connection: Connection) -> Job:
        _found(connection, job_id, ask)
        _note(connection, "job.retry", job_id, ask)
        job = transitions.retry(connection, job_id, ask.now, ask.caller.name)
        ask.check_queue(connection)
        return job

    return ask.transact(retry)


def _found(connection: Connection, job_id: int, ask: Ask) -> Job:
    job = reading.get_job(connection, job_id, ask.visible)
    _check_scope(ask.caller, job.kind)
    return job


def _check_scope(caller: Principal, kind: str) -> None:
    scope: Scope = kinds()[kind].scope if kind in kinds() else "admin"
    if not caller.may(scope):
        raise ForbiddenError(f"a job of the kind {kind!r} needs a key with the scope {scope!r}", scope=scope)


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
    state: Annotated[list[JobState] | None, Query(max_length=7)] = None,
    kind: Annotated[list[Name] | None, Query(max_length=16)] = None,
    root: Annotated[Name | None, Query()] = None,
    checkpoint_id: Annotated[int | None, Query(ge=1, le=MAX_ID)] = None,
    created_by: Annotated[Name | None, Query()] = None,
    scans: Annotated[bool, Query(description="Also the scheduled scans, one a minute.")] = False,
) -> Page[Job]:
    """Jobs, newest first. Of states and kinds, any of those that are given."""
    wanted = JobFilter(
        states=frozenset(state or ()),
        kinds=frozenset(kind or ()),
        root=root,
        checkpoint_id=checkpoint_id,
        created_by=created_by,
        own_scans=scans or "scan" in (kind or ()) or created_by == SYSTEM.name,
    )
    _check_kinds(wanted.kinds)
    given = (sorted(wanted.states), sorted(wanted.kinds), root, checkpoint_id, created_by)
    mark = query_mark("jobs", *given, *([scans] if scans else []))
    before = None if page.cursor is None else decode_cursor(page.cursor, mark, int)[0]
    with ask.reading() as connection:
        check_root(connection, root, ask.visible)
        found = _listed(connection, wanted, ask, before, page.limit + 1)
    more = encode_cursor(mark, found[page.limit - 1].id) if len(found) > page.limit else None
    return Page(tuple(found[: page.limit]), more)


def active_jobs(ask: Ask, limit: int, checkpoint_id: int | None = None) -> list[Job]:
    """Find the newest jobs that have not ended, of all or of one checkpoint."""
    with ask.reading() as connection:
        wanted = JobFilter(states=frozenset(ACTIVE), checkpoint_id=checkpoint_id, own_scans=False)
        return _listed(connection, wanted, ask, None, limit)


def _listed(connection: Connection, wanted: JobFilter, ask: Ask, before: int | None, limit: int) -> list[Job]:
    found = reading.list_jobs(connection, wanted, before_id=before, limit=limit, visible=ask.visible)
    progress = rows.progress_of(connection, [job.id for job in found if not job.is_final])
    return [replace(job, progress=progress.get(job.id, job.progress)) for job in found]


def _check_kinds(wanted: Iterable[str]) -> None:
    for kind in wanted:
        if kind not in kinds():
            raise UnprocessableError(
                f"there is no kind of job {kind!r}: {', '.join(sorted(kinds()))}", field="kind"
            )


# -- event streams -------------------------------------------------------------------------------------------

_STREAM: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "Events as they come; the last one of a job is `end`.",
        "content": {
            "text/event-stream": {
                "schema": {
                    "type": "object",
                    "description": "One event; `data` is JSON, of `JobEvent` where it has an `id`.",
                    "properties": {
                        "id": {"type": "string"},
                        "event": {"type": "string"},
                        "data": {"type": "string"},
                        "retry": {"type": "integer"},
                    },
                }
            }
        },
    },
}
_OVER: Final[dict[int | str, dict[str, Any]]] = {
    204: {"description": "The job is over, and nothing happened since Last-Event-ID."}
}


@feature.get("/jobs/events", tag="jobs", responses=_STREAM, errors=(503,))
def watch_jobs(
    ask: Ask,
    scans: Annotated[bool, Query(description="Also the scheduled scans.")] = False,
    last_event_id: LastEventId = None,
) -> Response:
    """Events of all jobs, as server-sent events: from now on, or behind Last-Event-ID.

    The first is `ready`, whose `id` is where the stream begins. Each event has an `id` and `job_id` in its
    `data`. In between come `progress` events of running jobs, which have no `id`, and comments that keep the
    connection alive. The stream may end at any time; reconnect with Last-Event-ID.
    """
    return all_jobs_stream(ask, last_event_id, own_scans=scans)


@feature.get("/jobs/{job_id}/events", tag="jobs", responses=_STREAM | _OVER)
def watch_job(job_id: IdPath, ask: Ask, last_event_id: LastEventId = None) -> Response:
    """Events of the job, as server-sent events: all from the beginning, or those behind Last-Event-ID.

    Each has an `id` and JSON as `data`. In between come `progress` events, which have no `id`, and comments
    that keep the connection alive. When the job is over `end` comes, and the stream ends; it may also end
    before: reconnect with Last-Event-ID.
    """
    return job_stream(ask, job_id, last_event_id or 0)


# -- one job -------------------------------------------------------------------------------------------------


@feature.get("/jobs/{job_id}", tag="jobs")
def get_job(job_id: IdPath, ask: Ask) -> Job:
    """One job, with its progress, and its result once it has succeeded."""
    return ask.job(job_id)


@feature.get("/jobs/{job_id}/throughput", tag="jobs")
def get_job_throughput(job_id: IdPath, ask: Ask) -> JobThroughput:
    """The speed of its tasks, and an estimate of the time that is left."""
    with ask.reading() as connection:
        job = reading.get_job(connection, job_id, ask.visible)
        progress = rows.progress_of(connection, [job_id]).get(job_id)
        begun = reading.tasks_begun_seconds(connection, job_id)
    return throughput_of(job, progress, begun, ask.now)


@feature.get("/jobs/{job_id}/log", tag="jobs")
def get_job_log(job_id: IdPath, ask: Ask, page: PageQuery) -> Page[JobLogLine]:
    """The last events of the job as sentences, in their order; the next page has earlier ones."""
    mark = query_mark("log", job_id)
    before = None if page.cursor is None else decode_cursor(page.cursor, mark, int)[0]
    with ask.reading() as connection:
        reading.get_job(connection, job_id, ask.visible)
        found = reading.latest_events(connection, job_id, before, limit=page.limit + 1)
    shown = found[-page.limit :]
    more = encode_cursor(mark, shown[0].id) if len(found) > page.limit else None
    return Page(tuple(log_line(event) for event in shown), more)


@feature.get("/jobs/{job_id}/tasks", tag="jobs")
def list_job_tasks(job_id: IdPath, ask: Ask, page: PageQuery) -> Page[JobTask]:
    """The tasks of the job by number, once it is planned."""
    mark = query_mark("tasks", job_id)
    after = -1 if page.cursor is None else decode_cursor(page.cursor, mark, int)[0]
    with ask.reading() as connection:
        reading.get_job(connection, job_id, ask.visible)
        found = reading.list_tasks(connection, job_id, after_number=after, limit=page.limit + 1)
    shown = found[: page.limit]
    more = encode_cursor(mark, shown[-1].number) if len(found) > page.limit else None
    return Page(tuple(shown), more)
