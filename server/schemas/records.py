"""Records as JSON: the model of an answer, made of the record's declaration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, ClassVar, Self, TypeVar, get_args, get_origin

from pydantic import Field, create_model

from dcp.server.formats import FormatName
from dcp.server.records.declaring import RecordField, fields_of
from dcp.server.schemas.common import Answer, rfc3339_of

__all__ = ["RecordAnswer", "answers"]

R = TypeVar("R", bound="RecordAnswer")


class RecordAnswer(Answer):
    """A record as it is answered with: see `answers`."""

    record: ClassVar[type[Any]]
    written: ClassVar[tuple[tuple[str, Callable[[Any], Any] | None], ...]]
    """Each member, and what JSON makes of its value if not the same."""

    @classmethod
    def of(cls, found: Any) -> Self:
        """As the catalog has it."""
        if not isinstance(found, cls.record):
            raise TypeError(f"{cls.__name__} is of a {cls.record.__name__}, not of a {type(found).__name__}")
        values = {}
        for name, write in cls.written:
            value = getattr(found, name)
            values[name] = value if write is None or value is None else write(value)
        return cls.model_construct(**values)


def answers(record: type[Any]) -> Callable[[type[R]], type[R]]:
    """A class decorator: the model has the fields of the record, all of which every answer has."""

    def made(answer: type[R]) -> type[R]:
        fields = fields_of(record)
        members: dict[str, Any] = {field.name: (_type(field), _described(field)) for field in fields}
        model = create_model(
            answer.__name__, __base__=answer, __module__=answer.__module__, __doc__=answer.__doc__, **members
        )
        model.record = record
        model.written = tuple((field.name, _writer(field)) for field in fields)
        return model

    return made


def _described(field: RecordField) -> Any:
    return Field(description=None if field.shown is None else field.shown.description)


def _type(field: RecordField) -> Any:
    kind = field.hint if field.one_of is None else field.one_of.literal
    if field.is_format:
        kind = FormatName
    if kind is datetime:
        kind = str
    elif get_origin(kind) is tuple:
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
    elif get_origin(kind) is Mapping:
        kind = dict[get_args(kind)]  # type: ignore[misc]
    return kind | None if field.is_optional and kind is not Any else kind


def _writer(field: RecordField) -> Callable[[Any], Any] | None:
    if field.hint is datetime:
        return rfc3339_of
    return {tuple: list, Mapping: dict}.get(get_origin(field.hint))
