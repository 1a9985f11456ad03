"""Retries: repeat transient failures, count requests, and name permanent failures.

Pauses use "full jitter" (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015): a
uniformly random time below a bound that doubles, to spread the retries of many throttled ranks. Errors are
classified without importing file system packages: fsspec's by Python types, HTTP status and type names;
those of S3 by error codes.
"""

from __future__ import annotations

import errno
import http.client
import json
import logging
import math
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from dcp.storage.errors import StorageError, StorageFullError
from dcp.storage.threads import or_unwanted

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LONGEST_CHAIN: Final = 8
_LONGEST_WAIT_SECONDS: Final = 60.0


class Failure(Enum):
    """Kinds of request failures, which decide the next action."""

    MISSING = "missing"
    """Object or upload does not exist."""
    CONDITION = "condition"
    """Precondition of the request failed."""
    RANGE = "range"
    """Range begins after the end of the object."""
    PASSING = "passing"
    """Transient: throttled, timed out, reset, cut short, or a server error."""
    FULL = "full"
    """Space or quota exhausted."""
    FINAL = "final"
    """Permanent: denied, missing bucket, or malformed request."""


class RequestError(Exception):
    """Failure of one attempt, with the service's or library's error as the cause.

    ``is_unresolved``: the host name has no address. ``is_ambiguous``: an earlier attempt failed transiently
    and may have taken effect.
    """

    def __init__(
        self,
        kind: Failure,
        message: str,
        *,
        retry_after_seconds: float = 0.0,
        is_unresolved: bool = False,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_seconds = retry_after_seconds
        self.is_unresolved = is_unresolved
        self.is_ambiguous = False


def _is_unresolved(error: BaseException) -> bool:
    """Return True if an error or one of its causes reports a host name without an address."""
    chain = _chain(error, implied=True)
    return any(isinstance(one, socket.gaierror) or "DNSError" in type(one).__name__ for one in chain)


def _chain(error: BaseException | None, *, implied: bool = False) -> Iterator[BaseException]:
    """Yield an error and its causes; with ``implied``, also errors in attributes of botocore and aiohttp,
    and contexts.
    """
    for _ in range(_LONGEST_CHAIN):
        if error is None:
            return
        yield error
        within = getattr(error, "kwargs", None)  # attribute of botocore's errors
        kept = within.get("error") if isinstance(within, dict) else getattr(error, "os_error", None)
        after = error.__cause__ or (error.__context__ if implied else None)
        error = kept if implied and isinstance(kept, BaseException) else after


# -- S3 ------------------------------------------------------------------------------------------------------

_PASSING_CODES: Final = frozenset(
    {
        "BadDigest",  # damaged in transfer: sent again by the next attempt
        "ConditionalRequestConflict",  # another conditional write to the key was under way
        "IncompleteBody",
        "InternalError",
        "OperationAborted",
        "RequestTimeout",
        "RequestTimeoutException",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
    }
)
_FULL_CODES: Final = frozenset({"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull"})
_PASSING_STATUS: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_NOT_TRUSTED: Final = "CERTIFICATE_VERIFY_FAILED"
_ELSEWHERE_STATUS: Final = frozenset({301, 302, 307, 308})
_ELSEWHERE_CODES: Final = frozenset(
    {"IllegalLocationConstraintException", "PermanentRedirect", "TemporaryRedirect"}
)
_SETTLED_BY_STATUS: Final = {404: Failure.MISSING, 412: Failure.CONDITION, 416: Failure.RANGE}


def s3_failure(error: Exception, bucket: str) -> RequestError:
    """Return ``error`` of an S3 attempt as a `RequestError` without credentials in the text."""
    from botocore import exceptions, parsers

    if isinstance(error, exceptions.ClientError):
        return answer_failure(error.response, bucket)
    text = f"{type(error).__name__}: {error}"
    inner = error.kwargs.get("error") if isinstance(error, exceptions.HTTPClientError) else error
    if isinstance(inner, FileNotFoundError) or _NOT_TRUSTED in text:  # not errors of the network
        return RequestError(Failure.FINAL, text)
    if isinstance(error, RecursionError):
        # botocore's lookup of the bucket's region is redirected, which starts another lookup, and so on
        return _elsewhere(bucket, "redirected repeatedly")
    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return RequestError(
            Failure.FINAL,
            "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or the "
            "storage options key and secret (anon=True for public buckets)",
        )
    passing = (
        exceptions.HTTPClientError,
        exceptions.ConnectionError,
        exceptions.IncompleteReadError,
        parsers.ResponseParserError,
        http.client.HTTPException,
        OSError,
        EOFError,
    )
    kind = Failure.PASSING if isinstance(error, passing) else Failure.FINAL
    return RequestError(kind, text, is_unresolved=kind is Failure.PASSING and _is_unresolved(error))


def answer_failure(response: Mapping[str, Any], bucket: str) -> RequestError:
    """Return the error of an answer by the code of the body (absent for HEAD) or by the status.

    ``response`` is botocore's parsed answer: Error, with Code and Message, and ResponseMetadata.
    """
    metadata, body = response.get("ResponseMetadata", {}), response.get("Error", {})
    status, code = int(metadata.get("HTTPStatusCode", 0)), str(body.get("Code", ""))
    named = f"{status} {code}" if code != str(status) else code  # responses to HEAD have only a status
    text = f"{named}: {body.get('Message', '')}".rstrip(": ")
    if code == "NoSuchBucket":
        return RequestError(Failure.FINAL, f"the bucket {bucket!r} does not exist ({text})")
    if status in _ELSEWHERE_STATUS or code in _ELSEWHERE_CODES or body.get("Region"):
        region = metadata.get("HTTPHeaders", {}).get("x-amz-bucket-region") or body.get("Region")
        return _elsewhere(bucket, text, region, body.get("Endpoint"))
    if code in _FULL_CODES or status == 507:
        return RequestError(Failure.FULL, text)
    if code in _PASSING_CODES or status in _PASSING_STATUS:
        return RequestError(Failure.PASSING, text, retry_after_seconds=_retry_after(metadata))
    return RequestError(_SETTLED_BY_STATUS.get(status, Failure.FINAL), text)


def _elsewhere(bucket: str, text: str, region: object = None, endpoint: object = None) -> RequestError:
    there = f"endpoint {endpoint}" if endpoint else "another region or endpoint"
    there = f"region {region}" if region else there
    setting = f'client_kwargs={{"region_name": "{region or "..."}"}}'
    return RequestError(
        Failure.FINAL,
        f"the bucket {bucket!r} belongs to {there} ({text}): set its region (AWS_DEFAULT_REGION, or "
        f"storage_options {setting}) and endpoint (AWS_ENDPOINT_URL, or endpoint_url)",
    )


def _retry_after(metadata: Mapping[str, Any]) -> float:
    try:
        wished = float(metadata.get("HTTPHeaders", {}).get("retry-after", 0))
    except ValueError:  # a date: use our own pause
        return 0.0
    return min(max(0.0, wished), _LONGEST_WAIT_SECONDS)


# -- file systems of fsspec ----------------------------------------------------------------------------------

_MISSING: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_FINAL: Final = (NotImplementedError, TypeError, ValueError, AttributeError)
"""Permanent errors of any service."""
_REFUSED_NAME: Final = re.compile(r"Auth|Credential|AccessDenied|Forbidden|Permission|TokenNotFound")
_REFUSED_TEXT: Final = re.compile(
    r"(Forbidden|Unauthorized|Access ?Denied|Permission denied)\b", re.IGNORECASE
)
_FINAL_NAMES: Final = frozenset({"OfflineModeIsEnabled", "error_perm"})
"""Permanent errors of huggingface_hub, and of ftplib (replies 500 to 599)."""
_PASSING_NAMES: Final = frozenset({"TransportError"})
"""Transient errors of google.auth: network failures."""
_REFUSED_STATUS: Final = frozenset({401, 403, 407})
_BY_STATUS: Final = {
    404: Failure.MISSING,
    410: Failure.MISSING,
    416: Failure.RANGE,
    507: Failure.FULL,
    # 409 and 412 come from other writers; `FileExistsError` reports existing files.
    **dict.fromkeys((408, 409, 412, 425, 429), Failure.PASSING),
}
_FULL_ERRNO: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_FINAL_ERRNO: Final = frozenset({errno.EROFS, errno.ENAMETOOLONG, errno.EINVAL, errno.ENOTSUP})


def filesystem_failure(error: Exception, place: str) -> RequestError:
    """Return ``error`` of an attempt in the file system ``place`` as a `RequestError`. Unknown errors count
    as transient.
    """
    text = f"{type(error).__name__}: {error}"
    chain = list(_chain(error))
    if isinstance(error, _MISSING):
        unanswered = next(filter(_is_of_the_network, chain), None)
        if unanswered is None:
            return RequestError(Failure.MISSING, text)
        text = f"{type(unanswered).__name__}: {unanswered}"
        return RequestError(Failure.PASSING, text, is_unresolved=_is_unresolved(unanswered))
    if any(isinstance(one, ImportError) for one in chain):
        return RequestError(Failure.FINAL, f"{text} (install the package that {place} needs)")
    status = next((found for one in chain if (found := _status(one))), 0)
    if status in _REFUSED_STATUS or (not status and _is_refusal(chain)):
        return RequestError(
            Failure.FINAL,
            f"{text} (credentials are missing, wrong or lack a permission: pass them in storage_options, or "
            f"configure them for the package of {place})",
        )
    if status:
        kind = _BY_STATUS.get(status, Failure.FINAL if status < 500 else Failure.PASSING)
    else:
        kind = _of_type(error)
    return RequestError(kind, text, is_unresolved=_is_unresolved(error))


def _is_of_the_network(error: BaseException) -> bool:
    """Return True if no answer arrived; fsspec's HTTP file system reports such failures as missing files."""
    return isinstance(error, ConnectionError | TimeoutError) or "ClientConnectionError" in _type_names(error)


def _type_names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _status(error: BaseException) -> int:
    """Return the HTTP status of an error; 0 without a failure status."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if isinstance(value, int | str) and re.fullmatch(r"[45]\d\d", str(value)):
                return int(value)
    return 0


def _is_refusal(chain: list[BaseException]) -> bool:
    names = set[str]().union(*map(_type_names, chain))
    if names & _PASSING_NAMES or any(getattr(one, "retryable", False) is True for one in chain):
        return False
    if any(map(_REFUSED_NAME.search, names)):  # also PermissionError
        return True
    return any(isinstance(one, OSError) and _REFUSED_TEXT.match(str(one)) for one in chain)


def _of_type(error: Exception) -> Failure:
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL_ERRNO:
        return Failure.FULL
    if isinstance(error, json.JSONDecodeError):  # a response of a proxy, not of the service
        return Failure.PASSING
    is_final = isinstance(error, _FINAL) or number in _FINAL_ERRNO or _type_names(error) & _FINAL_NAMES
    return Failure.FINAL if is_final else Failure.PASSING


CALLED_OFF: Final[ContextVar[threading.Event | None]] = ContextVar("CALLED_OFF", default=None)
"""Set when the answer is no longer wanted: the attempt ends as a transient failure."""

_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 15.0
_QUIET_ATTEMPTS: Final = 2
_UNRESOLVED_SECONDS: Final = 5.0
"""Retry time for a host without an address that never answered: probably a misspelled name."""
_FORGET_SECONDS: Final = 60.0
_unresolved_since: dict[tuple[str, str], float] = {}
"""Times of first failed name lookups by host."""
_answered_hosts: set[tuple[str, str]] = set()
"""Hosts that answered this process; these get the full retry time."""
_ANSWERS: Final = frozenset({Failure.MISSING, Failure.CONDITION, Failure.RANGE})


class Requests:
    """Requests of a store to ``place`` (a bucket), with counters. Thread-safe."""

    def __init__(self, url: str, place: str, retry_seconds: float) -> None:
        self._url = url
        self._place = place
        self._host = urlsplit(url)[:2]
        self._retry_seconds = retry_seconds
        self._lock = threading.Lock()
        self._traffic: Counter[str] = Counter()
        self._seconds = self._slowest_seconds = 0.0
        self._interrupted = threading.Event()
        # Not the shared generator, which training scripts seed equally on all ranks.
        self._random = random.Random()

    def run(
        self,
        op: str,
        key: str,
        attempt: Callable[[], T],
        *,
        answers: Collection[Failure] = (),
        received_bytes: int = 0,
        sent_bytes: int = 0,
        called_off: threading.Event | None = None,
    ) -> T:
        """Run ``attempt`` until success, and return the result.

        Transient failures are retried until ``retry_seconds``, until ``called_off`` is set (without this
        argument: until `interrupt`), or until `CALLER_LEFT` is set. ``op`` names the request in counters
        and errors.

        Raises:
            RequestError: For failures in ``answers``, which the caller handles.
            StorageError: For all other failures, with ``bucket``, ``key``, ``op`` and ``attempts``.
        """
        called_off = or_unwanted(self._interrupted if called_off is None else called_off)
        token = CALLED_OFF.set(called_off)
        give_up = time.monotonic() + self._retry_seconds
        bound_seconds, attempts = _FIRST_PAUSE_SECONDS, 0
        try:
            while True:
                attempts += 1
                begun = time.perf_counter()
                try:
                    result = attempt()
                except RequestError as error:
                    self._count(op, time.perf_counter() - begun, attempts > 1)
                    if error.kind in _ANSWERS:
                        _answered_hosts.add(self._host)
                    if error.kind in answers:
                        error.is_ambiguous = attempts > 1
                        raise
                    pause = max(self._random.uniform(0, bound_seconds), error.retry_after_seconds)
                    now = time.monotonic()
                    if error.is_unresolved and self._host not in _answered_hosts:
                        # Later requests, such as cleanup, do not wait again.
                        if now - _unresolved_since.get(self._host, -math.inf) > _FORGET_SECONDS:
                            _unresolved_since[self._host] = now
                        give_up = min(give_up, _unresolved_since[self._host] + _UNRESOLVED_SECONDS)
                    late = now + pause > give_up
                    if error.kind is not Failure.PASSING or late or called_off.is_set():
                        raise self._error(op, key, error, attempts) from error
                    level = logging.DEBUG if attempts <= _QUIET_ATTEMPTS else logging.WARNING
                    # As text: a handler that keeps records would keep the store by the error's traceback.
                    failed = "%s of %s: attempt %d failed, retry in %.1f s: %s"
                    logger.log(level, failed, op, key, attempts, pause, str(error))
                    called_off.wait(pause)
                    bound_seconds = min(2 * bound_seconds, _LONGEST_PAUSE_SECONDS)
                    continue
                _answered_hosts.add(self._host)
                self._count(op, time.perf_counter() - begun, attempts > 1, received_bytes, sent_bytes)
                return result
        except (RequestError, StorageError):
            raise
        except BaseException:  # Ctrl-C: cancel the requests of other threads for the same caller
            self.interrupt()
            raise
        finally:
            CALLED_OFF.reset(token)

    def interrupt(self) -> None:
        """End pending requests of other threads, because the caller is leaving."""
        interrupted, self._interrupted = self._interrupted, threading.Event()
        interrupted.set()

    def traffic(self) -> dict[str, float]:
        """See `Store.traffic`."""
        with self._lock:
            found: dict[str, float] = {**self._traffic}
            if found:
                found |= {"request_seconds": self._seconds, "slowest_request_seconds": self._slowest_seconds}
            return found

    def _count(
        self, op: str, seconds: float, again: bool, received_bytes: int = 0, sent_bytes: int = 0
    ) -> None:
        with self._lock:
            for name, count in (
                *((op, 1), ("requests", 1), ("retries", int(again))),
                *(("bytes_received", received_bytes), ("bytes_sent", sent_bytes)),
            ):
                self._traffic[name] += count
            self._seconds += seconds
            self._slowest_seconds = max(self._slowest_seconds, seconds)

    def _error(self, op: str, key: str, error: RequestError, attempts: int) -> StorageError:
        kind = StorageFullError if error.kind is Failure.FULL else StorageError
        tried = f", after {attempts} attempts" if attempts > 1 else ""
        return kind(
            f"{op} of {key!r} in {self._place} failed{tried}: {error}",
            path=f"{self._url}/{key.rpartition('/')[2]}".rstrip("/"),
            op=op,
            bucket=self._place,
            key=key,
            attempts=attempts,
        )
