"""Accounts and grants: the resources, and the account of a person at sign-in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import structlog
from sqlalchemy import Connection, Row, insert, select, update
from sqlalchemy.exc import IntegrityError

from dcp.server.catalog import audit
from dcp.server.catalog.inputs import clean_text
from dcp.server.core.ask import Ask
from dcp.server.core.resource import Resource
from dcp.server.core.security.accounts import ALL_ROOTS, actor_of
from dcp.server.core.security.callers import end_sessions
from dcp.server.database.mapping import record_of_row
from dcp.server.database.tables import accounts, grants
from dcp.server.features.people.settings import PeopleSettings
from dcp.server.records.people import Account, Grant

_MAX_GROUPS: Final = 2000
_MAX_GROUP: Final = 256
_MAX_NAMED: Final = 48
_UNNAMED: Final = re.compile(r"[^a-z0-9_.+@=-]")
_log = structlog.get_logger(__name__)


ACCOUNTS: Final = Resource(
    accounts,
    what="account",
    noun="account",
    tag="u{id}",
    record=lambda row, etag: record_of_row(
        Account, row._mapping, actor=actor_of(row.kind, row.name), etag=etag
    ),
    detail=lambda row: {"account": actor_of(row.kind, row.name)},
)

_GRANTED: Final = select(
    grants, accounts.c.kind.label("account_kind"), accounts.c.name.label("account_name")
).outerjoin(accounts, accounts.c.id == grants.c.account_id)


def _account_of(row: Row[Any]) -> str | None:
    return None if row.account_id is None else actor_of(row.account_kind, row.account_name)


def _root_of(row: Row[Any]) -> str | None:
    return None if row.root == ALL_ROOTS else str(row.root)


GRANTS: Final = Resource(
    grants,
    what="grant",
    noun="grant",
    tag="g{id}",
    record=lambda row, etag: record_of_row(
        Grant, row._mapping, account=_account_of(row), group=row.group_name, root=_root_of(row), etag=etag
    ),
    detail=lambda row: {
        "account": _account_of(row),
        "group": row.group_name,
        "role": row.role,
        "root": _root_of(row),
    },
    query=_GRANTED,
    is_visible=lambda row, visible: visible is None or row.root in visible,
    root=_root_of,
)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A person may not sign in; ``message`` is for the person, ``reason`` for the log."""

    message: str
    reason: str


def sign_in_person(ask: Ask, claims: Mapping[str, Any], options: PeopleSettings) -> int | Refusal:
    """Record the person at sign-in, with current groups and names from the provider. Returns the account's
    id."""
    facts = _facts(claims, options)
    groups = facts["groups"]
    is_allowed = options.allowed_groups is None or not set(options.allowed_groups).isdisjoint(groups)

    def act(connection: Connection) -> int | Refusal:
        account = _find(connection, claims, options)
        if account is None and is_allowed:
            account = _create(connection, claims, facts, options, ask)
        if account is not None:
            seen = {"seen_seconds": ask.now} if is_allowed else {}
            connection.execute(update(accounts).where(accounts.c.id == account.id).values(**facts, **seen))
        if is_allowed and account is not None and account.disabled_seconds is None:
            return int(account.id)
        if account is not None:
            end_sessions(connection, account.id)
            _note(connection, account, ask, is_allowed=is_allowed)
        if is_allowed:
            return Refusal(
                "Your account is disabled. An administrator can enable it.", "the account is disabled"
            )
        return Refusal(
            f"{facts['email'] or claims['sub']} is not in any group that may use this catalog. Ask the "
            "administrator of your accounts for access, or sign in with another account.",
            "the person is not in an allowed group",
        )

    return ask.service.database.transact(act)


def _note(connection: Connection, account: Row[Any], ask: Ask, *, is_allowed: bool) -> None:
    audit.record(
        connection,
        actor_of(account.kind, account.name),
        "session.refuse",
        f"account:{account.id}",
        {"reason": "disabled" if is_allowed else "groups"},
        now=ask.now,
        request_id=ask.request_id,
        address=ask.address,
    )


def _facts(claims: Mapping[str, Any], options: PeopleSettings) -> dict[str, Any]:
    name = claims.get("name")
    return {
        "title": clean_text(name)[:256] if isinstance(name, str) else "",
        "email": _email(claims, options),
        "groups": _groups(claims, options.groups_claim),
    }


def _email(claims: Mapping[str, Any], options: PeopleSettings) -> str | None:
    """Return the address if the provider has verified it; unverified addresses can belong to other people."""
    email = claims.get("email")
    is_verified = claims.get("email_verified") in (True, "true") or options.trust_email
    return clean_text(email)[:320] if isinstance(email, str) and is_verified else None


def _groups(claims: Mapping[str, Any], claim: str) -> list[str]:
    found: Any = claims.get(claim)
    if found is None:
        found = claims
        for part in claim.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
    given = [found] if isinstance(found, str) else found if isinstance(found, list) else []
    groups = sorted({one for one in given if isinstance(one, str) and 0 < len(one) <= _MAX_GROUP})
    if len(groups) > _MAX_GROUPS:
        _log.warning("a person is in too many groups; some are ignored", groups=len(groups))
    return [one for one in groups[:_MAX_GROUPS] if clean_text(one) == one]


def _find(connection: Connection, claims: Mapping[str, Any], options: PeopleSettings) -> Row[Any] | None:
    return connection.execute(
        select(accounts)
        .where(accounts.c.issuer == options.issuer, accounts.c.subject == claims["sub"])
        .with_for_update()
    ).one_or_none()


def _create(
    connection: Connection,
    claims: Mapping[str, Any],
    facts: Mapping[str, Any],
    options: PeopleSettings,
    ask: Ask,
) -> Row[Any] | None:
    """Add the account of a person with a unique name, also for equal addresses."""
    base = _base_name(claims, facts, options)
    values = {
        "kind": "person",
        "issuer": options.issuer,
        "subject": claims["sub"],
        "created_seconds": ask.now,
        "updated_seconds": ask.now,
        **facts,
    }
    for number in range(1, 1000):
        name = base if number == 1 else f"{base}={number}"
        taken = select(accounts.c.id).where(accounts.c.kind == "person", accounts.c.name == name)
        if connection.execute(taken).first() is not None:
            continue
        try:
            with connection.begin_nested():
                made = connection.execute(
                    insert(accounts).values(name=name, **values).returning(accounts)
                ).one()
        except IntegrityError:  # a concurrent sign-in of the same person or name
            found = _find(connection, claims, options)
            if found is not None:
                return found
            continue
        actor = actor_of("person", name)
        audit.record(
            connection,
            actor,
            "account.create",
            f"account:{made.id}",
            {"account": actor},
            now=ask.now,
            request_id=ask.request_id,
            address=ask.address,
        )
        return made
    return None


def _base_name(claims: Mapping[str, Any], facts: Mapping[str, Any], options: PeopleSettings) -> str:
    given = facts["email"] if options.name_claim == "email" else claims.get(options.name_claim)
    text = given if isinstance(given, str) and given else str(claims["sub"])
    name = _UNNAMED.sub("_", text.lower())[:_MAX_NAMED].lstrip(".+@=-")
    return name or "unnamed"
