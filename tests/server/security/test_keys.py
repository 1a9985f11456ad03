"""Tests of API keys as they are kept."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from dcp.server.database.engine import Database
from dcp.server.database.tables import api_keys
from dcp.server.problems import ConflictError, NotFoundError
from dcp.server.security import keys
from dcp.server.security.principal import Scope

NOW = 1_700_000_000.0


def _make(database: Database, name: str = "ci", **given: object) -> tuple[keys.KeyRecord, str]:
    values = {"scopes": ["read"], "roots": None, "expires_seconds": None, "now_seconds": NOW, **given}
    with database.write() as connection:
        return keys.create_key(connection, name=name, **values)  # type: ignore[arg-type]


def test_a_key_is_found_by_all_of_it(database: Database) -> None:
    """Only the very string is the key; what is kept does not hold it."""
    record, secret = _make(database)
    assert keys.KEY_PATTERN.fullmatch(secret)
    tampered = secret[:-1] + ("A" if secret[-1] != "A" else "B")
    other_prefix = f"dcp_{'a' * 8}{secret[12:]}"
    with database.read() as connection:
        found = keys.find_key(connection, secret, NOW)
        assert found == record
        for wrong in (tampered, other_prefix, secret[:-1], secret + "a", secret.upper(), "", "dcp__", "\0"):
            assert keys.find_key(connection, wrong, NOW) is None, wrong
        row = connection.execute(select(api_keys)).one()
    assert secret.encode() not in repr(tuple(row)).encode()
    assert secret[13:] not in repr(tuple(row))
    assert record.principal.name == "key:ci"


def test_keys_end(database: Database) -> None:
    """At their time, or when they are revoked; revoking again changes nothing."""
    record, secret = _make(database, expires_seconds=NOW + 10)
    with database.write() as connection:
        assert keys.find_key(connection, secret, NOW + 9.9) is not None
        assert keys.find_key(connection, secret, NOW + 10) is None
        assert keys.revoke_key(connection, record.id, NOW + 5).revoked_seconds == NOW + 5
        assert keys.find_key(connection, secret, NOW + 6) is None
        assert keys.revoke_key(connection, record.id, NOW + 7).revoked_seconds == NOW + 5
        with pytest.raises(NotFoundError):
            keys.revoke_key(connection, record.id + 1, NOW)


def test_names_of_valid_keys_differ(database: Database) -> None:
    """The audit log names keys, so that two valid ones must not have one name; an ended one frees it."""
    record, _ = _make(database)
    with pytest.raises(ConflictError):
        _make(database)
    with database.write() as connection:
        keys.revoke_key(connection, record.id, NOW)
    again, _ = _make(database)
    assert again.principal.identity != record.principal.identity
    with database.read() as connection:
        assert [one.id for one in keys.list_keys(connection)] == [record.id, again.id]


@pytest.mark.parametrize("scope", ["read", "write", "convert", "delete", "admin"])
def test_what_a_key_may(database: Database, scope: Scope) -> None:
    """Its scopes and roots, and no others; admin has all scopes."""
    _, secret = _make(database, scopes=[scope], roots=["main"])
    with database.read() as connection:
        record = keys.find_key(connection, secret, NOW)
    assert record is not None
    principal = record.principal
    scopes: tuple[Scope, ...] = ("read", "write", "convert", "delete", "admin")
    assert {one for one in scopes if principal.may(one)} == (set(scopes) if scope == "admin" else {scope})
    assert (principal.may_see("main"), principal.may_see("other")) == (True, False)


def test_when_a_key_was_used(database: Database) -> None:
    """It is written by `flush`, and not more often than once a minute."""
    now = [NOW]
    ring = keys.KeyRing(database, lambda: now[0])
    record, secret = _make(database)

    def used() -> float | None:
        ring.flush()
        with database.read() as connection:
            found = keys.get_key(connection, record.id)
        assert found is not None
        return found.used_seconds

    assert used() is None
    ring.find(secret)
    assert used() == NOW
    now[0] += 59
    ring.find(secret)
    assert used() == NOW
    now[0] += 2
    ring.find(secret)
    assert used() == NOW + 61
