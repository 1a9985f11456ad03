"""Declarations of the fields of records, in their ``Annotated`` types."""

from __future__ import annotations

import dataclasses
import types
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

_LAST_SECONDS: Final = 253_402_300_799.0  # of the year 9999, the last that dates are written for

ColumnType = Literal["id", "reference", "name", "code", "text", "integer", "large", "seconds", "flag", "json"]
"""``code``: short text of a bounded length. ``name``: text that is sorted by code point. ``large``: an
integer of 64 bits. ``seconds``: a time, since the epoch; its column ends in ``_seconds`` where the field ends
in ``_at``."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OwnColumn:
    """A column of the record's own table. ``refers`` is to a column of another, for a "reference"."""

    type: ColumnType
    size: int = 0
    default: bool | int | str | None = None
    refers: str = ""


@dataclass(frozen=True, slots=True)
class JoinedColumn:
    """A column of another table, with which the record is shown."""

    table: str
    column: str


@dataclass(frozen=True, slots=True)
class Found:
    """Found out by looking. Where it was not (None): ``keeps`` says whether what is known stays. "the first":
    it stays in any case while the content is the same."""

    keeps: Literal["nothing", "of the same content", "the first", "always"] = "nothing"


@dataclass(frozen=True, slots=True)
class OneOf:
    """There are no other values than those of the ``Literal``. ``is_checked``: by the database as well."""

    literal: Any
    is_checked: bool = False

    @property
    def values(self) -> tuple[str, ...]:
        """In the order in which they are declared."""
        return get_args(self.literal)


@dataclass(frozen=True, slots=True)
class IsFormat:
    """The name of a format; there are others than this program knows."""


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Lists can be filtered by some of its values: by the field ``name`` of the list's filter."""

    name: str


@dataclass(frozen=True, slots=True)
class Within:
    """Lists can be filtered by a range: from ``least`` on, to ``most`` or to before ``below``, fields of the
    filter. ``column``: another one that has the same order, with -1 where there is no value."""

    least: str
    most: str = ""
    below: str = ""
    column: str = ""


@dataclass(frozen=True, slots=True)
class Shown:
    """The field in the documentation of the API. ``may_be_absent``: no promise that each answer has it;
    it is the field's default then."""

    description: str | None = None
    examples: tuple[str, ...] = ()
    may_be_absent: bool = False


@dataclass(frozen=True, slots=True)
class Hidden:
    """The field is for the service alone: no answer has it."""


@dataclass(frozen=True, slots=True)
class RecordField:
    """The declaration of a field; ``hint`` is without what stands in ``Annotated`` and without None.
    ``is_secret``: in no ``repr``."""

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
        """The name of its column, and of the like in rows: times are seconds there."""
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
    """Seconds since the epoch as a time, in UTC; the nearest one where the calendar ends."""
    return datetime.fromtimestamp(min(max(seconds, 0.0), _LAST_SECONDS), UTC)
