"""Drafts and documents: data too large for one transaction, written in parts.

A draft is a row of one table with many parts in another. Short transactions with pauses write the parts,
because on SQLite writers take turns. Readers ignore drafts by name. A final transaction renames the complete
draft; incomplete drafts are removed later.

A document is a JSON object. Its lists and long texts are stored in parts, so reading a page reads only a
page. Tasks, jobs and statistics can share one document. A document without references becomes a draft again
and is removed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any, Final

from sqlalchemy import Column, Connection, Executable, Text, cast, delete, insert, select, tuple_, update

from dcp.server.database.engine import Database, Encoded, encode_json
from dcp.server.database.tables import (
    document_parts,
    documents,
    jobs,
    statistics,
    structure_tensors,
    structures,
    tasks,
)

_DRAFT: Final = "draft-"
"""Prefix of the names of drafts; the time of creation follows."""

_MOST_PAUSE_SECONDS: Final = 0.1

Pause = Callable[[float], None]
"""Callback between two transactions, with the seconds to leave to other writers."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of one kind: the ``name`` column of the row, and the column of the parts that refers to the
    row.

    One transaction removes at most ``rows`` parts.
    """

    name: Column[Any]
    owner: Column[Any]
    rows: int

    def begin(self, database: Database, columns: Mapping[str, Any], now: float) -> int:
        """Return the number of a new draft without parts."""
        values = {**columns, self.name.name: draft_name(now, secrets.token_hex(12))}
        statement = insert(self.name.table).values(values).returning(self.name.table.c.id)
        return int(database.transact(lambda connection: connection.execute(statement).scalar_one()))

    def write(
        self, database: Database, parts: Iterable[Sequence[Mapping[str, Any]]], pause: Pause = time.sleep
    ) -> None:
        """Write parts, each sequence of rows in a separate transaction."""
        for rows in parts:
            begun = time.monotonic()
            database.transact(partial(_execute, insert(self.owner.table), rows))
            pause(min(_MOST_PAUSE_SECONDS, time.monotonic() - begun))

    def remove(self, database: Database, number: int) -> None:
        """Delete the draft with all parts."""
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
        """Remove drafts older than the given time, and return their number."""
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
    """Return the name of a draft created ``now``, with a unique ``token``."""
    return f"{_DRAFT}{now:.0f}-{token}"


def forget_drafts(database: Database, before: float) -> int:
    """Remove drafts of all kinds older than the given time, left by killed writers; return their number."""
    return sum(drafts.forget(database, before) for drafts in (STRUCTURES, DOCUMENTS))


def _execute(statement: Executable, rows: Sequence[Mapping[str, Any]] | None, connection: Connection) -> None:
    connection.execute(statement, rows)


_ITEMS: Final = 100
_CHARACTERS: Final = 1 << 16
"""Characters of a list or text in one part."""

_TRANSACTION_CHARACTERS: Final = 1 << 17
"""Characters of one transaction, which takes hundredths of a second."""

_REFERRING: Final = (tasks, jobs, statistics)


def prepare_document(
    database: Database, content: Mapping[str, Any], *, now: float, pause: Pause = time.sleep
) -> int:
    """Write a new document as a draft, in short transactions, and return its number for `ensure_document`."""
    number = DOCUMENTS.begin(database, {"head": _head(content)}, now)
    DOCUMENTS.write(database, _together(_parts(number, content)), pause)
    return number


def ensure_document(connection: Connection, content: Mapping[str, Any], prepared: int | None) -> int:
    """Return the number of the document, written unless ``prepared``. The caller must store a reference."""
    if prepared is None:
        return write_document(connection, content)
    published = update(documents).where(documents.c.id == prepared).values(name=None)
    if connection.execute(published).rowcount != 1:
        raise LookupError(f"document {prepared} expired and was removed")
    return prepared


def write_document(connection: Connection, content: Mapping[str, Any]) -> int:
    """Write a small document at once and return its number."""
    statement = insert(documents).values(head=_head(content)).returning(documents.c.id)
    number = int(connection.execute(statement).scalar_one())
    if rows := list(_parts(number, content)):
        connection.execute(insert(document_parts), rows)
    return number


def read_document(connection: Connection, number: int) -> dict[str, Any]:
    """Return the whole document."""
    head = select(documents.c.head).where(documents.c.id == number)
    content = dict(connection.execute(head).scalar_one())
    table = document_parts.c
    query = select(table.field, table.content).where(table.document_id == number)
    rows = connection.execute(query.order_by(table.field, table.position))
    for field, parts in groupby(rows, key=lambda row: row.field):
        pieces = [part.content for part in parts]
        is_text = isinstance(content[field], str)
        content[field] = "".join(pieces) if is_text else list(chain.from_iterable(pieces))
    return content


def read_items(connection: Connection, number: int, field: str, begin: int, end: int) -> list[Any]:
    """Return the items from ``begin`` to ``end`` of a list."""
    table = document_parts.c
    query = select(table.position, table.content).where(
        table.document_id == number,
        table.field == field,
        table.position > begin - _ITEMS,
        table.position < end,
    )
    parts = connection.execute(query.order_by(table.position)).all()
    first = parts[0].position if parts else 0
    return [item for part in parts for item in part.content][begin - first : end - first]


def find_item(connection: Connection, number: int, field: str, name: str, value: str) -> Any | None:
    """Return the first item of a list whose ``name`` is ``value``, or None. Parts are read one by one."""
    table = document_parts.c
    query = select(table.content).where(table.document_id == number, table.field == field)
    parts = connection.execute(query.order_by(table.position), execution_options={"yield_per": 1}).scalars()
    return next((item for part in parts for item in part if item.get(name) == value), None)


def abandon_documents(connection: Connection, now: float) -> int:
    """Turn documents without references into drafts and return their number.

    Deletion follows later, since a reader may still use a document.
    """
    unused = [~select(table.c.document_id).where(_is_of(table)).exists() for table in _REFERRING]
    name = draft_name(now, "") + cast(documents.c.id, Text)
    statement = update(documents).where(documents.c.name.is_(None), *unused).values(name=name)
    return connection.execute(statement).rowcount


def _is_of(table: Any) -> Any:
    return table.c.document_id == documents.c.id


def _is_cut(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, str) and len(value) > _CHARACTERS)


def _head(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members without parts and the names of all members, in the order of `read_document`."""
    return {name: type(value)() if _is_cut(value) else value for name, value in content.items()}


def _parts(number: int, content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for field, value in content.items():
        if not _is_cut(value):
            continue
        step = _CHARACTERS if isinstance(value, str) else _ITEMS
        for begin in range(0, len(value), step):
            encoded = Encoded(encode_json(value[begin : begin + step], separators=(",", ":")))
            yield {"document_id": number, "field": field, "position": begin, "content": encoded}


def _together(parts: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Group parts into transactions; each group is encoded on demand."""
    rows: list[dict[str, Any]] = []
    characters = 0
    for part in parts:
        rows.append(part)
        characters += len(part["content"])
        if characters >= _TRANSACTION_CHARACTERS:
            yield rows
            rows, characters = [], 0
    if rows:
        yield rows
