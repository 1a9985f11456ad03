"""Parts of both clients: addresses, headers, retries, errors, and results of several answers."""

from __future__ import annotations

import dataclasses
import io
import json
import random
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import httpx

from dcp.server.client.calls import Call
from dcp.server.client.errors import (
    AnswerError,
    JobCancelledError,
    JobFailedError,
    ProblemError,
    TransportError,
    WaitTimeoutError,
    problem_error,
)
from dcp.server.client.generated import models
from dcp.version import __version__

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "RetryPolicy",
    "array_of",
    "base_url_of",
    "error_of",
    "headers_of",
    "httpx_request",
    "joined",
    "next_pause",
    "parsed",
    "succeeded",
    "transport_error",
    "wait_timeout",
]

T = TypeVar("T")
_Listed = TypeVar("_Listed", models.Diff, models.Statistics)

_PASSING: Final = frozenset({429, 502, 503, 504})
_LOST: Final = frozenset({502, 504})
"""Those of a proxy: the service may have carried the request out."""
_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 30.0
_MAX_PROBLEM_BYTES: Final = 1 << 20
_FIRST_LOOK_SECONDS: Final = 0.1
_LONGEST_LOOK_SECONDS: Final = 2.0
_BEFORE_SENDING: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class RetryPolicy:
    """Decides whether a request is sent again, at most ``retries`` times."""

    def __init__(self, retries: int) -> None:
        self.retries = retries

    def pause_seconds(self, call: Call[Any], attempt: int, failure: Exception) -> float | None:
        """Seconds to wait before attempt ``attempt`` + 1; None if ``failure`` is to be raised."""
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
    # A POST that comes again while its first one is still at work, and is answered as that one afterwards.
    is_at_work = failure.status == 409 and failure.extra.get("state") == "working"
    return failure.status in _PASSING or is_at_work


def base_url_of(url: str) -> str:
    """Check a URL of a service. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not the URL of a service, such as https://host:8470")
    return url.rstrip("/")


def headers_of(key: str | None) -> dict[str, str]:
    """Headers of all requests. Raises ValueError for an invalid key, which it does not show."""
    headers = {"User-Agent": f"dcphub/{__version__}", "Accept": "application/json"}
    if key:
        if not key.isascii() or not key.isprintable():
            raise ValueError("the key contains invalid characters")
        headers["Authorization"] = f"Bearer {key}"
    return headers


def httpx_request(client: httpx.Client | httpx.AsyncClient, call: Call[Any]) -> httpx.Request:
    """The request of ``call``; a POST with changes has an idempotency key."""
    headers = dict(call.headers)
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
    """Any mapping and sequence as JSON has them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def parsed(call: Call[T], response: httpx.Response) -> T:
    """The result of a call. Raises ProblemError and AnswerError."""
    if not response.is_success:
        raise error_of(response)
    if response.status_code == 204 or not response.content:
        return call.parse(None)
    try:
        document = response.json()
    except ValueError as error:
        where = f"{call.method} {call.path}"
        raise AnswerError(f"{where}: {response.status_code}, the body is not JSON") from error
    return call.parse(document)


def error_of(response: httpx.Response) -> ProblemError:
    """The error of an answer whose body has been read."""
    try:
        document = json.loads(response.content[:_MAX_PROBLEM_BYTES])
    except ValueError:
        document = None
    after = response.headers.get("Retry-After", "")
    seconds = float(after) if re.fullmatch(r"[0-9]{1,9}", after) else None
    return problem_error(response.status_code, response.reason_phrase, document, seconds)


def transport_error(error: httpx.HTTPError, url: str) -> TransportError:
    """The error of this client for one of httpx."""
    return TransportError(f"{url}: {type(error).__name__}: {error}")


# -- results -------------------------------------------------------------------------------------------------


def array_of(data: bytes) -> npt.NDArray[np.generic]:
    """The array of an .npy file; nothing in it is unpickled. Raises AnswerError."""
    import numpy as np

    try:
        found: npt.NDArray[np.generic] = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise AnswerError(f"the answer of the service is not an array: {error}") from error
    return found


def joined(pages: Sequence[_Listed]) -> _Listed:
    """All pages as one, with the tensors of all."""
    return dataclasses.replace(pages[0], tensors=tuple(tensor for page in pages for tensor in page.tensors))


def succeeded(job: models.Job) -> models.Job:
    """A job that has ended, if it has succeeded. Raises JobFailedError and JobCancelledError."""
    if job.state == "failed":
        why = job.error.detail if job.error is not None else "no reason is known"
        raise JobFailedError(f"job {job.id} ({job.kind}) failed: {why}", job)
    if job.state == "cancelled":
        raise JobCancelledError(f"job {job.id} ({job.kind}) was cancelled", job)
    return job


def wait_timeout(job: models.Job, seconds: float) -> WaitTimeoutError:
    """The error for a job that has not ended in time."""
    return WaitTimeoutError(f"job {job.id} ({job.kind}) is still {job.state} after {seconds:g} s", job)


def next_pause(pause_seconds: float) -> float:
    """Seconds to wait before a job is looked at again."""
    return min(_LONGEST_LOOK_SECONDS, max(_FIRST_LOOK_SECONDS, pause_seconds * 1.5))
