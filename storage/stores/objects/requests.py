"""Requests with patience: repeated while they fail in passing, counted, and named in the error they end in.

Waiting follows "full jitter" (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015): a
uniformly random time up to a bound that doubles, so that a thousand ranks that were throttled together do not
come back together.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import Final, TypeVar
from urllib.parse import urlsplit

from dcp.storage.errors import StorageError, StorageFullError
from dcp.storage.stores.objects.failures import Failure, RequestError
from dcp.storage.stores.objects.transport import CALLED_OFF
from dcp.storage.threads import or_unwanted

__all__ = ["Requests"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_SECONDS: Final = 0.1
_LONGEST_PAUSE_SECONDS: Final = 15.0
_QUIET_ATTEMPTS: Final = 2
_UNRESOLVED_SECONDS: Final = 5.0
"""The patience with a host that has no address and never answered: most likely its name is misspelt."""
_FORGET_SECONDS: Final = 60.0
_unresolved_hosts: dict[tuple[str, str], tuple[float, float]] = {}
"""When hosts were first and last found to have no address."""
_answered_hosts: set[tuple[str, str]] = set()
"""Of this process, whose stores come and go: there the patience is that with any outage."""
_ANSWERS: Final = frozenset({Failure.MISSING, Failure.CONDITION, Failure.RANGE})


class Requests:
    """The requests of one store object to ``place`` (a bucket), and what they cost. Thread-safe."""

    def __init__(self, url: str, place: str, retry_seconds: float) -> None:
        self._url = url
        self._place = place
        self._host = urlsplit(url)[:2]
        self._retry_seconds = retry_seconds
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._seconds = 0.0
        self._slowest_seconds = 0.0
        self._interrupted = threading.Event()
        # Not the shared generator: a training script seeds that one alike on all ranks.
        self._random = random.Random()

    def run(
        self,
        op: str,
        key: str,
        attempt: Callable[[], T],
        *,
        answers: Collection[Failure] = (),
        received_bytes: int = 0,
        sent_bytes: int = 0,
        called_off: threading.Event | None = None,
    ) -> T:
        """Return what ``attempt`` returns, made again as long as it fails in passing and is not
        ``called_off`` (or, where that is not given, `interrupt` is called), or `CALLER_LEFT` is set.

        ``op`` names the request for counters and errors. Raises `RequestError` for those of ``answers`` that
        the caller interprets, `StorageError` (with ``bucket``, ``key``, ``op``, ``attempts``) for all other
        failures.
        """
        called_off = or_unwanted(self._interrupted if called_off is None else called_off)
        token = CALLED_OFF.set(called_off)
        give_up = time.monotonic() + self._retry_seconds
        bound_seconds, attempts = _FIRST_PAUSE_SECONDS, 0
        try:
            while True:
                attempts += 1
                begun = time.perf_counter()
                try:
                    result = attempt()
                except RequestError as error:
                    self._count(op, time.perf_counter() - begun, attempts > 1)
                    if error.kind in _ANSWERS:
                        _answered_hosts.add(self._host)
                    if error.kind in answers:
                        error.is_ambiguous = attempts > 1
                        raise
                    pause = max(self._random.uniform(0, bound_seconds), error.retry_after_seconds)
                    if error.is_unresolved and self._host not in _answered_hosts:
                        give_up = min(give_up, self._without_address_since() + _UNRESOLVED_SECONDS)
                    late = time.monotonic() + pause > give_up
                    if error.kind is not Failure.PASSING or late or called_off.is_set():
                        raise self._error(op, key, error, attempts) from error
                    level = logging.DEBUG if attempts <= _QUIET_ATTEMPTS else logging.WARNING
                    # As text: a handler that keeps records would keep the store with the error's traceback.
                    failed = "%s of %s: attempt %d failed, again in %.1f s: %s"
                    logger.log(level, failed, op, key, attempts, pause, str(error))
                    called_off.wait(pause)
                    bound_seconds = min(2 * bound_seconds, _LONGEST_PAUSE_SECONDS)
                    continue
                _answered_hosts.add(self._host)
                self._count(op, time.perf_counter() - begun, attempts > 1, received_bytes, sent_bytes)
                return result
        except (RequestError, StorageError):
            raise
        except BaseException:  # Ctrl-C: what other threads ask for the same caller is not worth waiting for
            self.interrupt()
            raise
        finally:
            CALLED_OFF.reset(token)

    def interrupt(self) -> None:
        """End what is under way in other threads: their caller is leaving, and waits for them to do so."""
        interrupted, self._interrupted = self._interrupted, threading.Event()
        interrupted.set()

    def traffic(self) -> dict[str, float]:
        """See `Store.traffic`."""
        with self._lock:
            if not self._counts:
                return {}
            return {
                "requests": sum(self._counts.values()) - self._counts["retries"],
                "retries": 0,
                **self._counts,
                "bytes_received": self._bytes["received"],
                "bytes_sent": self._bytes["sent"],
                "request_seconds": self._seconds,
                "slowest_request_seconds": self._slowest_seconds,
            }

    def _without_address_since(self) -> float:
        """Return when the host was first found to have none: what is asked for next, to clear up, waits no
        more."""
        now = time.monotonic()
        first, last = _unresolved_hosts.get(self._host, (now, now))
        if now - last > _FORGET_SECONDS:
            first = now
        _unresolved_hosts[self._host] = first, now
        return first

    def _count(
        self, op: str, seconds: float, again: bool, received_bytes: int = 0, sent_bytes: int = 0
    ) -> None:
        with self._lock:
            self._counts[op] += 1
            self._counts["retries"] += again
            self._bytes["received"] += received_bytes
            self._bytes["sent"] += sent_bytes
            self._seconds += seconds
            self._slowest_seconds = max(self._slowest_seconds, seconds)

    def _error(self, op: str, key: str, error: RequestError, attempts: int) -> StorageError:
        kind = StorageFullError if error.kind is Failure.FULL else StorageError
        tried = f", after {attempts} attempts" if attempts > 1 else ""
        return kind(
            f"{op} of {key!r} in {self._place} failed{tried}: {error}",
            path=f"{self._url}/{key.rpartition('/')[2]}".rstrip("/"),
            op=op,
            bucket=self._place,
            key=key,
            attempts=attempts,
        )
