"""What happens to a job as server-sent events: replayed from the ledger, then followed."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, Any, Final

import anyio
from fastapi import Header, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dcp.server.http.context import Service
from dcp.server.inputs import MAX_ID
from dcp.server.jobs.following import POLL_SECONDS, JobFeed
from dcp.server.jobs.ledger import get_job, job_events_after
from dcp.server.jobs.ledger.states import JobEventRow
from dcp.server.problems import TooManyRequestsError, UnavailableError
from dcp.server.schemas.jobs import JobEventAnswer
from dcp.server.security.principal import Principal

__all__ = ["LastEventId", "job_stream"]

HEARTBEAT_SECONDS: Final = 15.0
_GRACE_SECONDS: Final = 2.0
_SEND_SECONDS: Final = 30.0
_MAX_STREAM_SECONDS: Final = 3600.0
_MAX_STREAMS: Final = 256
_MAX_STREAMS_EACH: Final = 32

LastEventId = Annotated[
    int | None,
    Header(alias="Last-Event-ID", ge=0, le=MAX_ID, description="Of the last event that was seen."),
]


def job_stream(request: Request, service: Service, job_id: int, caller: Principal, after_id: int) -> Response:
    """The stream behind the event ``after_id``; 204 if the job is over and nothing is left to tell.

    Raises NotFoundError. The stream itself is refused if this process, or this key, has as many as it may.
    """
    state = request.app.state
    with service.database.read() as connection:
        job = get_job(connection, job_id, caller.roots)
        if after_id and job.is_final and not job_events_after(connection, job_id, after_id, limit=1):
            return Response(status_code=204)
    if getattr(state, "job_feed", None) is None:
        state.job_feed, state.job_streams = JobFeed(service.database, service.clock), Counter()
    stop = anyio.Event()
    address = None if request.client is None else request.client.host
    return _Stream(
        state.job_streams,
        caller.identity if caller.key_id is not None else f"address {address}",
        _follow(state.job_feed, job_id, after_id, caller.key_id, stop),
        shutdown_event=stop,  # the stream ends whole when the server stops, and is asked for at the next one
        shutdown_grace_period=_GRACE_SECONDS,
        ping=HEARTBEAT_SECONDS,
        send_timeout=_SEND_SECONDS,
        headers={"Cache-Control": "no-store"},
        sep="\n",
    )


class _Stream(EventSourceResponse):
    """Counted in ``streams`` by who asked."""

    def __init__(self, streams: Counter[str], who: str, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._streams = streams
        self._who = who

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises UnavailableError and TooManyRequestsError."""
        streams, who = self._streams, self._who
        if streams.total() >= _MAX_STREAMS:
            raise UnavailableError("too many streams of events are open; ask for the job itself")
        if streams[who] >= _MAX_STREAMS_EACH:
            raise TooManyRequestsError(
                f"{_MAX_STREAMS_EACH} streams of events are open with this key; end one, or ask for the job",
                headers={"Retry-After": "10"},
            )
        streams[who] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            streams[who] -= 1
            if not streams[who]:
                del streams[who]


async def _follow(
    feed: JobFeed, job_id: int, after_id: int, key_id: int | None, stop: anyio.Event
) -> AsyncIterator[ServerSentEvent]:
    until = time.monotonic() + _MAX_STREAM_SECONDS
    yield ServerSentEvent(comment="events of a job", retry=int(POLL_SECONDS * 1000))
    with feed.follow(job_id, after_id, key_id) as following:
        while time.monotonic() < until and not stop.is_set():
            news = await following.take(POLL_SECONDS)
            if news is None:
                continue
            for event in news.events:
                yield _shown(event)
            if news.progress is not None:
                yield ServerSentEvent(event="progress", data=json.dumps(asdict(news.progress)))
            if news.is_last:
                if news.state is not None:
                    yield ServerSentEvent(event="end", data=json.dumps({"state": news.state}))
                return


def _shown(event: JobEventRow) -> ServerSentEvent:
    return ServerSentEvent(
        id=str(event.id), event=event.kind, data=JobEventAnswer.of(event).model_dump_json()
    )
