"""API keys: 256 random bits, of which only the SHA-256 is kept.

A key reads ``dcp_PREFIX_SECRET``. The prefix finds the row and tells keys apart in lists and logs; a hash
without a salt is enough, since what is hashed cannot be guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast, get_args

from sqlalchemy import Connection, Row, insert, select, update

from dcp.server.core.problems import ConflictError, NotFoundError
from dcp.server.core.security.principal import ALL_SCOPES, Principal, Scope
from dcp.server.database.engine import Database
from dcp.server.database.tables import api_keys
from dcp.server.records.administration import Whoami
from dcp.server.records.declaring import moment

__all__ = [
    "KEY_PATTERN",
    "KeyRecord",
    "KeyRing",
    "create_key",
    "find_key",
    "get_key",
    "list_keys",
    "prefix_of",
    "revoke_key",
    "valid_keys",
    "whoami",
]

KEY_PATTERN: Final = re.compile(r"dcp_([a-z0-9]{8})_([A-Za-z0-9_-]{43})")
_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789"
_USE_SECONDS: Final = 60.0
"""`used_seconds` is not written more often than this."""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key as it is listed: without what it is made of."""

    id: int
    name: str
    prefix: str
    scopes: frozenset[Scope]
    roots: frozenset[str] | None
    created_seconds: float
    expires_seconds: float | None
    revoked_seconds: float | None
    used_seconds: float | None

    @property
    def principal(self) -> Principal:
        """Who asks with it."""
        return Principal(f"key:{self.name}", self.scopes, self.roots, self.id)

    def is_valid(self, now_seconds: float) -> bool:
        """Neither revoked nor expired."""
        if self.revoked_seconds is not None:
            return False
        return self.expires_seconds is None or now_seconds < self.expires_seconds


def create_key(
    connection: Connection,
    *,
    name: str,
    scopes: Iterable[Scope],
    roots: Iterable[str] | None,
    expires_seconds: float | None,
    now_seconds: float,
) -> tuple[KeyRecord, str]:
    """Make a key; the string is shown once and cannot be had again.

    Raises ConflictError if a valid key has this name, since the audit log names keys.
    """
    for row in connection.execute(select(api_keys).where(api_keys.c.name == name)):
        if _record(row).is_valid(now_seconds):
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
    return _record(row), secret


def list_keys(connection: Connection) -> list[KeyRecord]:
    """All keys, revoked ones too, in the order in which they were made."""
    return [_record(row) for row in connection.execute(select(api_keys).order_by(api_keys.c.id))]


def get_key(connection: Connection, key_id: int) -> KeyRecord | None:
    """One key; None if there is no such one."""
    row = connection.execute(select(api_keys).where(api_keys.c.id == key_id)).one_or_none()
    return None if row is None else _record(row)


def whoami(connection: Connection, principal: Principal) -> Whoami:
    """Who that is, and what it may."""
    key = None if principal.key_id is None else get_key(connection, principal.key_id)
    expires = None if key is None else key.expires_seconds
    return Whoami(
        principal.name,
        principal.key_id,
        tuple(scope for scope in get_args(Scope) if principal.may(scope)),
        None if principal.roots is None else tuple(sorted(principal.roots)),
        None if expires is None else moment(expires),
    )


def valid_keys(connection: Connection, key_ids: Collection[int], now_seconds: float) -> set[int]:
    """Which of the keys are valid."""
    if not key_ids:
        return set()
    found = connection.execute(select(api_keys).where(api_keys.c.id.in_(sorted(key_ids))))
    return {row.id for row in found if _record(row).is_valid(now_seconds)}


def revoke_key(connection: Connection, key_id: int, now_seconds: float) -> KeyRecord:
    """End a key at once. One that has ended stays as it is. Raises NotFoundError."""
    connection.execute(
        update(api_keys)
        .where(api_keys.c.id == key_id, api_keys.c.revoked_seconds.is_(None))
        .values(revoked_seconds=now_seconds)
    )
    record = get_key(connection, key_id)
    if record is None:
        raise NotFoundError(f"there is no key {key_id}")
    return record


def find_key(connection: Connection, secret: str, now_seconds: float) -> KeyRecord | None:
    """The key ``secret`` is, if it is one that is valid."""
    match = KEY_PATTERN.fullmatch(secret)
    if match is None:
        return None
    row = connection.execute(select(api_keys).where(api_keys.c.prefix == match[1])).one_or_none()
    if row is None or not hmac.compare_digest(bytes(row.hash), _digest(secret)):
        return None
    record = _record(row)
    return record if record.is_valid(now_seconds) else None


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

    def find(self, secret: str) -> KeyRecord | None:
        """The valid key ``secret`` is, or None. Raises `DatabaseUnavailableError`."""
        now_seconds = self._clock()
        if KEY_PATTERN.fullmatch(secret) is None:
            return None
        with self._database.read() as connection:
            record = find_key(connection, secret, now_seconds)
        self.note_use(record)
        return record

    def note_use(self, record: KeyRecord | None) -> None:
        """Somebody has just asked with this key."""
        now_seconds = self._clock()
        if record is not None and now_seconds - (record.used_seconds or 0.0) >= _USE_SECONDS:
            with self._lock:
                self._used[record.id] = now_seconds

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


def _record(row: Row[Any]) -> KeyRecord:
    scopes = ALL_SCOPES.intersection(cast(list[Scope], row.scopes))
    return KeyRecord(
        id=row.id,
        name=row.name,
        prefix=row.prefix,
        scopes=scopes,
        roots=None if row.roots is None else frozenset(row.roots),
        created_seconds=row.created_seconds,
        expires_seconds=row.expires_seconds,
        revoked_seconds=row.revoked_seconds,
        used_seconds=row.used_seconds,
    )
