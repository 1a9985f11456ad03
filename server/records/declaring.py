"""Declarations of record fields, used inside ``Annotated`` types."""

from __future__ import annotations

import dataclasses
import types
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_LAST_SECONDS: Final = 253_402_300_799.0  # end of the year 9999, the last year of datetime

ColumnType = Literal["id", "reference", "name", "code", "text", "integer", "large", "seconds", "flag", "json"]
"""``code``: short bounded text. ``name``: text sorted by code point. ``large``: 64-bit integer. ``seconds``:
a time since the epoch; a field ``*_at`` has a column ``*_seconds``."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OwnColumn:
    """A column of the record's own table. ``refers`` names the referenced column of a "reference"."""

    type: ColumnType
    size: int = 0
    default: bool | int | str | None = None
    refers: str = ""


@dataclass(frozen=True, slots=True)
class JoinedColumn:
    """A column of a joined table."""

    table: str
    column: str


@dataclass(frozen=True, slots=True)
class Found:
    """A value found by inspecting storage; None if not inspected.

    With ``keeps`` a known value survives None. "the first" keeps the first value while the content is the
    same.
    """

    keeps: Literal["nothing", "of the same content", "the first", "always"] = "nothing"


@dataclass(frozen=True, slots=True)
class OneOf:
    """Only the values of the ``Literal`` are allowed. ``is_checked`` adds a database constraint."""

    literal: Any
    is_checked: bool = False

    @property
    def values(self) -> tuple[str, ...]:
        """Return the values in declaration order."""
        return get_args(self.literal)


@dataclass(frozen=True, slots=True)
class IsFormat:
    """The name of a format; plug-ins may add formats."""


@dataclass(frozen=True, slots=True)
class AnyOf:
    """A filter by some values, given as the field ``name`` of the list filter."""

    name: str


@dataclass(frozen=True, slots=True)
class Within:
    """A filter by range: from ``least`` to ``most`` (inclusive) or ``below`` (exclusive), fields of the list
    filter.

    ``column`` names another column with the same order, with -1 for no value.
    """

    least: str
    most: str = ""
    below: str = ""
    column: str = ""


@dataclass(frozen=True, slots=True)
class Shown:
    """The documentation of the field in the API. ``may_be_absent``: answers may omit the field, which then
    has its default."""

    description: str | None = None
    examples: tuple[str, ...] = ()
    may_be_absent: bool = False


@dataclass(frozen=True, slots=True)
class Hidden:
    """An internal field that no answer contains."""


@dataclass(frozen=True, slots=True)
class RecordField:
    """The declaration of a field. ``hint`` is the type without ``Annotated`` and None; ``is_secret``
    excludes the field from the ``repr``."""

    name: str
    hint: Any
    is_optional: bool
    default: Any = dataclasses.MISSING
    is_secret: bool = False
    stored: OwnColumn | None = None
    joined: JoinedColumn | None = None
    found: Found | None = None
    one_of: OneOf | None = None
    shown: Shown | None = None
    is_hidden: bool = False
    is_format: bool = False
    any_of: AnyOf | None = None
    within: Within | None = None

    @property
    def column(self) -> str:
        """Return the column name; times are stored in seconds."""
        if self.hint is datetime:
            return f"{self.name.removesuffix('_at')}_seconds"
        return self.name


def fields_of(record: type[Any]) -> tuple[RecordField, ...]:
    """Return the fields of a record, a data class, in order."""
    return _fields_of(cast(Any, record))


@cache
def _fields_of(record: type[Any]) -> tuple[RecordField, ...]:
    hints = get_type_hints(record, include_extras=True)
    return tuple(_field(field, hints[field.name]) for field in dataclasses.fields(record))


def _field(field: dataclasses.Field[Any], hint: Any) -> RecordField:
    hint, *notes = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    is_optional = hint is Any or type(None) in choices
    (hint,) = (each for each in choices if each is not type(None))

    def said(kind: type[T]) -> T | None:
        return next((note for note in notes if isinstance(note, kind)), None)

    return RecordField(
        field.name,
        hint,
        is_optional,
        field.default,
        is_secret=not field.repr,
        stored=said(OwnColumn),
        joined=said(JoinedColumn),
        found=said(Found),
        one_of=said(OneOf),
        shown=said(Shown),
        is_hidden=said(Hidden) is not None,
        is_format=said(IsFormat) is not None,
        any_of=said(AnyOf),
        within=said(Within),
    )


def moment(seconds: float) -> datetime:
    """Return the UTC time of seconds since the epoch, clamped to the calendar."""
    return datetime.fromtimestamp(min(max(seconds, 0.0), _LAST_SECONDS), UTC)
