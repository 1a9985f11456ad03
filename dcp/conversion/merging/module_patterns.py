"""Regular expressions of peft's patterns, matched in time that the length of a name bounds.

Those of strangers may take `re` for ever. So what a configuration may say is a part of Python's: characters
and classes of them, groups, ``|``, ``^``, ``$``, and repetitions, which are not within each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from dcp.storage.errors import OptionError

__all__ = ["ModulePattern"]

_MAX_LENGTH: Final = 1000
_MAX_NESTING: Final = 20
_SPECIAL: Final = frozenset(".^$*+?{}[]()|\\")
_CLASS: Final = re.compile(r"\[\^?\]?(?:[^\[\]\\]|\\[dws.\\\[\]^-])*\]")
_COUNTS: Final = re.compile(r"\{(\d{1,4})(,(\d{0,4}))?\}")

_Ends = frozenset[int]
"""Places in a name where a match may be."""

_Matcher = Callable[[str, _Ends], _Ends]
"""From where a match may begin to where it may end."""


@dataclass(frozen=True)
class ModulePattern:
    """A pattern as peft has it: of the whole of a module's name, or of its end behind a dot."""

    text: str
    matcher: _Matcher

    @classmethod
    def parse(cls, text: str) -> ModulePattern:
        """Raise OptionError for expressions that are none of these."""
        if len(text) > _MAX_LENGTH:
            raise OptionError(f"a pattern of more than {_MAX_LENGTH} characters")
        parser = _Parser(text)
        matcher = parser.alternatives()
        if parser.at < len(text):
            raise parser.refused()
        return cls(text, matcher)

    def match(self, name: str) -> bool:
        """Return whether ``(.*\\.)?(text)$`` matches. OptionError for a name of more than 1,000
        characters."""
        if len(name) > _MAX_LENGTH:
            raise OptionError(f"{name:.80}... is longer than {_MAX_LENGTH} characters: no pattern is applied")
        begins = frozenset([0, *(at + 1 for at, character in enumerate(name) if character == ".")])
        return len(name) in self.matcher(name, begins)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self.at = 0
        self._depth = 0
        self._repeats = 0
        """The number of repetitions so far."""

    def refused(self) -> OptionError:
        """Return the error for the text at this place."""
        return OptionError(f"{self._text[self.at :][:40]!r} of the pattern {self._text!r:.80}")

    def alternatives(self) -> _Matcher:
        """Parse up to ``)`` or the end."""
        found = [self._sequence()]
        while self._takes("|"):
            found.append(self._sequence())
        return lambda name, at: frozenset().union(*(each(name, at) for each in found))

    def _takes(self, token: str) -> bool:
        is_there = self._text.startswith(token, self.at)
        self.at += len(token) * is_there
        return is_there

    def _sequence(self) -> _Matcher:
        parts = list(self._parts())

        def match(name: str, at: _Ends) -> _Ends:
            for part in parts:
                at = part(name, at) if at else at
            return at

        return match

    def _parts(self) -> Iterator[_Matcher]:
        while self.at < len(self._text) and self._text[self.at] not in "|)":
            if self._takes("^"):
                yield lambda name, at: at & {0}
            elif self._takes("$"):
                yield lambda name, at: at & {len(name)}
            else:
                before = self._repeats
                yield self._repeated(self._atom(), before)

    def _atom(self) -> _Matcher:
        if self._text.startswith("(", self.at):
            return self._group()
        return _of_characters(self._characters())

    def _group(self) -> _Matcher:
        begin = self.at
        _ = self._takes("(?:") or self._takes("(")
        self._depth += 1
        if self._depth > _MAX_NESTING or self._text.startswith("?", self.at):
            self.at = begin
            raise self.refused()
        inner = self.alternatives()
        if not self._takes(")"):
            raise self.refused()
        self._depth -= 1
        return inner

    def _characters(self) -> re.Pattern[str]:
        """Return one character, or any of several."""
        rest = self._text[self.at :]
        if found := _CLASS.match(rest):
            token = found[0]
        elif rest[0] == "\\" and len(rest) > 1 and (rest[1] in "dDwWsS" or not rest[1].isalnum()):
            token = rest[:2]
        elif rest[0] == "." or rest[0] not in _SPECIAL:
            token = rest[0]
        else:
            raise self.refused()
        try:
            pattern = re.compile(token if token == "." or len(token) > 1 else re.escape(token))
        except re.error:
            raise self.refused() from None
        self.at += len(token)
        return pattern

    def _repeated(self, atom: _Matcher, before: int) -> _Matcher:
        """Return the matcher of a repetition: the text says how often ``atom`` is there; ``before`` are
        repetitions before it."""
        begin = self.at
        low, high = 1, 1
        if self._takes("*"):
            low, high = 0, _MAX_LENGTH
        elif self._takes("+"):
            low, high = 1, _MAX_LENGTH
        elif self._takes("?"):
            low, high = 0, 1
        elif found := _COUNTS.match(self._text, self.at):
            self.at = found.end()
            low = int(found[1])
            high = low if found[2] is None else int(found[3] or max(low, _MAX_LENGTH))
        else:
            return atom
        _ = self._takes("?")  # as few as possible: what matches is the same
        if self._repeats > before or high < low or self._text[self.at : self.at + 1] in ("*", "+", "?", "{"):
            self.at = begin
            raise self.refused()
        self._repeats += 1
        return lambda name, at: _often(atom, name, at, low, high)


def _of_characters(pattern: re.Pattern[str]) -> _Matcher:
    return lambda name, at: frozenset(one + 1 for one in at if pattern.match(name, one))


def _often(atom: _Matcher, name: str, at: _Ends, low: int, high: int) -> _Ends:
    """Return the places where ``atom`` ends that is there ``low`` to ``high`` times."""
    found = at if low == 0 else frozenset()
    for count in range(1, min(high, low + len(name) + 1) + 1):
        at = atom(name, at)
        if not at or (count > low and at <= found):
            break
        found = found | at if count >= low else found
    return found
