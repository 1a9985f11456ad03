"""Events of a job, or of all, as server-sent events: replayed from the ledger, then followed."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Annotated, Any, Final

import anyio
import structlog
from fastapi import Header
from pydantic import BeforeValidator, Field
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dcp.server.catalog.inputs import MAX_ID
from dcp.server.core.answers import answer_model, answer_of
from dcp.server.core.ask import Ask
from dcp.server.core.http.context import Service
from dcp.server.core.jobs.following import POLL_SECONDS, AllJobsFeed, Following, JobFeed
from dcp.server.core.jobs.ledger.reading import get_job, job_events_after, last_event_id
from dcp.server.core.problems import BrokenBodyError, TooManyRequestsError, UnavailableError
from dcp.server.records.jobs import JobEvent, JobProgress

__all__ = ["LastEventId", "all_jobs_stream", "job_stream"]

HEARTBEAT_SECONDS: Final = 15.0
_GRACE_SECONDS: Final = 2.0
_SEND_SECONDS: Final = 30.0
_MAX_STREAM_SECONDS: Final = 3600.0
_MAX_STREAMS: Final = 256
_MAX_STREAMS_EACH: Final = 32
_log = structlog.get_logger(__name__)


def _digits(text: str) -> str:
    if not (text.isascii() and text.isdecimal()):  # pydantic takes "+0.0" and "1_000"
        raise ValueError("an event's id has digits only")
    return text


LastEventId = Annotated[
    Annotated[int, Field(ge=0, le=MAX_ID), BeforeValidator(_digits)] | None,
    Header(alias="Last-Event-ID", description="Of the last event that was seen."),
]


def job_stream(ask: Ask, job_id: int, after_id: int) -> Response:
    """The stream behind the event ``after_id``; 204 if the job is over and has no more events.

    Raises NotFoundError. The stream itself is refused if this process, or this key, has too many.
    """
    with ask.reading() as connection:
        job = get_job(connection, job_id, ask.visible)
        if after_id and job.is_final and not job_events_after(connection, job_id, after_id, limit=1):
            return Response(status_code=204)
    stop = anyio.Event()
    followed = ask.service.own(_Feeds).one.follow(job_id, after_id, ask.caller.key_id)
    return _stream(ask, _events(followed, stop, "events of a job"), stop)


def all_jobs_stream(ask: Ask, after_id: int | None, *, own_scans: bool) -> Response:
    """The stream of all visible jobs behind the event ``after_id``, or from now on. Refused as
    `job_stream`."""
    if after_id is None:
        after_id = ask.find(last_event_id)
    stop = anyio.Event()
    feed = ask.service.own(_Feeds).all
    followed = feed.follow(after_id, ask.caller.key_id, ask.visible, own_scans=own_scans)
    ready = ServerSentEvent(id=str(after_id), event="ready", data="{}")
    return _stream(ask, _events(followed, stop, "events of all jobs", ready), stop)


class _Feeds:
    """The feeds that streams of a process share; ``open``: how many streams each caller has."""

    def __init__(self, service: Service) -> None:
        self.one = JobFeed(service.database, service.clock)
        self.all = AllJobsFeed(service.database, service.clock)
        self.open: Counter[str] = Counter()


def _stream(ask: Ask, events: AsyncIterator[ServerSentEvent], stop: anyio.Event) -> Response:
    return _Stream(
        ask.service.own(_Feeds).open,
        ask.caller.identity if ask.caller.key_id is not None else f"address {ask.address}",
        events,
        shutdown_event=stop,  # the stream ends whole when the server stops, and clients reconnect to the next
        shutdown_grace_period=_GRACE_SECONDS,
        ping=HEARTBEAT_SECONDS,
        send_timeout=_SEND_SECONDS,
        headers={"Cache-Control": "no-store"},
        sep="\n",
    )


class _Stream(EventSourceResponse):
    """A stream that counts in ``streams`` of its caller."""

    def __init__(self, streams: Counter[str], who: str, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._streams = streams
        self._who = who

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI. Raises UnavailableError and TooManyRequestsError; BrokenBodyError once it has begun."""
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
        except SendTimeoutError:
            _log.info("answer broken off", path=scope["path"], error="the client takes no events")
            raise BrokenBodyError("the client takes no events") from None
        finally:
            streams[who] -= 1
            if not streams[who]:
                del streams[who]


async def _events(
    followed: AbstractContextManager[Following], stop: anyio.Event, comment: str, *first: ServerSentEvent
) -> AsyncIterator[ServerSentEvent]:
    until = time.monotonic() + _MAX_STREAM_SECONDS
    yield ServerSentEvent(comment=comment, retry=int(POLL_SECONDS * 1000))
    for event in first:
        yield event
    sent: dict[int, JobProgress] = {}
    with followed as following:
        while time.monotonic() < until and not stop.is_set():
            news = await following.take(POLL_SECONDS)
            if news is None:
                continue
            for found in news.events:
                yield _shown(found)
            for job_id, progress in news.progress.items():
                if sent.get(job_id) != progress:
                    data = {"job_id": job_id, **asdict(progress)}
                    yield ServerSentEvent(event="progress", data=json.dumps(data))
            sent = dict(news.progress)
            if news.is_last:
                if news.state is not None:
                    yield ServerSentEvent(event="end", data=json.dumps({"state": news.state}))
                return


def _shown(event: JobEvent) -> ServerSentEvent:
    data = answer_of(answer_model(JobEvent), event).model_dump_json()
    return ServerSentEvent(id=str(event.id), event=event.kind, data=data)
