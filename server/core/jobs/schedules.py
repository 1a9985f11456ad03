"""Periodic work and event consumers, run by one process at a time; removal of old jobs.

Periodic work is a row with a due time and a lease. A consumer is a function of a feature that receives
events in order; periodic work calls it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import structlog
from sqlalchemy import ColumnElement, Connection, Table, delete, func, or_, select, update

from dcp.server.catalog.events import (
    CatalogEvent,
    events_after,
    last_event_id,
    lock_position,
    move_on,
    position,
)
from dcp.server.core.security.principal import SYSTEM
from dcp.server.core.settings import Settings
from dcp.server.database.documents import abandon_documents, forget_drafts
from dcp.server.database.engine import Database, DatabaseUnavailableError, insert_missing
from dcp.server.database.tables import job_events, jobs, lineage, statistics, tasks, verifications
from dcp.server.database.tables import schedules as table
from dcp.server.records.jobs import FINAL_STATES

_THREADS: Final = 4
_MOST_PAUSE_SECONDS: Final = 300.0
"""Maximum pause after consecutive failures."""
_MOST_SECONDS: Final = 5.0
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ScheduleContext:
    """The service for periodic work. ``stop`` is set when the worker ends; work longer than a second must
    check it."""

    settings: Settings
    database: Database
    now: float
    stop: threading.Event

    def repeat(self, act: Callable[[Connection], object]) -> None:
        """Call ``act`` in separate transactions while it returns True, for a few seconds or until the worker
        ends."""
        until = time.monotonic() + _MOST_SECONDS
        while self.database.transact(act) and not self.stop.is_set() and time.monotonic() < until:
            pass


@dataclass(frozen=True, slots=True)
class PeriodicWork:
    """Work in a separate thread: ``act`` every ``interval_seconds`` after its last end.

    It may run twice if a process was believed dead. ``is_needed`` is a query for pending work; without
    pending work nothing is written.
    """

    name: str
    interval_seconds: float
    act: Callable[[ScheduleContext], object]
    is_needed: Callable[[Connection, ScheduleContext], bool] | None = None


class Scheduler:
    """Runs due work in threads; call `tick` several times a second."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        schedules: Sequence[PeriodicWork],
        owner: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._settings = settings
        self._database = database
        self._schedules = {schedule.name: schedule for schedule in schedules}
        self._owner = owner
        self._clock = clock
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="dcp-schedule")
        self._running: set[str] = set()
        self._lock = threading.Lock()
        self._next_renewal = 0.0
        self._failures: dict[str, int] = {}
        """Number of consecutive failures by name."""

    def tick(self) -> None:
        """Start due work, and renew the leases of running work. Raises DatabaseUnavailableError."""
        now = self._clock()
        with self._lock:
            running = set(self._running)
        self._renew(running, now)
        for name in self._due(running, now):
            if self._take(name, now):
                with self._lock:
                    self._running.add(name)
                self._pool.submit(self._act, self._schedules[name], now)

    def close(self) -> None:
        """Stop running work, and wait for its end."""
        self._stop.set()
        self._pool.shutdown()

    def _due(self, running: set[str], now: float) -> list[str]:
        wanted = [name for name in self._schedules if name not in running]
        with self._database.read() as connection:
            rows = connection.execute(select(table).where(table.c.name.in_(wanted))).all()
            known = {row.name for row in rows}
            due = [name for name in wanted if name not in known]
            due += [row.name for row in rows if _is_free(row, now)]
            return [name for name in due if self._is_needed(connection, name, now)]

    def _is_needed(self, connection: Connection, name: str, now: float) -> bool:
        is_needed = self._schedules[name].is_needed
        return is_needed is None or is_needed(connection, self._context(now))

    def _context(self, now: float) -> ScheduleContext:
        return ScheduleContext(self._settings, self._database, now, self._stop)

    def _take(self, name: str, now: float) -> bool:
        lease = {"lease_owner": self._owner, "lease_until_seconds": now + self._settings.lease_seconds}

        def take(connection: Connection) -> bool:
            insert_missing(connection, table, [{"name": name, "due_seconds": now}])
            free = or_(table.c.lease_until_seconds.is_(None), table.c.lease_until_seconds < now)
            statement = update(table).where(table.c.name == name, table.c.due_seconds <= now, free)
            return connection.execute(statement.values(**lease)).rowcount == 1

        return self._database.transact(take)

    def _renew(self, running: set[str], now: float) -> None:
        if not running or now < self._next_renewal:
            return
        self._next_renewal = now + self._settings.lease_seconds / 3
        with self._database.write() as connection:
            connection.execute(
                update(table)
                .where(table.c.name.in_(running), table.c.lease_owner == self._owner)
                .values(lease_until_seconds=now + self._settings.lease_seconds)
            )

    def _act(self, schedule: PeriodicWork, now: float) -> None:
        try:
            schedule.act(self._context(now))
            self._failures.pop(schedule.name, None)
        except DatabaseUnavailableError as error:
            _log.warning("database unavailable", schedule=schedule.name, error=str(error))
        except Exception:  # noqa: BLE001 - one that fails must not end the others, nor itself for ever
            self._failures[schedule.name] = self._failures.get(schedule.name, 0) + 1
            _log.exception("periodic work failed", schedule=schedule.name)
        finally:
            self._settle(schedule)
            with self._lock:
                self._running.discard(schedule.name)

    def _settle(self, schedule: PeriodicWork) -> None:
        """Write the next due time, later after each consecutive failure. If that fails, the lease expires."""
        seconds = schedule.interval_seconds
        if failures := self._failures.get(schedule.name, 0):
            seconds = max(seconds, min(_MOST_PAUSE_SECONDS, seconds * 2.0 ** min(failures - 1, 20)))
        values: dict[str, Any] = {"due_seconds": self._clock() + seconds}
        values |= {"lease_owner": None, "lease_until_seconds": None}
        statement = update(table).where(table.c.name == schedule.name, table.c.lease_owner == self._owner)
        try:
            self._database.transact(lambda connection: connection.execute(statement.values(**values)))
        except DatabaseUnavailableError as error:
            _log.warning("database unavailable", schedule=schedule.name, error=str(error))


