"""Deliveries: made from events in their order, claimed by one sender each, repeated, remembered, forgotten.

A delivery is claimed by raising ``attempt`` and putting ``due_seconds`` off; the outcome is written only if
``attempt`` is still that of the claim. Whoever is killed in between has it repeated by the next one, so a
receiver may get a delivery twice, always with the same id.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Select, delete, insert, select, text, update

from dcp.server.catalog import audit
from dcp.server.catalog.errors import MissingError
from dcp.server.catalog.events import emit, events_after, last_event_id, move_on, position
from dcp.server.core.security.principal import SYSTEM
from dcp.server.database.sql import insert_missing
from dcp.server.database.tables import checkpoints, deliveries, events, roots, runs, webhooks
from dcp.server.features.webhooks.hooks import Hook, count_enabled, disable_hook, enabled_hooks, get_hook
from dcp.server.records.administration import DeliveryState

__all__ = [
    "CONSUMER",
    "MAX_ATTEMPTS",
    "TEST_KIND",
    "DeliveryClaim",
    "DeliveryOutcome",
    "DeliveryRow",
    "DeliveryState",
    "claim_next",
    "due_hooks",
    "forget_deliveries",
    "has_news",
    "is_anything_due",
    "list_deliveries",
    "queue_events",
    "record",
    "redeliver",
    "retry_pause",
    "send_test",
]

CONSUMER: Final = "webhooks"
TEST_KIND: Final = "webhook.test"
"""An event for one webhook only, that somebody asked for."""

RETRY_SECONDS: Final = (10.0, 60.0, 300.0, 1800.0, 3600.0, 7200.0, 14_400.0, 28_800.0, 43_200.0)
"""After the first attempt, the second, ...: 27 hours in all."""

MAX_ATTEMPTS: Final = len(RETRY_SECONDS) + 1
GIVE_UP_SECONDS: Final = 5 * 86_400.0
"""A webhook none of whose deliveries has succeeded for so long is disabled."""

_BATCH: Final = 500
_FORGET_BATCH: Final = 1000
_QUEUE_LOCK: Final = 0x6463_7068_6F6F
_GONE: Final = 410
_ERROR_CHARACTERS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRow:
    """One event for one webhook. ``attempt``: how many there were."""

    id: int
    webhook_id: int
    event_id: int
    event_kind: str
    state: DeliveryState
    attempt: int
    created_seconds: float
    due_seconds: float
    status_code: int | None
    error: str | None
    delivered_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryClaim:
    """A delivery that this sender makes, with all that it says."""

    id: int
    attempt: int
    hook: Hook
    event_id: int
    kind: str
    at_seconds: float
    root: str | None
    checkpoint: dict[str, Any] | None
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DeliveryOutcome:
    """What became of an attempt; delivered if there is no error."""

    status_code: int | None
    error: str | None
    retry_after_seconds: float | None = None


def queue_events(connection: Connection, now: float) -> int:
    """Make deliveries of the next events; how many events there were.

    In a writing transaction. Two at a time take turns, so that each event is dealt with once.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _QUEUE_LOCK})
    after = position(connection, CONSUMER)
    if count_enabled(connection) == 0:  # nobody listens: all that has happened is dealt with
        newest = last_event_id(connection)
        if newest > after:
            move_on(connection, CONSUMER, newest)
        return 0
    found = events_after(connection, after, _BATCH)
    if not found:
        return 0
    hooks = enabled_hooks(connection)
    rows = [
        _waiting(hook.id, event.id, now)
        for event in found
        for hook in hooks
        if hook.wants(event.kind, event.root, event.at_seconds)
    ]
    insert_missing(connection, deliveries, rows)
    move_on(connection, CONSUMER, found[-1].id)
    return len(found)


def has_news(connection: Connection) -> bool:
    """Whether `queue_events` has something to do."""
    return last_event_id(connection) > position(connection, CONSUMER)


def is_anything_due(connection: Connection, now: float) -> bool:
    """Whether a round has something to do; only reads."""
    return has_news(connection) or bool(due_hooks(connection, now))


