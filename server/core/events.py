"""Consumers of events: functions of features that get what has happened, in order and once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from dcp.server.catalog.events import (
    CatalogEvent,
    events_after,
    last_event_id,
    lock_position,
    move_on,
    position,
)
from dcp.server.core.jobs.schedules import PeriodicWork, ScheduleContext
from dcp.server.core.settings import Settings

__all__ = ["Consume", "Consumer"]

Consume = Callable[[Any, Sequence[CatalogEvent], ScheduleContext], object]
"""Called with a connection, or None where the consumer is slow; events; the settings and the database."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """A reader of all events of ``kinds``, or of every kind, from the first one on.

    ``consume`` is called with up to ``batch`` of them, in the transaction that notes how far the consumer
    ``name`` has come: what it writes is written once. If it ``is_slow``, it is called outside of it, and the
    events come again where it raises or its process ends. One process at a time does so. While ``is_needed``
    returns False, events are skipped.
    """

    name: str
    kinds: frozenset[str] | None
    consume: Consume
    is_needed: Callable[[Connection], bool] | None = None
    batch: int = 500
    is_slow: bool = False

    def work(self, settings: Settings) -> PeriodicWork:
        """Make the periodic work of a worker."""
        return PeriodicWork(f"events:{self.name}", settings.poll_seconds, self.run, self._is_behind)

    def run(self, context: ScheduleContext) -> None:
        """Consume what has happened since the last time."""
        # in a transaction of its own: monitoring knows also a consumer that has never come to an end
        context.database.transact(lambda connection: lock_position(connection, self.name))
        if not self.is_slow:
            context.repeat(lambda connection: self._consume_some(connection, context))
            return
        while not context.stop.is_set() and self._consume_outside(context):
            pass

    def _consume_outside(self, context: ScheduleContext) -> bool:
        """Consume a batch. Returns whether more may be left."""
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
        """Consume a batch. Returns whether more may be left."""
        begin = lock_position(connection, self.name)
        found, end, is_full = self._batch(connection, begin)
        if found:
            self.consume(connection, found, context)
        if end > begin:
            move_on(connection, self.name, end)
        return is_full

    def _batch(self, connection: Connection, begin: int) -> tuple[list[CatalogEvent], int, bool]:
        """The next events, the position behind them, and whether more may be left."""
        newest = last_event_id(connection)
        is_needed = self.is_needed is None or self.is_needed(connection)
        found = events_after(connection, begin, self.batch, kinds=self.kinds) if is_needed else []
        is_full = len(found) == self.batch
        last = found[-1].id if found else begin
        return found, last if is_full else max(last, newest), is_full

    def _is_behind(self, connection: Connection, context: ScheduleContext) -> bool:
        return last_event_id(connection) > position(connection, self.name)
