"""``/jobs``: submit, list, watch, cancel and retry."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Body, Query, Request, Response
from sqlalchemy import Connection

from dcp.server.catalog import audit
from dcp.server.catalog.cursors import decode_cursor, encode_cursor, query_mark
from dcp.server.catalog.filter_checks import check_root
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.http.dependencies import Author, Caller, Db, Page, ServiceDep, Writer, requires
from dcp.server.core.http.idempotent_transaction import IdempotentDep
from dcp.server.core.http.routers import api_router
from dcp.server.core.inputs import MAX_ID, Name
from dcp.server.core.jobs.answers import (
    JobAnswer,
    JobList,
    LogLineAnswer,
    LogPage,
    TaskAnswer,
    TaskList,
    ThroughputAnswer,
)
from dcp.server.core.jobs.ledger import reading, rows, transitions
from dcp.server.core.jobs.ledger.reading import JobFilter
from dcp.server.core.jobs.ledger.states import JobRow
from dcp.server.core.jobs.submitting import check_queue, submit_new
from dcp.server.core.jobs.watching import log_line, throughput_of
from dcp.server.core.problems import ForbiddenError, UnprocessableError
from dcp.server.core.security.principal import SYSTEM, Principal, Scope
from dcp.server.features import kinds
from dcp.server.features.jobs.new_job import NewJob
from dcp.server.features.jobs.streams import LastEventId, all_jobs_stream, job_stream
from dcp.server.records.jobs import JobState

__all__ = ["router"]

router = api_router("/jobs", tags=["jobs"])

# What a job may do depends on its kind, and so does who may submit, cancel and retry it: see `_check_scope`.
_BY_KIND = requires("read")

_STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events as they come; the last one of a job is `end`.",
        "content": {
            "text/event-stream": {
                "schema": {
                    "type": "object",
                    "description": "One event; `data` is JSON, of `JobEventAnswer` where it has an `id`.",
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
_OVER: dict[int | str, dict[str, Any]] = {
    204: {"description": "The job is over, and nothing happened since Last-Event-ID."}
}


def _check_scope(caller: Principal, kind: str) -> None:
    scope: Scope = kinds()[kind].scope if kind in kinds() else "admin"
    if not caller.may(scope):
        raise ForbiddenError(f"a job of the kind {kind!r} needs a key with the scope {scope!r}", scope=scope)


@router.post("", status_code=202, dependencies=[_BY_KIND], responses=problems(403, 404, 409, 410))
def submit_job(
    body: Annotated[NewJob, Body()],
    service: ServiceDep,
    author: Author,
    transact: IdempotentDep,
    response: Response,
) -> JobAnswer:
    """Have something done. If an unfinished job does the same already, the answer is that one."""
    _check_scope(author.principal, body.kind)
    if body.priority > 0 and not author.principal.may("admin"):
        raise ForbiddenError("a priority above 0 needs a key with the scope 'admin'", scope="admin")
    kind = kinds()[body.kind]

    def submit(connection: Connection) -> JobAnswer:
        spec = kind.specify(connection, body.params, author.principal, service.settings)
        spec = replace(spec, priority=body.priority)
        return submit_new(connection, spec, service, author, response)

    return transact(submit)


@router.get("", dependencies=[requires("read")])
def list_jobs(
    database: Db,
    caller: Caller,
    page: Page,
    state: Annotated[list[JobState] | None, Query(max_length=7)] = None,
    kind: Annotated[list[Name] | None, Query(max_length=16)] = None,
    root: Annotated[Name | None, Query()] = None,
    checkpoint_id: Annotated[int | None, Query(ge=1, le=MAX_ID)] = None,
    created_by: Annotated[Name | None, Query()] = None,
    scans: Annotated[
        bool, Query(description="Also the scans that the service makes by itself, one a minute.")
    ] = False,
) -> JobList:
    """Jobs, newest first. Of states and kinds, any of those that are given."""
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
    before = None if page.cursor is None else decode_cursor(page.cursor, mark, int)[0]
    _check_kinds(wanted.kinds)
    with database.read() as connection:
        check_root(connection, root, caller.roots)
        found = reading.list_jobs(
            connection, wanted, before_id=before, limit=page.limit + 1, visible=caller.roots
        )
        shown = found[: page.limit]
        progress = rows.progress_of(connection, [job.id for job in shown if not job.is_final])
    items = [JobAnswer.of(job, progress=progress.get(job.id, job.progress)) for job in shown]
    more = encode_cursor(mark, shown[-1].id) if len(found) > page.limit else None
    return JobList(items=items, next_cursor=more)


def _check_kinds(wanted: Iterable[str]) -> None:
    for kind in wanted:
        if kind not in kinds():
            raise UnprocessableError(
                f"there is no kind of job {kind!r}: {', '.join(sorted(kinds()))}", field="kind"
            )


@router.get(
    "/events",
    dependencies=[requires("read")],
    responses=_STREAM | problems(503),
    response_class=Response,
)
def watch_jobs(
    service: ServiceDep,
    caller: Caller,
    request: Request,
    scans: Annotated[bool, Query(description="Also the scans that the service makes by itself.")] = False,
    last_event_id: LastEventId = None,
) -> Response:
    """What happens to all jobs, as server-sent events: from now on, or behind Last-Event-ID.

    The first is `ready`, whose `id` is where the stream begins. Each event has an `id` and `job_id` in its
    `data`. In between come `progress` events of the jobs that run, which have no `id`, and comments that keep
    the connection alive. The stream may end at any time, and is then to be asked for again with
    Last-Event-ID.
    """
    return all_jobs_stream(request, service, caller, last_event_id, own_scans=scans)


@router.get("/{job_id}", dependencies=[requires("read")], responses=problems(404))
def get_job(job_id: IdPath, database: Db, caller: Caller) -> JobAnswer:
    """One job, with its progress, and its result once it has succeeded."""
    with database.read() as connection:
        job = reading.get_job(connection, job_id, caller.roots)
        progress = {} if job.is_final else rows.progress_of(connection, [job_id])
    return JobAnswer.of(job, progress=progress.get(job.id, job.progress))


@router.get("/{job_id}/throughput", dependencies=[requires("read")], responses=problems(404))
def get_job_throughput(job_id: IdPath, service: ServiceDep, caller: Caller) -> ThroughputAnswer:
    """How fast its tasks are, and how long they still take if they go on so."""
    with service.database.read() as connection:
        job = reading.get_job(connection, job_id, caller.roots)
        progress = rows.progress_of(connection, [job_id]).get(job_id)
        begun = reading.tasks_begun_seconds(connection, job_id)
    return ThroughputAnswer.of(throughput_of(job, progress, begun, service.clock()))


@router.get("/{job_id}/log", dependencies=[requires("read")], responses=problems(404))
def get_job_log(job_id: IdPath, database: Db, caller: Caller, page: Page) -> LogPage:
    """What happened to it last, as sentences in their order; the next page is of what was before."""
    mark = query_mark("log", job_id)
    before = None if page.cursor is None else decode_cursor(page.cursor, mark, int)[0]
    with database.read() as connection:
        reading.get_job(connection, job_id, caller.roots)
        found = reading.latest_events(connection, job_id, before, limit=page.limit + 1)
    shown = found[-page.limit :]
    more = encode_cursor(mark, shown[0].id) if len(found) > page.limit else None
    return LogPage(items=[LogLineAnswer.of(log_line(event)) for event in shown], next_cursor=more)


@router.get("/{job_id}/tasks", dependencies=[requires("read")], responses=problems(404))
def list_job_tasks(job_id: IdPath, database: Db, caller: Caller, page: Page) -> TaskList:
    """What the job consists of, once it is planned."""
    mark = query_mark("tasks", job_id)
    after = -1 if page.cursor is None else decode_cursor(page.cursor, mark, int)[0]
    with database.read() as connection:
        reading.get_job(connection, job_id, caller.roots)
        found = reading.list_tasks(connection, job_id, after_number=after, limit=page.limit + 1)
    shown = found[: page.limit]
    more = encode_cursor(mark, shown[-1].number) if len(found) > page.limit else None
    return TaskList(items=[TaskAnswer.of(task) for task in shown], next_cursor=more)


@router.get(
    "/{job_id}/events",
    dependencies=[requires("read")],
    responses=_STREAM | _OVER | problems(404),
    response_class=Response,
)
def watch_job(
    job_id: IdPath, service: ServiceDep, caller: Caller, request: Request, last_event_id: LastEventId = None
) -> Response:
    """What happens to the job, as server-sent events: all from the beginning, or those behind Last-Event-ID.

    Each has an `id` and JSON as `data`. In between come `progress` events, which have no `id`, and comments
    that keep the connection alive. When the job is over `end` comes, and the stream ends; it may also end
    before, and is then to be asked for again with Last-Event-ID.
    """
    return job_stream(request, service, job_id, caller, last_event_id or 0)


@router.post("/{job_id}/cancel", status_code=202, dependencies=[_BY_KIND], responses=problems(403, 404, 409))
def cancel_job(job_id: IdPath, author: Author, transact: IdempotentDep) -> JobAnswer:
    """Stop it, and clear away what it left. Again is fine; what is being published is not stopped."""

    def cancel(connection: Connection) -> JobAnswer:
        job = _found(connection, author, job_id)
        after = transitions.request_cancel(connection, job_id, author.now_seconds, author.principal.name)
        if not job.is_ending and job.state != "cancelled":
            _note(connection, author, "job.cancel", job_id)
        return JobAnswer.of(after)

    return transact(cancel)


@router.post("/{job_id}/retry", status_code=202, dependencies=[_BY_KIND], responses=problems(403, 404, 409))
def retry_job(job_id: IdPath, author: Author, service: ServiceDep, transact: IdempotentDep) -> JobAnswer:
    """Begin a job anew that has failed or was cancelled."""

    def retry(connection: Connection) -> JobAnswer:
        _found(connection, author, job_id)
        _note(connection, author, "job.retry", job_id)
        job = transitions.retry(connection, job_id, author.now_seconds, author.principal.name)
        check_queue(connection, author, service.settings.max_queued_jobs)
        return JobAnswer.of(job)

    return transact(retry)


def _found(connection: Connection, author: Writer, job_id: int) -> JobRow:
    job = reading.get_job(connection, job_id, author.principal.roots)
    _check_scope(author.principal, job.kind)
    return job


def _note(connection: Connection, author: Writer, action: str, job_id: int, **detail: Any) -> None:
    audit.record(
        connection,
        author.principal.name,
        action,
        f"job:{job_id}",
        detail or None,
        now=author.now_seconds,
        request_id=author.request_id,
        address=author.address,
    )
