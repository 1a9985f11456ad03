"""Webhooks and their deliveries as JSON."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StringConstraints
from pydantic.json_schema import SkipJsonSchema

from dcp.server.schemas.common import Answer, Request, Text, optional_rfc3339, rfc3339, sorted_names
from dcp.server.webhooks.addresses import MAX_URL_LENGTH
from dcp.server.webhooks.hooks import ALL_EVENTS, EventKind, Hook
from dcp.server.webhooks.ledger import MAX_ATTEMPTS, Delivery
from dcp.server.webhooks.signing import check_secret

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


class WebhookAnswer(Answer):
    """A webhook, without its secret."""

    id: int
    url: str
    events: list[str]
    roots: list[str] | None = Field(description="null: all.")
    description: str
    is_enabled: bool
    disabled_reason: str | None = Field(description="Why the service disabled it.")
    failing_since: str | None = Field(description="No delivery has succeeded since.")
    previous_secret_until: str | None = Field(description="Until then the secret before signs as well.")
    created_at: str
    updated_at: str
    etag: str = Field(description="For If-Match.")

    @classmethod
    def of(cls, hook: Hook) -> WebhookAnswer:
        """As it is shown."""
        return cls(**_shown(hook))


class SecretAnswer(WebhookAnswer):
    """A webhook and its secret, which is shown this once."""

    secret: str = Field(repr=False)

    @classmethod
    def with_secret(cls, hook: Hook, secret: str) -> SecretAnswer:
        """As it is shown once."""
        return cls(**_shown(hook), secret=secret)


class WebhookList(Answer):
    """Webhooks by id."""

    items: list[WebhookAnswer]
    next_cursor: str | None


class DeliveryAnswer(Answer):
    """One event for one webhook."""

    id: int
    webhook_id: int
    message_id: str = Field(description="The header `webhook-id`: the same in each attempt.")
    event: str
    state: Literal["waiting", "delivered", "failed"]
    attempts: int
    max_attempts: int = MAX_ATTEMPTS
    status_code: int | None = Field(description="What the receiver answered last.")
    error: str | None
    created_at: str
    next_attempt_at: str | None
    delivered_at: str | None

    @classmethod
    def of(cls, delivery: Delivery) -> DeliveryAnswer:
        """As it is shown."""
        is_waiting = delivery.state == "waiting"
        return cls(
            id=delivery.id,
            webhook_id=delivery.webhook_id,
            message_id=f"evt_{delivery.event_id}",
            event=delivery.event_kind,
            state=delivery.state,
            attempts=delivery.attempt,
            status_code=delivery.status_code,
            error=delivery.error,
            created_at=rfc3339(delivery.created_seconds),
            next_attempt_at=rfc3339(delivery.due_seconds) if is_waiting else None,
            delivered_at=optional_rfc3339(delivery.delivered_seconds),
        )


class DeliveryList(Answer):
    """Deliveries, newest event first."""

    items: list[DeliveryAnswer]
    next_cursor: str | None


def _shown(hook: Hook) -> dict[str, Any]:
    return {
        "id": hook.id,
        "url": hook.url,
        "events": list(hook.events),
        "roots": sorted_names(hook.roots),
        "description": hook.description,
        "is_enabled": hook.is_enabled,
        "disabled_reason": hook.disabled_reason,
        "failing_since": optional_rfc3339(hook.failing_since_seconds),
        "previous_secret_until": optional_rfc3339(hook.previous_until_seconds),
        "created_at": rfc3339(hook.created_seconds),
        "updated_at": rfc3339(hook.updated_seconds),
        "etag": hook.etag,
    }