def due_hooks(connection: Connection, now: float) -> list[int]:
    """The enabled webhooks for which something is due."""
    return list(
        connection.execute(
            select(deliveries.c.webhook_id)
            .join(webhooks, webhooks.c.id == deliveries.c.webhook_id)
            .where(deliveries.c.state == "waiting", deliveries.c.due_seconds <= now, webhooks.c.is_enabled)
            .distinct()
        ).scalars()
    )


def claim_next(
    connection: Connection, hook_id: int, now: float, lease_seconds: float
) -> DeliveryClaim | None:
    """The oldest one that is due for a webhook, for nobody else during ``lease_seconds``."""
    row = connection.execute(
        select(deliveries.c.id, deliveries.c.attempt, deliveries.c.event_id)
        .join(webhooks, webhooks.c.id == deliveries.c.webhook_id)
        .where(
            deliveries.c.webhook_id == hook_id,
            deliveries.c.state == "waiting",
            deliveries.c.due_seconds <= now,
            webhooks.c.is_enabled,
        )
        .order_by(deliveries.c.event_id)
        .limit(1)
    ).first()
    if row is None:
        return None
    claimed = connection.execute(
        update(deliveries)
        .where(
            deliveries.c.id == row.id, deliveries.c.attempt == row.attempt, deliveries.c.state == "waiting"
        )
        .values(attempt=row.attempt + 1, due_seconds=now + lease_seconds)
    )
    if claimed.rowcount != 1:
        return None
    return _claim(connection, row.id, row.attempt + 1, get_hook(connection, hook_id, None), row.event_id)


def record(connection: Connection, claim: DeliveryClaim, outcome: DeliveryOutcome, now: float) -> None:
    """Write what became of it, unless another has claimed it since."""
    is_last = claim.attempt >= MAX_ATTEMPTS
    values: dict[str, Any] = {"status_code": outcome.status_code, "error": outcome.error}
    if outcome.error is None:
        values |= {"state": "delivered", "delivered_seconds": now, "due_seconds": now}
    else:
        pause = max(retry_pause(claim.attempt), outcome.retry_after_seconds or 0.0)
        values |= {
            "error": outcome.error[:_ERROR_CHARACTERS],
            "state": "failed" if is_last else "waiting",
            "due_seconds": now if is_last else now + pause,
        }
    written = connection.execute(
        update(deliveries)
        .where(
            deliveries.c.id == claim.id,
            deliveries.c.attempt == claim.attempt,
            deliveries.c.state == "waiting",
        )
        .values(**values)
    )
    if written.rowcount == 1:
        _note_health(connection, claim.hook, outcome, is_last, now)


def retry_pause(attempt: int) -> float:
    """Seconds until the next one after ``attempt`` failed, a little different each time."""
    return RETRY_SECONDS[min(attempt, len(RETRY_SECONDS)) - 1] * random.uniform(0.9, 1.1)


def list_deliveries(
    connection: Connection, hook_id: int, state: str | None, before_event: int | None, limit: int
) -> list[DeliveryRow]:
    """The deliveries of a webhook, newest event first, of events before ``before_event``."""
    query = _deliveries().where(deliveries.c.webhook_id == hook_id)
    if state is not None:
        query = query.where(deliveries.c.state == state)
    if before_event is not None:
        query = query.where(deliveries.c.event_id < before_event)
    rows = connection.execute(query.order_by(deliveries.c.event_id.desc()).limit(limit))
    return [DeliveryRow(**row._mapping) for row in rows]


def redeliver(connection: Connection, hook_id: int, delivery_id: int, now: float) -> DeliveryRow:
    """Deliver it again, from the first attempt on. `MissingError` if the webhook has none of this number."""
    changed = connection.execute(
        update(deliveries)
        .where(deliveries.c.id == delivery_id, deliveries.c.webhook_id == hook_id)
        .values(state="waiting", attempt=0, due_seconds=now, created_seconds=now, delivered_seconds=None)
    )
    if changed.rowcount != 1:
        raise MissingError("delivery", delivery_id)
    return _delivery(connection, delivery_id)


def send_test(connection: Connection, hook: Hook, now: float) -> DeliveryRow:
    """An event for this webhook alone, to be delivered at once."""
    emit(connection, TEST_KIND, data={"webhook_id": hook.id}, now=now)
    event_id = last_event_id(connection)
    delivery_id = connection.execute(
        insert(deliveries).values(_waiting(hook.id, event_id, now)).returning(deliveries.c.id)
    ).scalar_one()
    return _delivery(connection, delivery_id)


