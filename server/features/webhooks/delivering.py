"""Rounds of deliveries: what the worker's schedule calls every few seconds."""

from __future__ import annotations

import functools
import json
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Final, Protocol

import structlog

from dcp.server.core.settings import Settings
from dcp.server.database.engine import Database
from dcp.server.features.webhooks.addresses import (
    Allowed,
    RefusedUrlError,
    Resolve,
    parse_url,
    permitted_addresses,
    resolve_host,
)
from dcp.server.features.webhooks.ledger import (
    DeliveryClaim,
    DeliveryOutcome,
    claim_next,
    due_hooks,
    has_news,
    queue_events,
    record,
)
from dcp.server.features.webhooks.sealing import Sealer, SealError
from dcp.server.features.webhooks.sending import SendError, post
from dcp.server.features.webhooks.signing import headers_for
from dcp.version import __version__

__all__ = ["Deliverer", "Needs", "deliver_due"]

_SENDERS: Final = 8
_LEASE_MARGIN_SECONDS: Final = 60.0  # for resolving a name, which has a time limit of the system's
_ROUND_FACTOR: Final = 2.0

_log = structlog.get_logger(__name__)


class Needs(Protocol):
    """What is needed of the service."""

    @property
    def settings(self) -> Settings:
        """Time limits, and what is allowed."""

    @property
    def database(self) -> Database:
        """Events and deliveries."""


def deliver_due(service: Needs, now: float) -> int:
    """Deliver what is due at ``now``: how many attempts were made.

    May be called in several processes at once. Takes about twice ``webhook_seconds`` at most; what remains is
    due the next time. Raises `DatabaseUnavailableError`.
    """
    return Deliverer(service.settings, service.database).round(now)


class Deliverer:
    """Sends what is due, to a few webhooks at a time, to each in the order of events.

    A webhook that fails is left alone for the rest of the round. ``resolve`` finds addresses, ``context``
    holds the certificates that are trusted.
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
        """Queue and deliver; see `deliver_due`."""
        began = time.monotonic()

        def clock() -> float:
            return now + time.monotonic() - began

        self._queue(now)
        with self._database.read() as connection:
            due = due_hooks(connection, now)
        if not due:
            return 0
        give_up = now + _ROUND_FACTOR * self._seconds
        with ThreadPoolExecutor(min(_SENDERS, len(due)), thread_name_prefix="webhook") as pool:
            return sum(pool.map(lambda hook_id: self._serve(hook_id, clock, give_up), due))

    def _queue(self, now: float) -> None:
        with self._database.read() as connection:
            if not has_news(connection):
                return
        while self._database.transact(lambda connection: queue_events(connection, now)):
            pass

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
            self._note(claim, outcome, clock())
            if outcome.error is not None:
                # The URL may hold a secret of the receiver's, so the log has the number only.
                _log.warning("webhook failed", webhook=hook_id, error=outcome.error, attempt=claim.attempt)
                break
        return attempts

    def _note(self, claim: DeliveryClaim, outcome: DeliveryOutcome, now: float) -> None:
        self._database.transact(lambda connection: record(connection, claim, outcome, now))

    def _attempt(self, claim: DeliveryClaim, now: float) -> DeliveryOutcome:
        message_id, body = f"evt_{claim.event_id}", payload(claim)
        try:
            headers = headers_for(self._signing(claim, now), message_id, now, body)
            target = parse_url(claim.hook.url, self._allowed)
            addresses = permitted_addresses(target, self._allowed, self._resolve)
        except RefusedUrlError as error:
            return DeliveryOutcome(None, f"refused: {error}")
        except SealError as error:
            return DeliveryOutcome(None, f"not signed: {error}")
        except (OSError, UnicodeError):
            return DeliveryOutcome(None, "the name of the host is not resolved")
        headers |= {"Content-Type": "application/json", "User-Agent": f"dcphub/{__version__}"}
        try:
            answer = post(
                target,
                addresses,
                headers,
                body,
                timeout_seconds=self._seconds,
                context=self._context,
            )
        except SendError as error:
            return DeliveryOutcome(None, str(error))
        if 200 <= answer.status < 300:
            return DeliveryOutcome(answer.status, None)
        what = "redirects are not followed" if 300 <= answer.status < 400 else "not taken"
        return DeliveryOutcome(answer.status, f"answered {answer.status}: {what}", answer.retry_after_seconds)

    def _signing(self, claim: DeliveryClaim, now: float) -> list[str]:
        until = claim.hook.previous_until_seconds
        stored = claim.hook.secrets if until is not None and now < until else claim.hook.secrets[:1]
        return [self._sealer.open(one) for one in stored]


def payload(claim: DeliveryClaim) -> bytes:
    """The body: the same bytes in each attempt, for it says only what does not change any more."""
    at = datetime.fromtimestamp(claim.at_seconds, UTC).isoformat(timespec="milliseconds")
    document = {
        "type": claim.kind,
        "timestamp": at.replace("+00:00", "Z"),
        "data": {"root": claim.root, "checkpoint": claim.checkpoint, "detail": claim.detail},
    }
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


@functools.cache
def _trusted() -> ssl.SSLContext:
    return ssl.create_default_context()  # reading the certificates takes longer than a delivery
