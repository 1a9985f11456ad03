"""Webhooks: the resource, and the upkeep of its secrets."""

from __future__ import annotations

from typing import Final, Literal, get_args

from sqlalchemy import Connection, delete, select, update

from dcp.server.core.resource import Resource
from dcp.server.database.records import record_of_row
from dcp.server.database.tables import deliveries, webhooks
from dcp.server.features.webhooks.signing import Sealer
from dcp.server.records.administration import Webhook
from dcp.server.records.declaring import moment

__all__ = ["ALL_EVENTS", "HOOKS", "EventKind", "forget_previous_secrets", "reseal_secrets"]

EventKind = Literal[
    "checkpoint.committed",
    "checkpoint.verified",
    "checkpoint.damaged",
    "checkpoint.converted",
    "checkpoint.deleted",
    "checkpoint.tagged",
    "checkpoint.aliased",
]
ALL_EVENTS: Final[tuple[EventKind, ...]] = get_args(EventKind)

HOOKS: Final = Resource(
    webhooks,
    what="webhook",
    noun="webhook",
    tag="w{id}",
    record=lambda row, etag: record_of_row(
        Webhook,
        row,
        previous_secret_until=moment(row.previous_until_seconds) if row.previous_until_seconds else None,
        etag=etag,
    ),
    # without the secrets, so that no log can have them
    query=select(*(column for column in webhooks.c if column.name not in ("secret", "previous_secret"))),
    # a key for some roots may see a webhook that is for no other roots
    is_visible=lambda row, visible: (
        visible is None or (row.roots is not None and visible.issuperset(row.roots))
    ),
    forget=lambda connection, number: connection.execute(
        delete(deliveries).where(deliveries.c.webhook_id == number)
    ),
)


def forget_previous_secrets(connection: Connection, now: float) -> None:
    """Delete secrets that were rotated and do not sign any more."""
    connection.execute(
        update(webhooks)
        .where(webhooks.c.previous_until_seconds < now)
        .values(previous_secret=None, previous_until_seconds=None)
    )


def reseal_secrets(connection: Connection, sealer: Sealer) -> None:
    """Seal secrets that are stored in clear text, or with the previous key. Versions of webhooks stay."""
    names = ("secret", "previous_secret")
    query = select(webhooks.c.id, *(webhooks.c[name] for name in names)).order_by(webhooks.c.id)
    for number, *stored in connection.execute(query.with_for_update()).all():
        renewed = {name: text and sealer.renewed(text) for name, text in zip(names, stored, strict=True)}
        values = {name: text for name, text in renewed.items() if text is not None}
        if values:
            connection.execute(update(webhooks).where(webhooks.c.id == number).values(**values))
