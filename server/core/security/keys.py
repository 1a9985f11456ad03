"""API keys: 256 random bits, stored as SHA-256.

A key reads ``dcp_PREFIX_SECRET``. The prefix finds the row and identifies keys in lists and logs. The hash
needs no salt, since the secret cannot be guessed. A key belongs to a person or service account, or is
independent.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Iterable
from dataclasses import asdict
from typing import Any, Final, cast, get_args

from sqlalchemy import Connection, Row, Select, insert, select, update

from dcp.server.core.problems import ConflictError, NotFoundError
from dcp.server.core.security.accounts import actor_of
from dcp.server.core.security.principal import ALL_SCOPES, Principal, Scope
from dcp.server.database.mapping import record_of_row
from dcp.server.database.tables import accounts, api_keys
from dcp.server.records.administration import ApiKey, CreatedKey, Whoami

KEY_PATTERN: Final = re.compile(r"dcp_([a-z0-9]{8})_([A-Za-z0-9_-]{43})")
_ALPHABET: Final = "abcdefghijklmnopqrstuvwxyz0123456789"

MAX_ACTOR: Final = 128
"""Length of columns with a caller name."""


def actor_of_key(key: ApiKey) -> str:
    """Return the name of the key in the audit log, after the name of its account."""
    return f"{'' if key.account is None else key.account + '/'}key:{key.name}"[:MAX_ACTOR]


def is_valid(key: ApiKey, now_seconds: float) -> bool:
    """Return True if the key is neither revoked nor expired."""
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
    account_id: int | None = None,
    maker: str | None = None,
) -> CreatedKey:
    """Create a key; its ``key`` is shown only once.

    Raises ConflictError if a valid key of the same account, or without account, has this name: the audit log
    identifies keys by name.
    """
    same = (api_keys.c.name == name, api_keys.c.account_id.is_not_distinct_from(account_id))
    for row in connection.execute(_keys().where(*same)):
        if is_valid(_key(row), now_seconds):
            raise ConflictError(f"key {name!r} already exists; revoke it first, or choose another name")
    prefix = "".join(secrets.choice(_ALPHABET) for _ in range(8))
    secret = f"dcp_{prefix}_{secrets.token_urlsafe(32)}"
    values: dict[str, Any] = {
        "name": name,
        "prefix": prefix,
        "hash": digest(secret),
        "scopes": sorted(scopes),
        "roots": None if roots is None else sorted(roots),
        "created_seconds": now_seconds,
        "expires_seconds": expires_seconds,
        "account_id": account_id,
        "maker": maker,
    }
    number = connection.execute(insert(api_keys).values(values).returning(api_keys.c.id)).scalar_one()
    return CreatedKey(**asdict(get_key(connection, number)), key=secret)


def list_keys(
    connection: Connection, visible: frozenset[str] | None = None, *, account_id: int | None = None
) -> list[ApiKey]:
    """Return keys, including revoked ones, by creation: for ``visible`` roots only, or of an account."""
    query = _keys().order_by(api_keys.c.id)
    if account_id is not None:
        query = query.where(api_keys.c.account_id == account_id)
    return [key for key in map(_key, connection.execute(query)) if _is_visible(key, visible)]


def get_key(connection: Connection, key_id: int, visible: frozenset[str] | None = None) -> ApiKey:
    """Return a key. Raises NotFoundError, also for a key of invisible roots."""
    key = keys_of(connection, [key_id]).get(key_id)
    if key is None or not _is_visible(key, visible):
        raise NotFoundError(f"key {key_id} not found")
    return key


def _is_visible(key: ApiKey, visible: frozenset[str] | None) -> bool:
    return visible is None or (key.roots is not None and visible.issuperset(key.roots))


def whoami(connection: Connection, principal: Principal) -> Whoami:
    """Return the caller and its rights."""
    key = None if principal.key_id is None else get_key(connection, principal.key_id)
    return Whoami(
        principal.name,
        principal.key_id,
        tuple(scope for scope in get_args(Scope) if principal.may(scope)),
        None if principal.roots is None else tuple(sorted(principal.roots)),
        None if key is None else key.expires_at,
        principal.account_id,
        principal.scopes_by_root,
    )


def keys_of(connection: Connection, key_ids: Collection[int]) -> dict[int, ApiKey]:
    """Return keys by id."""
    if not key_ids:
        return {}
    found = connection.execute(_keys().where(api_keys.c.id.in_(sorted(set(key_ids)))))
    return {row.id: _key(row) for row in found}


def revoke_key(connection: Connection, key_id: int, now_seconds: float) -> ApiKey:
    """Revoke a key at once; ended keys stay unchanged. Raises NotFoundError."""
    connection.execute(
        update(api_keys)
        .where(api_keys.c.id == key_id, api_keys.c.revoked_seconds.is_(None))
        .values(revoked_seconds=now_seconds)
    )
    return get_key(connection, key_id)


def find_key(connection: Connection, secret: str, now_seconds: float) -> ApiKey | None:
    """Return the valid key with this ``secret``."""
    match = KEY_PATTERN.fullmatch(secret)
    if match is None:
        return None
    row = connection.execute(_keys().where(api_keys.c.prefix == match[1])).one_or_none()
    if row is None or not hmac.compare_digest(bytes(row.hash), digest(secret)):
        return None
    key = _key(row)
    return key if is_valid(key, now_seconds) else None


def prefix_of(secret: str) -> str:
    """Return the prefix of a key; empty if ``secret`` does not look like a key."""
    match = KEY_PATTERN.fullmatch(secret)
    return "" if match is None else match[1]


def digest(secret: str) -> bytes:
    """Return the stored hash of a key or session token."""
    return hashlib.sha256(secret.encode()).digest()


def _keys() -> Select[Any]:
    owner = (accounts.c.kind.label("account_kind"), accounts.c.name.label("account_name"))
    return select(api_keys, *owner).outerjoin(accounts, accounts.c.id == api_keys.c.account_id)


def _key(row: Row[Any]) -> ApiKey:
    scopes = tuple(sorted(ALL_SCOPES.intersection(cast(list[Scope], row.scopes))))
    roots = None if row.roots is None else tuple(sorted(row.roots))
    account = None if row.account_id is None else actor_of(row.account_kind, row.account_name)
    return record_of_row(ApiKey, row._mapping, scopes=scopes, roots=roots, account=account)
