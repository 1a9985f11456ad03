"""Sending: rounds of due deliveries, and their requests with a fixed total time limit."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

import structlog
from sqlalchemy import Connection

from dcp.server.core.answers import rfc3339
from dcp.server.core.jobs.schedules import ScheduleContext
from dcp.server.core.settings import Settings
from dcp.server.database.engine import Database
from dcp.server.features.webhooks import feature
from dcp.server.features.webhooks.addresses import (
    Allowed,
    RefusedUrlError,
    Resolve,
    WebhookUrl,
    parse_url,
    permitted_addresses,
    resolve_host,
)
from dcp.server.features.webhooks.deliveries import (
    DeliveryClaim,
    DeliveryOutcome,
    claim_next,
    due_hooks,
    record,
)
from dcp.server.features.webhooks.hooks import Sealer, SealError, headers_for
from dcp.version import __version__

_SENDERS: Final = 8
_LEASE_MARGIN_SECONDS: Final = 60.0  # for the name resolution, which has the time limit of the system
_ROUND_FACTOR: Final = 2.0
_MAX_RETRY_AFTER_SECONDS: Final = 86_400.0

_log = structlog.get_logger(__name__)

# -- rounds --------------------------------------------------------------------------------------------------


def _is_any_due(connection: Connection, context: ScheduleContext) -> bool:
    return bool(due_hooks(connection, context.now))


@feature.schedule("webhooks", is_needed=_is_any_due)
def deliver(context: ScheduleContext) -> int:
    """Send due deliveries, and return the number of attempts. Several processes can call this at once.

    Takes at most about twice ``webhook_seconds``; remaining deliveries wait for the next call.
    """
    return Deliverer(context.settings, context.database).round(context.now)


class Deliverer:
    """Sender of due deliveries: to a few webhooks at a time, to each webhook in the order of events.

    A failing webhook gets no more deliveries in the round. ``resolve`` finds addresses, ``context`` has the
    trusted certificates.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        *,
        resolve: Resolve = resolve_host,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._database = database
        self._seconds = settings.webhook_seconds
        self._allowed = Allowed.parse(settings.webhook_allow_private)
        self._resolve = resolve
        self._context = context or _trusted()
        self._sealer = Sealer.from_settings(settings)

    def round(self, now: float) -> int:
        """Send due deliveries, and return the number of attempts. Raises DatabaseUnavailableError."""
        began = time.monotonic()

        def clock() -> float:
            return now + time.monotonic() - began

        with self._database.read() as connection:
            due = due_hooks(connection, now)
        if not due:
            return 0
        give_up = now + _ROUND_FACTOR * self._seconds
        with ThreadPoolExecutor(min(_SENDERS, len(due)), thread_name_prefix="webhook") as pool:
            return sum(pool.map(lambda hook_id: self._serve(hook_id, clock, give_up), due))

    def _serve(self, hook_id: int, clock: Callable[[], float], give_up: float) -> int:
        lease_seconds = self._seconds + _LEASE_MARGIN_SECONDS
        attempts = 0
        while clock() < give_up:
            claim = self._database.transact(
                lambda connection: claim_next(connection, hook_id, clock(), lease_seconds)
            )
            if claim is None:
                break
            outcome = self._attempt(claim, clock())
            attempts += 1
            self._database.transact(partial(record, claim=claim, outcome=outcome, now=clock()))
            if outcome.error is not None:
                # The URL can contain a secret of the receiver, so the log has the number only.
                _log.warning("webhook failed", webhook=hook_id, error=outcome.error, attempt=claim.attempt)
                break
        return attempts

    def _attempt(self, claim: DeliveryClaim, now: float) -> DeliveryOutcome:
        body = _payload(claim)
        try:
            headers = headers_for(self._signing(claim, now), claim.message_id, now, body)
            target = parse_url(claim.hook.url, self._allowed)
            addresses = permitted_addresses(target, self._allowed, self._resolve)
        except RefusedUrlError as error:
            return DeliveryOutcome(None, f"refused: {error}")
        except SealError as error:
            return DeliveryOutcome(None, f"not signed: {error}")
        except (OSError, UnicodeError):
            return DeliveryOutcome(None, "the host name cannot be resolved")
        headers |= {"Content-Type": "application/json", "User-Agent": f"dcphub/{__version__}"}
        try:
            answer = post(
                target, addresses, headers, body, timeout_seconds=self._seconds, context=self._context
            )
        except SendError as error:
            return DeliveryOutcome(None, str(error))
        if 200 <= answer.status < 300:
            return DeliveryOutcome(answer.status, None)
        why = "redirects are not followed" if 300 <= answer.status < 400 else "expected 2xx"
        return DeliveryOutcome(answer.status, f"status {answer.status}: {why}", answer.retry_after_seconds)

    def _signing(self, claim: DeliveryClaim, now: float) -> list[str]:
        until = claim.hook.previous_until_seconds
        stored = claim.secrets if until is not None and now < until else claim.secrets[:1]
        return [self._sealer.open(one) for one in stored]


def _payload(claim: DeliveryClaim) -> bytes:
    """Make the body: immutable facts only, so that all attempts send the same body."""
    event = claim.event
    checkpoint = {
        "id": event.checkpoint_id,
        "root": event.root,
        "run": event.run,
        "key": event.key,
        "step": event.step,
        "format": event.format,
        "href": f"/api/v1/checkpoints/{event.checkpoint_id}",
    }
    document = {
        "type": event.kind,
        "timestamp": rfc3339(event.at_seconds),
        "data": {
            "root": event.root,
            "checkpoint": None if event.checkpoint_id is None else checkpoint,
            "detail": event.data,
        },
    }
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


@cache
def _trusted() -> ssl.SSLContext:
    return ssl.create_default_context()  # reading the certificates takes longer than a delivery


# -- one request ---------------------------------------------------------------------------------------------


class SendError(OSError):
    """Request without an answer; the message names the failed step."""


@dataclass(frozen=True, slots=True)
class ReceiverAnswer:
    """Head of an answer. The body is never read, and can therefore not be shown."""

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
    """Send a POST to the first of ``addresses`` that accepts a connection. Redirects count as answers.

    ``timeout_seconds`` covers connecting, TLS, sending, and the head of the answer. Raises `SendError`.
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
                if late.is_set():  # the end of the connection counts as the end of the headers
                    raise TimeoutError
                return ReceiverAnswer(response.status, _retry_after(response.getheader("Retry-After")))
        except (OSError, http.client.HTTPException, ValueError) as error:
            if late.is_set() or isinstance(error, TimeoutError):  # timeout of the socket at the same moment
                raise SendError(f"no response within {timeout_seconds:g} s") from error
            raise SendError(_explained(error)) from error


class _Pinned(http.client.HTTPConnection):
    """Connection over a socket to a fixed address; certificates are compared with the name."""

    def __init__(self, target: WebhookUrl, connected: socket.socket, context: ssl.SSLContext) -> None:
        super().__init__(target.host, target.port)
        self.raw = connected
        self._tls = context if target.scheme == "https" else None
        self._name = target.host

    def connect(self) -> None:
        self.sock = self.raw
        if self._tls is not None:
            # In two steps, to interrupt an endless handshake.
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
        # Each address gets an equal share of the time, so that an address that drops packets does not use up
        # all of it.
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
        f"cannot connect: {_explained(problem)}" if problem else "timeout before connecting"
    ) from problem


@contextlib.contextmanager
def _cut_off(connection: _Pinned, give_up: float) -> Iterator[threading.Event]:
    # A time limit of the socket restarts with each byte; this limit does not.
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
    return f"not an HTTP response ({type(error).__name__})"
