"""Requests as values, shared by both clients: addresses, headers, retries, and parsing of answers."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import re
import types
import uuid
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, update_wrapper
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Final,
    Generic,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)
from urllib.parse import quote, urlsplit

import httpx

from dcp.server.client.errors import (
    AnswerError,
    JobCancelledError,
    JobFailedError,
    ProblemError,
    TransportError,
    WaitTimeoutError,
    problem_error,
)
from dcp.version import __version__

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from dcp.server.client.asynchronous import AsyncClient, AsyncPages
    from dcp.server.client.generated import models
    from dcp.server.client.synchronous import Client, Pages


P = ParamSpec("P")
C = TypeVar("C")
T = TypeVar("T")
_Decoder = Callable[[Any], Any]
Params = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request. ``parse`` makes the result from the JSON answer (None without a body), or from its bytes
    with ``is_raw``.

    ``etag``: expected version of the object. ``only_reads``: a POST without changes. ``has_secret``: the
    answer contains a secret, given only once.
    """

    method: str
    path: str
    parse: Callable[[Any], T]
    params: Params = ()
    body: Any = None
    etag: str | None = None
    only_reads: bool = False
    has_secret: bool = False
    is_raw: bool = False

    @property
    def is_repeatable(self) -> bool:
        """True if repeating is safe even if the service has executed the request."""
        return self.etag is None and not self.has_secret

    def after(self, cursor: str) -> Call[T]:
        """Return the request for the next page."""
        return dataclasses.replace(self, params=(*self.params, ("cursor", cursor)))


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A page with the cursor of the next one."""

    items: list[T]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class PagedCall(Generic[T]):
    """Requests for the pages of a list; with a ``body`` they are POSTs without changes."""

    page_size: int
    path: str
    item: Callable[[Any], T]
    params: Params = ()
    body: Any = None

    def page(self, cursor: str | None = None) -> Call[Page[T]]:
        """Return the request for a page."""
        params = (*self.params, *query(limit=self.page_size, cursor=cursor))
        method = "GET" if self.body is None else "POST"
        return Call(method, self.path, self._page, params, self.body, only_reads=True)

    def _page(self, document: Any) -> Page[T]:
        return Page([self.item(item) for item in _items(document)], _cursor(document))


class _Request(Generic[P, C]):
    """A method of both clients: a function that makes a request for the client to send."""

    def __init__(self, make: Callable[Concatenate[Any, P], C]) -> None:
        self._make = make
        update_wrapper(cast(Any, self), make)

    def _bound(self, client: Any, send: Callable[[C], Any]) -> Any:
        make = self._make
        if client is None:  # accessed on the class, for documentation
            return make

        def method(*args: P.args, **options: P.kwargs) -> Any:
            return send(make(client, *args, **options))

        return update_wrapper(method, make.__get__(client))


class Operation(_Request[P, Call[T]]):
    """A method that sends one request; `AsyncClient` returns an awaitable."""

    @overload
    def __get__(self, client: Client, owner: Any = None) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: Any = None) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, client: Any, owner: Any = None) -> Any:
        return self._bound(client, client and client._send)


class Listing(_Request[P, PagedCall[T]]):
    """A method that lists page by page."""

    @overload
    def __get__(self, client: Client, owner: Any = None) -> Callable[P, Pages[T]]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: Any = None) -> Callable[P, AsyncPages[T]]: ...
    def __get__(self, client: Any, owner: Any = None) -> Any:
        return self._bound(client, client and client._pages)


def query(**values: Any) -> Params:
    """Return URL parameters: None is omitted, sequences repeat, times have the form of the API."""
    return tuple(
        (name, _text_of(each))
        for name, value in values.items()
        for each in ([value] if isinstance(value, str) or not isinstance(value, Iterable) else value)
        if each is not None
    )


def _text_of(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone; use datetime(..., tzinfo=UTC)")
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return str(value)


def segment(name: str) -> str:
    """Return a name as URL path; slashes in labels stay."""
    return quote(name, safe="/:@+=")


def given(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a body that are not None."""
    return {name: value for name, value in body.items() if value is not None}


# -- answers -------------------------------------------------------------------------------------------------


def one(kind: type[T]) -> Callable[[Any], T]:
    """Return a parser for one ``kind``."""
    return lambda document: _decode(kind, document)


def many(kind: type[T]) -> Callable[[Any], list[T]]:
    """Return a parser for complete ``items``."""
    return lambda document: [_decode(kind, item) for item in _items(document)]


def with_cursor(kind: type[T]) -> Callable[[Any], tuple[T, str | None]]:
    """Return a parser for a page of a ``kind`` with the next cursor."""
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
    """Return a converter from JSON to a type. Unknown members of data classes are ignored."""
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


_Listed = TypeVar("_Listed", "models.Diff", "models.Statistics")

