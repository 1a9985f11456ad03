"""`AsyncClient`: the service from scripts, notebooks and pipelines."""

from __future__ import annotations

import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar, Unpack

import anyio
import httpx

from dcp.server.client.errors import AnswerError, ProblemError, TransportError
from dcp.server.client.generated import models
from dcp.server.client.operations import Operations
from dcp.server.client.requests import (
    Call,
    PagedCall,
    RetryPolicy,
    base_url_of,
    error_of,
    headers_of,
    httpx_request,
    joined,
    next_pause,
    nothing,
    parsed,
    query,
    segment,
    succeeded,
    transport_error,
    wait_timeout,
    with_cursor,
)
from dcp.server.client.streams import Download, EventStream, JobEvent, OnBytes

T = TypeVar("T")

_PAGE_SIZE: Final = 500
_STREAM_SILENCE_SECONDS: Final = 60.0
"""Maximum silence of a stream; the service sends data every 15 seconds."""
_STREAM_FAILURES: Final = 10


class AsyncPages(Generic[T]):
    """A list of the service, fetched page by page during iteration; each iteration starts again."""

    def __init__(self, fetch: Callable[[Call[Any]], Awaitable[Any]], call: PagedCall[T]) -> None:
        self._fetch = fetch
        self._call = call

    async def __aiter__(self) -> AsyncIterator[T]:
        async for page in self.pages():
            for item in page:
                yield item

    async def pages(self) -> AsyncIterator[list[T]]:
        """Iterate over pages. During long searches, pages can be short or empty."""
        cursor: str | None = None
        while True:
            page = await self._fetch(self._call.page(cursor))
            yield page.items
            cursor = page.next_cursor
            if cursor is None:
                return

    async def first(self) -> T | None:
        """Get the first item, or None for an empty list."""
        async for item in AsyncPages(self._fetch, replace(self._call, page_size=1)):
            return item
        return None

    async def all(self) -> list[T]:
        """Get all items."""
        return [item async for item in self]


