"""Events of the catalog in order, and the position of each consumer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from sqlalchemy import Connection, func, insert, select, text, update

from dcp.server.database.engine import insert_missing
from dcp.server.database.tables import consumers, events, roots

CHECKPOINT_EVENTS: Final = (
    "checkpoint.committed",
    "checkpoint.verified",
    "checkpoint.damaged",
    "checkpoint.converted",
    "checkpoint.deleted",
    "checkpoint.tagged",
    "checkpoint.aliased",
)
"""Kinds of events of the catalog; features declare further kinds."""

_ORDER_LOCK: Final = 0x6576_656E_7473


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event to write. ``kind`` is one of `CHECKPOINT_EVENTS` or declared by a feature."""

    kind: str
    root_id: int | None = None
    checkpoint_id: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


def checkpoint_event(kind: str, row: Mapping[Any, Any], **data: Any) -> NewEvent:
    """Return an event of a checkpoint; ``row`` includes the keys of root and run."""
    known = {name: row[name] for name in ("root", "run", "key", "step", "format")}
    return NewEvent(kind, row["root_id"], row["id"], known | data)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogEvent:
    """An event. Later events have greater ids, also on PostgreSQL."""

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
    """Write one event, visible with the transaction; see `emit_all`."""
    event = NewEvent(kind, root_id, checkpoint_id, data or {})
    emit_all(connection, [event], now=time.time() if now is None else now)


def emit_all(connection: Connection, new: Sequence[NewEvent], *, now: float) -> None:
    """Write events, preferably as the last step of a transaction.

    PostgreSQL assigns ids before the commit. A reader that sees id 8 while id 7 is uncommitted would miss 7,
    so writers of events take turns from this call to their commit.
    """
    if not new:
        return
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ORDER_LOCK})
    connection.execute(insert(events), [{**asdict(event), "at_seconds": now} for event in new])


def events_after(
    connection: Connection, event_id: int, limit: int = 100, *, kinds: Iterable[str] | None = None
) -> list[CatalogEvent]:
    """List the next ``limit`` events after ``event_id``, oldest first; of all kinds if none are named."""
    columns = (events.c[name] for name in ("id", "kind", "checkpoint_id", "data", "at_seconds"))
    query = (
        select(*columns, roots.c.name.label("root"))
        .outerjoin_from(events, roots, roots.c.id == events.c.root_id)
        .where(events.c.id > event_id)
        .order_by(events.c.id)
        .limit(limit)
    )
    if kinds is not None:
        query = query.where(events.c.kind.in_(sorted(kinds)))
    return [CatalogEvent(**row._mapping) for row in connection.execute(query)]


def last_event_id(connection: Connection) -> int:
    """Return the id of the newest event, 0 if there is none."""
    return int(connection.execute(select(func.coalesce(func.max(events.c.id), 0))).scalar_one())


def position(connection: Connection, consumer: str) -> int:
    """Return the id of the last event that ``consumer`` has handled; 0 before the first."""
    found = connection.execute(select(consumers.c.event_id).where(consumers.c.name == consumer)).scalar()
    return 0 if found is None else int(found)


def lock_position(connection: Connection, consumer: str) -> int:
    """Return the `position`, locked until the transaction ends."""
    insert_missing(connection, consumers, [{"name": consumer, "event_id": 0}])
    query = select(consumers.c.event_id).where(consumers.c.name == consumer)
    return int(connection.execute(query.with_for_update()).scalar_one())


def move_on(connection: Connection, consumer: str, event_id: int) -> None:
    """Store that ``consumer``, whose position is locked, has handled all events up to ``event_id``."""
    connection.execute(update(consumers).where(consumers.c.name == consumer).values(event_id=event_id))
