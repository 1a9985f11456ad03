"""Records of people, service accounts and their granted roles."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Literal

from dcp.server.records.declaring import OneOf, Shown

AccountKind = Literal["person", "service"]
Role = Literal["viewer", "contributor", "operator", "admin"]
"""viewer: read. contributor: also write. operator: also convert and delete. admin: all scopes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A person who signs in, or a service account, which uses only keys."""

    id: int
    kind: Annotated[str, OneOf(AccountKind), Shown("person: signs in. service: uses only keys.")]
    name: Annotated[str, Shown("Unique among accounts of the kind, and never changed.")]
    actor: Annotated[str, Shown("The name in the audit log.", examples=("person:alice@example.org",))]
    title: Annotated[str, Shown("The full name from the provider, or the description of a service account.")]
    email: Annotated[str | None, Shown("The verified address from the provider.")]
    issuer: Annotated[str | None, Shown("The provider of a person.")]
    groups: Annotated[tuple[str, ...], Shown("Groups at the last sign-in.")]
    created_at: datetime
    seen_at: Annotated[datetime | None, Shown("The last sign-in of a person.")]
    disabled_at: Annotated[datetime | None, Shown("Disabled since; its sessions and keys do not work.")]
    etag: Annotated[str, Shown("For If-Match.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A role in a root for an account, or for the members of a group."""

    id: int
    account_id: Annotated[int | None, Shown("null: the grant is for a group.")]
    account: Annotated[str | None, Shown("The account's name in the audit log.")]
    group: Annotated[str | None, Shown("null: the grant is for an account.")]
    role: Annotated[
        str,
        OneOf(Role),
        Shown("viewer: read. contributor: also write. operator: also convert and delete. admin: all scopes."),
    ]
    root: Annotated[str | None, Shown("null: all.")]
    created_by: Annotated[str, Shown("Account or key that granted the role.")]
    created_at: datetime
    updated_at: datetime
    etag: Annotated[str, Shown("For If-Match.")]
