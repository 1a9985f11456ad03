"""Cursors: opaque positions between pages, which clients send back.

Cursors contain no secrets and grant no rights, so they are not signed; every cursor is validated.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
from collections.abc import Callable
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, Connection, Row, Select, tuple_

from dcp.server.catalog.errors import InvalidQueryError
from dcp.server.catalog.inputs import UNSTORABLE
from dcp.server.records.lists import Page

T = TypeVar("T")

_VERSION: Final = 1
_MAX_CHARACTERS: Final = 4096
_MAX_INTEGER: Final = (1 << 63) - 1


def encode_cursor(mark: str, *values: int | float | str) -> str:
    """Return the cursor of a query (`query_mark` or a name) after a row with these sort ``values``."""
    data = json.dumps([_VERSION, mark, *values], separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def decode_cursor(cursor: str, mark: str, *types: type) -> tuple[Any, ...]:
    """Return the values, one of each type. Raises `InvalidQueryError` for a cursor of another service or
    query."""
    try:
        if len(cursor) > _MAX_CHARACTERS:
            raise ValueError
        data = json.loads(base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars="-_", validate=True))
        version, found_mark, *values = data
    except (ValueError, TypeError, binascii.Error, RecursionError):
        raise InvalidQueryError("cursor", "not a cursor of this service") from None
    if version != _VERSION or found_mark != mark:
        raise InvalidQueryError(
            "cursor", "the cursor belongs to another query or another version of the service"
        )
    if len(values) != len(types) or not all(map(_is_of, values, types)):
        raise InvalidQueryError("cursor", "not a cursor of this service")
    return tuple(values)


def read_page(
    connection: Connection,
    query: Select[Any],
    make: Callable[[Row[Any]], T],
    mark: str,
    *keys: tuple[ColumnElement[Any], type],
    cursor: str | None,
    limit: int,
    descending: bool = False,
) -> Page[T]:
    """Return up to ``limit`` rows of ``query`` after the cursor as records, ordered by ``keys``.

    ``keys`` are columns with their types that identify a row. Raises `InvalidQueryError` for a cursor of
    another query.
    """
    columns = [column for column, _ in keys]
    if cursor is not None:
        order, last = tuple_(*columns), tuple_(*decode_cursor(cursor, mark, *(kind for _, kind in keys)))
        query = query.where(order < last if descending else order > last)
    query = query.order_by(*(column.desc() if descending else column.asc() for column in columns))
    places = [column.label(f"place_{number}") for number, column in enumerate(columns)]
    rows = connection.execute(query.add_columns(*places).limit(limit + 1)).all()
    more = len(rows) > limit
    next_cursor = encode_cursor(mark, *rows[limit - 1][-len(places) :]) if more else None
    return Page(tuple(make(row) for row in rows[:limit]), next_cursor)


def offset_of(cursor: str | None, mark: str, first: int = 0) -> int:
    """Return the offset of a cursor; ``first`` without a cursor."""
    return first if cursor is None else max(first, decode_cursor(cursor, mark, int)[0])


def query_mark(*parts: object) -> str:
    """Return a short hash of ``parts``: a cursor is valid only for the query with this mark."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _is_of(value: object, expected: type) -> bool:
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return expected in (int, float) and abs(value) <= _MAX_INTEGER
    if isinstance(value, float):
        return expected is float and math.isfinite(value)
    return isinstance(value, str) and expected is str and not UNSTORABLE.search(value)
