"""What both clients do alike: addresses, headers, which failures are tried again, and what errors mean."""

from __future__ import annotations

import json
import random
import re
import uuid
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import httpx

from dcp.server.client.calls import API, Call
from dcp.server.client.errors import AnswerError, ProblemError, TransportError, problem_error
from dcp.version import __version__

__all__ = [
    "RetryPolicy",
    "base_url_of",
    "error_of",
    "headers_of",
    "httpx_request",
    "parsed",
    "transport_error",
]

T = TypeVar("T")

_PASSING: Final = frozenset({429, 502, 503, 504})
_LOST: Final = frozenset({502, 504})
"""A proxy's: the service may have done what it was asked for."""
_FIRST_PAUSE_SECONDS: Final = 0.5
_LONGEST_PAUSE_SECONDS: Final = 30.0
_MAX_PROBLEM_BYTES: Final = 1 << 20
_BEFORE_SENDING: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)


class RetryPolicy:
    """Whether a request is sent again. ``retries``: how many times at most, besides the first."""

    def __init__(self, retries: int) -> None:
        self.retries = retries

    def pause_seconds(self, call: Call[Any], attempt: int, failure: Exception) -> float | None:
        """How long to wait before attempt ``attempt`` + 1; None if ``failure`` is to be raised."""
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
    """Raises ValueError for what is no URL of a service."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no URL of a service, such as https://host:8470")
    return url.rstrip("/")


def headers_of(key: str | None) -> dict[str, str]:
    """Raises ValueError, which does not show it, for what is no key."""
    headers = {"User-Agent": f"dcphub/{__version__}", "Accept": "application/json"}
    if key:
        if not key.isascii() or not key.isprintable():
            raise ValueError("the key has characters that no key has")
        headers["Authorization"] = f"Bearer {key}"
    return headers


def httpx_request(client: httpx.Client | httpx.AsyncClient, call: Call[Any]) -> httpx.Request:
    """The request of ``call``; one that changes something can be recognised when it comes twice."""
    headers = dict(call.headers)
    if call.method == "POST" and not call.only_reads:
        headers["Idempotency-Key"] = uuid.uuid4().hex
    return client.build_request(
        call.method,
        f"{API}{call.path}",
        params=list(call.params) or None,
        headers=headers,
        json=call.body,
    )


def parsed(call: Call[T], response: httpx.Response) -> T:
    """What the answer means. Raises ProblemError and AnswerError."""
    if not response.is_success:
        raise error_of(response)
    if response.status_code == 204 or not response.content:
        return call.parse(None)
    try:
        document = response.json()
    except ValueError as error:
        where = f"{call.method} {call.path}"
        raise AnswerError(f"{where}: {response.status_code}, and the body is no JSON") from error
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
    """Ours for httpx's."""
    return TransportError(f"{url}: {type(error).__name__}: {error}")
