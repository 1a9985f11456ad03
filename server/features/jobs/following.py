"""Events of jobs as server-sent events: replayed from the ledger, then followed.

One query serves all followers of a process, in a thread that runs while followers exist. Followers that have
not consumed the last events are skipped, so a slow client costs one page of memory.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final

from fastapi import Header
from pydantic import BeforeValidator, Field
from sqlalchemy import Connection, and_, or_, select
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from dcp.server.catalog.inputs import MAX_ID
from dcp.server.core.answers import answer_model, answer_of
from dcp.server.core.ask import Ask
from dcp.server.core.jobs.ledger.reading import (
    active_progress,
    all_events_after,
    get_job,
    job_events_after,
    last_event_id,
)
from dcp.server.core.jobs.ledger.rows import event_of_row, progress_of
from dcp.server.core.streams import OVER, Feed, Following, News, stream_of
from dcp.server.database.tables import job_events, jobs
from dcp.server.records.jobs import FINAL_STATES, JobEvent, JobProgress, JobState

_PAGE: Final = 500
_OVERLAP: Final = 200
"""Earlier events to check for late arrivals: PostgreSQL transactions commit in another order than their
numbers."""
_KNOWN: Final = 4 * (_PAGE + _OVERLAP)


@dataclass(eq=False, kw_only=True)
class FollowingOne(Following):
    """Follower of one job."""

    job_id: int


@dataclass(eq=False, kw_only=True)
class FollowingAll(Following):
    """Follower of all visible jobs, with or without scans submitted by the service."""

    own_scans: bool
    known: deque[int] | None = None  # old events before ``after_id``; None before the first query


class JobFeed(Feed[FollowingOne]):
    """Feed for followers of single jobs."""

    def _look(self, connection: Connection, some: Sequence[FollowingOne]) -> bool:
        after: dict[int, int] = {}
        for one in some:
            after[one.job_id] = min(one.after_id, after.get(one.job_id, one.after_id))
        # Read states first: a finished job then has all of its events, even if statements have separate
        # snapshots.
        states = _states(connection, list(after))
        events, is_all = _events(connection, after)
        progress = progress_of(connection, states)
        for one in some:
            state = states.get(one.job_id)
            if state is None:
                one.tell(OVER)
                continue
            own = [event for event in events if event.job_id == one.job_id and event.id > one.after_id]
            is_last = is_all and state in FINAL_STATES
            mine = {one.job_id: progress[one.job_id]} if one.job_id in progress else {}
            one.tell(News(state, own, mine, is_last))
        return not is_all


class AllJobsFeed(Feed[FollowingAll]):
    """Feed for followers of all jobs: one query per set of visible roots."""

    def _look(self, connection: Connection, some: Sequence[FollowingAll]) -> bool:
        has_more = False
        groups: defaultdict[tuple[Any, bool], list[FollowingAll]] = defaultdict(list)
        for one in some:
            groups[one.caller.roots, one.own_scans].append(one)
        for (visible, own_scans), alike in groups.items():
            first = min(one.after_id for one in alike) - _OVERLAP
            events = all_events_after(connection, first, visible, own_scans=own_scans, limit=_PAGE + _OVERLAP)
            progress = active_progress(connection, visible, own_scans=own_scans)
            is_cut = len(events) == _PAGE + _OVERLAP
            for one in alike:
                # followers behind this event catch up first
                if not (is_cut and events[-1].id < one.after_id):
                    one.tell(News(None, new_events(one, events), progress))
            has_more |= is_cut
        return has_more


def new_events(one: FollowingAll, events: Sequence[JobEvent]) -> list[JobEvent]:
    """Return events after the last event, and earlier events that became visible since the last query."""
    if one.known is None:
        old = (event.id for event in events if event.id <= one.after_id)
        one.known = deque(old, maxlen=_KNOWN)
    known = frozenset(one.known)
    low = one.after_id - _OVERLAP
    new = [event for event in events if event.id > low and event.id not in known]
    one.known.extend(event.id for event in new)
    return new


def _states(connection: Connection, job_ids: Sequence[int]) -> dict[int, JobState]:
    rows = connection.execute(select(jobs.c.id, jobs.c.state).where(jobs.c.id.in_(job_ids)))
    return {row.id: row.state for row in rows}


def _events(connection: Connection, after: dict[int, int]) -> tuple[list[JobEvent], bool]:
    """Return the first page of events after the position of each job; and True if the page is complete."""
    wanted = [and_(job_events.c.job_id == job_id, job_events.c.id > last) for job_id, last in after.items()]
    if not wanted:
        return [], True
    query = select(job_events).where(or_(*wanted)).order_by(job_events.c.id).limit(_PAGE)
    found = [event_of_row(row) for row in connection.execute(query)]
    return found, len(found) < _PAGE


def _digits(text: str) -> str:
    if not (text.isascii() and text.isdecimal()):  # pydantic would accept "+0.0" and "1_000"
        raise ValueError("an event's id has digits only")
    return text


LastEventId = Annotated[
    Annotated[int, Field(ge=0, le=MAX_ID), BeforeValidator(_digits)] | None,
    Header(alias="Last-Event-ID", description="Id of the last received event."),
]


def job_stream(ask: Ask, job_id: int, after_id: int) -> Response:
    """Return the stream behind the event ``after_id``; 204 if the job is over and has no more events.

    Raises NotFoundError. The stream itself is refused if this process, or this key, has too many.
    """
    with ask.reading() as connection:
        job = get_job(connection, job_id, ask.visible)
        if after_id and job.is_final and not job_events_after(connection, job_id, after_id, limit=1):
            return Response(status_code=204)
    follower = FollowingOne(caller=ask.caller, after_id=after_id, job_id=job_id)
    return stream_of(ask, JobFeed, follower, _Shown(), comment="events of a job")


def all_jobs_stream(ask: Ask, after_id: int | None, *, own_scans: bool) -> Response:
    """Return the stream of all visible jobs behind the event ``after_id``, or from now on. Refused as
    `job_stream`."""
    if after_id is None:
        after_id = ask.find(last_event_id)
    follower = FollowingAll(caller=ask.caller, after_id=after_id, own_scans=own_scans)
    ready = ServerSentEvent(id=str(after_id), event="ready", data="{}")
    return stream_of(ask, AllJobsFeed, follower, _Shown(), ready, comment="events of all jobs")


class _Shown:
    """Events of one stream; progress only after a change."""

    def __init__(self) -> None:
        self._sent: Mapping[int, JobProgress] = {}

    def __call__(self, news: News) -> Iterator[ServerSentEvent]:
        for event in news.events:
            data = answer_of(answer_model(JobEvent), event).model_dump_json()
            yield ServerSentEvent(id=str(event.id), event=event.kind, data=data)
        for job_id, progress in news.progress.items():
            if self._sent.get(job_id) != progress:
                data = json.dumps({"job_id": job_id, **asdict(progress)})
                yield ServerSentEvent(event="progress", data=data)
        self._sent = dict(news.progress)
        if news.is_last and news.state is not None:
            yield ServerSentEvent(event="end", data=json.dumps({"state": news.state}))
