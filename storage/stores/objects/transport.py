"""HTTP of object stores: bodies go from the socket into memory that is already there, by the standard
library.

asyncio's clients hand out new bytes objects, from one thread for all connections: two copies more, and never
more than one core. `http.client` fills a buffer in place, and its threads wait and copy outside of the
interpreter's lock. Nothing is sent twice: a commit that is sent again unseen is answered with 412, and who
does not know that takes its own commit for another writer's.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import urlsplit
from weakref import finalize

from dcp.storage.stores.handles import Inflow
from dcp.storage.stores.objects.failures import Failure, RequestError

__all__ = ["CALLED_OFF", "SLOWEST_BYTES_PER_SECOND", "STEP_BYTES", "HttpAnswer", "Transport", "fill"]

T = TypeVar("T")

CALLED_OFF: Final[ContextVar[threading.Event | None]] = ContextVar("CALLED_OFF", default=None)
"""Once it is set nobody wants the answer any more: the attempt ends, as one that failed in passing."""

STEP_BYTES: Final = 1 << 20
"""After so many bytes a thread looks whether it was called off, and says how far it is."""

SLOWEST_BYTES_PER_SECOND: Final = 16 << 10
"""A body that is slower on the whole is given up, whatever trickles. A line that many share is not."""

_LARGEST_ERROR_BYTES: Final = 1 << 20
_KEPT_SECONDS: Final = 12.0
"""Idle connections are used again for so long, which is less than the patience of services."""
_LOOK_SECONDS: Final = 0.5
_SUCCESS: Final = frozenset({200, 206})


@dataclass(frozen=True)
class HttpAnswer:
    """Status, headers (names in lower case), and the body unless the inflow ``is_filled`` with that."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    is_filled: bool


class _Origin(NamedTuple):
    scheme: str
    host: str
    port: int


class _Attempt:
    """The work of a thread for a caller, who may `abort` it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_filling = False
        self._begun_seconds: float | None = None
        self._moved_bytes = 0
        self.is_aborted = False

    def begin(self) -> None:
        """Note the time: before a thread carries it out it is not late."""
        self._begun_seconds = time.monotonic()

    def is_late(self, limit_seconds: float) -> bool:
        """Return whether it is slower than is waited for."""
        if self._begun_seconds is None:
            return False
        allowed = limit_seconds + self._moved_bytes / SLOWEST_BYTES_PER_SECOND
        return time.monotonic() - self._begun_seconds > allowed

    def abort(self) -> bool:
        """End it; whether the thread may be writing to the caller's memory until it has noticed."""
        with self._lock:
            self.is_aborted = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    # Not SSLSocket's own, which would have the thread read on below the encryption.
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
                return True
            return self._is_filling

    def hold(self, used: socket.socket | None) -> None:
        """Use this socket from now on, or none."""
        with self._lock:
            if used is not None and self.is_aborted:
                raise ConnectionAbortedError("called off")
            self._socket = used

    def move(self, view: memoryview) -> Iterator[memoryview]:
        """Yield the steps in which a body is sent, each with a time limit of its own."""
        for begin in range(0, len(view), STEP_BYTES):
            if self.is_aborted:
                raise ConnectionAbortedError("called off")
            yield view[begin : begin + STEP_BYTES]
            self._moved_bytes += STEP_BYTES

    def fill(self, body: Any, inflow: Inflow) -> None:
        """Fill all buffers from a body that is read by ``readinto``, which must not end before."""
        self._is_filling = True
        try:
            for buffer in inflow.buffers():
                rest = buffer
                while len(rest):
                    if self.is_aborted:
                        raise ConnectionAbortedError("called off")
                    got = body.readinto(rest[:STEP_BYTES])
                    if not got:
                        raise http.client.IncompleteRead(b"", len(rest))
                    rest = rest[got:]
                    self._moved_bytes += got
        finally:
            self._is_filling = False


_CURRENT: Final[ContextVar[_Attempt]] = ContextVar("_CURRENT")


