"""Which saves of a manager are under way, and which have failed and are still to be told."""

from __future__ import annotations

import math
import threading
from collections import deque

from dcp.background.future import SaveFuture
from dcp.storage.errors import CheckpointError, CorruptCheckpointError

__all__ = ["SaveLedger"]


_REMEMBERED = 3
_PHASES = ("blocked", "save")
"""What of a save follows each other: the copy of the state, and all from there to the commit."""


class SaveLedger:
    """Filled by the threads that carry out saves, asked by the training thread.

    ``keep_failures``: the last failure is kept until it is raised; else they are only counted.
    """

    def __init__(self, *, keep_failures: bool) -> None:
        self._keep_failures = keep_failures
        self._changed = threading.Condition()
        self._running: dict[SaveFuture, int] = {}
        self._failures = 0
        self._closing = False
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._failure: BaseException | None = None
        self._damage: CorruptCheckpointError | None = None

    # -- written ---------------------------------------------------------------------------------------------

    def begun(self, step: int, future: SaveFuture) -> None:
        """The save of ``step`` is under way."""
        with self._changed:
            self._running[future] = step

    def ended(self, future: SaveFuture, error: BaseException | None) -> None:
        """It is not any more, and everything that follows at once has happened. One that was called off has
        not failed, unless it was late when its manager closed."""
        with self._changed:
            if error is None and future.outcome is not None:
                self._seconds.append(sum(future.outcome.seconds.get(name, 0.0) for name in _PHASES))
            if error is not None and (self._closing or not future.cancelled()):
                self._failures += 1
                self._failure = error if self._keep_failures else None
            self._running.pop(future, None)
            self._changed.notify_all()

    def closing(self) -> None:
        """No save begins any more; those that are called off now took too long."""
        self._closing = True

    def damaged(self, error: CorruptCheckpointError) -> None:
        """A committed checkpoint was found damaged, by this rank."""
        with self._changed:
            self._failures += 1
            self._damage = error if self._keep_failures else None

    # -- asked -----------------------------------------------------------------------------------------------

    @property
    def failures(self) -> int:
        """Saves that failed, and checkpoints found damaged."""
        with self._changed:
            return self._failures

    @property
    def expected_seconds(self) -> float:
        """How long a save may take, as the slowest of the last ones did; infinite where none has ended."""
        with self._changed:
            return max(self._seconds, default=math.inf)

    @property
    def has_failure(self) -> bool:
        """Whether there is something that is still to be raised."""
        with self._changed:
            return self._failure is not None or self._damage is not None

    def running(self) -> list[int]:
        """Steps whose saves are under way."""
        with self._changed:
            return sorted(self._running.values())

    def raise_failure(self, *, damage: bool) -> None:
        """Raise what is kept, once.

        All ranks see a save fail. ``damage``, which the coordinator alone sees, is raised only where the
        others know of it.
        """
        with self._changed:
            error, self._failure = self._failure, None
            if damage:
                found, self._damage = self._damage, None
                error = error if error is not None else found
        if error is not None:
            raise error

    def wait(self, timeout_seconds: float | None) -> bool:
        """Whether no save is under way any more, within ``timeout_seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_seconds)

    def settle(self, timeout_seconds: float) -> None:
        """As `wait`. Raises CheckpointError where it is not so."""
        if not self.wait(timeout_seconds):
            steps = ", ".join(map(str, self.running()))
            raise CheckpointError(
                f"the save of step {steps} has not ended within {timeout_seconds:g} s: the storage hangs, or "
                "timeout_seconds is too short for it"
            )
