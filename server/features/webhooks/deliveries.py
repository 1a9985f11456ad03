"""Deliveries: created from events in order, claimed by a sender, retried, recorded, and deleted.

A claim raises ``attempt`` and delays ``due_seconds``; the outcome is written only for an unchanged
``attempt``. If a sender is killed in between, the next sender repeats the delivery, so a receiver can get a
delivery twice, always with the same id.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Final, Literal

from sqlalchemy import Connection, Row, Select, delete, insert, select, update

from dcp.server.catalog import audit
from dcp.server.catalog.cursors import read_page
from dcp.server.catalog.errors import MissingError
from dcp.server.catalog.events import CatalogEvent, emit, last_event_id
from dcp.server.core.jobs.schedules import ScheduleContext
from dcp.server.core.security.accounts import NOT_ADMIN, without_scope
from dcp.server.core.security.principal import SYSTEM
from dcp.server.database.engine import insert_missing
from dcp.server.database.tables import checkpoints, events, roots, runs
from dcp.server.features import role_settings
from dcp.server.features.webhooks import deliveries_table as deliveries
from dcp.server.features.webhooks import feature, webhooks
from dcp.server.features.webhooks.hooks import (
    HOOKS,
    Sealer,
    forget_previous_secrets,
    reseal_secrets,
)
from dcp.server.records.declaring import OneOf, Shown, moment
from dcp.server.records.lists import Page

TEST_KIND: Final = "webhook.test"
"""Test event for a single webhook, created by a request."""

RETRY_SECONDS: Final = (10.0, 60.0, 300.0, 1800.0, 3600.0, 7200.0, 14_400.0, 28_800.0, 43_200.0)
"""After the first attempt, the second, ...: 27 hours in all."""

MAX_ATTEMPTS: Final = len(RETRY_SECONDS) + 1
GIVE_UP_SECONDS: Final = 5 * 86_400.0
"""A webhook without a successful delivery for this time is disabled."""

_FORGET_BATCH: Final = 1000
_GONE: Final = 410
_ERROR_CHARACTERS: Final = 300

DeliveryState = Literal["waiting", "delivered", "failed"]
Hook = Row[Any]
DeliveryRow = Row[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Event for a webhook; ``state``: "waiting", "delivered", or "failed"."""

    id: int
    webhook_id: int
    message_id: Annotated[str, Shown("The header `webhook-id`: the same in each attempt.")]
    event: Annotated[str, Shown("Kind of the event.")]
    state: Annotated[str, OneOf(DeliveryState)]
    attempts: Annotated[int, Shown("Number of attempts.")]
    max_attempts: Annotated[int, Shown(may_be_absent=True)] = 10
    status_code: Annotated[int | None, Shown("Of the receiver's last answer.")]
    error: Annotated[str | None, Shown("Failure of the last attempt.")]
    created_at: datetime
    next_attempt_at: Annotated[datetime | None, Shown("null: none is left, or delivered.")]
    delivered_at: Annotated[datetime | None, Shown("null: not delivered yet.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryClaim:
    """Delivery claimed by this sender: the webhook with its stored secrets, current secret first, and the
    event with its checkpoint."""

    id: int
    attempt: int
    hook: Hook
    secrets: tuple[str, ...] = field(repr=False)
    event: Any

    @property
    def message_id(self) -> str:
        """The header ``webhook-id``: the same in each attempt."""
        return f"evt_{self.event.id}"


@dataclass(frozen=True, slots=True)
class DeliveryOutcome:
    """Result of an attempt; delivered without an error."""

    status_code: int | None
    error: str | None
    retry_after_seconds: float | None = None


# -- made and forgotten --------------------------------------------------------------------------------------


@feature.consumer("webhooks", is_needed=partial(HOOKS.has, is_enabled=True))
def queue_deliveries(
    connection: Connection, events: Sequence[CatalogEvent], context: ScheduleContext
) -> None:
    """Make the deliveries of events to all enabled webhooks."""
    query = HOOKS.select.where(webhooks.c.is_enabled).order_by(webhooks.c.id)
    # prevents a concurrent deletion of webhooks
    hooks = [*connection.execute(query.with_for_update(read=True))]
    for hook in without_scope(connection, hooks, lambda hook: hook.roots, role_settings(context.settings)):
        hooks.remove(hook)
        _disable(connection, hook, NOT_ADMIN, context.now)
    rows = [
        _waiting(hook.id, event.id, context.now) for event in events for hook in hooks if _wants(hook, event)
    ]
    insert_missing(connection, deliveries, rows)


def _wants(hook: Hook, event: CatalogEvent) -> bool:
    is_its_root = hook.roots is None or event.root in hook.roots
    return event.kind in hook.events and is_its_root and event.at_seconds >= hook.created_seconds


@feature.schedule("webhooks-clean-up", 600.0)
def clean_up(context: ScheduleContext) -> None:
    """Delete old deliveries and rotated secrets, and encrypt secrets with the current key."""
    context.database.transact(partial(forget_previous_secrets, now=context.now))
    sealer = Sealer.from_settings(context.settings)
    if sealer.keys:
        context.database.transact(partial(reseal_secrets, sealer=sealer))
    context.repeat(partial(_forget_some, before=context.now - context.settings.keep_jobs_seconds))


def _forget_some(connection: Connection, before: float) -> int:
    ended = select(deliveries.c.id).where(
        deliveries.c.state.in_(("delivered", "failed")), deliveries.c.due_seconds < before
    )
    ids = connection.execute(ended.limit(_FORGET_BATCH)).scalars().all()
    connection.execute(delete(deliveries).where(deliveries.c.id.in_(ids)))
    return len(ids)


# -- sent ----------------------------------------------------------------------------------------------------


def due_hooks(connection: Connection, now: float) -> Sequence[int]:
    """List the enabled webhooks with due deliveries."""
    query = (
        select(deliveries.c.webhook_id)
        .join(webhooks, webhooks.c.id == deliveries.c.webhook_id)
        .where(deliveries.c.state == "waiting", deliveries.c.due_seconds <= now, webhooks.c.is_enabled)
        .distinct()
    )
    return connection.execute(query).scalars().all()


def claim_next(
    connection: Connection, hook_id: int, now: float, lease_seconds: float
) -> DeliveryClaim | None:
    """Claim the oldest due delivery of a webhook for ``lease_seconds``."""
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
    if row is None or not _update(
        connection, row.id, row.attempt, attempt=row.attempt + 1, due_seconds=now + lease_seconds
    ):
        return None
    secrets = select(webhooks.c.secret, webhooks.c.previous_secret).where(webhooks.c.id == hook_id)
    return DeliveryClaim(
        id=row.id,
        attempt=row.attempt + 1,
        hook=HOOKS.find(connection, hook_id),
        secrets=tuple(one for one in connection.execute(secrets).one() if one is not None),
        event=connection.execute(_EVENTS.where(events.c.id == row.event_id)).one(),
    )


_EVENTS: Final = (
    select(
        events.c.id,
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
)


def record(connection: Connection, claim: DeliveryClaim, outcome: DeliveryOutcome, now: float) -> None:
    """Write the outcome, unless another sender has claimed the delivery since."""
    is_last = claim.attempt >= MAX_ATTEMPTS
    values: dict[str, Any] = {"status_code": outcome.status_code, "error": outcome.error}
    if outcome.error is None:
        values |= {"state": "delivered", "delivered_seconds": now, "due_seconds": now}
    else:
        pause = max(_retry_pause(claim.attempt), outcome.retry_after_seconds or 0.0)
        values |= {
            "error": outcome.error[:_ERROR_CHARACTERS],
            "state": "failed" if is_last else "waiting",
            "due_seconds": now if is_last else now + pause,
        }
    if _update(connection, claim.id, claim.attempt, **values):
        _note_health(connection, claim.hook, outcome, is_last, now)


def _update(connection: Connection, delivery_id: int, claimed: int, **values: Any) -> bool:
    """Change a waiting delivery with the attempt ``claimed``."""
    is_claimed = deliveries.c.attempt == claimed, deliveries.c.state == "waiting"
    statement = update(deliveries).where(deliveries.c.id == delivery_id, *is_claimed)
    return connection.execute(statement.values(**values)).rowcount == 1


def _retry_pause(attempt: int) -> float:
    """Return the seconds until the next attempt after ``attempt`` failed, with random variation."""
    return RETRY_SECONDS[min(attempt, len(RETRY_SECONDS)) - 1] * random.uniform(0.9, 1.1)


def _note_health(
    connection: Connection, hook: Hook, outcome: DeliveryOutcome, is_last: bool, now: float
) -> None:
    since = hook.failing_since_seconds
    if outcome.error is None:
        if since is not None:
            _update_hook(connection, hook, failing_since_seconds=None)
        return
    if since is None:
        _update_hook(connection, hook, failing_since_seconds=now)
    # Later deliveries wait too: a failing receiver gets few requests, the oldest first.
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
        _disable(connection, hook, "the receiver responded with 410 Gone", now)
    elif is_last and since is not None and now - since >= GIVE_UP_SECONDS:
        days = int((now - since) // 86_400)
        _disable(connection, hook, f"all deliveries failed for {days} days", now)


def _disable(connection: Connection, hook: Hook, reason: str, now: float) -> None:
    version = webhooks.c.version + 1
    if _update_hook(
        connection, hook, is_enabled=False, disabled_reason=reason, updated_seconds=now, version=version
    ):
        audit.record(
            connection, SYSTEM.name, "webhook.disable", f"webhook:{hook.id}", {"reason": reason}, now=now
        )


def _update_hook(connection: Connection, hook: Hook, **values: Any) -> bool:
    """Change an enabled webhook."""
    statement = update(webhooks).where(webhooks.c.id == hook.id, webhooks.c.is_enabled)
    return connection.execute(statement.values(**values)).rowcount == 1


# -- shown and repeated --------------------------------------------------------------------------------------


def list_deliveries(
    connection: Connection, hook_id: int, state: str | None, *, cursor: str | None, limit: int
) -> Page[Delivery]:
    """Return a page of the deliveries of a webhook, the newest event first."""
    query = _deliveries().where(deliveries.c.webhook_id == hook_id)
    if state is not None:
        query = query.where(deliveries.c.state == state)
    mark, key = f"deliveries-{hook_id}-{state}", (deliveries.c.event_id, int)
    return read_page(connection, query, delivery_of, mark, key, cursor=cursor, limit=limit, descending=True)


def delivery_of(row: DeliveryRow) -> Delivery:
    """Make the record of a delivery."""
    return Delivery(
        id=row.id,
        webhook_id=row.webhook_id,
        message_id=f"evt_{row.event_id}",
        event=row.kind,
        state=row.state,
        attempts=row.attempt,
        max_attempts=MAX_ATTEMPTS,
        status_code=row.status_code,
        error=row.error,
        created_at=moment(row.created_seconds),
        next_attempt_at=moment(row.due_seconds) if row.state == "waiting" else None,
        delivered_at=None if row.delivered_seconds is None else moment(row.delivered_seconds),
    )


def redeliver(connection: Connection, hook_id: int, delivery_id: int, now: float) -> DeliveryRow:
    """Make a delivery due again, from the first attempt. Raises MissingError for an unknown delivery."""
    changed = connection.execute(
        update(deliveries)
        .where(deliveries.c.id == delivery_id, deliveries.c.webhook_id == hook_id)
        .values(state="waiting", attempt=0, due_seconds=now, created_seconds=now, delivered_seconds=None)
    )
    if changed.rowcount != 1:
        raise MissingError("delivery", delivery_id)
    return connection.execute(_deliveries().where(deliveries.c.id == delivery_id)).one()


def send_test(connection: Connection, hook: Hook, now: float) -> DeliveryRow:
    """Emit an event for this webhook alone, to be delivered at once."""
    emit(connection, TEST_KIND, data={"webhook_id": hook.id}, now=now)
    row = _waiting(hook.id, last_event_id(connection), now)
    number = connection.execute(insert(deliveries).values(row).returning(deliveries.c.id)).scalar_one()
    return connection.execute(_deliveries().where(deliveries.c.id == number)).one()


def _waiting(hook_id: int, event_id: int, now: float) -> dict[str, Any]:
    return {
        "webhook_id": hook_id,
        "event_id": event_id,
        "state": "waiting",
        "created_seconds": now,
        "due_seconds": now,
    }


def _deliveries() -> Select[Any]:
    return select(deliveries, events.c.kind).join(events, events.c.id == deliveries.c.event_id)
