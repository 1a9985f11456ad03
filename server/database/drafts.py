"""Drafts: data too large for one transaction is written in short ones, under a name that no reader looks up.

A draft is a row of one table with many parts in another. Its parts are written, and removed, some at a time
with pauses: on SQLite writers take turns, and none may be long. One short transaction gives it the name under
which it is found; what was killed before that is removed in time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import Column, Connection, Executable, delete, insert, select, tuple_

from dcp.server.database.engine import Database
from dcp.server.database.tables import document_parts, documents, structure_tensors, structures

__all__ = ["DOCUMENTS", "STRUCTURES", "Drafts", "Pause", "draft_name", "forget_drafts"]

_DRAFT: Final = "draft-"
"""The beginning of the name of a draft; the time follows, by which old ones are found."""

_MOST_PAUSE_SECONDS: Final = 0.1

Pause = Callable[[float], None]
"""Called between two transactions with the seconds that others are to have."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of one kind: by the ``name`` of their row, and the column of their parts that says whose they
    are. ``rows`` of the parts are removed in one transaction."""

    name: Column[Any]
    owner: Column[Any]
    rows: int

    def begin(self, database: Database, columns: Mapping[str, Any], now: float) -> int:
        """The number of a new draft without parts."""
        values = {**columns, self.name.name: draft_name(now, secrets.token_hex(12))}
        statement = insert(self.name.table).values(values).returning(self.name.table.c.id)
        return int(database.transact(lambda connection: connection.execute(statement).scalar_one()))

    def write(
        self, database: Database, parts: Iterable[Sequence[Mapping[str, Any]]], pause: Pause = time.sleep
    ) -> None:
        """Rows of parts, each sequence of them in a transaction of its own."""
        for rows in parts:
            begun = time.monotonic()
            database.transact(partial(_execute, insert(self.owner.table), rows))
            pause(min(_MOST_PAUSE_SECONDS, time.monotonic() - begun))

    def remove(self, database: Database, number: int) -> None:
        """The draft with all of its parts."""
        parts = self.owner.table
        keys = [column for column in parts.primary_key if column is not self.owner]
        own = self.owner == number
        bound = select(*keys).where(own).order_by(*keys).offset(self.rows).limit(1)
        is_more = True
        while is_more:
            with database.read() as connection:
                next_row = connection.execute(bound).one_or_none()
            is_more = next_row is not None
            some = own if next_row is None else own & (tuple_(*keys) < tuple(next_row))
            begun = time.monotonic()
            database.transact(partial(_execute, delete(parts).where(some), None))
            time.sleep(min(_MOST_PAUSE_SECONDS, time.monotonic() - begun))
        row = self.name.table
        database.transact(partial(_execute, delete(row).where(row.c.id == number), None))

    def forget(self, database: Database, before: float) -> int:
        """Remove drafts that were begun before that time; how many."""
        query = select(self.name.table.c.id, self.name).where(self.name.like(f"{_DRAFT}%"))
        with database.read() as connection:
            drafts = connection.execute(query).all()
        old = [number for number, name in drafts if float(name.split("-")[1]) < before]
        for number in old:
            self.remove(database, number)
        return len(old)


STRUCTURES: Final = Drafts(structures.c.digest, structure_tensors.c.structure_id, rows=2_000)
DOCUMENTS: Final = Drafts(documents.c.name, document_parts.c.document_id, rows=10)


def draft_name(now: float, token: str) -> str:
    """The name of a draft begun ``now``; ``token`` is of it alone."""
    return f"{_DRAFT}{now:.0f}-{token}"


def forget_drafts(database: Database, before: float) -> int:
    """Remove drafts of all kinds that were begun before that time, by writers that were killed; how many."""
    return sum(drafts.forget(database, before) for drafts in (STRUCTURES, DOCUMENTS))


def _execute(statement: Executable, rows: Sequence[Mapping[str, Any]] | None, connection: Connection) -> None:
    connection.execute(statement, rows)
