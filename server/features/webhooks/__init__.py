"""Webhooks: events posted to a URL, signed, and repeated until they are delivered. Their tables."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    String,
    Table,
    Text,
    UniqueConstraint,
    true,
)

from dcp.server.core.feature import Feature
from dcp.server.database.mapping import ID, JSON_DOCUMENT
from dcp.server.database.tables import metadata, resource_table

__all__ = ["deliveries_table", "feature", "webhooks"]

feature: Final = Feature("webhooks", __name__, web=["webhook_routes"], work=["deliveries", "sending"])

webhooks: Final = resource_table(
    "webhooks",
    Column("url", Text, nullable=False),
    Column("secret", Text, nullable=False),  # signs; never shown again
    Column("previous_secret", Text),  # signs as well until then, after the secret was rotated
    Column("previous_until_seconds", Float),
    Column("description", Text, nullable=False, server_default=""),
    Column("events", JSON_DOCUMENT, nullable=False),
    Column("roots", JSON_DOCUMENT),  # names; none: all
    Column("is_enabled", Boolean, nullable=False, server_default=true()),
    Column("maker", String(256)),  # `Principal.answerable` of the last admin to change the webhook
    Column("disabled_reason", Text),  # set if the service disabled the webhook
    Column("failing_since_seconds", Float),  # no delivery has succeeded since
)

deliveries_table: Final = Table(
    "webhook_deliveries",
    metadata,
    Column("id", ID, primary_key=True, autoincrement=True),
    Column("webhook_id", ID, ForeignKey("webhooks.id"), nullable=False),
    Column("event_id", ID, ForeignKey("events.id"), nullable=False),
    Column("state", String(16), nullable=False),  # "waiting", "delivered", "failed"
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("created_seconds", Float, nullable=False),
    Column("due_seconds", Float, nullable=False),
    Column("status_code", Integer),
    Column("error", Text),
    Column("delivered_seconds", Float),
    UniqueConstraint("webhook_id", "event_id"),
    Index(None, "state", "due_seconds"),
)
