from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from dcp.server.data.sharing import SharedValues


@dataclass(eq=False)
class Value:
    held_bytes: int


def test_the_last_ones_are_kept() -> None:
    """Up to so many, and so many bytes; which is used again is not the next to go."""
    values = SharedValues[str, Value](count=3, kept_bytes=100)
    for name in "abc":
        values.get(name, lambda: Value(10))
    values.get("a", lambda: pytest.fail("it is there"))
    values.get("d", lambda: Value(10))
    gc.collect()
    assert [name in values for name in "abcd"] == [True, False, True, True]
    values.get("e", lambda: Value(85))
    gc.collect()
    assert [name in values for name in "abcde"] == [False, False, False, True, True]


def test_what_is_too_large_is_shared_while_somebody_has_it() -> None:
    """It is not kept for itself, and pushes nothing out."""
    values = SharedValues[str, Value](count=3, kept_bytes=100)
    values.get("a", lambda: Value(10))
    large = values.get("large", lambda: Value(101))
    assert values.get("large", lambda: Value(101)) is large
    del large
    gc.collect()
    assert [name in values for name in ("a", "large")] == [True, False]


def test_a_failure_is_of_all_who_wait_and_of_nobody_later() -> None:
    """Who asks afterwards has it made anew."""
    values = SharedValues[str, Value](count=3, kept_bytes=100)
    go_on = threading.Event()

    def fail() -> Value:
        go_on.wait(30)
        raise OSError("not now")

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(values.get, "a", fail) for _ in range(3)]
        while values.waiting < 3:
            pass
        go_on.set()
        assert {str(one.exception()) for one in asked} == {"not now"}
    assert values.waiting == 0
    assert values.get("a", lambda: Value(1)).held_bytes == 1
