"""Records of JSON documents, by their annotations, such that a later version of the service may say more."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

__all__ = ["document_of", "record_of"]

T = TypeVar("T")
_Decoder = Callable[[Any], Any]


def record_of(kind: type[T], document: Any, **given: Any) -> T:
    """A record of ``document``, a JSON object, with the fields that are ``given`` as they are.

    Members that the record has not are passed over; those without a default must be there. Raises ValueError.
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
    """The JSON object of a flat record: `record_of` is the inverse."""
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
