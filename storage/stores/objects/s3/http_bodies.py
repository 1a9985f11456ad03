"""HTTP answers whose bodies go from the socket into memory that is already there, by the standard library.

asyncio's clients hand out new bytes objects, from one thread for all connections: two copies more, and never
more than one core. `http.client` fills a buffer in place, and its threads wait and copy outside of the
interpreter's lock.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from dcp.storage.stores.handles import Inflow

__all__ = ["SLOWEST_BYTES_PER_SECOND", "STEP_BYTES", "BodyTransport", "CalledOff", "HttpResponse", "Receiver"]

STEP_BYTES: Final = 1 << 20
"""After so many bytes a thread looks whether it was called off, and says how far it is."""

SLOWEST_BYTES_PER_SECOND: Final = 16 << 10
"""A body that is slower on the whole is given up, whatever trickles in. A line that many share is not."""

_LARGEST_ANSWER_BYTES: Final = 1 << 20
"""Of answers that are not what was asked for, such as errors."""

_LOOK_SECONDS: Final = 0.5
_SUCCESS: Final = frozenset({200, 206})


class CalledOff(Exception):
    """The caller does not want the answer any more."""


class Receiver:
    """Where one body goes, which has to have exactly the size of ``inflow``.

    ``is_filled`` tells whether an answer has filled it.
    """

    def __init__(self, inflow: Inflow) -> None:
        self.inflow = inflow
        self.size_bytes = inflow.size_bytes
        self.is_filled = False


@dataclass(frozen=True)
class HttpResponse:
    """Status, headers (names in lower case), and the body unless that went to the receiver."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class _Origin(NamedTuple):
    scheme: str
    host: str
    port: int


