"""Reading ranges of S3 objects past botocore, which takes milliseconds of processor time for every request.

botocore signs one URL for an object, with everything it knows of endpoints and credentials, and all ranges of
the object are asked for with that. What is not a plain success, or a plain failure, is asked again the
ordinary way: expired credentials, redirections, keys that are missing.
"""

from __future__ import annotations

import http.client
import re
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple

from dcp.storage.stores.handles import Inflow
from dcp.storage.stores.objects.client import CALLED_OFF, Failure, ObjectInfo, RequestError
from dcp.storage.stores.objects.s3.errors import answered
from dcp.storage.stores.objects.s3.http_bodies import BodyTransport, CalledOff, HttpResponse, Receiver

__all__ = ["DirectReads", "SignedUrl", "presigned", "range_of", "sign"]

_VALID_SECONDS: Final = 3600
_USED_SECONDS: Final = 600.0
"""A URL is signed anew long before it ends; the credentials that it was signed with may end earlier."""

_KEPT_URLS: Final = 1024

_REFUSALS: Final = 3
"""After so many in a row every object is read the ordinary way: the service does not take such URLs. What
worked before, and has ended with the credentials that it was signed with, does not tell that."""

_SETTLED_STATUS: Final = frozenset({408, 412, 416, 425, 429, 500, 502, 503, 504})
"""They mean the same whoever asks in which way."""

_RANGE: Final = re.compile(r"(\d+)-\d+/(\d+)")
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9]{1,64})</Code>")


class SignedUrl(NamedTuple):
    """A URL that has its signature, and what to send the request with."""

    url: str
    transport: BodyTransport


@dataclass(slots=True)
class _Kept:
    """A URL that is used again; ``made_seconds`` is by the monotonic clock."""

    made_seconds: float
    signed: SignedUrl
    has_worked: bool = False


async def sign(s3: Any, arguments: dict[str, Any]) -> SignedUrl | None:
    """The URL of an object, by aiobotocore's client ``s3``; None where it has to be asked the ordinary way.

    ``arguments`` are those of GetObject: some that users set are headers, which a URL does not have.
    """
    from dcp.storage.stores.objects.s3.session import OneAttemptSession

    session = getattr(getattr(s3, "_endpoint", None), "http_session", None)
    bucket = str(arguments.get("Bucket"))
    if not isinstance(session, OneAttemptSession) or session.bodies is None:
        return None
    if arguments.keys() != {"Bucket", "Key"} or bucket.startswith("arn:") or bucket.endswith("--x-s3"):
        return None
    url = await presigned(s3, arguments, _VALID_SECONDS)
    return None if session.uses_proxy(url) else SignedUrl(url, session.bodies)


async def presigned(s3: Any, arguments: dict[str, Any], seconds: int) -> str:
    """A URL to GET an object by, at the bucket's own endpoint and signed as other requests are.

    Left alone, botocore signs URLs by version 2, which no bucket made since June 2020 takes, and for the
    global endpoint, which redirects.
    """
    s3.meta.events.register_first("choose-signer.s3", _keep_version, unique_id="dcp-version")
    s3.meta.events.register_first("before-endpoint-resolution.s3", _keep_endpoint, unique_id="dcp-endpoint")
    return str(await s3.generate_presigned_url("get_object", Params=arguments, ExpiresIn=seconds))


def _keep_version(signature_version: Any, **_: Any) -> str | None:
    return "s3v4-query" if signature_version in ("s3v4-query", "v4-query") else None


def _keep_endpoint(context: dict[str, Any], **_: Any) -> None:
    context["use_global_endpoint"] = False


