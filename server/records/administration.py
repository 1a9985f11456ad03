"""Keys, webhooks, rules, retention, and the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal

from dcp.server.records.declaring import OneOf, Shown

Scope = Literal["read", "write", "convert", "delete", "admin"]
"""read: look. write: register, label, pin, verify. convert: jobs that write to roots. delete: delete, and
retention. admin: keys, webhooks, rules, protected aliases, audit log; it implies the others."""
DeliveryState = Literal["waiting", "delivered", "failed"]

_Etag = Annotated[str, Shown("For If-Match.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """A change, by whom and of what."""

    id: int
    at: datetime
    actor: Annotated[str, Shown(examples=("key:ci", "system"))]
    action: Annotated[str, Shown(examples=("checkpoint.state",))]
    target: Annotated[str, Shown(examples=("checkpoint:12",))]
    detail: Mapping[str, Any] | None
    request_id: str | None
    address: str | None
    root: Annotated[str | None, Shown("In which it was; null: in none, or in several.")]


@dataclass(frozen=True, slots=True)
class Key:
    """An API key without what it is made of; ``roots`` None: for all. ``used_at`` is right to a minute."""

    id: int
    name: str
    prefix: str
    scopes: Annotated[tuple[str, ...], OneOf(Scope)]
    roots: tuple[str, ...] | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    used_at: Annotated[datetime | None, Shown("Within a minute or so.")]
    account_id: Annotated[
        int | None, Shown("The account that it belongs to; its rights bound those of the key.")
    ]
    account: Annotated[str | None, Shown("The account's name in the audit log.")]
    maker: Annotated[
        str | None,
        Shown(
            "The account or key that made it, such as account#3; null: the command line. A key of no account "
            "that an account made works only in roots where that account still is an admin."
        ),
    ]


@dataclass(frozen=True, slots=True)
class Whoami:
    """The caller. ``scopes`` are all that it has, also those that "admin" implies; ``roots`` None: all."""

    name: str
    key_id: Annotated[int | None, Shown("null: no key is needed here.")]
    scopes: Annotated[tuple[str, ...], OneOf(Scope), Shown("All, also those that others imply.")]
    roots: Annotated[tuple[str, ...] | None, Shown("null: all.")]
    expires_at: Annotated[datetime | None, Shown("Of the key.")] = None
    account_id: Annotated[int | None, Shown("Of the person or service account.")] = None
    rights: Annotated[Mapping[str, Any], Shown("The scopes by root; `*` is all roots.")] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True)
class CreatedKey(Key):
    """A new key, with the only sight of it, which is in no repr."""

    key: Annotated[str, Shown("Shown now and never again.")] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Webhook:
    """A URL to which events are posted; ``roots`` None: events of all roots."""

    id: int
    url: str
    events: tuple[str, ...]
    roots: Annotated[tuple[str, ...] | None, Shown("null: all.")]
    description: str
    is_enabled: bool
    disabled_reason: Annotated[str | None, Shown("The reason why the service disabled it.")]
    failing_since: Annotated[datetime | None, Shown("No delivery has succeeded since.")]
    previous_secret_until: Annotated[datetime | None, Shown("Until then the previous secret signs as well.")]
    created_at: datetime
    updated_at: datetime
    etag: _Etag


@dataclass(frozen=True, slots=True)
class WebhookSecret(Webhook):
    """A webhook and its new secret, which is shown this once, and in no repr."""

    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """One event for one webhook; ``state``: "waiting", "delivered" or "failed"."""

    id: int
    webhook_id: int
    message_id: Annotated[str, Shown("The header `webhook-id`: the same in each attempt.")]
    event: str
    state: Annotated[str, OneOf(DeliveryState)]
    attempts: int
    max_attempts: Annotated[int, Shown(may_be_absent=True)] = 10
    status_code: Annotated[int | None, Shown("Of the receiver's last answer.")]
    error: str | None
    created_at: datetime
    next_attempt_at: datetime | None
    delivered_at: datetime | None


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule: ``actions`` are jobs to submit on ``event``, for checkpoints that meet ``condition``."""

    id: int
    name: str
    event: str
    condition: Mapping[str, Any]
    actions: tuple[Mapping[str, Any], ...]
    is_enabled: bool
    version: int
    created: datetime
    updated: datetime
    etag: _Etag


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """A retention policy for some runs; ``keep`` as in `dcp.Retention`."""

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
    etag: _Etag


@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """A checkpoint with the reasons to keep it; it is deleted if there are none. Of one that is kept
    ``drops`` are the parts to drop, with ``dropped_bytes`` of tensors."""

    checkpoint_id: int
    key: str
    step: int | None
    bytes: int
    reasons: tuple[str, ...]
    drops: Annotated[
        tuple[str, ...], Shown("Parts that would be dropped from it, such as optimizer.", may_be_absent=True)
    ] = ()
    dropped_bytes: Annotated[int, Shown("Of their tensors.", may_be_absent=True)] = 0


@dataclass(frozen=True, slots=True)
class RetentionPreview:
    """A preview of a policy for one run; ``checkpoints``: up to 1,000, those to delete first.

    ``unjudged``: a sentence on each rule by a metric that no checkpoint has, which therefore keeps all.
    """

    run_id: int
    run: str
    kept: int
    deleted: int
    deleted_bytes: int
    checkpoints: Annotated[tuple[RetentionDecision, ...], Shown("Up to 1,000; those to delete come first.")]
    unjudged: Annotated[
        tuple[str, ...], Shown("On each rule by a metric that no checkpoint has: it keeps all.")
    ] = ()
    dropped: Annotated[int, Shown("Of those kept, how many lose a part.", may_be_absent=True)] = 0
    dropped_bytes: Annotated[int, Shown("Of the tensors of these parts.", may_be_absent=True)] = 0


@dataclass(frozen=True, slots=True)
class RetentionTotals:
    """A preview of a policy for all runs together."""

    runs: int
    kept: int
    kept_bytes: int
    deleted: int
    deleted_bytes: Annotated[int, Shown("Freed once the grace is over.")]
    unjudged_runs: Annotated[int, Shown("Runs with a rule by a metric that none of their checkpoints has.")]
    is_cut: Annotated[bool, Shown("Always false: all runs are counted.")]
    dropped: Annotated[int, Shown("Of those kept, how many lose a part.", may_be_absent=True)] = 0
    dropped_bytes: Annotated[int, Shown("Of the tensors of these parts.", may_be_absent=True)] = 0


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Bytes of some tensors of older checkpoints of a run, which dropping them would free.

    Of ``checkpoints`` committed ones, ``held`` are pinned or named by an alias, and count no bytes.
    """

    run_id: int
    checkpoints: int
    held: Annotated[int, Shown("Of them, pinned or named by an alias; their bytes are not counted.")]
    tensors: Annotated[int, Shown("In all of them, those whose names match.")]
    bytes: Annotated[int, Shown("Of these tensors.")]
    total_bytes: Annotated[int, Shown("Of all tensors of these checkpoints.")]
