"""Mapping of records: their columns, and conversion of rows and JSON documents to records."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from datetime import datetime
from functools import cache, partial
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

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

R = TypeVar("R")

JSON_DOCUMENT: Final = JSON()
"""Plain JSON, not JSONB, because JSONB loses the order of members: rules of ``rename`` are ordered."""
NAME: Final = Text().with_variant(Text(collation="C"), "postgresql")
"""Text compared by code point on both databases: page cursors stay valid under any locale of the server."""
ID: Final = BigInteger().with_variant(Integer(), "sqlite")  # SQLite assigns ids to INTEGER PRIMARY KEY only

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
    """Return the columns of the record's own table."""
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
    """Return the CHECK constraints of the fields."""
    return [
        CheckConstraint(
            f"{field.column} IN ({', '.join(repr(value) for value in field.one_of.values)})",
            name=field.column,
        )
        for field in fields_of(record)
        if field.one_of is not None and field.one_of.is_checked
    ]


def shown_columns(record: type[Any], table: str, metadata: MetaData) -> list[Any]:
    """Return the own and joined columns of a record, as `record_of_row` needs them."""
    found: list[Any] = []
    for field in fields_of(record):
        if field.stored is not None:
            found.append(metadata.tables[table].c[field.column])
        elif field.joined is not None:
            joined = metadata.tables[field.joined.table].c[field.joined.column]
            found.append(joined.label(field.column))
    return found


def record_of_row(record: type[R], row: Any, **given: Any) -> R:
    """Return the record of a row, with columns matched by name, and with the ``given`` values."""
    columns = row._mapping if isinstance(row, Row) else row
    for name, column, decode in _readers(cast(Any, record)):
        if name not in given:
            value = columns[column]
            given[name] = value if value is None or decode is None else decode(value)
    return record(**given)


@cache
def _readers(record: type[Any]) -> list[tuple[str, str, Callable[[Any], Any] | None]]:
    return [(field.name, field.column, _row_decoder(field.hint)) for field in fields_of(record)]


def _row_decoder(hint: Any) -> Callable[[Any], Any] | None:
    if hint is datetime:
        return moment
    if get_origin(hint) is tuple:
        return tuple
    return partial(record_of, cast(Any, hint)) if is_dataclass(hint) else None


T = TypeVar("T")
_Decoder = Callable[[Any], Any]


def record_of(kind: type[T], document: Any, **given: Any) -> T:
    """Return a record of ``document``, a JSON object, with the ``given`` field values.

    Unknown members are ignored. Raises ValueError if a member without default is missing.
    """
    if not isinstance(document, Mapping):
        raise ValueError(f"not a {kind.__name__} but {type(document).__name__}")
    values = dict(given)
    for name, decoder, is_needed in _fields(cast(Any, kind)):
        if name in given:
            continue
        if name in document:
            try:
                values[name] = decoder(document[name])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{kind.__name__}.{name}: {error}") from error
        elif is_needed:
            raise ValueError(f"{kind.__name__} without {name}")
    return kind(**values)


def document_of(record: Any) -> dict[str, Any]:
    """Return the JSON object of a flat record, the inverse of `record_of`."""
    return {
        name: value.isoformat() if isinstance(value, datetime) else value
        for name, value in dataclasses.asdict(record).items()
    }


@cache
def _fields(kind: type[Any]) -> list[tuple[str, _Decoder, bool]]:
    hints = get_type_hints(kind)
    return [
        (
            field.name,
            _decoder(hints[field.name]),
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(kind)
    ]


def _decoder(hint: Any) -> _Decoder:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (each for each in get_args(hint) if each is not type(None))
        decoder = _decoder(inner)
        return lambda value: None if value is None else decoder(value)
    if origin in (tuple, list):
        item = _decoder(get_args(hint)[0])
        return lambda value: tuple(item(each) for each in _typed(value, list))
    if hint is datetime:
        return lambda value: datetime.fromisoformat(_typed(value, str))
    if dataclasses.is_dataclass(hint):
        return lambda value: record_of(hint, value)  # type: ignore[arg-type]
    if hint in (int, str, bool):
        return lambda value: _typed(value, hint)
    if hint is float:
        return lambda value: float(value) if not isinstance(value, str | bool) else _typed(value, float)
    return lambda value: value


def _typed(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value
