"""Events of jobs as server-sent events: replayed from the ledger, then followed.

One look at the database serves all followers in this process: a thread looks as long as there are some. It
skips those that have not taken the last news, so that a slow client costs one page of memory.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Final, Generic, TypeVar

import anyio
import structlog
from fastapi import Header
from pydantic import BeforeValidator, Field
from sqlalchemy import Connection, and_, or_, select
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dcp.server.catalog.inputs import MAX_ID
from dcp.server.core.answers import answer_model, answer_of
from dcp.server.core.ask import Ask
from dcp.server.core.http.context import Service
from dcp.server.core.jobs.ledger.reading import (
    active_progress,
    all_events_after,
    get_job,
    job_events_after,
    last_event_id,
)
from dcp.server.core.jobs.ledger.rows import event_of_row, progress_of
from dcp.server.core.problems import BrokenBodyError, TooManyRequestsError, UnavailableError
from dcp.server.core.security.keys import valid_keys
from dcp.server.database.engine import Database, DatabaseUnavailableError
from dcp.server.database.tables import job_events, jobs
from dcp.server.records.jobs import FINAL_STATES, JobEvent, JobProgress, JobState

__all__ = [
    "POLL_SECONDS",
    "AllJobsFeed",
    "Feed",
    "Following",
    "FollowingAll",
    "FollowingOne",
    "JobFeed",
    "LastEventId",
    "News",
    "all_jobs_stream",
    "job_stream",
    "new_events",
    "stream_of",
]


POLL_SECONDS: Final = 0.5
_log = structlog.get_logger(__name__)
_PAGE: Final = 500
_AT_ONCE: Final = 100
"""Jobs in one statement."""
_OVERLAP: Final = 200
"""Events before the last one among which late ones are looked for: transactions of PostgreSQL do not end in
the order in which they have numbered their events."""
_KNOWN: Final = 4 * (_PAGE + _OVERLAP)


@dataclass(frozen=True, slots=True)
class News:
    """New events, with progress by job. ``is_last``: no more will come, because the job has ended
    and all its events are here, or, with ``state`` None, because it was forgotten, the key has ended or the
    database is away."""

    state: JobState | None
    events: Sequence[Any] = ()
    progress: Mapping[int, JobProgress] = field(default_factory=dict)
    is_last: bool = False


_OVER: Final = News(None, is_last=True)


class Following:
    """One who follows jobs, from behind the event ``after_id`` on."""

    def __init__(self, after_id: int, key_id: int | None) -> None:
        self.after_id = after_id
        self.key_id = key_id
        self._loop = asyncio.get_running_loop()
        self._has_news = asyncio.Event()
        self._news: News | None = None
        self._told: Mapping[int, JobProgress] = {}

    @property
    def waits(self) -> bool:
        """True once it has taken the last news."""
        return self._news is None

    async def take(self, seconds: float) -> News | None:
        """Return the news; None without any within ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                await self._has_news.wait()
        except TimeoutError:
            return None
        self._has_news.clear()
        news, self._news = self._news, None
        return news

    def tell(self, news: News) -> None:
        """For the thread that looks: hand over what is new, if anything is."""
        is_new = news.events or news.is_last or news.progress not in ({}, self._told)
        if not is_new or not self.waits:
            return
        self._told = news.progress or self._told
        if news.events:
            self.after_id = max(self.after_id, news.events[-1].id)
        self._news = news
        with suppress(RuntimeError):  # its loop is closed: it is gone, and says so itself
            self._loop.call_soon_threadsafe(self._has_news.set)


class FollowingOne(Following):
    """Follows one job."""

    def __init__(self, job_id: int, after_id: int, key_id: int | None) -> None:
        super().__init__(after_id, key_id)
        self.job_id = job_id


class FollowingAll(Following):
    """Follows all jobs in ``visible`` roots, with the scans that the service makes by itself or without."""

    def __init__(
        self, after_id: int, key_id: int | None, visible: frozenset[str] | None, own_scans: bool
    ) -> None:
        super().__init__(after_id, key_id)
        self.visible = visible
        self.own_scans = own_scans
        self.known: deque[int] | None = None  # events before ``after_id`` that are old; None before a look


