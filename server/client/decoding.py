"""From JSON to data classes by their annotations, such that a later version of the service may say more."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from dcp.server.client.errors import AnswerError

__all__ = ["decode"]

T = TypeVar("T")
_Decoder = Callable[[Any], Any]


def decode(kind: type[T], document: Any) -> T:
    """An instance of the data class ``kind``. Members that it has not are passed over; those that have no
    default must be there. Raises AnswerError."""
    if not isinstance(document, Mapping):
        raise AnswerError(f"the service answered with no {kind.__name__}")
    values: dict[str, Any] = {}
    for name, decoder, is_needed in _fields(cast(Any, kind)):
        if name in document:
            try:
                values[name] = decoder(document[name])
            except (TypeError, ValueError) as error:
                raise AnswerError(f"{kind.__name__}.{name} of the answer: {error}") from error
        elif is_needed:
            raise AnswerError(f"the service answered with a {kind.__name__} without {name}")
    return kind(**values)


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
        return lambda value: decode(hint, value)  # type: ignore[arg-type]
    if hint in (int, str, bool):
        return lambda value: _typed(value, hint)
    if hint is float:
        return lambda value: float(value) if not isinstance(value, str | bool) else _typed(value, float)
    return lambda value: value


def _typed(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value
