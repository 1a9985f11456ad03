"""Rate limits: by key, or by address without a key; lower for invalid keys by prefix and address.

Each process counts in memory, so several API processes allow more in total. The limits stop runaway scripts
and key guessing; they are not for billing.
"""

from __future__ import annotations

import ipaddress
import math
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from dcp.server.core.problems import TooManyRequestsError

_NOTATION: Final = re.compile(
    r"\s*(?P<count>[0-9]+)\s*(?:/|per)\s*(?P<many>[0-9]*)\s*(?P<unit>second|minute|hour|day|month|year)s?\s*",
    re.IGNORECASE,
)
_UNIT_SECONDS: Final = {
    "second": 1.0,
    "minute": 60.0,
    "hour": 3_600.0,
    "day": 86_400.0,
    "month": 30 * 86_400.0,
    "year": 360 * 86_400.0,
}
_IPV6_PREFIX_BITS: Final = 64
_MAX_COUNTED: Final = 65_536
"""Maximum callers counted separately; exceeding it clears ended windows."""


@dataclass(frozen=True, slots=True)
class Rate:
    """``count`` requests in ``seconds``."""

    count: int
    seconds: float

    @classmethod
    def parse(cls, text: str) -> Rate:
        """Parse ``600/minute`` or ``10 per 5 minutes``. Raises ValueError."""
        found = _NOTATION.fullmatch(text)
        if found is None or int(found["count"]) == 0 or found["many"] == "0":
            raise ValueError(
                f"{text!r} is not a rate such as 600/minute (per second, minute, hour, day or month)"
            )
        return cls(int(found["count"]), int(found["many"] or 1) * _UNIT_SECONDS[found["unit"].lower()])


class RateLimits:
    """Counts requests against ``rate``, and invalid keys against ``login_rate``.

    Raises ValueError for a rate that `Rate.parse` refuses.
    """

    def __init__(self, rate: str, login_rate: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._login_rate = Rate.parse(rate), Rate.parse(login_rate)
        self._requests = _RateWindows(clock)
        self._refused = _RateWindows(clock)

    def count(self, who: str, rate: Rate | None = None) -> None:
        """Count a request of ``who`` against ``rate``, or the rate of the settings.

        Raises `TooManyRequestsError` above the rate.
        """
        rate = rate or self._rate
        if not self._requests.count(who, rate):
            raise self._requests.refusal(who, rate, "requests")

    def counted(self, who: str) -> int:
        """Return the number of requests in the current window of ``who``."""
        return self._requests.counted(who)

    def count_address(self, address: str) -> None:
        """Count a request without a key by the network of its address. Raises like `count`."""
        self.count(f"address:{network_of(address)}")

    def count_refused(self, address: str, prefix: str) -> None:
        """Count a request with an invalid key by prefix and address.

        Raises `TooManyRequestsError` above the limit, and like `count_address`, since prefixes can be
        invented. Called after the lookup: a valid key passes, whatever else its address sends.
        """
        who = f"{network_of(address)} {prefix}"
        if not self._refused.count(who, self._login_rate):
            raise self._refused.refusal(who, self._login_rate, "invalid keys")
        self.count_address(address)


class _RateWindows:
    """Fixed windows that begin with the first request of each caller."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: dict[str, tuple[float, int]] = {}  # end of the window, number of requests

    def count(self, who: str, rate: Rate) -> bool:
        now_seconds = self._clock()
        with self._lock:
            if who not in self._counts and len(self._counts) >= _MAX_COUNTED:
                self._forget(now_seconds)
            end_seconds, count = self._counts.get(who, (0.0, 0))
            # The second condition: the window belongs to a longer, former limit.
            if now_seconds >= end_seconds or end_seconds > now_seconds + rate.seconds:
                end_seconds, count = now_seconds + rate.seconds, 0
            if count >= rate.count:
                return False
            self._counts[who] = (end_seconds, count + 1)
            return True

    def counted(self, who: str) -> int:
        with self._lock:
            end_seconds, count = self._counts.get(who, (0.0, 0))
        return count if self._clock() < end_seconds else 0

    def refusal(self, who: str, rate: Rate, what: str) -> TooManyRequestsError:
        with self._lock:
            end_seconds, _ = self._counts.get(who, (0.0, 0))
        wait_seconds = max(1, math.ceil(end_seconds - self._clock()))
        return TooManyRequestsError(
            f"too many {what}: {rate.count} in {rate.seconds:g} s are allowed",
            headers={"Retry-After": str(wait_seconds)},
        )

    def _forget(self, now_seconds: float) -> None:
        self._counts = {who: entry for who, entry in self._counts.items() if entry[0] > now_seconds}
        if len(self._counts) >= _MAX_COUNTED:
            # too many addresses to count separately
            self._counts.clear()


def network_of(address: str) -> str:
    """Return the address; for IPv6 the /64, because one host can use all addresses of it."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    return str(ipaddress.ip_network((parsed, _IPV6_PREFIX_BITS), strict=False))
