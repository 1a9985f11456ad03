"""Requests to a bucket of S3. Credentials, options and endpoint are s3fs' to find; connections are
`Transport`'s.

`S3FileSystem` gives ranges as new bytes objects, repeats on its own terms, and cannot complete an upload
under a condition. So it only makes the client: botocore's synchronous one, whose requests are sent by
`Transport`.
"""

from __future__ import annotations

import http.client
import io
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache, partial
from typing import Any, Final, TypeVar
from weakref import ref

from botocore.awsrequest import AWSResponse
from botocore.httpsession import get_cert_path
from botocore.loaders import Loader, create_loader
from botocore.session import Session
from s3fs import S3FileSystem

from dcp.storage.errors import StorageError
from dcp.storage.stores.handles import Inflow
from dcp.storage.stores.objects.failures import Failure, RequestError, answer_failure, s3_failure
from dcp.storage.stores.objects.options import ObjectOptions
from dcp.storage.stores.objects.store import ObjectInfo
from dcp.storage.stores.objects.transport import (
    SLOWEST_BYTES_PER_SECOND,
    STEP_BYTES,
    HttpAnswer,
    Transport,
    fill,
)

__all__ = ["S3Bucket", "read_descriptions", "session_of"]

T = TypeVar("T")

_LEAST_BYTES_PER_SECOND: Final = 256 << 10
"""What a request sends or fetches whole comes faster than this, or is given up."""
_VALID_SECONDS: Final = 3600
_USED_SECONDS: Final = 600.0
"""A URL is signed anew long before it ends; the credentials that it was signed with may end earlier."""
_KEPT_URLS: Final = 1024
_REFUSALS: Final = 3
"""After so many in a row no URLs are signed: the service does not take them. What worked before, and has
ended with the credentials that it was signed with, does not tell that."""
_SETTLED_STATUS: Final = frozenset({408, 412, 416, 425, 429, 500, 502, 503, 504})
"""They mean the same whoever signed the request."""
_DELIVERED_STATUS: Final = frozenset({http.client.OK, http.client.PARTIAL_CONTENT})
_RANGE: Final = re.compile(r"(\d+)-\d+/(\d+)")
_CODE: Final = re.compile(rb"<Code>([A-Za-z0-9]{1,64})</Code>")


