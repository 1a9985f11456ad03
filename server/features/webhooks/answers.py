"""Webhooks and their deliveries as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, StringConstraints
from pydantic.json_schema import SkipJsonSchema

from dcp.server.core.answers import Answer
from dcp.server.core.inputs import Request, Text
from dcp.server.core.record_answers import RecordAnswer, answers
from dcp.server.features.webhooks.addresses import MAX_URL_LENGTH
from dcp.server.features.webhooks.hooks import ALL_EVENTS, EventKind
from dcp.server.features.webhooks.ledger import MAX_ATTEMPTS
from dcp.server.features.webhooks.signing import check_secret
from dcp.server.records import administration as records

__all__ = [
    "DeliveryAnswer",
    "DeliveryList",
    "RotateSecret",
    "SecretAnswer",
    "WebhookAnswer",
    "WebhookChange",
    "WebhookList",
    "WebhookRequest",
]

Url = Annotated[str, StringConstraints(min_length=1, max_length=MAX_URL_LENGTH, pattern=r"^[!-~]+$")]
RootNames = Annotated[
    list[Annotated[str, StringConstraints(min_length=1, max_length=64)]], Field(max_length=256)
]
Events = Annotated[list[EventKind], Field(min_length=1, max_length=len(ALL_EVENTS))]


def _checked(secret: str) -> str:
    check_secret(secret)
    return secret


Secret = Annotated[
    str,
    StringConstraints(min_length=30, max_length=128, pattern=r"^whsec_[A-Za-z0-9+/=]+$"),
    AfterValidator(_checked),
    Field(description="`whsec_` and 24 to 64 bytes in base64; without it one is made."),
]


class WebhookRequest(Request):
    """A new webhook."""

    url: Url = Field(
        description="https and a public address; http and others only where the operator allows it."
    )
    events: Events = Field(default_factory=lambda: list(ALL_EVENTS))
    roots: RootNames | None = Field(default=None, description="Names of roots; null: all.")
    description: Text = ""
    is_enabled: bool = True
    secret: Secret | None = Field(default=None, repr=False)


class WebhookChange(Request):
    """What is to change; what is not given stays. Only `roots` may be null."""

    url: Url | SkipJsonSchema[None] = None
    events: Events | SkipJsonSchema[None] = None
    roots: RootNames | None = Field(default=None, description="Names of roots; null: all.")
    description: Text | SkipJsonSchema[None] = None
    is_enabled: bool | SkipJsonSchema[None] = None


class RotateSecret(Request):
    """A new secret; deliveries carry signatures of both for a while."""

    secret: Secret | None = Field(default=None, repr=False)
    overlap_seconds: float = Field(default=86_400.0, ge=0, le=30 * 86_400)


@answers(records.Webhook)
class WebhookAnswer(RecordAnswer):
    """A webhook, without its secret."""

    @classmethod
    def of(cls, found: Any, **others: Any) -> Self:
        """As it is shown; with the ``secret`` once."""
        return super().of(found, previous_secret_until=found.previous_until_seconds, **others)


@answers(records.WebhookSecret)
class SecretAnswer(WebhookAnswer):
    """A webhook and its secret, which is shown this once."""


class WebhookList(Answer):
    """Webhooks by id."""

    items: list[WebhookAnswer]
    next_cursor: str | None


@answers(records.Delivery)
class DeliveryAnswer(RecordAnswer):
    """One event for one webhook."""

    @classmethod
    def of(cls, found: Any, **others: Any) -> Self:
        """As it is shown."""
        return super().of(
            found,
            message_id=f"evt_{found.event_id}",
            event=found.event_kind,
            attempts=found.attempt,
            max_attempts=MAX_ATTEMPTS,
            next_attempt_at=found.due_seconds if found.state == "waiting" else None,
            **others,
        )


class DeliveryList(Answer):
    """Deliveries, newest event first."""

    items: list[DeliveryAnswer]
    next_cursor: str | None
