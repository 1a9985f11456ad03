"""S3 requests: s3fs reads the options, botocore signs, sends and keeps connections.

`S3FileSystem` returns ranges as new bytes objects, retries by itself and cannot complete an upload under a
condition. Therefore only botocore's synchronous client is used. Callers can leave a request, and bodies are
received into existing memory. Requests are never repeated here: a hidden repeat of a commit would be
answered with 412 and look like another writer's commit.
"""

from __future__ import annotations

import http.client
import io
import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from typing import Any, Final, TypeVar
from weakref import finalize

from botocore.loaders import Loader, create_loader
from botocore.session import Session
from s3fs import S3FileSystem

from dcp.storage.errors import StorageError
from dcp.storage.stores.base import Inflow
from dcp.storage.stores.objects.requests import CALLED_OFF, Failure, RequestError, s3_failure
from dcp.storage.stores.objects.store import ObjectOptions

T = TypeVar("T")

_LEAST_BYTES_PER_SECOND: Final = 256 << 10
"""Minimum rate of requests that are sent or fetched as a whole."""
_SLOWEST_BYTES_PER_SECOND: Final = 16 << 10
"""Minimum average rate of a body, low enough for a shared network."""
_STEP_BYTES: Final = 1 << 20
"""Bytes between checks for cancellation and progress reports."""
_LOOK_SECONDS: Final = 0.5
_KEPT_SECONDS: Final = 30.0
"""Maximum idle time of a kept connection, because the network may have dropped older connections."""


class _Attempt:
    """Work of a thread for a caller, who may `abort` the work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_filling = False
        self._begun_seconds = math.inf
        self._moved_bytes = 0
        self._is_aborted = False

    def carry_out(self, act: Callable[[], T]) -> T:
        """Return what ``act`` returns."""
        self._begun_seconds = time.monotonic()
        token = _CURRENT.set(self)
        try:
            return act()
        finally:
            self.hold(None)
            _CURRENT.reset(token)

    def is_late(self, limit_seconds: float) -> bool:
        """Return True if the attempt exceeds its time limit; False before a thread has started."""
        allowed = limit_seconds + self._moved_bytes / _SLOWEST_BYTES_PER_SECOND
        return time.monotonic() - self._begun_seconds > allowed

    def abort(self) -> bool:
        """End the attempt; return True if the thread may still write to the caller's memory."""
        with self._lock:
            self._is_aborted = True
            if self._socket is not None:
                with suppress(OSError, TypeError):  # TypeError: TLS within the TLS of a proxy
                    # Not SSLSocket.shutdown, after which the thread would read encrypted bytes.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
                return True
            return self._is_filling

    def hold(self, used: socket.socket | None) -> None:
        """Use this socket from now on, or None."""
        with self._lock:
            if used is not None:
                self._go_on()
            self._socket = used

    def steps(self, data: memoryview) -> Iterator[memoryview]:
        """Yield pieces to send, each with a separate timeout."""
        for begin in range(0, len(data), _STEP_BYTES):
            self._go_on()
            step = data[begin : begin + _STEP_BYTES]
            yield step
            self._moved_bytes += len(step)

    def fill(self, raw: Any, inflow: Inflow) -> None:
        """Fill all buffers from urllib3's answer ``raw``, whose body must have exactly this size."""
        body = raw._fp  # of http.client, because urllib3 would copy into new bytes objects
        self._is_filling = True
        try:
            for buffer in inflow.buffers():
                rest = buffer
                while len(rest):
                    self._go_on()
                    got = body.readinto(rest[:_STEP_BYTES])
                    if not got:
                        raise http.client.IncompleteRead(b"", len(rest))
                    rest = rest[got:]
                    self._moved_bytes += got
        finally:
            self._is_filling = False
        if not body.isclosed() and body.read(1):  # chunked, without a size
            raise http.client.HTTPException(f"the response has more than {inflow.size_bytes} bytes")
        self.hold(None)
        raw.release_conn()

    def _go_on(self) -> None:
        if self._is_aborted:
            raise ConnectionAbortedError("the request was cancelled")


