"""Answers: identifiers in paths, times, problem documents, and records as JSON."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, create_model

from dcp.server.catalog.inputs import MAX_ID, NAME_PATTERN, FormatName
from dcp.server.records.declaring import RecordField, Shown, fields_of, moment

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"

IdPath = Annotated[int, Field(ge=1, le=MAX_ID)]


class Answer(BaseModel):
    """Base of answer bodies."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="null")


class Problem(BaseModel):
    """An error (RFC 9457). `detail` names the remedy; some kinds have further members."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(examples=["/problems/not-found"], description="Path of the kind of problem.")
    title: str = Field(description="Meaning of the status.")
    status: int = Field(description="Status of the answer.")
    detail: str = Field(description="What is wrong, and the remedy.")
    instance: str | None = Field(default=None, description="The requested path.")
    request_id: str | None = Field(
        default=None, description="The id of the request in the log of the service."
    )


_TITLES: Final = {
    400: "The request is malformed.",
    401: "The key is missing or invalid.",
    403: "The key lacks the required scope.",
    404: "The object does not exist or is not visible to the key.",
    405: "The method is not supported.",
    408: "The request did not arrive in time.",
    409: "The current state does not allow the operation.",
    410: "The files no longer exist.",
    412: "The object was changed (If-Match).",
    413: "The body is too large.",
    415: "The body is not JSON.",
    416: "The range is outside of the content.",
    421: "The host name is not in allowed_hosts.",
    422: "The request is well-formed but invalid.",
    428: "If-Match is needed.",
    429: "Too many requests.",
    500: "An internal error; see the log for the request id.",
    503: "The database or storage is unreachable, full or locked; retry later.",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return ``responses=`` of a route for these error statuses, as problem documents."""
    return {
        status: {
            "description": _TITLES[status],
            "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in statuses
    }


NamePath = Annotated[str, Field(min_length=1, max_length=128, pattern=NAME_PATTERN)]


def rfc3339(seconds: float) -> str:
    """Format seconds since the epoch as ``2026-01-31T12:00:00.250Z``."""
    return rfc3339_of(moment(seconds))


def rfc3339_of(time: datetime) -> str:
    """Format a UTC time like `rfc3339`."""
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# -- records as JSON -----------------------------------------------------------------------------------------


_Time = Annotated[str, Field(json_schema_extra={"format": "date-time"})]
_ANSWERS: Final[dict[Any, type[RecordAnswer]]] = {}
"""Answer models by record, for nested records."""
_ABSENT: Final = object()


class RecordAnswer(Answer):
    """The answer model of a record; see `answer_model`."""

    record: ClassVar[type[Any]]
    members: ClassVar[tuple[RecordField, ...]]
    written: ClassVar[tuple[tuple[str, Callable[[Any], Any]], ...]]
    """Members with another JSON form, and their converters."""

    if TYPE_CHECKING:  # members of the record

        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def of(cls, found: Any, **others: Any) -> Self:
        """Return the answer of the record or an equal row (times as seconds), with the ``others`` members."""
        if isinstance(found, cls.record):  # fast path: lists have thousands of values
            values = {field.name: getattr(found, field.name) for field in cls.members}
        else:
            values = {
                field.name: cls._found(found, field) for field in cls.members if field.name not in others
            }
        values |= others
        for name, write in cls.written:
            if values[name] is not None:
                values[name] = write(values[name])
        return cls.model_construct(**values)

    @classmethod
    def _found(cls, found: Any, field: RecordField) -> Any:
        if isinstance(found, Mapping):
            value = found.get(field.name, found.get(field.column, _default(field)))
        else:
            value = getattr(found, field.name, getattr(found, field.column, _ABSENT))
        if value is _ABSENT:
            raise TypeError(
                f"{cls.__name__} is of a {cls.record.__name__}, not of a {type(found).__name__}, which "
                f"has no {field.name}"
            )
        return value


def _default(field: RecordField) -> Any:
    """Return the default of a field that older stored documents lack."""
    is_new = field.shown is not None and field.shown.may_be_absent
    return field.default if is_new else _ABSENT


def _made(record: type[Any], name: str, doc: str, args: tuple[Any, ...]) -> type[RecordAnswer]:
    fields = [_filled(field, args) for field in fields_of(record) if not field.is_hidden]
    types: dict[str, Any] = {field.name: (_type(field), _described(field)) for field in fields}
    model = create_model(name, __base__=RecordAnswer, __module__=__name__, __doc__=doc, **types)
    model.record = record
    model.members = tuple(fields)
    writers = {field.name: _writer(field.hint) for field in fields}
    model.written = tuple((name, write) for name, write in writers.items() if write is not None)
    return model


def _filled(field: RecordField, args: tuple[Any, ...]) -> RecordField:
    """Return the field of a generic record with these ``args``."""
    is_open = bool(getattr(field.hint, "__parameters__", ()))
    return dataclasses.replace(field, hint=field.hint[args]) if is_open else field


def answer_model(returned: Any) -> Any:
    """Return the answer model of a route's return type; a record, such as ``Page[Run]``, gets a generated
    model."""
    record = get_origin(returned) or returned
    if not (isinstance(record, type) and dataclasses.is_dataclass(record)):
        return returned
    found = _ANSWERS.get(returned)
    if found is None:
        args = get_args(returned)
        summary = inspect.cleandoc(record.__doc__ or "").partition("\n\n")[0]
        name = "".join(arg.__name__ for arg in args) + record.__name__
        found = _ANSWERS[returned] = _made(record, name, summary, args)
    return found


def answer_of(model: Any, found: Any) -> Any:
    """Return the return value of a route as answer: a record through its ``model``, else unchanged."""
    is_record = isinstance(model, type) and issubclass(model, RecordAnswer) and not isinstance(found, model)
    return model.of(found) if is_record and dataclasses.is_dataclass(found) else found


def _described(field: RecordField) -> Any:
    shown = field.shown or Shown()
    options: dict[str, Any] = {"default": field.default} if shown.may_be_absent else {}
    if field.is_secret:
        options |= {"repr": False, "json_schema_extra": {"format": "password"}}
    return Field(**options, description=shown.description, examples=list(shown.examples) or None)


def _type(field: RecordField) -> Any:
    kind = _json_type(field.hint, None if field.one_of is None else field.one_of.literal)
    if field.is_format:
        kind = FormatName
    return kind | None if field.is_optional and kind is not Any else kind


def _json_type(hint: Any, literal: Any = None) -> Any:
    """Replace the type of text by ``literal``."""
    if get_origin(hint) is tuple:
        return list[_json_type(get_args(hint)[0], literal)]  # type: ignore[misc]
    if get_origin(hint) is Mapping:
        return dict[get_args(hint)]  # type: ignore[misc]
    if literal is not None:
        return literal
    if hint is datetime:
        return _Time
    return answer_model(hint)


def _writer(hint: Any) -> Callable[[Any], Any] | None:
    if hint is datetime:
        return lambda time: rfc3339_of(time if isinstance(time, datetime) else moment(time))
    if get_origin(hint) is Mapping:
        return dict
    if get_origin(hint) is tuple:
        write = _writer(get_args(hint)[0])
        return _in_order if write is None else lambda items: [write(item) for item in items]
    answer = answer_model(hint)
    return None if answer is hint else answer.of


def _in_order(items: Any) -> list[Any]:
    """Return a list; a set is sorted."""
    return sorted(items) if isinstance(items, frozenset) else list(items)
