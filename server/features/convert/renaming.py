"""Renames with regular expressions from requests, for a bounded time.

An expression such as ``(a+)+$`` takes twice as long with each letter that nearly matches. In a subprocess the
processor time that all of them together take is counted, and what exceeds it is interrupted: `re` looks for
signals while it searches.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Final

from dcp.planners.load.selection import renamer
from dcp.storage.errors import PlanError

__all__ = ["BoundedRename", "check_sets"]

LIMIT_SECONDS: Final = 10.0
"""Processor time; a million names through a dozen plain expressions take a few seconds."""

_MAX_NAME_CHARACTERS: Final = 16_384
_MAX_IN_SETS: Final = 1 << 21
"""Characters in the ranges of all expressions together. `re` goes through each when it compiles them, some
ten million a second; all that there are are a million."""

_TOKEN: Final = re.compile(
    r"\\x([0-9a-fA-F]{2})|\\u([0-9a-fA-F]{4})|\\U([0-9a-fA-F]{8})|\\([0-7]{1,3})|\\N\{[^}]*\}|\\.|.",
    re.DOTALL,
)


def check_sets(expressions: Iterable[str]) -> None:
    """Raise ValueError where ``expressions`` take long to compile, for the sets of characters in them."""
    if sum(map(_characters_in_ranges, expressions)) > _MAX_IN_SETS:
        raise ValueError(
            f"rename: the ranges in sets of characters, such as [a-z], have more than {_MAX_IN_SETS:,} "
            r"characters together; \W, or [^...] with what is not meant, is shorter"
        )


def _characters_in_ranges(expression: str) -> int:
    """At least as many as there are, whatever is before and after a hyphen, be it in a set or not."""
    tokens = list(_TOKEN.finditer(expression))
    return sum(
        max(0, _last_code(after) - _first_code(before) + 1)
        for before, hyphen, after in zip(tokens, tokens[1:], tokens[2:], strict=False)
        if hyphen[0] == "-"
    )


def _code(token: re.Match[str]) -> int | None:
    """None for a name, which may be of any character."""
    x, u, long, octal = token.groups()
    if octal is not None:
        return int(octal, 8)
    digits = x or u or long
    if digits is not None:
        return int(digits, 16)
    return None if token[0].startswith(r"\N") else ord(token[0][-1])


def _first_code(token: re.Match[str]) -> int:
    code = _code(token)
    return 0 if code is None else code


def _last_code(token: re.Match[str]) -> int:
    code = _code(token)
    return sys.maxunicode if code is None else min(code, sys.maxunicode)


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
