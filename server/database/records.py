"""Records in the database: their columns, the columns that show one, and rows as records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final, TypeVar

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
    String,
    Text,
    false,
    true,
)
from sqlalchemy.types import TypeEngine

from dcp.server.records.declaring import ColumnType, OwnColumn, RecordField, fields_of, moment

__all__ = [
    "ID",
    "JSON_DOCUMENT",
    "NAME",
    "checks_of",
    "columns_of",
    "record_of_row",
    "shown_columns",
    "values_of",
]

JSON_DOCUMENT: Final = JSON()
"""Of PostgreSQL too, whose JSONB does not keep the order of members: rules of ``rename`` apply in theirs."""
NAME: Final = Text().with_variant(Text(collation="C"), "postgresql")
"""Compared and sorted by code point on both: pages go on where they ended whatever the server's locale."""
T = TypeVar("T")
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
    """What the database itself refuses."""
    return [
        CheckConstraint(
            f"{field.column} IN ({', '.join(repr(value) for value in field.one_of.values)})",
            name=field.column,
        )
        for field in fields_of(record)
        if field.one_of is not None and field.one_of.is_checked
    ]


def shown_columns(record: type[Any], table: str, metadata: MetaData) -> list[Any]:
    """The columns that make a record, its own and the joined ones, each by the name of its field."""
    found = []
    for field in fields_of(record):
        if field.stored is not None:
            found.append(metadata.tables[table].c[field.column].label(field.name))
        elif field.joined is not None:
            found.append(metadata.tables[field.joined.table].c[field.joined.column].label(field.name))
    return found


def record_of_row(record: type[T], row: Mapping[Any, Any], **others: Any) -> T:
    """A record of a row that has a column for each of its fields but ``others``."""
    for field in fields_of(record):
        if field.name not in others:
            value = row[field.column]
            others[field.name] = moment(value) if field.hint is datetime and value is not None else value
    return record(**others)


def values_of(record: type[Any], row: Mapping[Any, Any]) -> dict[str, Any]:
    """What a row of `shown_columns` says of a record."""
    values = {field.name: row[field.name] for field in _read(record)}
    for field in _read(record):
        if field.stored is not None and field.stored.type == "seconds" and values[field.name] is not None:
            values[field.name] = moment(values[field.name])
    return values


def _read(record: type[Any]) -> Iterable[RecordField]:
    return (field for field in fields_of(record) if field.stored is not None or field.joined is not None)
