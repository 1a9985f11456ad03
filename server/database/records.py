"""Records in the database: their columns, the columns that show one, and rows as records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from datetime import datetime
from functools import cache, partial
from typing import Any, Final, TypeVar, cast, get_origin

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    Row,
    String,
    Text,
    false,
    true,
)
from sqlalchemy.types import TypeEngine

from dcp.server.records.declaring import ColumnType, OwnColumn, RecordField, fields_of, moment
from dcp.server.records.documents import record_of

__all__ = ["ID", "JSON_DOCUMENT", "NAME", "checks_of", "columns_of", "record_of_row", "shown_columns"]

R = TypeVar("R")

JSON_DOCUMENT: Final = JSON()
"""Of PostgreSQL too, whose JSONB does not keep the order of members: rules of ``rename`` apply in theirs."""
NAME: Final = Text().with_variant(Text(collation="C"), "postgresql")
"""Compared and sorted by code point on both: pages go on where they ended whatever the server's locale."""
ID: Final = BigInteger().with_variant(Integer(), "sqlite")  # SQLite numbers rows by INTEGER PRIMARY KEY only

_TYPES: Final[Mapping[ColumnType, TypeEngine[Any]]] = {
    "id": ID,
    "reference": ID,
    "name": NAME,
    "text": Text(),
    "integer": Integer(),
    "large": BigInteger(),
    "seconds": Float(),
    "flag": Boolean(),
    "json": JSON_DOCUMENT,
}


def columns_of(record: type[Any]) -> list[Column[Any]]:
    """The columns of the record's own table, for its definition."""
    return [_column(field, field.stored) for field in fields_of(record) if field.stored is not None]


def _column(field: RecordField, stored: OwnColumn) -> Column[Any]:
    if stored.type == "id":
        return Column(field.column, ID, primary_key=True, autoincrement=True)
    kind = String(stored.size) if stored.type == "code" else _TYPES[stored.type]
    refers = [ForeignKey(stored.refers)] if stored.refers else []
    return Column(
        field.column, kind, *refers, nullable=field.is_optional, server_default=_default(stored.default)
    )


def _default(value: bool | int | str | None) -> Any:
    if isinstance(value, bool):
        return true() if value else false()
    return None if value is None else str(value)


def checks_of(record: type[Any]) -> list[CheckConstraint]:
    """Checks by the database of the values of fields."""
    return [
        CheckConstraint(
            f"{field.column} IN ({', '.join(repr(value) for value in field.one_of.values)})",
            name=field.column,
        )
        for field in fields_of(record)
        if field.one_of is not None and field.one_of.is_checked
    ]


def shown_columns(record: type[Any], table: str, metadata: MetaData) -> list[Any]:
    """The columns that make a record, its own and the joined ones, for `record_of_row`."""
    found: list[Any] = []
    for field in fields_of(record):
        if field.stored is not None:
            found.append(metadata.tables[table].c[field.column])
        elif field.joined is not None:
            joined = metadata.tables[field.joined.table].c[field.joined.column]
            found.append(joined.label(field.column))
    return found


def record_of_row(record: type[R], row: Any, **given: Any) -> R:
    """The record with the values of a row, each by the name of its column, and with those ``given``."""
    columns = row._mapping if isinstance(row, Row) else row
    for name, column, decode in _readers(cast(Any, record)):
        if name not in given:
            value = columns[column]
            given[name] = value if value is None or decode is None else decode(value)
    return record(**given)


@cache
def _readers(record: type[Any]) -> list[tuple[str, str, Callable[[Any], Any] | None]]:
    return [(field.name, field.column, _decoder(field.hint)) for field in fields_of(record)]


def _decoder(hint: Any) -> Callable[[Any], Any] | None:
    if hint is datetime:
        return moment
    if get_origin(hint) is tuple:
        return tuple
    return partial(record_of, cast(Any, hint)) if is_dataclass(hint) else None
