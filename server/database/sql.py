"""The few statements that SQLite and PostgreSQL write alike and SQLAlchemy's core has in neither's place."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Table, text
from sqlalchemy.dialects import postgresql, sqlite

__all__ = ["dialect_insert", "insert_missing", "insert_or_update", "lock_names"]

_NAMED: Final = 0x64_63_70  # "dcp": the class of advisory locks that are found by names


def dialect_insert(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that can be given ``ON CONFLICT``."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def insert_missing(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert those rows whose keys are not there."""
    if rows:
        connection.execute(dialect_insert(connection, table).on_conflict_do_nothing(), rows)


def insert_or_update(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, by primary key; those that are there get the other columns of the rows."""
    if not rows:
        return
    statement = dialect_insert(connection, table)
    keys = [column.name for column in table.primary_key]
    changed = {name: statement.excluded[name] for name in rows[0] if name not in keys}
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed), rows)


def lock_names(connection: Connection, names: Iterable[str]) -> None:
    """Wait until no other transaction holds one of these names, and hold them until the end of this one.

    On SQLite there is one writer, which needs none. Two names may share a lock, and only wait in vain.
    """
    if connection.dialect.name == "postgresql":
        numbers = sorted({zlib.crc32(name.encode()) - (1 << 31) for name in names})
        for number in numbers:
            connection.execute(
                text("SELECT pg_advisory_xact_lock(:of, :number)"), {"of": _NAMED, "number": number}
            )
