"""Events of the catalog, in order, for webhooks, automation and subscribers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, func, insert, select, text

from dcp.server.database.sql import insert_or_update
from dcp.server.database.tables import consumers, events, roots

__all__ = [
    "CatalogEvent",
    "NewEvent",
    "checkpoint_event",
    "emit",
    "emit_all",
    "events_after",
    "last_event_id",
    "move_on",
    "position",
]

_ORDER_LOCK: Final = 0x6576_656E_7473


@dataclass(frozen=True, slots=True)
class NewEvent:
    """One to be written. ``kind`` is one of those in `dcp.server.database.tables.events`."""

    kind: str
    root_id: int | None = None
    checkpoint_id: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


def checkpoint_event(kind: str, row: Mapping[Any, Any], **data: Any) -> NewEvent:
    """An event of a checkpoint: ``row`` with the keys of its root and run."""
    known = {name: row[name] for name in ("root", "run", "key", "step", "format")}
    return NewEvent(kind, row["root_id"], row["id"], known | data)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEvent:
    """One that happened. A later one has a greater id, on PostgreSQL too."""

    id: int
    kind: str
    root: str | None
    checkpoint_id: int | None
    data: dict[str, Any]
    at_seconds: float


def emit(
    connection: Connection,
    kind: str,
    *,
    root_id: int | None = None,
    checkpoint_id: int | None = None,
    data: Mapping[str, Any] | None = None,
    now: float | None = None,
) -> None:
    """Write one event, which becomes visible with the transaction. See `emit_all`."""
    event = NewEvent(kind, root_id, checkpoint_id, data or {})
    emit_all(connection, [event], now=time.time() if now is None else now)


def emit_all(connection: Connection, new: Sequence[NewEvent], *, now: float) -> None:
    """Write events; best as the last thing in a transaction.

    PostgreSQL gives numbers before it commits. A reader of "all after 7" while 8 is committed and 7 is
    not would never see 7, so writers of events take turns from here to their commit.
    """
    if not new:
        return
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ORDER_LOCK})
    connection.execute(insert(events), [{**asdict(event), "at_seconds": now} for event in new])


def events_after(connection: Connection, event_id: int, limit: int) -> list[CatalogEvent]:
    """The next ``limit`` events after ``event_id``, oldest first."""
    columns = [column for column in events.c if column is not events.c.root_id]
    query = (
        select(*columns, roots.c.name.label("root"))
        .outerjoin_from(events, roots, roots.c.id == events.c.root_id)
        .where(events.c.id > event_id)
        .order_by(events.c.id)
        .limit(limit)
    )
    return [CatalogEvent(**row._mapping) for row in connection.execute(query)]


def last_event_id(connection: Connection) -> int:
    """The id of the newest event, 0 if there is none: new consumers begin here."""
    return int(connection.execute(select(func.coalesce(func.max(events.c.id), 0))).scalar_one())


def position(connection: Connection, consumer: str) -> int:
    """The last event that ``consumer`` has dealt with; 0 if it never said."""
    found = connection.execute(select(consumers.c.event_id).where(consumers.c.name == consumer)).scalar()
    return 0 if found is None else int(found)


def move_on(connection: Connection, consumer: str, event_id: int) -> None:
    """``consumer`` has dealt with all events up to ``event_id``."""
    insert_or_update(connection, consumers, [{"name": consumer, "event_id": event_id}])
