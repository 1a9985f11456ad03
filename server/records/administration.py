"""Records of scopes, keys, the caller and the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Annotated, Any, Literal

from dcp.server.records.declaring import OneOf, Shown

Scope = Literal["read", "write", "convert", "delete", "admin"]
"""read: list and download. write: register, label, pin, verify. convert: jobs that write to roots. delete:
deletion and retention. admin: keys, webhooks, rules, protected aliases, audit log, and all other scopes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """A change with its actor and target."""

    id: int
    at: datetime
    actor: Annotated[str, Shown(examples=("key:ci", "system"))]
    action: Annotated[str, Shown(examples=("checkpoint.state",))]
    target: Annotated[str, Shown(examples=("checkpoint:12",))]
    detail: Annotated[
        Mapping[str, Any] | None, Shown("Members that depend on the action, such as old and new values.")
    ]
    request_id: Annotated[
        str | None,
        Shown("X-Request-Id of the request; null: the change was made by a job or the command line."),
    ]
    address: Annotated[str | None, Shown("IP address of the client.")]
    root: Annotated[str | None, Shown("The root of the target; null: none or several.")]


@dataclass(frozen=True, slots=True)
# named differently from Key: schemathesis would link key_id to these answers and revoke its own key
class ApiKey:
    """An API key without its secret. ``roots`` None: all roots. ``used_at`` is exact to a minute."""

    id: int
    name: str
    prefix: Annotated[str, Shown("Beginning of the secret, to recognize the key in logs.")]
    scopes: Annotated[tuple[str, ...], OneOf(Scope), Shown("Granted scopes, without implied ones.")]
    roots: Annotated[tuple[str, ...] | None, Shown("Roots in which the key works; null: all.")]
    created_at: datetime
    expires_at: Annotated[datetime | None, Shown("null: never.")]
    revoked_at: Annotated[datetime | None, Shown("null: not revoked.")]
    used_at: Annotated[datetime | None, Shown("Exact to about a minute.")]
    account_id: Annotated[
        int | None, Shown("The account of the key; its rights bound the rights of the key.")
    ]
    account: Annotated[str | None, Shown("The account's name in the audit log.")]
    maker: Annotated[
        str | None,
        Shown(
            "The account or key that made the key, such as account#3; null: the command line. A key without "
            "account works only in roots where the account that made it is still an admin."
        ),
    ]


@dataclass(frozen=True, slots=True)
class Whoami:
    """The caller. ``scopes`` includes scopes implied by "admin"; ``roots`` None: all roots."""

    name: str
    key_id: Annotated[int | None, Shown("null: the service needs no key.")]
    scopes: Annotated[tuple[str, ...], OneOf(Scope), Shown("All scopes, including implied ones.")]
    roots: Annotated[tuple[str, ...] | None, Shown("null: all.")]
    expires_at: Annotated[datetime | None, Shown("Of the key.")] = None
    account_id: Annotated[int | None, Shown("The account of the caller.")] = None
    rights: Annotated[Mapping[str, Any], Shown("The scopes by root; `*` is all roots.")] = field(
        default_factory=dict
    )


@dataclass(frozen=True, slots=True)
class CreatedKey(ApiKey):
    """A new key with its secret, which no later answer and no repr contains."""

    key: Annotated[str, Shown("Shown only in this answer.")] = field(repr=False)
