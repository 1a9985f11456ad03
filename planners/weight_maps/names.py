"""Names of tensors with parts that vary: ``layers.{layer}.w{part:1|3}.weight``.

``{layer}`` is a number, ``{part:a|b}`` one of the words, ``{rest:*}`` anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from dcp.storage.errors import OptionError

__all__ = ["NamePattern"]

_PART: Final = re.compile(r"\{([A-Za-z_]\w*)(?::([^{}]*))?\}", re.ASCII)
_NUMBER: Final = r"0|[1-9][0-9]{0,8}"
_HALF: Final = re.compile("[\ud800-\udfff]")
_MAX_PARTS: Final = 8
_MAX_ANY: Final = 2
"""Matching takes the length of a name to this power."""


@dataclass(frozen=True)
class NamePattern:
    """A name, or many."""

    text: str

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str) -> NamePattern:
        """Raise OptionError for what is none."""
        found = cls(text)
        rest = _PART.sub("", text)
        if not text or "{" in rest or "}" in rest:
            raise OptionError(
                f"{text!r} is no name: a part that varies is {{part}}, {{part:a|b}} or {{part:*}}"
            )
        if _HALF.search(text):
            raise OptionError(f"{text!r} is no name: half of a character cannot be written")
        if len(set(found.parts)) < len(found.parts):
            raise OptionError(f"{text!r} has a part twice")
        if len(found.parts) > _MAX_PARTS or len(found.parts_of_anything) > _MAX_ANY:
            raise OptionError(f"{text!r} has more than {_MAX_PARTS} parts, or {_MAX_ANY} of anything (*)")
        return found

    def below(self, prefix: str) -> NamePattern:
        """Return the same behind ``prefix``."""
        return NamePattern.parse(prefix + self.text)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that vary."""
        return tuple(part[1] for part in _PART.finditer(self.text))

    @cached_property
    def numbers(self) -> frozenset[str]:
        """The parts that are numbers."""
        return frozenset(part[1] for part in _PART.finditer(self.text) if part[2] is None)

    @cached_property
    def parts_of_anything(self) -> frozenset[str]:
        """The parts that are anything."""
        return frozenset(part[1] for part in _PART.finditer(self.text) if part[2] == "*")

    def match(self, name: str) -> dict[str, str] | None:
        """Return the varying parts of ``name``; None if it is none of these."""
        if not name.startswith(self._head):
            return None
        found = self._regex.fullmatch(name)
        return found.groupdict() if found else None

    def format(self, parts: Mapping[str, str]) -> str:
        """Return the name with these parts. KeyError for one that is missing."""
        return _PART.sub(lambda part: parts[part[1]], self.text)

    @cached_property
    def _head(self) -> str:
        return self.text.split("{", 1)[0]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile("".join(self._pieces()), re.DOTALL)

    def _pieces(self) -> Iterator[str]:
        """Yield parts of a regular expression in which numbers and words are taken once, the longest, so
        that no name takes long to tell."""
        at = 0
        for part in _PART.finditer(self.text):
            yield re.escape(self.text[at : part.start()])
            words = part[2]
            if words is None:
                yield f"(?P<{part[1]}>(?>{_NUMBER}))"
            elif words == "*":
                yield f"(?P<{part[1]}>.+)"
            else:
                own = sorted(words.split("|"), key=len, reverse=True)
                yield f"(?P<{part[1]}>(?>{'|'.join(map(re.escape, own))}))"
            at = part.end()
        yield re.escape(self.text[at:])