class BodyTransport:
    """GET requests in threads of their own, over connections that are kept. Thread-safe.

    ``tls`` makes the context of https connections, and is asked once. ``threads`` requests run at a time.
    Idle connections are used again for ``kept_seconds``, which should be less than the services' patience.
    """

    def __init__(
        self,
        *,
        threads: int,
        connect_seconds: float,
        read_seconds: float,
        kept_seconds: float,
        tls: Callable[[], ssl.SSLContext],
    ) -> None:
        self._connect_seconds = connect_seconds
        self._read_seconds = read_seconds
        self._kept_seconds = kept_seconds
        self._make_tls = tls
        self._tls: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._idle: dict[_Origin, list[tuple[float, http.client.HTTPConnection]]] = {}
        self._is_closed = False
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="dcp-body")

    def get(
        self,
        url: str,
        headers: Mapping[str, str],
        receiver: Receiver,
        *,
        limit_seconds: float,
        called_off: threading.Event | None = None,
    ) -> HttpResponse:
        """One attempt; a body of a successful answer that has the receiver's size goes there.

        However this ends, nothing is written to the receiver's memory afterwards. Raises TimeoutError after
        ``limit_seconds`` and what the bytes that have come may take at `SLOWEST_BYTES_PER_SECOND`, and where
        no byte comes for the time of a read; `CalledOff`; other OSErrors, of which ssl.SSLError is one;
        http.client.HTTPException. No message has the URL, which may be signed.
        """
        if self._is_closed:
            raise ConnectionAbortedError("the session was closed")
        exchange = _Exchange(self, url, headers, receiver)
        future = self._threads.submit(exchange.run)
        try:
            while not wait([future], min(_LOOK_SECONDS, limit_seconds)).done:
                if called_off is not None and called_off.is_set():
                    raise CalledOff
                if exchange.is_late(limit_seconds):
                    raise TimeoutError(f"no end after {limit_seconds:.0f} s, and no more than a trickle")
            return future.result()
        finally:
            if not future.done() and not future.cancel() and exchange.abort():
                wait([future])

    def close(self) -> None:
        """Close the connections that are idle; those in use close when their answer has come."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, {}
        for kept in idle.values():
            for _, connection in kept:
                connection.close()
        self._threads.shutdown(wait=False)

    # -- connections, used by the threads --------------------------------------------------------------------

    def take(self, origin: _Origin) -> http.client.HTTPConnection:
        """A connection that nobody else uses, kept or new."""
        while True:
            with self._lock:
                kept = self._idle.get(origin)
                since, connection = kept.pop() if kept else (0.0, None)
            if connection is None:
                return self._connect(origin)
            if time.monotonic() - since < self._kept_seconds and not _has_news(connection):
                return connection
            connection.close()

    def give_back(self, origin: _Origin, connection: http.client.HTTPConnection) -> None:
        """Keep a connection whose last answer was read to its end."""
        with self._lock:
            if not self._is_closed:
                self._idle.setdefault(origin, []).append((time.monotonic(), connection))
                return
        connection.close()

    def _connect(self, origin: _Origin) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection
        if origin.scheme == "https":
            with self._lock:
                if self._tls is None:
                    self._tls = self._make_tls()
            connection = http.client.HTTPSConnection(
                origin.host, origin.port, timeout=self._connect_seconds, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(origin.host, origin.port, timeout=self._connect_seconds)
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        connection.sock.settimeout(self._read_seconds)
        return connection


class _Exchange:
    """One request and its answer, in a thread; `abort` comes from another one."""

    def __init__(
        self, transport: BodyTransport, url: str, headers: Mapping[str, str], receiver: Receiver
    ) -> None:
        parts = urlsplit(url)
        # http.client takes the end of an IPv6 address for a port where it is given none.
        port = parts.port or (443 if parts.scheme == "https" else 80)
        self._origin = _Origin(parts.scheme, parts.hostname or "", port)
        self._target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        self._transport = transport
        self._headers = headers
        self._receiver = receiver
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_aborted = False
        self._begun_seconds: float | None = None
        self._received_bytes = 0

    def is_late(self, limit_seconds: float) -> bool:
        """Whether it is slower than anybody waits for; before a thread carries it out it is not."""
        if self._begun_seconds is None:
            return False
        allowed = limit_seconds + self._received_bytes / SLOWEST_BYTES_PER_SECOND
        return time.monotonic() - self._begun_seconds > allowed

    def abort(self) -> bool:
        """End it; whether a thread may be writing to the receiver until it has noticed."""
        with self._lock:
            self._is_aborted = True
            if self._socket is None:
                return False
            with contextlib.suppress(OSError):
                # Not SSLSocket's own, which would have the thread read on below the encryption.
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
            return True

    def run(self) -> HttpResponse:
        """Carry it out; an answer that fits fills the receiver."""
        self._begun_seconds = time.monotonic()
        connection = self._transport.take(self._origin)
        is_done = False
        try:
            with self._lock:
                if self._is_aborted:
                    raise ConnectionAbortedError("called off")
                self._socket = connection.sock  # the connection forgets it where it is not to be kept
            connection.request("GET", self._target, headers=dict(self._headers))
            with connection.getresponse() as response:
                answer, is_done = self._receive(response)
        finally:
            with self._lock:
                self._socket = None
                is_done = is_done and not self._is_aborted
            if is_done:
                self._transport.give_back(self._origin, connection)
            else:
                connection.close()
        return answer

    def _receive(self, response: http.client.HTTPResponse) -> tuple[HttpResponse, bool]:
        """The answer, and whether the connection is good for another request."""
        status, headers = response.status, {name.lower(): value for name, value in response.getheaders()}
        body = b""
        if status not in _SUCCESS:
            body = response.read(_LARGEST_ANSWER_BYTES)
        elif response.length in (None, self._receiver.size_bytes):
            self._fill(response)
        return HttpResponse(status, headers, body), response.isclosed() and not response.will_close

    def _fill(self, response: http.client.HTTPResponse) -> None:
        receiver = self._receiver
        for buffer in receiver.inflow.buffers():
            rest = buffer
            while len(rest):
                if self._is_aborted:
                    raise ConnectionAbortedError("called off")
                got = response.readinto(rest[:STEP_BYTES])
                if not got:
                    raise http.client.IncompleteRead(b"", len(rest))
                rest = rest[got:]
                self._received_bytes += got
        if not response.isclosed() and response.read(1):  # sent in chunks, its size was not told
            raise http.client.HTTPException(f"the body has more than {receiver.size_bytes} bytes")
        receiver.is_filled = True


def _has_news(connection: http.client.HTTPConnection) -> bool:
    """Whether an idle connection has something to say, which can only be that it ends."""
    try:
        poller = select.poll()
        poller.register(connection.sock, select.POLLIN)
        return bool(poller.poll(0))
    except (OSError, ValueError):
        return True
