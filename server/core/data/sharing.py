"""Sharing of downloads in a process: threads, places, and rates by allowance."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

from dcp.server.core.allowances import Allowance, LimitSubject, refusal
from dcp.server.core.problems import UnavailableError

_RETRY_SECONDS: Final = 10
_BURST_SECONDS: Final = 0.5
_PIECE_SECONDS: Final = 0.125
_LEAST_PIECE_BYTES: Final = 4 << 10
_MOST_BUCKETS: Final = 4096


class NotAllowedError(Exception):
    """The key of the request is no longer valid."""


class Streams:
    """Threads that read bodies, and places for a bounded number of downloads.

    Allowances bound the places and rates of accounts, keys and roots. Clients below ``min_bytes_per_second``
    for long are disconnected.
    """

    def __init__(self, max_downloads: int, min_bytes_per_second: int = 0) -> None:
        self.max_downloads = max_downloads
        self.seconds_per_byte = 1 / min_bytes_per_second if min_bytes_per_second else 0.0
        self._threads = max_downloads + 2
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0
        self._lock = threading.Lock()
        self._running = 0
        self._places: Counter[LimitSubject] = Counter()
        self._buckets: dict[LimitSubject, _Bucket] = {}

    @property
    def running(self) -> int:
        """The number of places in use."""
        return self._running

    def running_of(self, subject: LimitSubject) -> int:
        """Return the places used by an account, key or root."""
        return self._places[subject]

    @property
    def pool(self) -> ThreadPoolExecutor:
        """The threads, started on first use in each process."""
        with self._lock:
            if self._pool is None or self._pid != os.getpid():
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="dcp-body")
                self._pid = os.getpid()
            return self._pool

    @contextlib.contextmanager
    def slot(self, allowances: Mapping[LimitSubject, Allowance]) -> Generator[None]:
        """Take a place. Raises UnavailableError if all are in use, TooManyRequestsError above a share."""
        with self._lock:
            if self._running >= self.max_downloads:
                raise UnavailableError(
                    f"{self.max_downloads} downloads are running, the maximum (max_downloads); retry later",
                    retry_seconds=_RETRY_SECONDS,
                )
            for subject, allowance in allowances.items():
                used = self._places[subject]
                if allowance.downloads is not None and used >= allowance.downloads:
                    raise refusal(
                        subject, "downloads", allowance.downloads, used, wait_seconds=_RETRY_SECONDS
                    )
            self._running += 1
            self._places.update(allowances.keys())
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._places.subtract(allowances.keys())
                self._places += Counter()  # drops zero entries

    def wait_seconds(self, allowances: Mapping[LimitSubject, Allowance], count: int) -> float:
        """Take ``count`` bytes from each rate, and return the waiting time."""
        now_seconds = time.monotonic()
        rates = [
            (subject, allowance.download_bytes_per_second)
            for subject, allowance in allowances.items()
            if allowance.download_bytes_per_second is not None
        ]
        with self._lock:
            if len(self._buckets) > _MOST_BUCKETS:
                self._buckets = {of: one for of, one in self._buckets.items() if one.until > now_seconds}
            return max(
                (
                    self._buckets.setdefault(subject, _Bucket()).take(rate, count, now_seconds)
                    for subject, rate in rates
                ),
                default=0.0,
            )


@dataclass(slots=True)
class _Bucket:
    """A rate shared by several downloads: ``until`` is the time when all taken bytes are due."""

    until: float = 0.0

    def take(self, rate: int, count: int, now_seconds: float) -> float:
        self.until = max(self.until, now_seconds - _BURST_SECONDS) + count / rate
        return max(0.0, self.until - now_seconds)


class Share:
    """The allowances of one download; ``find`` reads them, or None once the key has ended."""

    def __init__(self, find: Callable[[], Mapping[LimitSubject, Allowance] | None] = dict) -> None:
        self._find = find
        self.allowances = find() or {}

    @property
    def rate(self) -> int | None:
        """The smallest rate; None for no limit."""
        rates = (one.download_bytes_per_second for one in self.allowances.values())
        return min((rate for rate in rates if rate is not None), default=None)

    def piece_bytes(self, part_bytes: int) -> int:
        """Return the bytes to send at a time: few at low rates, for steady progress."""
        if self.rate is None:
            return part_bytes
        return min(part_bytes, max(_LEAST_PIECE_BYTES, int(self.rate * _PIECE_SECONDS)))

    def renew(self) -> None:
        """Read the allowances again. Raises `NotAllowedError` once the key has ended."""
        found = self._find()
        if found is None:
            raise NotAllowedError
        self.allowances = found
