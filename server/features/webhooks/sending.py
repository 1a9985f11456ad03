"""One request to one address, within a time that no receiver can stretch."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dcp.server.features.webhooks.addresses import WebhookUrl

__all__ = ["ReceiverAnswer", "SendError", "post"]

_MAX_RETRY_AFTER_SECONDS: Final = 86_400.0


class SendError(OSError):
    """There was no answer; the message says at which step."""


@dataclass(frozen=True, slots=True)
class ReceiverAnswer:
    """What the receiver said; its body is not read, so that nothing of it can be shown to anybody."""

    status: int
    retry_after_seconds: float | None


def post(
    target: WebhookUrl,
    addresses: Sequence[str],
    headers: Mapping[str, str],
    body: bytes,
    *,
    timeout_seconds: float,
    context: ssl.SSLContext,
) -> ReceiverAnswer:
    """POST to the first of ``addresses`` that takes a connection. Redirects are answers; no proxy is used.

    ``timeout_seconds`` is for all of it: connecting, TLS, sending and the head of the answer. Raises
    `SendError`.
    """
    give_up = time.monotonic() + timeout_seconds
    connection = _Pinned(target, _connected(target, addresses, give_up), context)
    with contextlib.closing(connection), _cut_off(connection, give_up) as late:
        try:
            connection.connect()
            connection.putrequest("POST", target.path, skip_host=True, skip_accept_encoding=True)
            given = {"Host": target.host_header, "Content-Length": str(len(body)), "Connection": "close"}
            for name, value in (given | dict(headers)).items():
                connection.putheader(name, value)
            connection.endheaders(body)
            with connection.getresponse() as response:
                if late.is_set():  # the end of the connection passes for that of the headers
                    raise TimeoutError
                return ReceiverAnswer(response.status, _retry_after(response.getheader("Retry-After")))
        except (OSError, http.client.HTTPException, ValueError) as error:
            if late.is_set() or isinstance(error, TimeoutError):  # of the socket, in the same moment
                raise SendError(f"no answer within {timeout_seconds:g} s") from error
            raise SendError(_explained(error)) from error


class _Pinned(http.client.HTTPConnection):
    """Over a socket that is connected to an address already; certificates are compared with the name."""

    def __init__(self, target: WebhookUrl, connected: socket.socket, context: ssl.SSLContext) -> None:
        super().__init__(target.host, target.port)
        self.raw = connected
        self._tls = context if target.scheme == "https" else None
        self._name = target.host

    def connect(self) -> None:
        self.sock = self.raw
        if self._tls is not None:
            # In two steps, so that a handshake without end can be cut off.
            self.sock = tls = self._tls.wrap_socket(
                self.raw, server_hostname=self._name, do_handshake_on_connect=False
            )
            tls.do_handshake()

    def close(self) -> None:
        super().close()
        self.raw.close()


def _connected(target: WebhookUrl, addresses: Sequence[str], give_up: float) -> socket.socket:
    problem: OSError | None = None
    for number, address in enumerate(addresses):
        # Those that remain get as much time each: one that swallows packets must not hide the others.
        left = (give_up - time.monotonic()) / (len(addresses) - number)
        if left <= 0:
            break
        try:
            connected = socket.create_connection((address, target.port), timeout=left)
        except OSError as error:
            problem = error
        else:
            connected.settimeout(max(give_up - time.monotonic(), 0.001))
            return connected
    raise SendError(
        f"cannot connect: {_explained(problem)}" if problem else "no time to connect"
    ) from problem


@contextlib.contextmanager
def _cut_off(connection: _Pinned, give_up: float) -> Iterator[threading.Event]:
    # A time limit of the socket starts anew with each byte; this one does not.
    late = threading.Event()

    def cut() -> None:
        late.set()
        for one in (connection.sock, connection.raw):
            if one is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(one, socket.SHUT_RDWR)

    timer = threading.Timer(max(give_up - time.monotonic(), 0), cut)
    timer.daemon = True
    timer.start()
    try:
        yield late
    finally:
        timer.cancel()


def _retry_after(value: str | None) -> float | None:
    # As seconds only: a date would need the receiver's clock.
    if value is None or not value.strip().isdecimal():
        return None
    return min(float(value.strip()[:9]), _MAX_RETRY_AFTER_SECONDS)


def _explained(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate is refused: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return f"not an answer in HTTP ({type(error).__name__})"