F = TypeVar("F", bound=Following)


class Feed(ABC, Generic[F]):
    """Looks for all `Following`s of a process, of whatever they follow. ``clock`` is for the ends of keys."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock
        self._following: set[F] = set()
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_running = False

    @contextmanager
    def _followed(self, one: F) -> Iterator[F]:
        with self._lock:
            self._following.add(one)
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="dcp-feed", daemon=True).start()
        self._wake.set()  # it need not wait for the next look
        try:
            yield one
        finally:
            with self._lock:
                self._following.discard(one)

    def _run(self) -> None:
        while True:
            with self._lock:
                followers = list(self._following)
                if not followers:
                    self._is_running = False
                    return
            self._wake.clear()
            has_more = False
            try:
                for begin in range(0, len(followers), _AT_ONCE):
                    has_more |= self._look(followers[begin : begin + _AT_ONCE])
            except Exception as error:  # noqa: BLE001 - followers must not wait for ever
                if not isinstance(error, DatabaseUnavailableError):
                    _log.exception("events cannot be followed")
                for one in followers:  # they ask again, and are refused as long as it lasts
                    one.tell(_OVER)
            if not has_more:
                self._wake.wait(POLL_SECONDS)

    @abstractmethod
    def _look(self, some: Sequence[F]) -> bool:
        """Look for ``some``, and tell them; whether there is more than a page."""

    def _without_key(self, connection: Connection, some: Sequence[F]) -> set[F]:
        """Return those whose keys are none any more."""
        keys = valid_keys(connection, {one.key_id for one in some if one.key_id}, self._clock())
        return {one for one in some if one.key_id is not None and one.key_id not in keys}


class JobFeed(Feed[FollowingOne]):
    """For those who follow one job each."""

    @contextmanager
    def follow(self, job_id: int, after_id: int, key_id: int | None) -> Iterator[FollowingOne]:
        """Follow a job with a key; ended when that is revoked."""
        with self._followed(FollowingOne(job_id, after_id, key_id)) as one:
            yield one

    def _look(self, some: Sequence[FollowingOne]) -> bool:
        waiting = [one for one in some if one.waits]
        after: dict[int, int] = {}
        for one in waiting:
            after[one.job_id] = min(one.after_id, after.get(one.job_id, one.after_id))
        with self._database.read() as connection:
            ended = self._without_key(connection, waiting)
            # States first: if a job is over, all of its events are there, also if each statement has its own
            # view.
            states = _states(connection, list(after))
            events, is_all = _events(connection, after)
            progress = progress_of(connection, states)
        for one in waiting:
            state = states.get(one.job_id)
            if state is None or one in ended:
                one.tell(_OVER)
                continue
            own = [event for event in events if event.job_id == one.job_id and event.id > one.after_id]
            is_last = is_all and state in FINAL_STATES
            mine = {one.job_id: progress[one.job_id]} if one.job_id in progress else {}
            one.tell(News(state, own, mine, is_last))
        return not is_all


class AllJobsFeed(Feed[FollowingAll]):
    """For those who follow all jobs: one look for each set of roots that may be seen."""

    @contextmanager
    def follow(
        self, after_id: int, key_id: int | None, visible: frozenset[str] | None, *, own_scans: bool = False
    ) -> Iterator[FollowingAll]:
        """Follow with a key; ended when that is revoked."""
        with self._followed(FollowingAll(after_id, key_id, visible, own_scans)) as one:
            yield one

    def _look(self, some: Sequence[FollowingAll]) -> bool:
        waiting = [one for one in some if one.waits]
        has_more = False
        with self._database.read() as connection:
            ended = self._without_key(connection, waiting)
            groups: defaultdict[tuple[Any, bool], list[FollowingAll]] = defaultdict(list)
            for one in waiting:
                if one in ended:
                    one.tell(_OVER)
                else:
                    groups[one.visible, one.own_scans].append(one)
            for (visible, own_scans), alike in groups.items():
                first = min(one.after_id for one in alike) - _OVERLAP
                events = all_events_after(
                    connection, first, visible, own_scans=own_scans, limit=_PAGE + _OVERLAP
                )
                progress = active_progress(connection, visible, own_scans=own_scans)
                is_cut = len(events) == _PAGE + _OVERLAP
                for one in alike:
                    if not (is_cut and events[-1].id < one.after_id):  # else others catch up first
                        one.tell(News(None, new_events(one, events), progress))
                has_more |= is_cut
        return has_more


def new_events(one: FollowingAll, events: Sequence[JobEvent]) -> list[JobEvent]:
    """Return the events behind the last one, and those before it that have become visible since the look
    before."""
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
    """Return those of jobs behind an event each, the first page; whether that is all."""
    wanted = [and_(job_events.c.job_id == job_id, job_events.c.id > last) for job_id, last in after.items()]
    if not wanted:
        return [], True
    query = select(job_events).where(or_(*wanted)).order_by(job_events.c.id).limit(_PAGE)
    found = [event_of_row(row) for row in connection.execute(query)]
    return found, len(found) < _PAGE


HEARTBEAT_SECONDS: Final = 15.0
_GRACE_SECONDS: Final = 2.0
_SEND_SECONDS: Final = 30.0
_MAX_STREAM_SECONDS: Final = 3600.0
_MAX_STREAMS: Final = 256
_MAX_STREAMS_EACH: Final = 32


def _digits(text: str) -> str:
    if not (text.isascii() and text.isdecimal()):  # pydantic takes "+0.0" and "1_000"
        raise ValueError("an event's id has digits only")
    return text


LastEventId = Annotated[
    Annotated[int, Field(ge=0, le=MAX_ID), BeforeValidator(_digits)] | None,
    Header(alias="Last-Event-ID", description="Of the last event that was seen."),
]


def job_stream(ask: Ask, job_id: int, after_id: int) -> Response:
    """Return the stream behind the event ``after_id``; 204 if the job is over and has no more events.

    Raises NotFoundError. The stream itself is refused if this process, or this key, has too many.
    """
    with ask.reading() as connection:
        job = get_job(connection, job_id, ask.visible)
        if after_id and job.is_final and not job_events_after(connection, job_id, after_id, limit=1):
            return Response(status_code=204)
    stop = anyio.Event()
    followed = ask.service.own(_Feeds).one.follow(job_id, after_id, ask.caller.key_id)
    return stream_of(ask, _sent_events(followed, stop, "events of a job"), stop)


def all_jobs_stream(ask: Ask, after_id: int | None, *, own_scans: bool) -> Response:
    """Return the stream of all visible jobs behind the event ``after_id``, or from now on. Refused as
    `job_stream`."""
    if after_id is None:
        after_id = ask.find(last_event_id)
    stop = anyio.Event()
    feed = ask.service.own(_Feeds).all
    followed = feed.follow(after_id, ask.caller.key_id, ask.visible, own_scans=own_scans)
    ready = ServerSentEvent(id=str(after_id), event="ready", data="{}")
    return stream_of(ask, _sent_events(followed, stop, "events of all jobs", ready), stop)


class _Feeds:
    """The feeds that streams of a process share; ``open``: how many streams each caller has."""

    def __init__(self, service: Service) -> None:
        self.one = JobFeed(service.database, service.clock)
        self.all = AllJobsFeed(service.database, service.clock)
        self.open: Counter[str] = Counter()


def stream_of(ask: Ask, events: AsyncIterator[ServerSentEvent], stop: anyio.Event) -> Response:
    """Answer with ``events``, a stream of the caller that counts; ``stop`` is set when the server ends."""
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
            raise UnavailableError("too many streams of events are open; read without a stream")
        if streams[who] >= _MAX_STREAMS_EACH:
            raise TooManyRequestsError(
                f"{_MAX_STREAMS_EACH} streams of events are open with this key; end one, or read without",
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


async def _sent_events(
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