class S3Bucket:
    """Requests to one bucket, each one attempt, from any thread. Every failure is a `RequestError`."""

    def __init__(self, name: str, storage_options: Mapping[str, Any], options: ObjectOptions) -> None:
        given = dict(storage_options)
        if given.get("session") is not None:
            raise StorageError(
                "session= is of an asynchronous client: give key, secret and token, or profile",
                path=f"s3://{name}",
                op="open",
            )
        wished = dict(given.pop("config_kwargs", None) or {})
        config = {
            "max_pool_connections": options.concurrency + 4,  # of proxies, which are botocore's
            "connect_timeout": min(10.0, options.request_timeout_seconds),
            "read_timeout": options.request_timeout_seconds,
            # Checksums of what we send are ours; those of what we read are in the manifest.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **wished,
            # Not hashed a second time: the CRC-32 of each upload is signed, and the service compares it.
            "s3": {"payload_signing_enabled": False, **(wished.get("s3") or {})},
            "retries": {"total_max_attempts": 1},
        }
        # Asynchronous only in that it starts no event loop; botocore finds the region of a bucket by itself.
        fixed = {"asynchronous": True, "skip_instance_cache": True, "cache_regions": False}
        try:
            self._filesystem: Any = S3FileSystem(**{**given, **fixed}, config_kwargs=config)
            self._filesystem.session = _Session(session_of(**self._filesystem.kwargs))
        except (TypeError, ValueError, KeyError) as error:
            names = ", ".join(sorted(given))
            raise StorageError(
                f"s3fs does not take these storage options ({names}): {type(error).__name__}",
                path=f"s3://{name}",
                op="open",
            ) from error
        self.name = name
        self._free_seconds = 4 * options.request_timeout_seconds
        self._lock = threading.Lock()
        self._client: Any = None
        self._transport = Transport(
            threads=options.concurrency + 4,
            connect_seconds=config["connect_timeout"],
            read_seconds=config["read_timeout"],
        )
        self._urls = _SignedUrls()

    def ask(self, method: str, size_bytes: int = 0, /, **arguments: Any) -> dict[str, Any]:
        """Return the answer to a request of botocore's ``method``, which sends so many bytes."""
        return self._attempt(lambda: self._call(method, arguments), size_bytes / _LEAST_BYTES_PER_SECOND)

    def head(self, key: str) -> ObjectInfo:
        """Return what the object is."""
        _, headers = _head_of(self.ask("head_object", Key=key))
        return _info(key, headers, int(headers["content-length"]))

    def endpoint(self) -> str:
        """Return the URL of the service."""
        return self._attempt(lambda: str(self._botocore().meta.endpoint_url))

    def presigned_url(self, key: str, seconds: int) -> str:
        """Return a URL to GET an object by, which is made here, without a request."""
        arguments = self._attempt(lambda: self._arguments("get_object", {"Key": key}))
        return self._attempt(lambda: self._presign(arguments, seconds))

    def start(self, key: str, limit_bytes: int) -> tuple[bytes, ObjectInfo]:
        """Return the first ``limit_bytes`` (at least 1) of the object, or all of it; the info has its true
        size."""

        def act() -> tuple[bytes, ObjectInfo]:
            token = _FETCH.set(_Fetch(None, limit_bytes))
            try:
                answer = self._call("get_object", {"Key": key, "Range": f"bytes=0-{limit_bytes - 1}"})
            finally:
                _FETCH.reset(token)
            info = _range_info(key, *_head_of(answer), 0, limit_bytes)
            return answer["Body"].read(), info

        try:
            data, info = self._attempt(act, limit_bytes / _LEAST_BYTES_PER_SECOND)
        except RequestError as error:
            if error.kind is not Failure.RANGE:
                raise
            info = self.head(key)  # an empty object has no first byte
            if info.size_bytes:
                raise RequestError(Failure.PASSING, "the object changed while it was read") from error
            return b"", info
        if len(data) != min(info.size_bytes, limit_bytes):
            raise RequestError(Failure.PASSING, f"{len(data)} bytes came of {info.size_bytes}")
        return data, info

    def get(self, key: str, begin: int, inflow: Inflow, etag: str | None) -> ObjectInfo:
        """Send GetObject with a range; the body goes to the buffers as it arrives.

        It uses a URL that botocore has signed once for the object, because it takes milliseconds of processor
        time for every request that it signs itself; that it does where the URL is refused: credentials that
        have expired, redirections, keys that are missing, and services that take no such URLs.
        """
        size = inflow.size_bytes
        headers = {"Range": f"bytes={begin}-{begin + size - 1}"} | ({"If-Match": etag} if etag else {})

        def act() -> ObjectInfo:
            url = self._urls.of(key, self._sign)
            if url is not None:
                try:
                    answer = self._transport.send("GET", url.text, headers, inflow=inflow)
                except (OSError, http.client.HTTPException):
                    self._urls.forget(key, url)
                    raise
                if answer.status in _SETTLED_STATUS:
                    raise self._failure(answer)
                if answer.status in _DELIVERED_STATUS:
                    self._urls.works(url)
                    return _delivered(key, answer, begin, size)
                self._urls.refused(key, url, answer.status)
            arguments = {"Key": key, "Range": headers["Range"]} | ({"IfMatch": etag} if etag else {})
            return _delivered(key, self._fetch(arguments, inflow), begin, size)

        return self._attempt(act, min(size, STEP_BYTES) / SLOWEST_BYTES_PER_SECOND)

    # -- within an attempt -----------------------------------------------------------------------------------

    def _attempt(self, act: Callable[[], T], seconds: float = 0.0) -> T:
        try:
            return self._transport.attempt(act, limit_seconds=self._free_seconds + seconds)
        except RequestError:
            raise
        except Exception as error:
            raise s3_failure(error, self.name) from error

    def _call(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(self._botocore(), method)(**self._arguments(method, arguments))
        return answer

    def _arguments(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        # With what the user set for all requests: server-side encryption, requester pays, ...
        merged: dict[str, Any] = self._filesystem._get_s3_method_kwargs(
            getattr(self._botocore(), method), Bucket=self.name, **arguments
        )
        return merged

    def _botocore(self) -> Any:
        """Return botocore's client, made of the options as s3fs reads them."""
        with self._lock:
            if self._client is None:
                with suppress(StopIteration):
                    self._filesystem.set_session().send(None)  # a coroutine, in which nothing waits
                client = self._filesystem._s3
                session, events = client._endpoint.http_session, client.meta.events
                certificate = (session._cert_file, session._cert_key) if session._cert_file else None
                self._transport.make_tls = partial(_tls, session._verify, certificate)
                events.register("before-send.s3", partial(_send, ref(self._transport), session))
                # Left alone, botocore signs URLs by version 2, which no bucket made since June 2020 takes,
                # and for the global endpoint, which redirects.
                events.register_first("choose-signer.s3", _keep_version)
                events.register_first("before-endpoint-resolution.s3", _keep_endpoint)
                self._client = client
            return self._client

    def _presign(self, arguments: Mapping[str, Any], seconds: int) -> str:
        client = self._botocore()
        return str(client.generate_presigned_url("get_object", Params=arguments, ExpiresIn=seconds))

    def _sign(self, key: str) -> str | None:
        """Return the URL of an object; None where botocore has to sign each request: some options are
        headers, which a URL does not have, and proxies are botocore's."""
        arguments = self._arguments("get_object", {"Key": key})
        if (
            arguments.keys() != {"Bucket", "Key"}
            or self.name.startswith("arn:")
            or self.name.endswith("--x-s3")
        ):
            return None
        url = self._presign(arguments, _VALID_SECONDS)
        return None if _uses_proxy(self._client._endpoint.http_session, url) else url

    def _fetch(self, arguments: Mapping[str, Any], inflow: Inflow) -> HttpAnswer:
        """Return the answer to GetObject as botocore signs it; the body goes to ``inflow``."""
        fetch = _Fetch(inflow)
        token = _FETCH.set(fetch)
        try:
            answer = self._call("get_object", arguments)
        finally:
            _FETCH.reset(token)
        if fetch.answer is not None:
            return fetch.answer
        is_filled = answer["ContentLength"] == inflow.size_bytes  # by a proxy, over botocore's connections
        if is_filled:
            fill(answer["Body"], inflow)
        return HttpAnswer(*_head_of(answer), b"", is_filled)

    def _failure(self, answer: HttpAnswer) -> RequestError:
        code = _CODE.search(answer.body)
        error = {"Code": code.group(1).decode()} if code else {}
        metadata = {"HTTPStatusCode": answer.status, "HTTPHeaders": answer.headers}
        return answer_failure({"Error": error, "ResponseMetadata": metadata}, self.name)


@dataclass(slots=True)
class _Url:
    """A URL that has its signature; ``made_seconds`` is by the monotonic clock."""

    text: str
    made_seconds: float
    has_worked: bool = False


class _SignedUrls:
    """The URLs by which objects are read. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._signing = (
            threading.Lock()
        )  # may fetch credentials, for which reads of other objects do not wait
        self._urls: dict[str, _Url] = {}
        self._refusals = 0

    def of(self, key: str, sign: Callable[[str], str | None]) -> _Url | None:
        """Return the URL of an object, signed anew if it is old; None where requests have to be signed one by
        one."""
        url = self._fresh(key)
        if url is None:
            with self._signing:  # threads that begin an object together wait for one signature
                url = self._fresh(key)
                if url is None and self._refusals < _REFUSALS:
                    now, text = time.monotonic(), sign(key)
                    url = self._keep(key, None if text is None else _Url(text, now))
        return url

    def _fresh(self, key: str) -> _Url | None:
        with self._lock:
            url = self._urls.get(key) if self._refusals < _REFUSALS else None
        return url if url is not None and time.monotonic() - url.made_seconds < _USED_SECONDS else None

    def _keep(self, key: str, url: _Url | None) -> _Url | None:
        with self._lock:
            if url is None:
                self._refusals = _REFUSALS
                return None
            self._urls.pop(key, None)
            self._urls[key] = url
            if len(self._urls) > _KEPT_URLS:
                del self._urls[next(iter(self._urls))]
        return url

    def works(self, url: _Url) -> None:
        """Note that the service takes such URLs."""
        with self._lock:
            url.has_worked, self._refusals = True, 0

    def refused(self, key: str, url: _Url, status: int) -> None:
        """Note that it did not take this one."""
        self.forget(key, url)
        with self._lock:
            if not url.has_worked and status != http.client.NOT_FOUND:
                self._refusals += 1

    def forget(self, key: str, url: _Url) -> None:
        """Sign another one the next time; another thread may have a newer one by now."""
        with self._lock:
            if self._urls.get(key) is url:
                del self._urls[key]


# -- botocore's client, its session and its connections ------------------------------------------------------


@dataclass(slots=True)
class _Fetch:
    """The destination of the body of a request that botocore signs, and the answer."""

    inflow: Inflow | None
    limit_bytes: int | None = None
    answer: HttpAnswer | None = None


_FETCH: Final[ContextVar[_Fetch | None]] = ContextVar("_FETCH", default=None)


class _Body(io.BytesIO):
    """A body as botocore reads it."""

    def stream(self, **_: Any) -> Iterator[bytes]:
        """Yield all of it."""
        yield self.read()


def _send(transport: ref[Transport], session: Any, request: Any, event_name: str = "", **_: Any) -> Any:
    """Send a request that botocore has signed; None has botocore send it, which knows of proxies."""
    used = transport()
    # Not the answers to what botocore asks for in between: sessions of directory buckets, regions.
    fetch = _FETCH.get() if event_name.endswith(".GetObject") else None
    if used is None or _uses_proxy(session, request.url):
        return None
    inflow = fetch.inflow if fetch is not None else None
    body = request.body.getbuffer() if isinstance(request.body, io.BytesIO) else request.body
    # Bodies follow at once: a service that does not want one says so in the answer.
    headers = {name: value for name, value in request.headers.items() if name.lower() != "expect"}
    limit = fetch.limit_bytes if fetch is not None else None
    answer = used.send(request.method, request.url, headers, body, inflow, limit)
    if fetch is not None:
        fetch.answer = answer
    return AWSResponse(request.url, answer.status, answer.headers, _Body(answer.body))


def _uses_proxy(session: Any, url: str) -> bool:
    return session._proxy_config.proxy_url_for(url) is not None


def _keep_version(signature_version: Any, **_: Any) -> str | None:
    return "s3v4-query" if signature_version in ("s3v4-query", "v4-query") else None


def _keep_endpoint(context: dict[str, Any], **_: Any) -> None:
    context["use_global_endpoint"] = False


def _tls(verify: Any, client_cert: Any) -> ssl.SSLContext:
    """Return the TLS context that botocore makes of the same settings."""
    if verify:
        context = ssl.create_default_context(cafile=get_cert_path(verify) or None)
    else:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if client_cert:
        context.load_cert_chain(*((client_cert,) if isinstance(client_cert, str) else client_cert))
    return context


class _Session:
    """The session that `S3FileSystem` makes its client by: botocore's synchronous one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._client: Any = None

    def create_client(self, *names: str, **options: Any) -> _Session:
        """Make a client as aiobotocore's session does, which gives what has to be entered."""
        self._client = self._session.create_client(*names, **options)
        return self

    async def __aenter__(self) -> Any:
        return self._client


def session_of(**options: Any) -> Session:
    """Return botocore's session with these options. All sessions share the descriptions of services, which
    take a tenth of a second to parse, and megabytes."""
    session = Session(**options)
    session.lazy_register_component("data_loader", lambda: _loader(session.get_config_variable("data_path")))
    return session


@cache
def _loader(data_path: str | None) -> Loader:
    return create_loader(data_path)


def read_descriptions() -> None:
    """Read what the first client of a process needs, for those that are forked from this one."""
    for description in ("service-2", "endpoint-rule-set-1"):
        _loader(None).load_service_model("s3", description)


# -- answers -------------------------------------------------------------------------------------------------


def _head_of(answer: Mapping[str, Any]) -> tuple[int, Mapping[str, str]]:
    """Return status and headers of an answer as botocore gives it."""
    metadata = answer["ResponseMetadata"]
    return metadata["HTTPStatusCode"], metadata["HTTPHeaders"]


def _delivered(key: str, answer: HttpAnswer, begin: int, size: int) -> ObjectInfo:
    """Return the object of which the answer has the range that was asked for."""
    info = _range_info(key, answer.status, answer.headers, begin, size)
    if info.size_bytes < begin + size:
        raise RequestError(Failure.RANGE, f"the object has {info.size_bytes} bytes")
    if not answer.is_filled:
        came = answer.headers.get("content-length", "an unknown number of")
        raise RequestError(Failure.PASSING, f"the body had {came} bytes instead of {size}")
    return info


def _range_info(key: str, status: int, headers: Mapping[str, str], begin: int, size: int) -> ObjectInfo:
    if status != http.client.PARTIAL_CONTENT:
        total = int(headers.get("content-length", size + 1))
        if begin or total > size:
            raise RequestError(Failure.FINAL, "the service ignores ranges; it cannot be read from")
        return _info(key, headers, total)
    found = _RANGE.search(headers.get("content-range", ""))
    if found is None:
        raise RequestError(Failure.FINAL, "the service does not say how long the object is")
    if int(found[1]) != begin:  # of a cache on the way: the bytes have come, and are others
        raise RequestError(Failure.PASSING, f"bytes from {found[1]} on came instead of {begin}")
    return _info(key, headers, int(found[2]))


def _info(key: str, headers: Mapping[str, str], size_bytes: int) -> ObjectInfo:
    seconds = 0.0
    with suppress(ValueError):
        seconds = parsedate_to_datetime(headers.get("last-modified", "")).timestamp()
    return ObjectInfo(key, size_bytes, seconds, headers.get("etag", ""))