def forget_deliveries(connection: Connection, before: float) -> int:
    """Remove some of the deliveries that ended before then; how many, 0 when none is left."""
    ended = select(deliveries.c.id).where(
        deliveries.c.state.in_(("delivered", "failed")), deliveries.c.due_seconds < before
    )
    ids = connection.execute(ended.limit(_FORGET_BATCH)).scalars().all()
    connection.execute(delete(deliveries).where(deliveries.c.id.in_(ids)))
    return len(ids)


def _waiting(hook_id: int, event_id: int, now: float) -> dict[str, Any]:
    return {
        "webhook_id": hook_id,
        "event_id": event_id,
        "state": "waiting",
        "created_seconds": now,
        "due_seconds": now,
    }


def _deliveries() -> Select[Any]:
    columns = [column for column in deliveries.c if column.name != "event_id"]
    return select(deliveries.c.event_id, *columns, events.c.kind.label("event_kind")).join(
        events, events.c.id == deliveries.c.event_id
    )


def _delivery(connection: Connection, delivery_id: int) -> DeliveryRow:
    row = connection.execute(_deliveries().where(deliveries.c.id == delivery_id)).one()
    return DeliveryRow(**row._mapping)


def _claim(
    connection: Connection, delivery_id: int, attempt: int, hook: Hook, event_id: int
) -> DeliveryClaim:
    row = connection.execute(
        select(
            events.c.kind,
            events.c.at_seconds,
            events.c.data,
            roots.c.name.label("root"),
            checkpoints.c.id.label("checkpoint_id"),
            checkpoints.c.key,
            checkpoints.c.step,
            checkpoints.c.format,
            runs.c.key.label("run"),
        )
        .select_from(events)
        .outerjoin(roots, roots.c.id == events.c.root_id)
        .outerjoin(checkpoints, checkpoints.c.id == events.c.checkpoint_id)
        .outerjoin(runs, runs.c.id == checkpoints.c.run_id)
        .where(events.c.id == event_id)
    ).one()
    checkpoint = None
    if row.checkpoint_id is not None:
        checkpoint = {
            "id": row.checkpoint_id,
            "root": row.root,
            "run": row.run,
            "key": row.key,
            "step": row.step,
            "format": row.format,
            "href": f"/api/v1/checkpoints/{row.checkpoint_id}",
        }
    return DeliveryClaim(
        id=delivery_id,
        attempt=attempt,
        hook=hook,
        event_id=event_id,
        kind=row.kind,
        at_seconds=row.at_seconds,
        root=row.root,
        checkpoint=checkpoint,
        detail=row.data,
    )


def _note_health(
    connection: Connection, hook: Hook, outcome: DeliveryOutcome, is_last: bool, now: float
) -> None:
    if outcome.error is None:
        if hook.failing_since_seconds is not None:
            _set_failing(connection, hook, None)
        return
    since = hook.failing_since_seconds
    if since is None:
        _set_failing(connection, hook, now)
    # Those behind wait as well: a receiver in trouble gets one request in a while, and the oldest first.
    connection.execute(
        update(deliveries)
        .where(
            deliveries.c.webhook_id == hook.id,
            deliveries.c.state == "waiting",
            deliveries.c.due_seconds < now + RETRY_SECONDS[0],
        )
        .values(due_seconds=now + RETRY_SECONDS[0])
    )
    if outcome.status_code == _GONE:
        _give_up(connection, hook, "the receiver answered 410 Gone", now)
    elif is_last and since is not None and now - since >= GIVE_UP_SECONDS:
        days = int((now - since) // 86_400)
        _give_up(connection, hook, f"nothing could be delivered for {days} days", now)


def _give_up(connection: Connection, hook: Hook, reason: str, now: float) -> None:
    if disable_hook(connection, hook.id, reason, now):
        audit.record(
            connection, SYSTEM.name, "webhook.disable", f"webhook:{hook.id}", {"reason": reason}, now=now
        )


def _set_failing(connection: Connection, hook: Hook, since: float | None) -> None:
    connection.execute(update(webhooks).where(webhooks.c.id == hook.id).values(failing_since_seconds=since))
