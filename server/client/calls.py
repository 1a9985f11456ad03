"""Requests as values: method, path, query and body, and how to parse the answer. Both clients send them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any, Generic, TypeVar, Union, cast, get_args, get_origin, get_type_hints
from urllib.parse import quote

from dcp.server.client.errors import AnswerError

__all__ = [
    "Call",
    "Page",
    "PagedCall",
    "given",
    "if_match",
    "json_call",
    "many",
    "nothing",
    "one",
    "query",
    "segment",
    "with_cursor",
]

T = TypeVar("T")
_Decoder = Callable[[Any], Any]
Params = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. ``parse`` makes the result of the JSON of the answer (None if it has no body).

    ``only_reads``: a POST that changes nothing. ``has_secret``: the answer contains a secret, which is given
    once only.
    """

    method: str
    path: str
    parse: Callable[[Any], T]
    params: Params = ()
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    only_reads: bool = False
    has_secret: bool = False

    @property
    def is_repeatable(self) -> bool:
        """Whether it may be sent again although the service may have carried it out."""
        return "If-Match" not in self.headers and not self.has_secret

    def after(self, cursor: str) -> Call[T]:
        """The request for the next page."""
        return dataclasses.replace(self, params=(*self.params, ("cursor", cursor)))


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A page, and the cursor of the next one."""

    items: list[T]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class PagedCall(Generic[T]):
    """Requests for the pages of a list; with a ``body`` they are POSTs that change nothing."""

    path: str
    item: Callable[[Any], T]
    params: Params = ()
    body: Any = None

    def page(self, limit: int, cursor: str | None = None) -> Call[Page[T]]:
        """The request for a page of at most ``limit`` items."""
        params = (*self.params, *query(limit=limit, cursor=cursor))
        method = "GET" if self.body is None else "POST"
        return Call(method, self.path, self._page, params, self.body, only_reads=True)

    def _page(self, document: Any) -> Page[T]:
        return Page([self.item(item) for item in _items(document)], _cursor(document))


def json_call(
    method: str, path: str, parameters: Mapping[str, Any] | None, body: Any, etag: str | None
) -> Call[Any]:
    """Any request; its result is the JSON of the answer."""
    params = query(**parameters or {})
    return Call(method, path, lambda document: document, params, body, if_match(etag))


def query(**values: Any) -> Params:
    """Parameters of a URL: none for None, several for a sequence, times as the API writes them."""
    return tuple(
        (name, _text(each))
        for name, value in values.items()
        for each in ([value] if isinstance(value, str) or not isinstance(value, Iterable) else value)
        if each is not None
    )


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone; use datetime(..., tzinfo=UTC)")
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return str(value)


def segment(name: str) -> str:
    """A name in the path of a URL; slashes of labels stay."""
    return quote(name, safe="/:@+=")


def given(body: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a body that are not None."""
    return {name: value for name, value in body.items() if value is not None}


def if_match(etag: str | None) -> dict[str, str]:
    """The header that makes the service refuse a change of any other version."""
    if etag is None:
        return {}
    return {"If-Match": etag if etag == "*" or etag.startswith('"') else f'"{etag}"'}


# -- answers -------------------------------------------------------------------------------------------------


def one(kind: type[T]) -> Callable[[Any], T]:
    """Parse an answer that is one ``kind``."""
    return lambda document: _decode(kind, document)


def many(kind: type[T]) -> Callable[[Any], list[T]]:
    """Parse an answer with all ``items``."""
    return lambda document: [_decode(kind, item) for item in _items(document)]


def with_cursor(kind: type[T]) -> Callable[[Any], tuple[T, str | None]]:
    """Parse an answer that is one page of a ``kind``, with the cursor of the next page."""
    return lambda document: (_decode(kind, document), _cursor(document))


def nothing(document: Any) -> None:
    """Parse an answer without a body."""


def _items(document: Any) -> list[Any]:
    items = document.get("items") if isinstance(document, Mapping) else None
    if not isinstance(items, list):
        raise AnswerError("the answer of the service is not a list")
    return items


def _cursor(document: Mapping[str, Any]) -> str | None:
    cursor = document.get("next_cursor")
    return cursor if isinstance(cursor, str) else None


def _decode(kind: type[T], document: Any) -> T:
    try:
        return cast(T, _decoder(cast(Any, kind))(document))
    except (TypeError, ValueError) as error:
        raise AnswerError(f"the answer of the service is not a valid {kind.__name__}: {error}") from error


@cache
def _decoder(hint: Any) -> _Decoder:
    """Make values of a type of JSON. Members that a data class does not have are passed over."""
    if dataclasses.is_dataclass(hint):
        return _object_decoder(hint)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (_decoder(each) for each in get_args(hint) if each is not type(None))
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        item = _decoder(get_args(hint)[0])
        return lambda value: tuple(item(each) for each in _typed(value, list))
    if hint is datetime:
        return lambda value: datetime.fromisoformat(_typed(value, str))
    if hint is float:
        return lambda value: float(value) if type(value) is int else _typed(value, float)
    if hint in (int, str, bool):
        return lambda value: _typed(value, hint)
    return lambda value: value


def _object_decoder(kind: Any) -> _Decoder:
    decoders = {name: _decoder(hint) for name, hint in get_type_hints(kind).items()}

    def decode(document: Any) -> Any:
        members = _typed(document, dict)
        values = {}
        for name, decoder in decoders.items():
            if name in members:
                try:
                    values[name] = decoder(members[name])
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{name}: {error}") from error
        return kind(**values)

    return decode


def _typed(value: Any, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value