_PASSING: Final = frozenset({429, 502, 503, 504})
_LOST: Final = frozenset({502, 504})
"""Status codes of proxies: the service may have executed the request."""
_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 30.0
_MAX_PROBLEM_BYTES: Final = 1 << 20
_FIRST_LOOK_SECONDS: Final = 0.1
_LONGEST_LOOK_SECONDS: Final = 2.0
_BEFORE_SENDING: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class RetryPolicy:
    """Decides on repetitions of a request, at most ``retries``."""

    def __init__(self, retries: int) -> None:
        self.retries = retries

    def pause_seconds(self, call: Call[Any], attempt: int, failure: Exception) -> float | None:
        """Return the seconds to wait after attempt ``attempt``; None to raise ``failure``."""
        if attempt > self.retries:
            return None
        pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2.0 ** (attempt - 1))
        pause *= random.uniform(0.75, 1.25)
        if isinstance(failure, ProblemError):
            asked = failure.retry_after_seconds or 0.0
            if not _is_passing(failure) or asked > _LONGEST_PAUSE_SECONDS:
                return None
            if failure.status in _LOST and not call.is_repeatable:
                return None
            return max(pause, asked)
        if isinstance(failure, _BEFORE_SENDING) or call.is_repeatable:
            return pause
        return None


def _is_passing(failure: ProblemError) -> bool:
    # the service still runs the first POST; a later repetition returns its answer
    is_at_work = failure.status == 409 and failure.extra.get("state") == "working"
    return failure.status in _PASSING or is_at_work


def base_url_of(url: str) -> str:
    """Return a validated service URL. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not the URL of a service, such as https://host:8470")
    return url.rstrip("/")


def headers_of(key: str | None) -> dict[str, str]:
    """Return the headers of all requests. Raises ValueError for an invalid key, without showing it."""
    headers = {"User-Agent": f"dcphub/{__version__}", "Accept": "application/json"}
    if key:
        if not key.isascii() or not key.isprintable():
            raise ValueError("the key contains invalid characters")
        headers["Authorization"] = f"Bearer {key}"
    return headers


def httpx_request(client: httpx.Client | httpx.AsyncClient, call: Call[Any]) -> httpx.Request:
    """Return the httpx request of ``call``; a POST with changes gets an idempotency key."""
    headers = {}
    if call.etag is not None:
        headers["If-Match"] = call.etag if call.etag == "*" or call.etag.startswith('"') else f'"{call.etag}"'
    if call.method == "POST" and not call.only_reads:
        headers["Idempotency-Key"] = uuid.uuid4().hex
    return client.build_request(
        call.method,
        f"/api/v1{call.path}",
        params=list(call.params) or None,
        headers=headers,
        json=_plain(call.body),
    )


def _plain(value: Any) -> Any:
    """Convert mappings and sequences to JSON types."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def parsed(call: Call[T], response: httpx.Response) -> T:
    """Return the result of a call. Raises ProblemError and AnswerError."""
    if not response.is_success:
        raise error_of(response)
    if call.is_raw:
        return call.parse(response.content)
    if response.status_code == 204 or not response.content:
        return call.parse(None)
    try:
        document = response.json()
    except ValueError as error:
        where = f"{call.method} {call.path}"
        raise AnswerError(f"{where}: {response.status_code}, the body is not JSON") from error
    return call.parse(document)


def error_of(response: httpx.Response) -> ProblemError:
    """Return the error of a complete answer."""
    try:
        document = json.loads(response.content[:_MAX_PROBLEM_BYTES])
    except ValueError:
        document = None
    after = response.headers.get("Retry-After", "")
    seconds = float(after) if re.fullmatch(r"[0-9]{1,9}", after) else None
    return problem_error(response.status_code, response.reason_phrase, document, seconds)


def transport_error(error: httpx.HTTPError, url: str) -> TransportError:
    """Return the client error for an httpx error."""
    return TransportError(f"{url}: {type(error).__name__}: {error}")


# -- results -------------------------------------------------------------------------------------------------


def array_of(data: bytes) -> npt.NDArray[np.generic]:
    """Return the array of an .npy file without unpickling. Raises AnswerError."""
    import numpy as np

    try:
        found: npt.NDArray[np.generic] = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise AnswerError(f"the answer of the service is not an array: {error}") from error
    return found


def joined(pages: Sequence[_Listed]) -> _Listed:
    """Join pages, with the tensors of all."""
    return dataclasses.replace(pages[0], tensors=tuple(tensor for page in pages for tensor in page.tensors))


def succeeded(job: models.Job) -> models.Job:
    """Return an ended job if it succeeded. Raises JobFailedError and JobCancelledError."""
    if job.state == "failed":
        why = job.error.detail if job.error is not None else "unknown reason"
        raise JobFailedError(f"job {job.id} ({job.kind}) failed: {why}", job)
    if job.state == "cancelled":
        raise JobCancelledError(f"job {job.id} ({job.kind}) was cancelled", job)
    return job


def wait_timeout(job: models.Job, seconds: float) -> WaitTimeoutError:
    """Return the timeout error for a job."""
    return WaitTimeoutError(f"job {job.id} ({job.kind}) is still {job.state} after {seconds:g} s", job)


def next_pause(pause_seconds: float) -> float:
    """Return the seconds until the next poll of a job."""
    return min(_LONGEST_LOOK_SECONDS, max(_FIRST_LOOK_SECONDS, pause_seconds * 1.5))