class DirectReads:
    """Ranges by signed URLs. Thread-safe."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._signing = threading.Lock()
        self._urls: dict[str, _Kept] = {}
        self._refusals = 0

    def get(
        self,
        key: str,
        begin: int,
        inflow: Inflow,
        *,
        etag: str | None,
        limit_seconds: float,
        make_url: Callable[[str], SignedUrl | None],
    ) -> ObjectInfo | None:
        """As `ObjectClient.get`; None where the ordinary way has to be gone.

        ``make_url`` signs a URL for a key, see `sign`.
        """
        kept = self._url(key, make_url)
        if kept is None:
            return None
        signed = kept.signed
        receiver = Receiver(inflow)
        headers = {"Range": f"bytes={begin}-{begin + inflow.size_bytes - 1}"}
        if etag:
            headers["If-Match"] = etag
        try:
            answer = signed.transport.get(
                signed.url, headers, receiver, limit_seconds=limit_seconds, called_off=CALLED_OFF.get()
            )
        except CalledOff as error:
            raise RequestError(Failure.PASSING, "called off") from error
        except (OSError, http.client.HTTPException) as error:
            with self._lock:
                self._forget(key, kept)
            is_final = isinstance(error, ssl.SSLCertVerificationError | FileNotFoundError)
            kind = Failure.FINAL if is_final else Failure.PASSING
            raise RequestError(kind, f"{type(error).__name__}: {error}") from error
        info = self._understood(key, answer, begin, receiver)
        self._learn(key, kept, answer.status, is_good=info is not None)
        return info

    def _learn(self, key: str, kept: _Kept, status: int, *, is_good: bool) -> None:
        with self._lock:
            if is_good:
                kept.has_worked, self._refusals = True, 0
                return
            self._forget(key, kept)
            if not kept.has_worked and status != http.client.NOT_FOUND:
                self._refusals += 1

    def _forget(self, key: str, kept: _Kept) -> None:
        """With the lock held; another thread may have a newer one by now."""
        if self._urls.get(key) is kept:
            del self._urls[key]

    def _url(self, key: str, make_url: Callable[[str], SignedUrl | None]) -> _Kept | None:
        kept = self._fresh(key)
        if kept is None:
            with self._signing:  # threads that begin an object together wait for one signature
                kept = self._fresh(key) or self._sign(key, make_url)
        return kept

    def _fresh(self, key: str) -> _Kept | None:
        with self._lock:
            kept = self._urls.get(key) if self._refusals < _REFUSALS else None
        return kept if kept is not None and time.monotonic() - kept.made_seconds < _USED_SECONDS else None

    def _sign(self, key: str, make_url: Callable[[str], SignedUrl | None]) -> _Kept | None:
        with self._lock:
            if self._refusals >= _REFUSALS:
                return None
        now, signed = time.monotonic(), make_url(key)
        with self._lock:
            if signed is None:
                self._refusals = _REFUSALS
                return None
            self._urls.pop(key, None)
            kept = self._urls[key] = _Kept(now, signed)
            if len(self._urls) > _KEPT_URLS:
                del self._urls[next(iter(self._urls))]
        return kept

    def _understood(
        self, key: str, answer: HttpResponse, begin: int, receiver: Receiver
    ) -> ObjectInfo | None:
        status, headers = answer.status, answer.headers
        if status in _SETTLED_STATUS:
            code = _CODE.search(answer.body)
            error = {"Code": code.group(1).decode()} if code else {}
            metadata = {"HTTPStatusCode": status, "HTTPHeaders": headers}
            raise answered({"Error": error, "ResponseMetadata": metadata}, self._place)
        got = range_of(headers.get("content-range", ""))
        if status != http.client.PARTIAL_CONTENT or got is None:
            return None
        first, size = got
        if size < begin + receiver.size_bytes:
            raise RequestError(Failure.RANGE, f"the object has {size} bytes")
        if first != begin:  # of a cache on the way: the bytes have come, and are others
            raise RequestError(Failure.PASSING, f"bytes from {first} on came instead of {begin}")
        if not receiver.is_filled:
            told = headers.get("content-length", "an unknown number of")
            raise RequestError(Failure.PASSING, f"the body had {told} bytes instead of {receiver.size_bytes}")
        return ObjectInfo(key, size, _seconds(headers.get("last-modified", "")), headers.get("etag", ""))


def range_of(content_range: str) -> tuple[int, int] | None:
    """(first byte, bytes of the whole object) of the header Content-Range; None where it does not tell."""
    match = _RANGE.search(content_range)
    return (int(match[1]), int(match[2])) if match else None


def _seconds(date: str) -> float:
    try:
        return parsedate_to_datetime(date).timestamp()
    except ValueError:
        return 0.0