def _is_free(row: Any, now: float) -> bool:
    return row.due_seconds <= now and (row.lease_until_seconds is None or row.lease_until_seconds < now)


# -- consumers of events -------------------------------------------------------------------------------------


Consume = Callable[[Any, Sequence[CatalogEvent], ScheduleContext], object]
"""Callback with a connection (None for slow consumers), events, and the context."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """A reader of all events of ``kinds``, or of every kind, from the first event on.

    ``consume`` is called with up to ``batch`` events, in the transaction that stores the position of the
    consumer ``name``: its writes happen once. If it ``is_slow``, it is called outside of the transaction,
    and events repeat after an exception or crash. One process at a time runs a consumer. While ``is_needed``
    returns False, events are skipped.
    """

    name: str
    kinds: frozenset[str] | None
    consume: Consume
    is_needed: Callable[[Connection], bool] | None = None
    batch: int = 500
    is_slow: bool = False

    def work(self, settings: Settings) -> PeriodicWork:
        """Return the periodic work of a worker."""
        return PeriodicWork(f"events:{self.name}", settings.poll_seconds, self.run, self._is_behind)

    def run(self, context: ScheduleContext) -> None:
        """Consume the events since the last run."""
        # a separate transaction: monitoring sees consumers that never finish
        context.database.transact(lambda connection: lock_position(connection, self.name))
        if not self.is_slow:
            context.repeat(lambda connection: self._consume_some(connection, context))
            return
        while not context.stop.is_set() and self._consume_outside(context):
            pass

    def _consume_outside(self, context: ScheduleContext) -> bool:
        """Consume a batch outside of a transaction. Returns True if more may be left."""
        with context.database.read() as connection:
            found, end, is_full = self._batch(connection, position(connection, self.name))
        if found:
            self.consume(None, found, context)

        def note(connection: Connection) -> None:
            if end > lock_position(connection, self.name):
                move_on(connection, self.name, end)

        context.database.transact(note)
        return is_full

    def _consume_some(self, connection: Connection, context: ScheduleContext) -> bool:
        """Consume a batch. Returns True if more may be left."""
        begin = lock_position(connection, self.name)
        found, end, is_full = self._batch(connection, begin)
        if found:
            self.consume(connection, found, context)
        if end > begin:
            move_on(connection, self.name, end)
        return is_full

    def _batch(self, connection: Connection, begin: int) -> tuple[list[CatalogEvent], int, bool]:
        """Return the next events, the position after them, and True if more may be left."""
        newest = last_event_id(connection)
        is_needed = self.is_needed is None or self.is_needed(connection)
        found = events_after(connection, begin, self.batch, kinds=self.kinds) if is_needed else []
        is_full = len(found) == self.batch
        last = found[-1].id if found else begin
        return found, last if is_full else max(last, newest), is_full

    def _is_behind(self, connection: Connection, context: ScheduleContext) -> bool:
        return last_event_id(connection) > position(connection, self.name)


_KEEP_SCANS_SECONDS: Final = 3600.0
_KEEP_DRAFTS_SECONDS: Final = 86_400.0

_REFERRING: Final[tuple[Table, ...]] = (lineage, verifications, statistics)


def forget_jobs(connection: Connection, before: float, *, limit: int = 500) -> int:
    """Delete jobs that ended before the given time, and return their number; 0 when done.

    Jobs referenced by the catalog lose only tasks and events. The newest job always stays, so numbers are
    never reused.
    """
    return _forget(connection, limit, jobs.c.state.in_(FINAL_STATES), jobs.c.finished_seconds < before)


def forget_scans(connection: Connection, before: float, *, limit: int = 500) -> int:
    """Delete successful periodic scans, which run every minute, like `forget_jobs`."""
    return _forget(
        connection,
        500,
        jobs.c.kind == "scan",
        jobs.c.created_by == SYSTEM.name,
        jobs.c.state == "succeeded",
        jobs.c.finished_seconds < before,
    )


def _forget(connection: Connection, limit: int, *conditions: ColumnElement[bool]) -> int:
    newest = select(func.max(jobs.c.id)).scalar_subquery()
    has_events = select(job_events.c.id).where(job_events.c.job_id == jobs.c.id).exists()
    query = (
        select(jobs.c.id)
        .where(*conditions, jobs.c.id != newest, has_events)
        .order_by(jobs.c.finished_seconds)
        .limit(limit)
    )
    old = list(connection.execute(query).scalars())
    if not old:
        return 0
    for one in (job_events, tasks):
        connection.execute(delete(one).where(one.c.job_id.in_(old)))
    referred = [select(one.c.job_id).where(one.c.job_id.in_(old)).distinct() for one in _REFERRING]
    unused = [jobs.c.id.not_in(query) for query in referred]
    connection.execute(delete(jobs).where(jobs.c.id.in_(old), *unused))
    return len(old)


def _clean_up(context: ScheduleContext) -> None:
    context.database.transact(partial(abandon_documents, now=context.now))
    forget_drafts(context.database, context.now - _KEEP_DRAFTS_SECONDS)
    before = context.now - context.settings.keep_jobs_seconds
    context.repeat(partial(forget_jobs, before=before))
    context.repeat(partial(forget_scans, before=max(before, context.now - _KEEP_SCANS_SECONDS)))


CLEAN_UP: Final = PeriodicWork("clean-up", 600.0, _clean_up)
