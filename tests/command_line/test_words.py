"""Times as printed. Internal: no file system here stores times beyond the range of dates."""

from __future__ import annotations

import time

from dcp.cli.printing import describe_time


def test_times_are_local_and_sortable() -> None:
    """Times are shown in the local zone, year first."""
    assert describe_time(None) == "-"
    assert describe_time(0.0) == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(0))
    for odd in (float("nan"), float("inf"), 1e14):  # a tmpfs can store the last value
        assert describe_time(odd) == "-"
