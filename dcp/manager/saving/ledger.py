"""Which saves of a manager are under way, and which have failed and are still to be told."""

from __future__ import annotations

import math
import threading
from collections import deque

from dcp.background.future import SaveFuture
from dcp.storage.errors import CheckpointError, CollectiveTimeoutError, CorruptCheckpointError, PlanError

__all__ = ["SaveLedger"]


_REMEMBERED = 3
_PHASES = ("blocked", "save")
"""What of a save follows each other: the copy of the state, and all from there to the commit."""


class SaveLedger:
    """Filled by the threads that carry out saves, asked by the training thread.

    ``keep_failures``: the last failure is kept until it is raised; else only one that every save will hit,
    and the others are counted.
    """

    def __init__(self, *, keep_failures: bool) -> None:
        self._keep_failures = keep_failures
        self._changed = threading.Condition()
        self._running: dict[SaveFuture, int] = {}
        self._failures = 0
        self._closing = False
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._failure: BaseException | None = None
        self._untold: BaseException | None = None
        self._has_committed = False
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
            is_committed = error is None or (isinstance(error, CheckpointError) and error.committed)
            self._has_committed |= is_committed
            if error is not None and (self._closing or not future.cancelled()):
                self._failures += not is_committed
                self._untold = None if future.cancelled() else error
                if self._keep_failures or _is_lasting(error):
                    self._failure = error
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
                self._untold = None
        if error is not None:
            raise error

    def raise_unsaved(self) -> None:
        """Raise CheckpointError where saves failed, the last of them was not raised, and none committed."""
        with self._changed:
            error, self._untold = self._untold, None
        if error is not None and not self._has_committed:
            raise CheckpointError(
                f"nothing was saved: no save of this manager was committed, and {self._failures} failed, the "
                f"last one by: {error}"
            ) from error

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


def _is_lasting(error: BaseException) -> bool:
    """Whether the saves to come will fail as well: an entry cannot be saved as it is, or the ranks do not
    come together any more."""
    if isinstance(error, PlanError):
        return bool(error.fqn or error.fqns or error.problems)
    return isinstance(error, CollectiveTimeoutError)
