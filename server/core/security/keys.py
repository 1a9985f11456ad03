"""API keys and sessions: 256 random bits, of which only the SHA-256 is kept.

A key reads ``dcp_PREFIX_SECRET``. The prefix finds the row and distinguishes keys in lists and logs; a hash
without a salt is enough, since the secret cannot be guessed. A session is a browser that was signed in with a
key, known by 256 random bits in a cookie. It has the rights of its key; it ends with the key, when its time
is over, or by signing out.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict
from typing import Any, Final, cast, get_args

from sqlalchemy import Connection, Row, delete, insert, select, update

from dcp.server.core.problems import ConflictError, NotFoundError
from dcp.server.core.security.principal import ALL_SCOPES, Principal, Scope
from dcp.server.database.engine import Database
from dcp.server.database.mapping import record_of_row
from dcp.server.database.tables import api_keys, sessions
from dcp.server.records.administration import CreatedKey, Key, Whoami

__all__ = [
    "KEY_PATTERN",
    "KeyRing",
    "begin_session",
    "create_key",
    "end_session",
    "find_key",
    "find_session",
    "get_key",
    "is_valid",
    "list_keys",
    "prefix_of",
    "principal_of",
    "revoke_key",
    "valid_keys",
    "whoami",
]

KEY_PATTERN: Final = re.compile(r"dcp_([a-z0-9]{8})_([A-Za-z0-9_-]{43})")
_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789"
_USE_SECONDS: Final = 60.0
"""`used_seconds` is not written more often than this."""


def principal_of(key: Key) -> Principal:
    """Return the caller of requests with the key."""
    scopes = ALL_SCOPES.intersection(cast(tuple[Scope, ...], key.scopes))
    return Principal(f"key:{key.name}", scopes, None if key.roots is None else frozenset(key.roots), key.id)


def is_valid(key: Key, now_seconds: float) -> bool:
    """Return whether the key is neither revoked nor expired."""
    if key.revoked_at is not None:
        return False
    return key.expires_at is None or now_seconds < key.expires_at.timestamp()


def create_key(
    connection: Connection,
    *,
    name: str,
    scopes: Iterable[Scope],
    roots: Iterable[str] | None,
    expires_seconds: float | None,
    now_seconds: float,
) -> CreatedKey:
    """Create a key; its ``key`` is shown once and cannot be read again.

    Raises ConflictError if a valid key has this name, since the audit log names keys.
    """
    for row in connection.execute(select(api_keys).where(api_keys.c.name == name)):
        if is_valid(_key(row), now_seconds):
            raise ConflictError(f"there is a key {name!r}; revoke it first, or take another name")
    prefix = "".join(secrets.choice(_ALPHABET) for _ in range(8))
    secret = f"dcp_{prefix}_{secrets.token_urlsafe(32)}"
    values: dict[str, Any] = {
        "name": name,
        "prefix": prefix,
        "hash": _digest(secret),
        "scopes": sorted(scopes),
        "roots": None if roots is None else sorted(roots),
        "created_seconds": now_seconds,
        "expires_seconds": expires_seconds,
    }
    row = connection.execute(insert(api_keys).values(values).returning(api_keys)).one()
    return CreatedKey(**asdict(_key(row)), key=secret)


def list_keys(connection: Connection) -> list[Key]:
    """List all keys, also revoked ones, in the order of their creation."""
    return [_key(row) for row in connection.execute(select(api_keys).order_by(api_keys.c.id))]


def get_key(connection: Connection, key_id: int) -> Key:
    """Return a key. Raises NotFoundError."""
    row = connection.execute(select(api_keys).where(api_keys.c.id == key_id)).one_or_none()
    if row is None:
        raise NotFoundError(f"there is no key {key_id}")
    return _key(row)


def whoami(connection: Connection, principal: Principal) -> Whoami:
    """Describe the caller and its rights."""
    key = None if principal.key_id is None else get_key(connection, principal.key_id)
    return Whoami(
        principal.name,
        principal.key_id,
        tuple(scope for scope in get_args(Scope) if principal.may(scope)),
        None if principal.roots is None else tuple(sorted(principal.roots)),
        None if key is None else key.expires_at,
    )


def valid_keys(connection: Connection, key_ids: Collection[int], now_seconds: float) -> set[int]:
    """Return the ids of those keys that are valid."""
    if not key_ids:
        return set()
    found = connection.execute(select(api_keys).where(api_keys.c.id.in_(sorted(key_ids))))
    return {row.id for row in found if is_valid(_key(row), now_seconds)}


def revoke_key(connection: Connection, key_id: int, now_seconds: float) -> Key:
    """End a key at once. One that has ended stays as it is. Raises NotFoundError."""
    connection.execute(
        update(api_keys)
        .where(api_keys.c.id == key_id, api_keys.c.revoked_seconds.is_(None))
        .values(revoked_seconds=now_seconds)
    )
    return get_key(connection, key_id)


def find_key(connection: Connection, secret: str, now_seconds: float) -> Key | None:
    """Return the key ``secret`` is, if it is one that is valid."""
    match = KEY_PATTERN.fullmatch(secret)
    if match is None:
        return None
    row = connection.execute(select(api_keys).where(api_keys.c.prefix == match[1])).one_or_none()
    if row is None or not hmac.compare_digest(bytes(row.hash), _digest(secret)):
        return None
    key = _key(row)
    return key if is_valid(key, now_seconds) else None


def prefix_of(secret: str) -> str:
    """Return the prefix of a key; an empty one if ``secret`` does not look like a key."""
    match = KEY_PATTERN.fullmatch(secret)
    return "" if match is None else match[1]


class KeyRing:
    """The keys of a database, as requests ask for them: always its word, so that revoking works at once.

    When a key was used is kept in memory and written by `flush`, now and then, because no request must wait
    for a writer only because of that.
    """

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        self._database = database
        self._clock = clock
        self._used: dict[int, float] = {}
        self._lock = threading.Lock()

    def find(self, secret: str) -> Key | None:
        """Return the valid key ``secret`` is, or None. Raises `DatabaseUnavailableError`."""
        now_seconds = self._clock()
        if KEY_PATTERN.fullmatch(secret) is None:
            return None
        with self._database.read() as connection:
            key = find_key(connection, secret, now_seconds)
        self.note_use(key)
        return key

    def note_use(self, key: Key | None) -> None:
        """Remember that the key was just used."""
        now_seconds = self._clock()
        used = key.used_at.timestamp() if key is not None and key.used_at is not None else 0.0
        if key is not None and now_seconds - used >= _USE_SECONDS:
            with self._lock:
                self._used[key.id] = now_seconds

    def flush(self) -> None:
        """Write when keys were last used."""
        with self._lock:
            used, self._used = self._used, {}
        if used:
            self._database.transact(lambda connection: _mark_used(connection, used))


def _mark_used(connection: Connection, used: Mapping[int, float]) -> None:
    for key_id, seconds in used.items():
        connection.execute(update(api_keys).where(api_keys.c.id == key_id).values(used_seconds=seconds))


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def _key(row: Row[Any]) -> Key:
    scopes = tuple(sorted(ALL_SCOPES.intersection(cast(list[Scope], row.scopes))))
    roots = None if row.roots is None else tuple(sorted(row.roots))
    return record_of_row(Key, row._mapping, scopes=scopes, roots=roots)


_TOKEN: Final = re.compile(r"[A-Za-z0-9_-]{43}")


def begin_session(connection: Connection, key_id: int, now_seconds: float, lasts_seconds: float) -> str:
    """Return a new session of this key: what its cookie has, which cannot be had again. Drops old ones."""
    connection.execute(delete(sessions).where(sessions.c.expires_seconds <= now_seconds))
    token = secrets.token_urlsafe(32)
    values = {
        "key_id": key_id,
        "created_seconds": now_seconds,
        "expires_seconds": now_seconds + lasts_seconds,
    }
    connection.execute(insert(sessions).values(hash=_digest(token), **values))
    return token


def find_session(connection: Connection, token: str, now_seconds: float) -> Key | None:
    """Return the valid key of a session that lasts; None if there is none."""
    if _TOKEN.fullmatch(token) is None:
        return None
    query = select(sessions.c.key_id).where(
        sessions.c.hash == _digest(token), sessions.c.expires_seconds > now_seconds
    )
    key_id = connection.execute(query).scalar_one_or_none()
    key = None if key_id is None else get_key(connection, key_id)
    return key if key is not None and is_valid(key, now_seconds) else None


def end_session(connection: Connection, token: str) -> None:
    """Sign out; what is no session is none afterwards, either."""
    connection.execute(delete(sessions).where(sessions.c.hash == _digest(token)))
