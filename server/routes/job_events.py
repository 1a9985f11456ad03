"""What happens to a job as server-sent events: replayed from the ledger, then followed."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

import anyio
from fastapi import Header, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from dcp.server.database.engine import Database, DatabaseUnavailableError
from dcp.server.jobs.ledger import (
    Job,
    JobEvent,
    Progress,
    find_job,
    get_job,
    job_events_after,
    progress_of,
)
from dcp.server.problems import UnavailableError
from dcp.server.schemas.common import MAX_ID
from dcp.server.schemas.jobs import JobEventAnswer

__all__ = ["LastEventId", "job_stream"]

HEARTBEAT_SECONDS: Final = 15.0
_POLL_SECONDS: Final = 0.5
_GRACE_SECONDS: Final = 2.0
_SEND_SECONDS: Final = 30.0
_MAX_STREAM_SECONDS: Final = 3600.0  # then it is asked for again, with a key that is still valid
_MAX_STREAMS: Final = 256
_PAGE: Final = 500

LastEventId = Annotated[
    int | None,
    Header(alias="Last-Event-ID", ge=0, le=MAX_ID, description="Of the last event that was seen."),
]


def job_stream(
    request: Request, database: Database, job_id: int, visible: frozenset[str] | None, after_id: int
) -> Response:
    """The stream behind the event ``after_id``; 204 if the job is over and nothing is left to tell.

    Raises NotFoundError, and UnavailableError if this process has as many streams as it may.
    """
    state = request.app.state
    with database.read() as connection:
        job = get_job(connection, job_id, visible)
        if after_id and job.is_final and not job_events_after(connection, job_id, after_id, limit=1):
            return Response(status_code=204)
    if getattr(state, "job_streams", 0) >= _MAX_STREAMS:
        raise UnavailableError("too many streams of events are open; ask for the job itself")
    stop = anyio.Event()
    return EventSourceResponse(
        _counted(state, _follow(database, job_id, after_id, stop)),
        shutdown_event=stop,  # the stream ends whole when the server stops, and is asked for at the next one
        shutdown_grace_period=_GRACE_SECONDS,
        ping=HEARTBEAT_SECONDS,
        send_timeout=_SEND_SECONDS,
        headers={"Cache-Control": "no-store"},
        sep="\n",
    )


async def _counted(state: Any, events: AsyncIterator[ServerSentEvent]) -> AsyncIterator[ServerSentEvent]:
    state.job_streams = getattr(state, "job_streams", 0) + 1
    try:
        async for event in events:
            yield event
    finally:
        state.job_streams -= 1


async def _follow(
    database: Database, job_id: int, after_id: int, stop: anyio.Event
) -> AsyncIterator[ServerSentEvent]:
    until = time.monotonic() + _MAX_STREAM_SECONDS
    told: Progress | None = None
    yield ServerSentEvent(comment="events of a job", retry=int(_POLL_SECONDS * 1000))
    while time.monotonic() < until and not stop.is_set():
        try:
            job, events, progress = await run_in_threadpool(_look, database, job_id, after_id)
        except DatabaseUnavailableError:
            return  # it is asked for again, and refused as long as that lasts
        for event in events:
            after_id = event.id
            yield _shown(event)
        if progress is not None and progress != told:
            told = progress
            yield ServerSentEvent(event="progress", data=json.dumps(progress.document()))
        if job is None:  # it was forgotten
            return
        if job.is_final and len(events) < _PAGE:
            yield ServerSentEvent(event="end", data=json.dumps({"state": job.state}))
            return
        if len(events) < _PAGE:
            with anyio.move_on_after(_POLL_SECONDS):
                await stop.wait()


def _look(
    database: Database, job_id: int, after_id: int
) -> tuple[Job | None, list[JobEvent], Progress | None]:
    with database.read() as connection:
        # The job first: if it is over, all of its events are there, also if each statement has its own view.
        job = find_job(connection, job_id)
        events = list(job_events_after(connection, job_id, after_id, limit=_PAGE))
        return job, events, progress_of(connection, [job_id]).get(job_id)


def _shown(event: JobEvent) -> ServerSentEvent:
    return ServerSentEvent(
        id=str(event.id), event=event.kind, data=JobEventAnswer.of(event).model_dump_json()
    )
