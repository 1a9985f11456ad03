"""What object stores take where nothing is said."""

from __future__ import annotations

import os

import pytest

from dcp.storage.stores.objects.options import ObjectOptions


@pytest.mark.parametrize(("cores", "requests"), [(1, 8), (2, 8), (3, 12), (4, 16), (192, 16)])
def test_requests_at_a_time_go_by_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, requests: int
) -> None:
    """Few cores serve few; a line that is not full by sixteen is for the user to say."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert ObjectOptions().concurrency == requests
    assert ObjectOptions.split({"concurrency": 32})[0].concurrency == 32
