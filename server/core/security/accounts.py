"""People and service accounts: roles and the resulting rights in each root."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import Connection, Row, or_, select

from dcp.server.core.security.principal import ALL_SCOPES, NO_ROOTS, Scope
from dcp.server.database.tables import accounts, grants
from dcp.server.records.people import AccountKind, Role

Rights = Mapping[Scope, frozenset[str] | None]
"""Roots by scope; None for all roots."""
ALL_ROOTS: Final = "*"
"""Placeholder for all roots, never the name of a root."""
ROLES: Final[Mapping[Role, frozenset[Scope]]] = {
    "viewer": frozenset({"read"}),
    "contributor": frozenset({"read", "write"}),
    "operator": frozenset({"read", "write", "convert", "delete"}),
    "admin": ALL_SCOPES,
}


@dataclass(frozen=True, slots=True)
class GroupRole:
    """A role of a group by the settings; without ``group``, of each person who may sign in."""

    group: str | None
    role: Role
    root: str | None = None


@dataclass(frozen=True, slots=True)
class RoleSettings:
    """Rights from the settings, in addition to granted roles.

    ``allowed_groups``: other people have no rights. ``absence_seconds``: keys of people stop working after
    this time without a sign-in.
    """

    roles: tuple[GroupRole, ...] = ()
    allowed_groups: frozenset[str] | None = None
    absence_seconds: float | None = None


NO_ROLES: Final = RoleSettings()
NOT_ADMIN: Final = "the account that made it is no longer an admin of its roots"
"""Reason for disabling objects of former admins; another admin may enable them."""
_MAX_NAMED: Final = 500
"""Maximum groups named in one statement."""


def actor_of(kind: str, name: str) -> str:
    """Return the name of an account in the audit log, such as ``person:alice@example.org``.

    Account names contain no slash, which precedes the name of a key. ``service:`` is the prefix of the
    service's own work.
    """
    return f"{'service-account' if kind == 'service' else kind}:{name}"


def grantee_of(account_id: int | None, group: str | None) -> str:
    """Return an account or a group as one text."""
    return f"group:{group}" if account_id is None else f"account#{account_id}"


def find_account(connection: Connection, kind: AccountKind, name: str) -> Row[Any] | None:
    """Return an account by name."""
    query = select(accounts).where(accounts.c.kind == kind, accounts.c.name == name)
    return connection.execute(query).one_or_none()


def accounts_of(connection: Connection, numbers: Iterable[int]) -> dict[int, Row[Any]]:
    """Return accounts by id."""
    wanted = sorted(set(numbers))
    if not wanted:
        return {}
    return {row.id: row for row in connection.execute(select(accounts).where(accounts.c.id.in_(wanted)))}


def is_present(account: Row[Any], settings: RoleSettings, now_seconds: float) -> bool:
    """Return True if keys of the account work: enabled, and for a person a recent sign-in."""
    if account.disabled_seconds is not None:
        return False
    if account.kind != "person" or settings.absence_seconds is None:
        return True
    return now_seconds - (account.seen_seconds or 0.0) <= settings.absence_seconds


def rights_of(connection: Connection, found: Sequence[Row[Any]], settings: RoleSettings) -> dict[int, Rights]:
    """Return the rights of accounts by id."""
    if not found:  # the usual case
        return {}
    groups = sorted({group for account in found for group in account.groups})
    numbers = [account.id for account in found]
    query = select(grants)
    if len(groups) <= _MAX_NAMED:  # otherwise read all, because there are too many for one statement
        query = query.where(or_(grants.c.account_id.in_(numbers), grants.c.group_name.in_(groups)))
    granted: defaultdict[str, list[GroupRole]] = defaultdict(list)
    for row in connection.execute(query):
        root = None if row.root == ALL_ROOTS else row.root
        granted[row.grantee].append(GroupRole(row.group_name, row.role, root))
    return {account.id: _rights(account, granted, settings) for account in found}


def _rights(account: Row[Any], granted: Mapping[str, Sequence[GroupRole]], settings: RoleSettings) -> Rights:
    roles = [*granted.get(grantee_of(account.id, None), ())]
    if account.kind == "person":
        if settings.allowed_groups is not None and settings.allowed_groups.isdisjoint(account.groups):
            return {}
        for group in account.groups:
            roles += granted.get(grantee_of(None, group), ())
        roles += [one for one in settings.roles if one.group is None or one.group in account.groups]
    held: dict[Scope, frozenset[str] | None] = {}
    for one in roles:
        for scope in ROLES.get(one.role, ()):
            before = held.get(scope, NO_ROOTS)
            held[scope] = None if before is None or one.root is None else before | {one.root}
    return held


def account_number(identity: str | None) -> int | None:
    """Return the id of the account in an identity such as ``account#3``; None for a key."""
    kind, _, number = (identity or "").partition("#")
    return int(number) if kind == "account" else None


def without_scope(
    connection: Connection,
    rows: Iterable[Row[Any]],
    roots_of: Callable[[Row[Any]], Iterable[str] | None],
    settings: RoleSettings,
    scope: Scope = "admin",
) -> list[Row[Any]]:
    """Return the rows whose ``maker`` no longer has the scope in all of their roots (None: all roots)."""
    makers = [(row, number) for row in rows if (number := account_number(row.maker)) is not None]
    found = accounts_of(connection, [number for _, number in makers])
    rights = rights_of(connection, list(found.values()), settings)

    def may(row: Row[Any], number: int) -> bool:
        held, roots = rights[number].get(scope, NO_ROOTS), roots_of(row)
        is_inside = held is None or (roots is not None and held.issuperset(roots))
        return found[number].disabled_seconds is None and is_inside

    return [row for row, number in makers if not may(row, number)]


def bounded(rights: Rights, scopes: Iterable[str], roots: Iterable[str] | None) -> Rights:
    """Return ``rights`` limited to these scopes and roots."""
    wanted = frozenset(scopes)
    inside = None if roots is None else frozenset(roots)
    held = {scope: both(found, inside) for scope, found in rights.items() if {scope, "admin"} & wanted}
    return {scope: found for scope, found in held.items() if found is None or found}


def both(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    """Return the common roots; None means all."""
    if one is None or other is None:
        return other if one is None else one
    return one & other
