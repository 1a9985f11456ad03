"""What errors of S3, botocore and the HTTP client below mean for the next attempt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dcp.storage.stores.objects.client import Failure, RequestError, is_unresolved

__all__ = ["answered", "request_error"]

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
_LONGEST_WAIT_SECONDS: Final = 60.0
_NOT_TRUSTED: Final = "CERTIFICATE_VERIFY_FAILED"
_ELSEWHERE_STATUS: Final = frozenset({301, 302, 307, 308})
_ELSEWHERE_CODES: Final = frozenset(
    {"IllegalLocationConstraintException", "PermanentRedirect", "TemporaryRedirect"}
)
_SETTLED_BY_STATUS: Final = {404: Failure.MISSING, 412: Failure.CONDITION, 416: Failure.RANGE}


def request_error(error: BaseException, bucket: str) -> RequestError:
    """``error`` of one attempt as a `RequestError`; its text never has credentials."""
    from aiohttp import ClientError as HttpError
    from aiohttp import TooManyRedirects
    from botocore import exceptions, parsers

    if isinstance(error, exceptions.ClientError):
        return answered(error.response, bucket)
    if isinstance(error, exceptions.SSLError) and _NOT_TRUSTED in str(error):
        return RequestError(Failure.FINAL, f"{type(error).__name__}: {error}")
    if isinstance(_inner(error), FileNotFoundError):  # of certificates; the network has no such error
        return RequestError(Failure.FINAL, f"{type(error).__name__}: {error}")
    if isinstance(error, RecursionError) or isinstance(_inner(error), TooManyRedirects):
        # botocore asks for the bucket's region, is redirected, asks for the region, ...
        return _elsewhere(bucket, "redirected again and again")
    passing = (
        exceptions.HTTPClientError,  # connections closed, timed out; bodies cut short
        exceptions.ConnectionError,  # refused, reset
        exceptions.IncompleteReadError,
        parsers.ResponseParserError,
        HttpError,
        OSError,  # with asyncio's TimeoutError
        EOFError,
    )
    if isinstance(error, passing):
        text = f"{type(error).__name__}: {error}"
        return RequestError(Failure.PASSING, text, is_unresolved=is_unresolved(error))
    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return RequestError(
            Failure.FINAL,
            "there are no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or "
            "storage_options key and secret (anon=True for public buckets)",
        )
    return RequestError(Failure.FINAL, f"{type(error).__name__}: {error}")


def answered(response: Mapping[str, Any], bucket: str) -> RequestError:
    """An answer that is an error: by the code of its body, which HEAD does not have, or by its status.

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
    if status in _SETTLED_BY_STATUS:
        return RequestError(_SETTLED_BY_STATUS[status], text)
    return RequestError(Failure.FINAL, text)


def _inner(error: BaseException) -> object:
    """What the HTTP client raised; botocore hides some of that in errors of its own."""
    from botocore.exceptions import HTTPClientError

    return error.kwargs.get("error") if isinstance(error, HTTPClientError) else error


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
