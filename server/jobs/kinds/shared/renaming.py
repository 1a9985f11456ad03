"""Regular expressions that came over the network, applied to names for a bounded time.

An expression such as ``(a+)+$`` takes twice as long with each letter that nearly matches. In a subprocess the
processor time that all of them together take is counted, and what exceeds it is interrupted: `re` looks for
signals while it searches.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from types import FrameType
from typing import Final

from dcp.planners.load.selection import renamer
from dcp.storage.errors import PlanError

__all__ = ["BoundedRename"]

LIMIT_SECONDS: Final = 10.0
"""Of the processor; a million names through a dozen plain expressions take a few."""

_MAX_NAME_CHARACTERS: Final = 16_384


class _TooSlowError(Exception):
    pass


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise _TooSlowError


class BoundedRename:
    """A function for `dcp.convert`'s ``rename``: ``expressions`` in order, each on what those before it gave.

    For the main thread of a process that does nothing else. Raises PlanError, which names the expression,
    where all calls together take more than `LIMIT_SECONDS`, or a name grows beyond all measure.
    """

    def __init__(self, expressions: Mapping[str, str]) -> None:
        self._steps = [(pattern, renamer({pattern: text})) for pattern, text in expressions.items()]
        self._left_seconds = LIMIT_SECONDS

    def __call__(self, name: str) -> str:
        """The new name."""
        before = signal.signal(signal.SIGVTALRM, _interrupt)
        begun = time.process_time()
        try:
            signal.setitimer(signal.ITIMER_VIRTUAL, max(self._left_seconds, 1e-3))
            try:
                return self._applied(name)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        finally:
            signal.signal(signal.SIGVTALRM, before)
            self._left_seconds -= time.process_time() - begun

    def _applied(self, name: str) -> str:
        new = name
        for pattern, rename in self._steps:
            try:
                new = new if rename is None else rename(new)
            except _TooSlowError:
                raise PlanError(
                    f"rename: {pattern[:100]!r} is at work on {name[:100]!r} when the "
                    f"{LIMIT_SECONDS:g} s are over that all names may take; write it without a repeat "
                    "within a repeat, such as in (a+)+",
                    fqn=name,
                ) from None
            if len(new) > _MAX_NAME_CHARACTERS:
                raise PlanError(
                    f"rename: {pattern[:100]!r} makes more than {_MAX_NAME_CHARACTERS} characters "
                    f"of {name[:100]!r}",
                    fqn=name,
                )
        return new
