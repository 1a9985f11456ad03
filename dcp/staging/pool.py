"""The few arenas of a stager, handed out to one save at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dcp.staging.copier import Memory, Slot
from dcp.staging.errors import StagingTimeoutError
from dcp.storage.errors import OptionError, StagingError

__all__ = ["SlotPool"]


class SlotPool:
    """At most ``limit`` arenas. Taken by one thread, given back by any."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise OptionError(f"a stager needs at least one arena, not {limit}")
        self._limit = limit
        self._changed = threading.Condition()
        self._free: list[Slot] = []
        self._taken = 0
        self._closed = False

    def take(self, memory: Memory, timeout_seconds: float) -> Slot:
        """An arena of that kind that nobody uses; the one given back last, since its views may fit.

        Raises StagingTimeoutError when all are in use for so long.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._taken < self._limit, timeout_seconds):
                raise StagingTimeoutError(
                    f"{self._taken} staged saves were not written within {timeout_seconds:g} s, and hold all "
                    "host memory that this stager may use; wait for their futures, save less often, or "
                    "give it more arenas",
                    timeout_seconds=timeout_seconds,
                )
            if self._closed:
                raise StagingError("this stager is closed")
            self._taken += 1
            slot = self._free.pop() if self._free else None
        try:
            return Slot.of(slot, memory)
        except BaseException:
            with self._changed:
                self._taken -= 1
            raise

    def give_back(self, slot: Slot) -> None:
        """The save that had ``slot`` has ended."""
        with self._changed:
            self._taken -= 1
            if self._closed:
                slot.close()
            else:
                self._free.append(slot)
            self._changed.notify_all()

    def giving_back(self, slot: Slot) -> Callable[[], None]:
        """`give_back` that does it once, however often it is called."""
        lock = threading.Lock()

        def once() -> None:
            if lock.acquire(blocking=False):
                self.give_back(slot)

        return once

    def close(self) -> None:
        """Let go of the arenas; those in use follow when they are given back. Idempotent."""
        with self._changed:
            self._closed = True
            for slot in self._free:
                slot.close()
            self._free.clear()
            self._changed.notify_all()
