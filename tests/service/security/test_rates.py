"""Tests of rate limits. Internal: a clock of the test, and pure counting.

Moves to HTTP when the service is rebuilt.
"""

from __future__ import annotations

import re

import pytest

from dcp.server.problems import TooManyRequestsError
from dcp.server.security import rates
from dcp.server.security.rates import RateLimits, network_of


def test_windows() -> None:
    """So many in a window of each caller; the next window begins with the first request after it."""
    now = [100.0]
    limits = RateLimits("2/minute", "1/hour", lambda: now[0])
    limits.count("a")
    now[0] += 30
    limits.count("a")
    limits.count("b")
    with pytest.raises(TooManyRequestsError) as refused:
        limits.count("a")
    assert refused.value.headers["Retry-After"] == "30"
    now[0] += 30
    limits.count("a")
    limits.count("a")
    with pytest.raises(TooManyRequestsError):
        limits.count("a")


def test_refused_keys_are_counted_by_network_and_prefix() -> None:
    """One who has a /64 of IPv6 has it as one address; another prefix and another network have their own."""
    limits = RateLimits("60/minute", "2/minute")
    limits.count_refused("2001:db8::1", "abcdefgh")
    limits.count_refused("2001:db8::2", "abcdefgh")
    with pytest.raises(TooManyRequestsError):
        limits.count_refused("2001:db8::3", "abcdefgh")
    limits.count_refused("2001:db8::3", "ijklmnop")
    limits.count_refused("2001:db8:0:1::1", "abcdefgh")
    limits.count_refused("10.0.0.1", "abcdefgh")
    assert network_of("testclient") == "testclient"


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many callers there are: ended windows are forgotten, at worst all of them."""
    monkeypatch.setattr(rates, "_MAX_COUNTED", 100)
    now = [0.0]
    limits = RateLimits("1/minute", "1/minute", lambda: now[0])
    for number in range(1000):
        now[0] += 1
        limits.count(f"caller {number}")
        assert len(limits._requests._counts) <= 100


@pytest.mark.parametrize(
    "rate", ["many/minute", "0/minute", "5/0 minutes", "5", "1/second;9/minute", "5/fortnight"]
)
def test_notation(rate: str) -> None:
    """What is no limit, or more than one, is refused at the start."""
    with pytest.raises(ValueError, match=re.escape(rate)):
        RateLimits("1/minute", rate)


@pytest.mark.parametrize(
    ("rate", "seconds"),
    [
        ("1/second", 1),
        ("1 per 5 minutes", 300),
        (" 1/2Hours ", 7_200),
        ("1/day", 86_400),
        ("1/month", 2_592_000),
    ],
)
def test_how_long_a_window_is(rate: str, seconds: int) -> None:
    """Of one unit or several."""
    limits = RateLimits(rate, "1/minute", lambda: 0.0)
    limits.count("a")
    with pytest.raises(TooManyRequestsError) as refused:
        limits.count("a")
    assert refused.value.headers["Retry-After"] == str(seconds)
