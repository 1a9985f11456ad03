"""When a training loop saves: every so many steps, every so many seconds, at the first step and at the last.

Pure: the clock and what the ranks agreed on are given, so that the same calls give the same answers on all
ranks.
"""

from __future__ import annotations

from typing import Literal

from dcp.storage.errors import OptionError

__all__ = ["Reason", "Schedule"]

Reason = Literal["steps", "seconds", "first", "last", "call", "force", "stop"]
"""Why a step is saved: its interval, its place in the run, no interval at all (every call saves), or because
it was asked for."""


class Schedule:
    """Decides which steps are due.

    With ``every_steps`` a step is due when it is a multiple of it, or when a multiple was passed since the
    last save (a loop need not ask at each step). With ``every_seconds`` a step is due when the ranks agreed
    that so much time has passed since the last save. Both: whichever comes first. Neither: every step that is
    asked for. ``save_first``: the first step of a run that was not restored, too.
    """

    def __init__(
        self, *, every_steps: int | None, every_seconds: float | None, save_first: bool, now_seconds: float
    ) -> None:
        if every_steps is not None and every_steps < 1:
            raise OptionError(f"every_steps must be at least 1, not {every_steps}")
        if every_seconds is not None and not every_seconds > 0:
            raise OptionError(f"every_seconds must be more than 0, not {every_seconds}")
        self._every_steps = every_steps
        self._every_seconds = every_seconds
        self._save_first = save_first
        self._since_seconds = now_seconds
        self._saved: int | None = None
        self._skipped: int | None = None
        self._repeated: int | None = None
        self._restored = False
        self._first: int | None = None
        self._step: int | None = None
        self._time_is_up = False

    @property
    def saves_each(self) -> bool:
        """Whether every step is due that is asked for."""
        return self._every_steps is None and self._every_seconds is None

    def time_is_up(self, now_seconds: float) -> bool:
        """Whether ``every_seconds`` have passed since the last save; one rank's clock decides for all."""
        return self._every_seconds is not None and now_seconds - self._since_seconds >= self._every_seconds

    def begin(self, step: int, *, time_is_up: bool) -> None:
        """A new step, and whether the ranks agreed that it is time for a save."""
        if self._first is None:
            self._first = step
        self._step, self._time_is_up = step, time_is_up

    def reason(self, step: int, *, last: bool = False, stop: bool = False) -> Reason | None:
        """Why ``step``, which was begun, has to be saved; None if it has not, or was already.

        ``stop``: the run is to end after it.
        """
        if step == self._saved:
            return "last" if last and step == self._skipped else None
        if stop:
            return "stop"
        if last:
            return "last"
        if self._save_first and not self._restored and step == self._first:
            return "first"
        if self.saves_each:
            return "call"
        if self._every_steps is not None and self._passed_multiple(step, self._every_steps):
            return "steps"
        return "seconds" if self._time_is_up and step == self._step else None

    def is_repeated(self, step: int) -> bool:
        """Whether ``step`` was saved or restored already, and not left out on purpose; true once a step."""
        if step != self._saved or step == self._skipped or step == self._repeated:
            return False
        self._repeated = step
        return True

    def _passed_multiple(self, step: int, every: int) -> bool:
        base = self._saved if self._saved is not None else self._first
        if base is None or base == self._first == step or step < base:  # steps may begin anew
            return step > 0 and step % every == 0
        return step // every > base // every

    def saved(self, step: int, now_seconds: float) -> None:
        """``step`` is being saved: the intervals count from here."""
        self._saved, self._since_seconds, self._time_is_up = step, now_seconds, False
        self._skipped = None

    def skipped(self, step: int, now_seconds: float) -> None:
        """``step`` was left out on purpose, as if it had been saved; as the last one it still may be."""
        self.saved(step, now_seconds)
        self._skipped = step

    def restored(self, step: int, now_seconds: float) -> None:
        """The run goes on from ``step``."""
        self.saved(step, now_seconds)
        self._restored = True
