"""Feeds of the events of jobs: one look at the database for all followers in this process.

A thread looks as long as there are followers. It skips those that have not taken the last news, so that a
slow client costs one page of memory.
"""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

import structlog
from sqlalchemy import Connection, and_, or_, select

from dcp.server.core.jobs.ledger.reading import active_progress, all_events_after
from dcp.server.core.jobs.ledger.rows import event_of_row, progress_of
from dcp.server.core.security.keys import valid_keys
from dcp.server.database.engine import Database, DatabaseUnavailableError
from dcp.server.database.tables import job_events, jobs
from dcp.server.records.jobs import FINAL_STATES, JobEvent, JobProgress, JobState

__all__ = ["POLL_SECONDS", "AllJobsFeed", "FollowingAll", "FollowingOne", "JobFeed", "News", "new_events"]

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
    events: Sequence[JobEvent] = ()
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
        """The news; None without any within ``seconds``."""
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


class _Feed(ABC, Generic[F]):
    """Looks for all `Following`s of a process. ``clock`` is for the ends of keys."""

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
                threading.Thread(target=self._run, name="dcp-job-feed", daemon=True).start()
        self._wake.set()  # it need not wait for the next look
        try:
            yield one
        finally:
            with self._lock:
                self._following.discard(one)

    def _run(self) -> None:
        while True:
            with self._lock:
                everybody = list(self._following)
                if not everybody:
                    self._is_running = False
                    return
            self._wake.clear()
            has_more = False
            try:
                for begin in range(0, len(everybody), _AT_ONCE):
                    has_more |= self._look(everybody[begin : begin + _AT_ONCE])
            except Exception as error:  # noqa: BLE001 - followers must not wait for ever
                if not isinstance(error, DatabaseUnavailableError):
                    _log.exception("jobs cannot be followed")
                for one in everybody:  # they ask again, and are refused as long as it lasts
                    one.tell(_OVER)
            if not has_more:
                self._wake.wait(POLL_SECONDS)

    @abstractmethod
    def _look(self, some: Sequence[F]) -> bool:
        """Look for ``some``, and tell them; whether there is more than a page."""

    def _without_key(self, connection: Connection, some: Sequence[F]) -> set[F]:
        """Those whose keys are none any more."""
        keys = valid_keys(connection, {one.key_id for one in some if one.key_id}, self._clock())
        return {one for one in some if one.key_id is not None and one.key_id not in keys}


class JobFeed(_Feed[FollowingOne]):
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


class AllJobsFeed(_Feed[FollowingAll]):
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
    """The events behind the last one, and those before it that have become visible since the look before."""
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
    """Those of jobs behind an event each, the first page; whether that is all."""
    wanted = [and_(job_events.c.job_id == job_id, job_events.c.id > last) for job_id, last in after.items()]
    if not wanted:
        return [], True
    query = select(job_events).where(or_(*wanted)).order_by(job_events.c.id).limit(_PAGE)
    found = [event_of_row(row) for row in connection.execute(query)]
    return found, len(found) < _PAGE
