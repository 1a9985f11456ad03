"""Documents: JSON objects that are too large for the rows they belong to, which have their number instead.

Lists, and long texts, lie in parts, so that a page reads a page, and are written as a draft before the
transaction that refers to them. What tasks, jobs and statistics have in common they refer to together. A
document that nothing refers to any more becomes a draft again, and is removed as such.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, groupby
from typing import Any, Final

from sqlalchemy import Connection, Text, cast, insert, select, update

from dcp.server.database.drafts import DOCUMENTS, Pause, draft_name
from dcp.server.database.engine import Database, Encoded, encode_json
from dcp.server.database.tables import document_parts, documents, jobs, statistics, tasks

__all__ = [
    "abandon_documents",
    "ensure_document",
    "find_item",
    "prepare_document",
    "read_document",
    "read_items",
    "write_document",
]

_ITEMS: Final = 100
_CHARACTERS: Final = 1 << 16
"""Of a list or a text in one part."""

_TRANSACTION_CHARACTERS: Final = 1 << 17
"""In one transaction: hundredths of a second."""

_REFERRING: Final = (tasks, jobs, statistics)


def prepare_document(
    database: Database, content: Mapping[str, Any], *, now: float, pause: Pause = time.sleep
) -> int:
    """The number of a new document, a draft until `ensure_document` is given it; in short transactions."""
    number = DOCUMENTS.begin(database, {"head": _head(content)}, now)
    DOCUMENTS.write(database, _together(_parts(number, content)), pause)
    return number


def ensure_document(connection: Connection, content: Mapping[str, Any], prepared: int | None) -> int:
    """The number of the document, which is written if it was not ``prepared``; the caller refers to it."""
    if prepared is None:
        return write_document(connection, content)
    published = update(documents).where(documents.c.id == prepared).values(name=None)
    if connection.execute(published).rowcount != 1:
        raise LookupError(f"document {prepared} has not been used for so long that it was removed")
    return prepared


def write_document(connection: Connection, content: Mapping[str, Any]) -> int:
    """The number of a new document, written at once: for small ones."""
    statement = insert(documents).values(head=_head(content)).returning(documents.c.id)
    number = int(connection.execute(statement).scalar_one())
    if rows := list(_parts(number, content)):
        connection.execute(insert(document_parts), rows)
    return number


def read_document(connection: Connection, number: int) -> dict[str, Any]:
    """All of it."""
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
    """The items from ``begin`` to ``end`` of a list."""
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
    """The first of a list whose ``name`` is ``value``; None if none is. Parts are read one by one."""
    table = document_parts.c
    query = select(table.content).where(table.document_id == number, table.field == field)
    parts = connection.execute(query.order_by(table.position), execution_options={"yield_per": 1}).scalars()
    return next((item for part in parts for item in part if item.get(name) == value), None)


def abandon_documents(connection: Connection, now: float) -> int:
    """Turn documents that no row refers to into drafts, and return their number. They are removed later,
    since a reader may still use them."""
    unused = [~select(table.c.document_id).where(_is_of(table)).exists() for table in _REFERRING]
    name = draft_name(now, "") + cast(documents.c.id, Text)
    statement = update(documents).where(documents.c.name.is_(None), *unused).values(name=name)
    return connection.execute(statement).rowcount


def _is_of(table: Any) -> Any:
    return table.c.document_id == documents.c.id


def _is_cut(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, str) and len(value) > _CHARACTERS)


def _head(content: Mapping[str, Any]) -> dict[str, Any]:
    """The members that are in no part, and the names of all: `read_document` has them in this order."""
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
    """As many in a list as are written in one transaction; the next ones are encoded when they are due."""
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