_CURRENT: Final[ContextVar[_Attempt]] = ContextVar("_CURRENT")


class S3Bucket:
    """Requests to a bucket from any thread, one attempt each. Every failure is a `RequestError`."""

    def __init__(self, name: str, storage_options: Mapping[str, Any], options: ObjectOptions) -> None:
        given = dict(storage_options)
        if given.get("session") is not None:
            raise StorageError(
                "the storage option session= (of an asynchronous client) is not supported: pass key, secret "
                "and token, or profile",
                path=f"s3://{name}",
                op="open",
            )
        wished = dict(given.pop("config_kwargs", None) or {})
        config = {
            "max_pool_connections": options.concurrency + 4,
            "connect_timeout": min(10.0, options.request_timeout_seconds),
            "read_timeout": options.request_timeout_seconds,
            # Uploads carry our checksums; checksums of reads are in the manifest.
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            **wished,
            # No second hash: the CRC-32 of each upload is signed and checked by the service.
            "s3": {"payload_signing_enabled": False, **(wished.get("s3") or {})},
            "retries": {"total_max_attempts": 1},
        }
        # Asynchronous without an event loop; botocore finds the bucket's region.
        fixed = {"asynchronous": True, "skip_instance_cache": True, "cache_regions": False}
        try:
            self._filesystem: Any = S3FileSystem(**{**given, **fixed}, config_kwargs=config)
            self._filesystem.session = _Session(session_of(**self._filesystem.kwargs))
        except (TypeError, ValueError, KeyError) as error:
            names = ", ".join(sorted(given))
            raise StorageError(
                f"s3fs rejects these storage options ({names}): {type(error).__name__}",
                path=f"s3://{name}",
                op="open",
            ) from error
        self.name = name
        self._free_seconds = 4 * options.request_timeout_seconds
        self._lock = threading.Lock()
        self._client: Any = None
        self._threads = ThreadPoolExecutor(options.concurrency + 4, thread_name_prefix="dcp-http")

    def ask(self, method: str, size_bytes: int = 0, /, **arguments: Any) -> dict[str, Any]:
        """Send botocore's ``method`` with ``size_bytes`` of data and return the answer."""
        return self.attempt(lambda: self.call(method, arguments), size_bytes)

    def endpoint(self) -> str:
        """Return the URL of the service."""
        return self.attempt(lambda: str(self._botocore().meta.endpoint_url))

    def presigned_url(self, key: str, seconds: int) -> str:
        """Return a presigned URL to GET an object, computed locally."""

        def act() -> str:
            arguments = self._arguments("get_object", {"Key": key})
            return str(self._client.generate_presigned_url("get_object", arguments, ExpiresIn=seconds))

        return self.attempt(act)

    def attempt(self, act: Callable[[], T], whole_bytes: int = 0, body_bytes: int = 0) -> T:
        """Run ``act`` in a separate thread and return the result.

        ``whole_bytes`` are moved as a whole, ``body_bytes`` as a body; both determine the time limit.
        Nothing is written to the caller's memory after the return. Fails at the time limit, or when
        `CALLED_OFF` is set.
        """
        first_step = min(body_bytes, _STEP_BYTES) / _SLOWEST_BYTES_PER_SECOND
        limit_seconds = self._free_seconds + whole_bytes / _LEAST_BYTES_PER_SECOND + first_step
        attempt, called_off = _Attempt(), CALLED_OFF.get()
        try:
            try:
                future = self._threads.submit(attempt.carry_out, act)
            except RuntimeError:  # the interpreter ends, and thread pools accept no more work
                return attempt.carry_out(act)
            try:
                while not wait([future], min(_LOOK_SECONDS, limit_seconds)).done:
                    if called_off is not None and called_off.is_set():
                        raise RequestError(Failure.PASSING, "the request was cancelled")
                    if attempt.is_late(limit_seconds):
                        raise TimeoutError(
                            f"the transfer was too slow and did not end within {limit_seconds:.0f} s"
                        )
                return future.result()
            finally:
                if not future.done() and not future.cancel() and attempt.abort():
                    wait([future])
        except RequestError:
            raise
        except Exception as error:
            raise s3_failure(error, self.name) from error

    def call(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Call like `ask`, within an attempt; the body of the answer is not read."""
        answer: dict[str, Any] = getattr(self._botocore(), method)(**self._arguments(method, arguments))
        return answer

    def fill(self, answer: Mapping[str, Any], inflow: Inflow) -> None:
        """Receive the body of an answer, within the attempt of the answer."""
        _CURRENT.get().fill(answer["Body"]._raw_stream, inflow)

    def _arguments(self, method: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        # Includes the user's settings for all requests: server-side encryption, requester pays, ...
        merged: dict[str, Any] = self._filesystem._get_s3_method_kwargs(
            getattr(self._botocore(), method), Bucket=self.name, **arguments
        )
        return merged

    def _botocore(self) -> Any:
        """Return botocore's client with the options of s3fs."""
        with self._lock:
            if self._client is None:
                with suppress(StopIteration):
                    self._filesystem.set_session().send(None)  # run the coroutine, which never waits
                client = self._filesystem._s3
                http, events = client._endpoint.http_session, client.meta.events
                pools = http._pool_classes_by_scheme
                seconds = http._timeout.read_timeout
                pools.update({scheme: _leavable(pool, seconds) for scheme, pool in pools.items()})
                finalize(self, http.close)
                # By default, botocore signs URLs by version 2, which buckets created since June 2020 refuse,
                # and for the global endpoint, which redirects.
                events.register_first("choose-signer.s3", _keep_version)
                events.register_first("before-endpoint-resolution.s3", _keep_endpoint)
                self._client = client
            return self._client


def _leavable(pool: Any, wait_seconds: float) -> Any:
    """Return a subclass of urllib3's connection pools whose connections serve an `_Attempt`."""

    class Connection(pool.ConnectionCls):  # type: ignore[misc]
        used_seconds = 0.0

        @property
        def is_connected(self) -> bool:  # urllib3 checks before reuse
            is_fresh = time.monotonic() - self.used_seconds < _KEPT_SECONDS
            return is_fresh and bool(super().is_connected)

        def connect(self) -> None:
            super().connect()
            self.sock.settimeout(wait_seconds)  # otherwise the connect timeout limits sending the body
            _CURRENT.get().hold(self.sock)

        def request(self, *args: Any, body: Any = None, headers: Any, **options: Any) -> None:
            _CURRENT.get().hold(self.sock)
            self.used_seconds = time.monotonic()
            # Send bodies without waiting for "100 Continue"; the service can refuse in its response.
            headers.pop("Expect", None)
            body = body.getbuffer() if isinstance(body, io.BytesIO) else body
            super().request(*args, body=body, headers=headers, **options)

        def send(self, data: Any) -> None:
            for step in _CURRENT.get().steps(memoryview(data)):
                super().send(step)

    return type(pool.__name__, (pool,), {"ConnectionCls": Connection})


def _keep_version(signature_version: Any, **_: Any) -> str | None:
    return "s3v4-query" if signature_version in ("s3v4-query", "v4-query") else None


def _keep_endpoint(context: dict[str, Any], **_: Any) -> None:
    context["use_global_endpoint"] = False


class _Session:
    """Session for the client of `S3FileSystem`, backed by botocore's synchronous session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._client: Any = None

    def create_client(self, *names: str, **options: Any) -> _Session:
        """Return a client context, like aiobotocore's session."""
        self._client = self._session.create_client(*names, **options)
        return self

    async def __aenter__(self) -> Any:
        return self._client


def session_of(**options: Any) -> Session:
    """Return botocore's session with these options. All sessions share the service descriptions, which take
    0.1 s to parse.
    """
    session = Session(**options)
    session.lazy_register_component("data_loader", lambda: _loader(session.get_config_variable("data_path")))
    return session


@cache
def _loader(data_path: str | None) -> Loader:
    return create_loader(data_path)


def read_descriptions() -> None:
    """Load the data needed by the first client, before a process forks."""
    for description in ("service-2", "endpoint-rule-set-1"):
        _loader(None).load_service_model("s3", description)