class AsyncClient(Operations):
    """The service at ``url``; a context manager::

        async with AsyncClient("https://catalog:8470", key="dcp_...") as client:
            async for checkpoint in client.checkpoints(run="llama/7", sort="metric:loss"):
                print(checkpoint.step, checkpoint.metrics)

    All errors derive from `dcp.server.client.ClientError`. Options of methods, with their meanings and
    defaults, are those of the REST API. A change with an ``etag`` is refused if the object has another
    version. Requests that return a secret are not repeated after sending, because the answer is given only
    once.

    Args:
        url: The address of the service.
        key: An API key; by default the environment variable ``DCP_CATALOG_KEY``.
        timeout_seconds: Maximum wait for the network.
        retries: Repetitions after temporary failures.
        verify: Passed to httpx.
        transport: Passed to httpx.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_seconds: float = 30.0,
        retries: int = 3,
        verify: Any = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = base_url_of(url)
        self._policy = RetryPolicy(retries)
        headers = headers_of(key or os.environ.get("DCP_CATALOG_KEY"))
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=timeout_seconds, verify=verify, transport=transport
        )
        self._timeout_seconds = timeout_seconds
        self._verify = verify

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # -- contents and downloads ------------------------------------------------------------------------------

    async def diff(self, checkpoint_id: int, before: int, **options: Unpack[models.DiffQuery]) -> models.Diff:
        """Get the differences from the checkpoint ``before`` by structure and checksums, without reading
        tensors.

        With ``basis="values"``, get the last value differences computed by a "diff" job.
        """
        params = query(before=before, limit=_PAGE_SIZE, **options)
        call = Call("GET", f"/checkpoints/{checkpoint_id}/diff", with_cursor(models.Diff), params)
        return joined(await self._parts(call))

    async def statistics(self, checkpoint_id: int) -> models.Statistics:
        """Get the latest statistics of all values. Raises NotFoundError before the first
        `compute_statistics`."""
        path, params = f"/checkpoints/{checkpoint_id}/statistics", query(limit=_PAGE_SIZE)
        return joined(await self._parts(Call("GET", path, with_cursor(models.Statistics), params)))

    async def download(
        self,
        checkpoint_id: int,
        target: str | os.PathLike[str],
        *,
        resume: bool = True,
        overwrite: bool = False,
        on_bytes: OnBytes | None = None,
        **options: Unpack[models.DownloadQuery],
    ) -> Path:
        """Download a checkpoint as one file: ``format`` "safetensors" or "torch".

        ``target`` appears once complete. After a failure the partial file stays beside it, and the next call
        resumes if the checkpoint is unchanged. Raises DownloadError after repeated interruptions,
        FileExistsError, OSError.
        """
        call = Call("GET", f"/checkpoints/{checkpoint_id}/download", nothing, query(**options))
        return await self._download(call, target, resume=resume, overwrite=overwrite, on_bytes=on_bytes)

    async def download_file(
        self,
        checkpoint_id: int,
        name: str,
        target: str | os.PathLike[str],
        *,
        resume: bool = True,
        overwrite: bool = False,
        on_bytes: OnBytes | None = None,
    ) -> Path:
        """Download an original file of the checkpoint, directly from S3 where allowed."""
        call = Call("GET", f"/checkpoints/{checkpoint_id}/files/{segment(name)}", nothing)
        return await self._download(call, target, resume=resume, overwrite=overwrite, on_bytes=on_bytes)

    # -- jobs ------------------------------------------------------------------------------------------------

    async def wait(
        self,
        job: models.Job | int,
        *,
        timeout_seconds: float | None = None,
        on_progress: Callable[[models.Job], None] | None = None,
    ) -> models.Job:
        """Wait until a job succeeds.

        Raises JobFailedError, JobCancelledError, and WaitTimeoutError on a timeout, which does not stop the
        job.
        """
        job_id = job if isinstance(job, int) else job.id
        begun, pause = time.monotonic(), 0.0
        while True:
            found = await self.job(job_id)
            if on_progress is not None:
                on_progress(found)
            if found.is_final:
                return succeeded(found)
            pause = next_pause(pause)
            if timeout_seconds is not None and time.monotonic() - begun + pause > timeout_seconds:
                raise wait_timeout(found, timeout_seconds)
            await anyio.sleep(pause)

    def watch(self, job_id: int, *, after_id: int | None = None) -> AsyncIterator[JobEvent]:
        """Iterate over the events of a job, from its beginning (or after the event ``after_id``) to its end.

        Reconnects after interruptions without missing events.
        """
        return self._watch(Call("GET", f"/jobs/{job_id}/events", nothing), EventStream(after_id))

    def watch_jobs(self, *, after_id: int | None = None, scans: bool = False) -> AsyncIterator[JobEvent]:
        """Iterate over the events of all jobs from now on (or after the event ``after_id``), without end.

        With ``scans`` includes the automatic scans of the service.
        """
        return self._watch(Call("GET", "/jobs/events", nothing, query(scans=scans)), EventStream(after_id))

    # -- answers ---------------------------------------------------------------------------------------------

    async def _send(self, call: Call[T]) -> T:
        return parsed(call, await self._response(call))

    def _pages(self, call: PagedCall[T]) -> AsyncPages[T]:
        return AsyncPages(self._send, call)

    async def _response(self, call: Call[Any]) -> httpx.Response:
        """Return the complete answer; a temporary failure only after the last attempt."""
        request = httpx_request(self._http, call)
        attempt = 0
        while True:
            attempt += 1
            try:
                response = await self._http.send(request)
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
            await anyio.sleep(pause)

    async def _parts(self, call: Call[tuple[T, str | None]]) -> list[T]:
        """Return all pages of a paged answer."""
        found, cursor = await self._send(call)
        parts = [found]
        while cursor is not None:
            found, cursor = await self._send(call.after(cursor))
            parts.append(found)
        return parts

    # -- streams ---------------------------------------------------------------------------------------------

    async def _download(
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
                failure = await self._fetch_part(call, download)
                if failure is None:
                    return download.finish()
                attempt = 1 if download.broke_off() else attempt
                pause = self._policy.pause_seconds(call, attempt, failure)
                if pause is None:
                    if isinstance(failure, ProblemError):
                        raise failure
                    raise download.incomplete(str(failure)) from failure
                await anyio.sleep(pause)

    async def _fetch_part(self, call: Call[Any], download: Download) -> Exception | None:
        """Download with one request. Returns the failure, if any."""
        request = httpx_request(self._http, call)
        request.headers.update(download.headers())
        try:
            async with self._stream(request) as response:
                if response.is_error and response.status_code != 416:
                    await response.aread()
                    return error_of(response)
                if download.begin(response.status_code, response.headers):
                    async for chunk in response.aiter_raw():
                        download.write(chunk)
                if not download.is_whole:
                    return TransportError("the service closed the connection")
        except httpx.HTTPError as error:
            return transport_error(error, self.url)
        return None

    @asynccontextmanager
    async def _stream(self, request: httpx.Request) -> AsyncGenerator[httpx.Response]:
        """Yield an answer as a stream; follows redirects without the key."""
        response = await self._http.send(request, stream=True)
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
            async with (
                httpx.AsyncClient(timeout=self._timeout_seconds, verify=self._verify) as elsewhere,
                elsewhere.stream(
                    "GET", place.url, headers={**wanted, "Accept-Encoding": "identity"}
                ) as found,
            ):
                yield found
        finally:
            await response.aclose()

    async def _watch(self, call: Call[None], stream: EventStream) -> AsyncIterator[JobEvent]:
        while not stream.ended:
            try:
                request = httpx_request(self._http, call)
                request.headers.update(stream.headers())
                request.extensions["timeout"]["read"] = _STREAM_SILENCE_SECONDS
                async with self._stream(request) as response:
                    if response.status_code == 204:
                        return
                    if response.is_error:
                        await response.aread()
                        raise error_of(response)
                    async for data in response.aiter_bytes():
                        for event in stream.feed(data):
                            yield event
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
            await anyio.sleep(pause)
