"""The gate between staging and whoever changes the state: one copies, or the other writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dcp.staging.errors import StagingTimeoutError
from dcp.storage.errors import StagingError

__all__ = ["Gate"]


class Gate:
    """Any number of stagings, or any number of changers, at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._copying = 0
        self._changers: list[int] = []

    def begin_copying(self, timeout_seconds: float) -> None:
        """Wait until nobody changes the state, and keep changers out until `end_copying`.

        Raises StagingError in a thread that is a changer itself: it would wait for ever.
        """
        with self._changed:
            if threading.get_ident() in self._changers:
                raise StagingError(
                    "a save was begun inside of lock() by the thread that holds it; begin it outside"
                )
            if not self._changed.wait_for(lambda: not self._changers, timeout_seconds):
                raise StagingTimeoutError(
                    f"lock() was held for {timeout_seconds:g} s, so that staging could not begin; hold it "
                    "around optimizer.step() only",
                    timeout_seconds=timeout_seconds,
                )
            self._copying += 1

    def end_copying(self) -> None:
        """The copies are there, or were given up; any thread may say so."""
        with self._changed:
            self._copying -= 1
            self._changed.notify_all()

    @contextmanager
    def changing(self, timeout_seconds: float) -> Iterator[None]:
        """Wait for stagings under way; the next ones wait until the block is left."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self._copying, timeout_seconds):
                raise StagingTimeoutError(
                    f"a staging is not complete after {timeout_seconds:g} s, so the state must not change",
                    timeout_seconds=timeout_seconds,
                )
            self._changers.append(threading.get_ident())
        try:
            yield
        finally:
            with self._changed:
                self._changers.remove(threading.get_ident())
                self._changed.notify_all()
