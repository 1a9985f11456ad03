"""Callers: principals of keys and sessions, read from the database for each request.

A session is a signed-in browser, identified by 256 random bits in a cookie. It has the rights of its key or
person, and ends with them, by expiry, or by signing out. A key of an account has at most the current rights
of the account.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from sqlalchemy import Connection, Row, delete, insert, select, update

from dcp.server.core.security import accounts
from dcp.server.core.security.accounts import NO_ROLES, RoleSettings
from dcp.server.core.security.keys import KEY_PATTERN, actor_of_key, digest, find_key, is_valid, keys_of
from dcp.server.core.security.principal import ALL_SCOPES, NO_ROOTS, Principal, Scope
from dcp.server.database.engine import Database
from dcp.server.database.tables import api_keys, sessions
from dcp.server.records.administration import ApiKey

_USE_SECONDS: Final = 60.0
"""Minimum interval between writes of `used_seconds`."""
_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{43}")

P = TypeVar("P", bound=Principal)
_Found = tuple[ApiKey | None, Row[Any] | None]
"""A key, an account, or a key with its account."""


class Callers:
    """The callers of a database, always read fresh, so revocation and disabling act at once.

    Times of use are kept in memory and written by `flush`, so no request waits for a writer.
    """

    def __init__(
        self, database: Database, clock: Callable[[], float], roles: RoleSettings = NO_ROLES
    ) -> None:
        self._database = database
        self._clock = clock
        self._roles = roles
        self._used: dict[int, float] = {}
        self._lock = threading.Lock()

    def of_key(self, secret: str) -> Principal | None:
        """Return the caller of this key; None if invalid. Raises `DatabaseUnavailableError`."""
        if KEY_PATTERN.fullmatch(secret) is None:
            return None
        with self._database.read() as connection:
            return self._admitted(connection, find_key(connection, secret, self._clock()))

    def of_session(self, token: str) -> Principal | None:
        """Return the caller of a session; None if ended. Raises `DatabaseUnavailableError`."""
        if _TOKEN.fullmatch(token) is None:
            return None
        query = select(sessions).where(
            sessions.c.hash == digest(token), sessions.c.expires_seconds > self._clock()
        )
        with self._database.read() as connection:
            row = connection.execute(query).one_or_none()
            if row is None:
                return None
            if row.key_id is not None:
                return self._admitted(connection, keys_of(connection, [row.key_id]).get(row.key_id))
        return self.of_account(row.account_id)

    def of_account(self, account_id: int) -> Principal | None:
        """Return the person or service account; None if disabled. Raises `DatabaseUnavailableError`."""
        with self._database.read() as connection:
            return self.of_numbers(connection, [(None, account_id)])[0]

    def still_admitted(self, connection: Connection, callers: Iterable[P]) -> list[P]:
        """Return the ``callers`` whose rights are unchanged since admission."""
        asked = list(callers)
        now = self.of_numbers(connection, [(one.key_id, one.account_id) for one in asked])
        return [one for one, new in zip(asked, now, strict=True) if not one.is_admitted or _is_same(one, new)]

    def of_numbers(
        self, connection: Connection, asked: Sequence[tuple[int | None, int | None]]
    ) -> list[Principal | None]:
        """Return callers by key id, account id, or both; None for ended ones."""
        keys = keys_of(connection, [key for key, _ in asked if key is not None])
        owned = [(keys.get(key or 0), account) for key, account in asked]
        numbers = [_bounding_account(key) if account is None else account for key, account in owned]
        found = accounts.accounts_of(connection, [number for number in numbers if number is not None])
        pairs = [(key, found.get(number or 0)) for (key, _), number in zip(owned, numbers, strict=True)]
        return self._principals(connection, pairs)

    def _admitted(self, connection: Connection, key: ApiKey | None) -> Principal | None:
        if key is None:
            return None
        number = _bounding_account(key)
        account = None if number is None else accounts.accounts_of(connection, [number])[number]
        principal = self._principals(connection, [(key, account)])[0]
        if principal is not None:
            self._note_use(key)
        return principal

    def _principals(self, connection: Connection, found: Sequence[_Found]) -> list[Principal | None]:
        now = self._clock()
        rows = {account.id: account for _, account in found if account is not None}
        rights = accounts.rights_of(connection, list(rows.values()), self._roles)
        return [self._principal(key, account, rights, now) for key, account in found]

    def _principal(
        self, key: ApiKey | None, account: Row[Any] | None, rights: Mapping[int, accounts.Rights], now: float
    ) -> Principal | None:
        if key is not None and not is_valid(key, now):
            return None
        if account is None:
            return None if key is None or _bounding_account(key) is not None else _of_key_alone(key, None)
        is_present = account.disabled_seconds is None
        if key is not None:
            is_present = accounts.is_present(account, self._roles, now)
        if not is_present:
            return None
        if key is not None and key.account_id is None:
            return _of_key_alone(key, rights[account.id].get("admin", NO_ROOTS))
        return _of_account(key, account, rights[account.id])

    def _note_use(self, key: ApiKey) -> None:
        now_seconds = self._clock()
        used = key.used_at.timestamp() if key.used_at is not None else 0.0
        if now_seconds - used >= _USE_SECONDS:
            with self._lock:
                self._used[key.id] = now_seconds

    def flush(self) -> None:
        """Write the times of last use."""
        with self._lock:
            used, self._used = self._used, {}
        if used:
            self._database.transact(lambda connection: _mark_used(connection, used))


def _bounding_account(key: ApiKey | None) -> int | None:
    """Return the account that bounds the rights of the key: its own, else its maker."""
    if key is None or key.account_id is not None:
        return None if key is None else key.account_id
    return accounts.account_number(key.maker)


def _of_key_alone(key: ApiKey, allowed: frozenset[str] | None) -> Principal | None:
    """Return the caller of a key without account, limited to the ``allowed`` roots; None without roots."""
    scopes = ALL_SCOPES.intersection(cast(tuple[Scope, ...], key.scopes))
    roots = accounts.both(None if key.roots is None else frozenset(key.roots), allowed)
    if roots is not None and not roots:
        return None
    return Principal(actor_of_key(key), scopes, roots, key.id, maker=key.maker)


def _of_account(key: ApiKey | None, account: Row[Any], rights: accounts.Rights) -> Principal:
    owner = accounts.actor_of(account.kind, account.name)
    name = owner if key is None else actor_of_key(key)
    if key is not None:
        rights = accounts.bounded(rights, key.scopes, key.roots)
    seen = list(rights.values())
    everything = None in seen
    roots = None if everything else frozenset[str]().union(*(one for one in seen if one is not None))
    key_id = None if key is None else key.id
    return Principal(name, frozenset(rights), roots, key_id, account.id, owner, rights)


def _is_same(one: Principal, new: Principal | None) -> bool:
    if new is None:
        return False
    return one.rights == new.rights and (one.rights is not None or one.roots == new.roots)


def _mark_used(connection: Connection, used: Mapping[int, float]) -> None:
    for key_id, seconds in used.items():
        connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(used_seconds=seconds))


def begin_session(connection: Connection, caller: Principal, now_seconds: float, lasts_seconds: float) -> str:
    """Start a session of a key or person, and return the cookie token. Deletes old sessions."""
    connection.execute(delete(sessions).where(sessions.c.expires_seconds <= now_seconds))
    token = secrets.token_urlsafe(32)
    values = {
        "key_id": caller.key_id,
        "account_id": caller.account_id if caller.key_id is None else None,
        "created_seconds": now_seconds,
        "expires_seconds": now_seconds + lasts_seconds,
    }
    connection.execute(insert(sessions).values(hash=digest(token), **values))
    return token


def end_session(connection: Connection, token: str) -> None:
    """End a session; unknown tokens are ignored."""
    connection.execute(delete(sessions).where(sessions.c.hash == digest(token)))


def end_sessions(connection: Connection, account_id: int) -> None:
    """End all sessions of a person, including sessions of the person's keys."""
    own = select(api_keys.c.id).where(api_keys.c.account_id == account_id)
    connection.execute(
        delete(sessions).where((sessions.c.account_id == account_id) | sessions.c.key_id.in_(own))
    )
