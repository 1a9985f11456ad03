# Generated from asynchronous/connection.py by `make client`.
"""Connections: send requests, repeat them, read answers, streams and pages; for `Client`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

import httpx

from dcp.server.client.errors import AnswerError, ProblemError, TransportError
from dcp.server.client.requests import (
    Call,
    PagedCall,
    Params,
    RetryPolicy,
    base_url_of,
    error_of,
    headers_of,
    httpx_request,
    parsed,
    transport_error,
)
from dcp.server.client.streams import Download, EventStream, JobEvent, OnBytes

T = TypeVar("T")

_STREAM_SILENCE_SECONDS: Final = 60.0
"""The service sends something every 15 seconds."""
_STREAM_FAILURES: Final = 10


class Pages(Generic[T]):
    """A list of the service, fetched page by page during iteration; each iteration starts again."""

    def __init__(self, fetch: Callable[[Call[Any]], Any], call: PagedCall[T], page_size: int) -> None:
        self._fetch = fetch
        self._call = call
        self._page_size = page_size

    def __iter__(self) -> Iterator[T]:
        for page in self.pages():
            yield from page

    def pages(self) -> Iterator[list[T]]:
        """Iterate over pages. Where the service searches for long, some are short or empty."""
        cursor: str | None = None
        while True:
            page = self._fetch(self._call.page(self._page_size, cursor))
            yield page.items
            cursor = page.next_cursor
            if cursor is None:
                return

    def first(self) -> T | None:
        """Get the first item, or None of an empty list."""
        for item in Pages(self._fetch, self._call, 1):
            return item
        return None

    def all(self) -> list[T]:
        """Get all items."""
        return list(self)


class HttpConnection:
    """The connection of a client; see `Client`."""

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_seconds: float = 30.0,
        retries: int = 3,
        verify: Any = True,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = base_url_of(url)
        self._policy = RetryPolicy(retries)
        headers = headers_of(key or os.environ.get("DCP_CATALOG_KEY"))
        self._http = httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout_seconds, verify=verify, transport=transport
        )
        self._timeout_seconds = timeout_seconds
        self._verify = verify

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- answers ---------------------------------------------------------------------------------------------

    def _send(self, call: Call[T]) -> T:
        return parsed(call, self._response(call))

    def _call(
        self, method: str, path: str, parse: Callable[[Any], T], params: Params = (), **options: Any
    ) -> T:
        """Send a `Call` with these ``options``."""
        return self._send(Call(method, path, parse, params, **options))

    def _pages(
        self, page_size: int, path: str, item: Callable[[Any], T], params: Params = (), body: Any = None
    ) -> Pages[T]:
        return Pages(self._send, PagedCall(path, item, params, body), page_size)

    def _bytes(self, call: Call[Any]) -> bytes:
        response = self._response(call)
        if not response.is_success:
            raise error_of(response)
        return response.content

    def _response(self, call: Call[Any]) -> httpx.Response:
        """Return the answer, read; that of a passing failure only after the last attempt."""
        request = httpx_request(self._http, call)
        attempt = 0
        while True:
            attempt += 1
            try:
                response = self._http.send(request)
            except httpx.HTTPError as error:
                pause = self._policy.pause_seconds(call, attempt, error)
                if pause is None:
                    raise transport_error(error, self.url) from error
            else:
                if not response.is_error:
                    return response
                pause = self._policy.pause_seconds(call, attempt, error_of(response))
                if pause is None:
                    return response
            time.sleep(pause)

    def _parts(self, call: Call[tuple[T, str | None]]) -> list[T]:
        """All pages of an answer that comes in pages."""
        found, cursor = self._send(call)
        parts = [found]
        while cursor is not None:
            found, cursor = self._send(call.after(cursor))
            parts.append(found)
        return parts

    # -- streams ---------------------------------------------------------------------------------------------

    def _download(
        self,
        call: Call[Any],
        target: str | os.PathLike[str],
        *,
        resume: bool,
        overwrite: bool,
        on_bytes: OnBytes | None,
    ) -> Path:
        what = f"{self.url}{call.path}?{httpx.QueryParams(list(call.params))}"
        with Download(target, what, resume=resume, overwrite=overwrite, on_bytes=on_bytes) as download:
            attempt = 0
            while True:
                attempt += 1
                failure = self._fetch_part(call, download)
                if failure is None:
                    return download.finish()
                attempt = 1 if download.broke_off() else attempt
                pause = self._policy.pause_seconds(call, attempt, failure)
                if pause is None:
                    if isinstance(failure, ProblemError):
                        raise failure
                    raise download.incomplete(str(failure)) from failure
                time.sleep(pause)

    def _fetch_part(self, call: Call[Any], download: Download) -> Exception | None:
        """Fetch what one request brings. Returns the failure that ended it."""
        request = httpx_request(self._http, call)
        request.headers.update(download.headers())
        try:
            with self._stream(request) as response:
                if response.is_error and response.status_code != 416:
                    response.read()
                    return error_of(response)
                if download.begin(response.status_code, response.headers):
                    for chunk in response.iter_raw():
                        download.write(chunk)
                if not download.is_whole:
                    return TransportError("the service closed the connection")
        except httpx.HTTPError as error:
            return transport_error(error, self.url)
        return None

    @contextmanager
    def _stream(self, request: httpx.Request) -> Generator[httpx.Response]:
        """Yield an answer as it comes; where the service redirects, from there, without the key."""
        response = self._http.send(request, stream=True)
        try:
            if not response.is_redirect:
                yield response
                return
            place = response.next_request
            if place is None or place.url.scheme not in ("http", "https"):
                raise AnswerError("the service redirects to an invalid URL")
            wanted = {
                name: request.headers[name] for name in ("Range", "If-Range") if name in request.headers
            }
            with (
                httpx.Client(timeout=self._timeout_seconds, verify=self._verify) as elsewhere,
                elsewhere.stream(
                    "GET", place.url, headers={**wanted, "Accept-Encoding": "identity"}
                ) as found,
            ):
                yield found
        finally:
            response.close()

    def _watch(self, call: Call[None], stream: EventStream) -> Iterator[JobEvent]:
        while not stream.ended:
            try:
                request = httpx_request(self._http, call)
                request.headers.update(stream.headers())
                request.extensions["timeout"]["read"] = _STREAM_SILENCE_SECONDS
                with self._stream(request) as response:
                    if response.status_code == 204:
                        return
                    if response.is_error:
                        response.read()
                        raise error_of(response)
                    for data in response.iter_bytes():
                        yield from stream.feed(data)
                        if stream.ended:
                            return
                pause = stream.failed()
            except httpx.HTTPError as error:
                pause = stream.failed()
                if stream.failures > _STREAM_FAILURES:
                    raise transport_error(error, self.url) from error
            except ProblemError as error:
                pause = stream.failed()
                wanted = self._policy.pause_seconds(call, stream.failures, error)
                if wanted is None:
                    raise
                pause = max(pause, wanted)
            time.sleep(pause)
