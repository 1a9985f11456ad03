"""What the service answers with about keys, webhooks, rules and retention: values, that never change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

__all__ = [
    "Delivery",
    "Key",
    "NewKey",
    "RetentionDecision",
    "RetentionPolicy",
    "RetentionPreview",
    "Rule",
    "Webhook",
    "WebhookSecret",
]


@dataclass(frozen=True, slots=True)
class Key:
    """An API key without what it is made of; ``roots`` None: for all. ``used_at`` is right to a minute."""

    id: int
    name: str
    prefix: str
    scopes: tuple[str, ...]
    roots: tuple[str, ...] | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    used_at: datetime | None


@dataclass(frozen=True, slots=True)
class NewKey(Key):
    """A new key, with the only sight of it, which is in no repr."""

    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Webhook:
    """A URL that is told of events; ``roots`` None: of all roots."""

    id: int
    url: str
    events: tuple[str, ...]
    roots: tuple[str, ...] | None
    description: str
    is_enabled: bool
    disabled_reason: str | None
    failing_since: datetime | None
    previous_secret_until: datetime | None
    created_at: datetime
    updated_at: datetime
    etag: str


@dataclass(frozen=True, slots=True)
class WebhookSecret(Webhook):
    """A webhook, with the only sight of its new secret, which is in no repr."""

    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One event for one webhook; ``state``: "waiting", "delivered" or "failed"."""

    id: int
    webhook_id: int
    message_id: str
    event: str
    state: str
    attempts: int
    max_attempts: int
    status_code: int | None
    error: str | None
    created_at: datetime
    next_attempt_at: datetime | None
    delivered_at: datetime | None


@dataclass(frozen=True, slots=True)
class Rule:
    """On ``event``, for checkpoints that meet ``condition``, jobs are made as ``actions`` say."""

    id: int
    name: str
    event: str
    condition: Mapping[str, Any]
    actions: tuple[Mapping[str, Any], ...]
    is_enabled: bool
    version: int
    created: datetime
    updated: datetime
    etag: str


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """What is kept of which runs; ``keep`` as `dcp.Retention` has it."""

    id: int
    name: str
    root: str
    run_glob: str
    keep: Mapping[str, Any]
    grace_seconds: float
    interval_seconds: float
    is_enabled: bool
    version: int
    created: datetime
    updated: datetime
    etag: str


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """A checkpoint, and why it is kept; it goes if there are no ``reasons``."""

    checkpoint_id: int
    key: str
    step: int | None
    bytes: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RetentionPreview:
    """What would become of a run's checkpoints; ``checkpoints``: up to 1,000, those that go first.

    ``unjudged``: a sentence on each rule by a metric that nothing has, which therefore keeps all.
    """

    run_id: int
    run: str
    kept: int
    deleted: int
    deleted_bytes: int
    checkpoints: tuple[RetentionDecision, ...]
    unjudged: tuple[str, ...] = ()
