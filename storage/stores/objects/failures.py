"""Failures of object services: what an error of one attempt means for the next one.

No package of a file system is imported to tell its errors: fsspec's are known by Python's own types, the
status of HTTP that they carry, and words in the names of their types; those of S3 by the codes of its
answers.
"""

from __future__ import annotations

import errno
import http.client
import json
import re
import socket
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any, Final

__all__ = ["Failure", "RequestError", "answer_failure", "filesystem_failure", "s3_failure"]

_LONGEST_CHAIN: Final = 8
_LONGEST_WAIT_SECONDS: Final = 60.0


class Failure(Enum):
    """Reasons why a request failed, as far as it decides what to do next."""

    MISSING = "missing"
    """There is no such object (or upload)."""
    CONDITION = "condition"
    """Something else is there than the request's condition says."""
    RANGE = "range"
    """The object ends before the range begins."""
    PASSING = "passing"
    """Throttled, timed out, reset, cut short, or an error of the server: the next attempt may succeed."""
    FULL = "full"
    """No space or quota left."""
    FINAL = "final"
    """Denied, no such bucket, not understood: the next attempt would fail alike."""


class RequestError(Exception):
    """One attempt failed; the service's or the library's error is chained.

    ``is_unresolved``: the name of the service's host has no address. ``is_ambiguous``: an earlier attempt of
    the same request failed in passing, and may have been carried out.
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


def _is_unresolved(error: BaseException | None) -> bool:
    """Return whether an error, or one that it was made of, says that a host's name has no address."""
    for _ in range(_LONGEST_CHAIN):
        if error is None:
            return False
        if isinstance(error, socket.gaierror) or "DNSError" in type(error).__name__:
            return True
        within = getattr(error, "kwargs", None)  # of botocore
        inner = within.get("error") if isinstance(within, dict) else None
        error = next(
            (one for one in (inner, getattr(error, "os_error", None)) if isinstance(one, BaseException)),
            error.__cause__ or error.__context__,
        )
    return False


# -- S3 ------------------------------------------------------------------------------------------------------

_PASSING_CODES: Final = frozenset(
    {
        "BadDigest",  # damaged on the way: the next attempt sends it anew
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
    """Return ``error`` of one attempt at S3 as a `RequestError`; its text never has credentials."""
    from botocore import exceptions, parsers

    if isinstance(error, exceptions.ClientError):
        return answer_failure(error.response, bucket)
    text = f"{type(error).__name__}: {error}"
    inner = error.kwargs.get("error") if isinstance(error, exceptions.HTTPClientError) else error
    if isinstance(inner, FileNotFoundError) or _NOT_TRUSTED in text:  # the network has no such errors
        return RequestError(Failure.FINAL, text)
    if isinstance(error, RecursionError):
        # botocore asks for the bucket's region, is redirected, asks for the region, ...
        return _elsewhere(bucket, "redirected again and again")
    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return RequestError(
            Failure.FINAL,
            "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or "
            "storage_options key and secret (anon=True for public buckets)",
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
    """Return the error of an answer: by the code of its body, which HEAD does not have, or by its status.

    ``response`` is what botocore makes of it: Error, with Code and Message, and ResponseMetadata.
    """
    metadata, body = response.get("ResponseMetadata", {}), response.get("Error", {})
    status, code = int(metadata.get("HTTPStatusCode", 0)), str(body.get("Code", ""))
    named = f"{status} {code}" if code != str(status) else code  # an answer to HEAD has a status only
    text = f"{named}: {body.get('Message', '')}".rstrip(": ")
    if code == "NoSuchBucket":
        return RequestError(Failure.FINAL, f"there is no bucket {bucket!r} ({text})")
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
        f"the bucket {bucket!r} was asked for in the wrong place, it belongs to {there} ({text}): set its "
        f"region (AWS_DEFAULT_REGION, or storage_options {setting}) and endpoint (AWS_ENDPOINT_URL, or "
        "endpoint_url)",
    )


def _retry_after(metadata: Mapping[str, Any]) -> float:
    try:
        wished = float(metadata.get("HTTPHeaders", {}).get("retry-after", 0))
    except ValueError:  # a date: ours is the better guess
        return 0.0
    return min(max(0.0, wished), _LONGEST_WAIT_SECONDS)


# -- file systems of fsspec ----------------------------------------------------------------------------------

_MISSING: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_FINAL: Final = (NotImplementedError, TypeError, ValueError, AttributeError)
"""What does not depend on the service."""
_REFUSED_NAME: Final = re.compile(r"Auth|Credential|AccessDenied|Forbidden|Permission|TokenNotFound")
_REFUSED_TEXT: Final = re.compile(
    r"(Forbidden|Unauthorized|Access ?Denied|Permission denied)\b", re.IGNORECASE
)
_FINAL_NAMES: Final = frozenset({"OfflineModeIsEnabled", "error_perm"})
"""Of huggingface_hub, and of ftplib: the answers 500 to 599 to a command."""
_PASSING_NAMES: Final = frozenset({"TransportError"})
"""Of google.auth, all of whose errors are of a type with "Auth" in its name: the network failed."""
_REFUSED_STATUS: Final = frozenset({401, 403, 407})
_BY_STATUS: Final = {
    404: Failure.MISSING,
    410: Failure.MISSING,
    416: Failure.RANGE,
    507: Failure.FULL,
    # 409 and 412 are those of other writers: where a file must not be there `FileExistsError` says so.
    **dict.fromkeys((408, 409, 412, 425, 429), Failure.PASSING),
}
_FULL_ERRNO: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_FINAL_ERRNO: Final = frozenset({errno.EROFS, errno.ENAMETOOLONG, errno.EINVAL, errno.ENOTSUP})


def filesystem_failure(error: Exception, place: str) -> RequestError:
    """Return ``error`` of one attempt in the file system ``place`` as a `RequestError`. What is not known to
    be settled may pass."""
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
            f"{text} (credentials are missing, wrong, or not allowed to do this: give them as "
            f"storage_options, or as the package of {place} looks for them)",
        )
    if status:
        kind = _BY_STATUS.get(status, Failure.FINAL if status < 500 else Failure.PASSING)
    else:
        kind = _of_type(error)
    return RequestError(kind, text, is_unresolved=_is_unresolved(error))


def _is_of_the_network(error: BaseException) -> bool:
    """Return whether there was no answer at all: fsspec's HTTP says of that, too, that there is no such
    file."""
    return isinstance(error, ConnectionError | TimeoutError) or "ClientConnectionError" in _type_names(error)


def _type_names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those that it was raised from."""
    next_one: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if next_one is None:
            return
        yield next_one
        next_one = next_one.__cause__


def _status(error: BaseException) -> int:
    """Return the status of HTTP that an error carries, 0 without any that is one of a failure."""
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
    if any(map(_REFUSED_NAME.search, names)):  # PermissionError is one
        return True
    return any(isinstance(one, OSError) and _REFUSED_TEXT.match(str(one)) for one in chain)


def _of_type(error: Exception) -> Failure:
    number = error.errno if isinstance(error, OSError) else None
    if number in _FULL_ERRNO:
        return Failure.FULL
    if isinstance(error, json.JSONDecodeError):  # an answer that is not the service's
        return Failure.PASSING
    is_final = isinstance(error, _FINAL) or number in _FINAL_ERRNO or _type_names(error) & _FINAL_NAMES
    return Failure.FINAL if is_final else Failure.PASSING