class Transport:
    """Requests in threads of their own, over connections that are kept. Thread-safe.

    ``tls`` makes the context of https connections, and is asked once. ``threads`` attempts run at a time.
    """

    def __init__(
        self,
        *,
        threads: int,
        connect_seconds: float,
        read_seconds: float,
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        self._connect_seconds = connect_seconds
        self._read_seconds = read_seconds
        self.make_tls = tls
        self._tls: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._idle: dict[_Origin, list[tuple[float, http.client.HTTPConnection]]] = {}
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="dcp-http")
        # The collector calls it, in any thread, also in one that holds locks: it takes none.
        self.close: Final = finalize(self, _close, self._idle)

    def attempt(self, act: Callable[[], T], *, limit_seconds: float) -> T:
        """Return what ``act`` returns, in a thread of its own, which may `send`.

        However this ends, nothing is written to the caller's memory afterwards. Raises TimeoutError after
        ``limit_seconds`` and what the bytes that were moved may take at `SLOWEST_BYTES_PER_SECOND`;
        `RequestError` once `CALLED_OFF` is set; what ``act`` raises.
        """
        attempt, called_off = _Attempt(), CALLED_OFF.get()
        try:
            future = self._threads.submit(_carry_out, attempt, act)
        except RuntimeError:  # the interpreter ends, and its pools take no more work
            return _carry_out(attempt, act)
        try:
            while not wait([future], min(_LOOK_SECONDS, limit_seconds)).done:
                if called_off is not None and called_off.is_set():
                    raise RequestError(Failure.PASSING, "called off")
                if attempt.is_late(limit_seconds):
                    raise TimeoutError(f"no end after {limit_seconds:.0f} s, and no more than a trickle")
            return future.result()
        finally:
            if not future.done() and not future.cancel() and attempt.abort():
                wait([future])

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, Any],
        body: bytes | bytearray | memoryview | None = None,
        inflow: Inflow | None = None,
        limit_bytes: int | None = None,
    ) -> HttpAnswer:
        """Make one request, within an `attempt`; a body of the inflow's size goes there, if it is a success.

        Raises OSErrors, of which ssl.SSLError and TimeoutError (no byte came for the time of a read) are
        some, and http.client.HTTPException. No message has the URL, which may be signed.
        """
        attempt, parts = _CURRENT.get(), urlsplit(url)
        # http.client takes the end of an IPv6 address for a port where it is given none.
        origin = _Origin(
            parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        )
        connection = self._take(origin)
        is_reusable = False
        try:
            attempt.hold(connection.sock)  # the connection forgets it where it is not to be kept
            sent = attempt.move(memoryview(body)) if body else None
            target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
            with contextlib.suppress(BrokenPipeError):  # refused while it was sent: the answer says why
                connection.request(method, target, body=sent, headers=dict(headers))
            with connection.getresponse() as response:
                answer = _received(attempt, response, inflow, limit_bytes)
                is_reusable = response.isclosed() and not response.will_close
        finally:
            attempt.hold(None)
            if is_reusable and not attempt.is_aborted:
                with self._lock:
                    self._idle.setdefault(origin, []).append((time.monotonic(), connection))
            else:
                connection.close()
        return answer

    def _take(self, origin: _Origin) -> http.client.HTTPConnection:
        """Return a connection that no one else uses, kept or new."""
        while True:
            with self._lock:
                kept = self._idle.get(origin)
                since, connection = kept.pop() if kept else (0.0, None)
                if connection is None and origin.scheme == "https" and self._tls is None:
                    self._tls = self.make_tls()
            if connection is None:
                return self._connect(origin)
            if time.monotonic() - since < _KEPT_SECONDS and not _has_news(connection):
                return connection
            connection.close()

    def _connect(self, origin: _Origin) -> http.client.HTTPConnection:
        address, limit = (origin.host, origin.port), self._connect_seconds
        connection: http.client.HTTPConnection
        if origin.scheme == "https":
            connection = http.client.HTTPSConnection(*address, timeout=limit, context=self._tls)
        else:
            connection = http.client.HTTPConnection(*address, timeout=limit)
        try:
            connection.connect()
        except BaseException as error:
            connection.close()
            if isinstance(error, OSError) and not isinstance(error, ssl.SSLError):
                place = f"{origin.scheme}://{origin.host}:{origin.port}/"
                raise ConnectionError(f"could not connect to {place} ({error})") from error
            raise
        connection.sock.settimeout(self._read_seconds)
        return connection


def fill(body: Any, inflow: Inflow) -> None:
    """Fill an inflow, within an attempt, from a body that came another way."""
    _CURRENT.get().fill(body, inflow)


def _carry_out(attempt: _Attempt, act: Callable[[], T]) -> T:
    attempt.begin()
    token = _CURRENT.set(attempt)
    try:
        return act()
    finally:
        _CURRENT.reset(token)


def _received(
    attempt: _Attempt, response: http.client.HTTPResponse, inflow: Inflow | None, limit_bytes: int | None
) -> HttpAnswer:
    status, headers = response.status, {name.lower(): value for name, value in response.getheaders()}
    body, is_filled = b"", False
    if status not in _SUCCESS:
        body = response.read(_LARGEST_ERROR_BYTES)
    elif inflow is None:
        # More than was asked for is a service that ignores ranges: what is cut off tells that, too.
        body = response.read() if limit_bytes is None else response.read(limit_bytes + 1)
    elif response.length in (None, inflow.size_bytes):
        attempt.fill(response, inflow)
        if not response.isclosed() and response.read(1):  # sent in chunks, without its size
            raise http.client.HTTPException(f"the body has more than {inflow.size_bytes} bytes")
        is_filled = True
    return HttpAnswer(status, headers, body, is_filled)


def _has_news(connection: http.client.HTTPConnection) -> bool:
    """Return whether an idle connection has something to say, which can only be that it ends."""
    try:
        poller = select.poll()
        poller.register(connection.sock, select.POLLIN)
        return bool(poller.poll(0))
    except (OSError, ValueError):
        return True


def _close(idle: dict[_Origin, list[tuple[float, http.client.HTTPConnection]]]) -> None:
    for kept in idle.values():
        for _, connection in kept:
            connection.close()
