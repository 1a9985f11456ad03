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

_PART: Final = re.compile(r"\{([A-Za-z_]\w*)(?::([^{}]*))?\}")
_NUMBER: Final = r"0|[1-9]\d{0,8}"


@dataclass(frozen=True)
class NamePattern:
    """A name, or many."""

    text: str

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, text: str) -> NamePattern:
        """OptionError for what is none."""
        found = cls(text)
        rest = _PART.sub("", text)
        if not text or "{" in rest or "}" in rest:
            raise OptionError(
                f"{text!r} is no name: a part that varies is {{part}}, {{part:a|b}} or {{part:*}}"
            )
        if len(set(found.parts)) < len(found.parts):
            raise OptionError(f"{text!r} has a part twice")
        return found

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that vary."""
        return tuple(part[1] for part in _PART.finditer(self.text))

    @cached_property
    def numbers(self) -> frozenset[str]:
        """Those that are numbers."""
        return frozenset(part[1] for part in _PART.finditer(self.text) if part[2] is None)

    def match(self, name: str) -> dict[str, str] | None:
        """The varying parts of ``name``; None if it is none of these."""
        if not name.startswith(self._head):
            return None
        found = self._regex.fullmatch(name)
        return found.groupdict() if found else None

    def format(self, parts: Mapping[str, str]) -> str:
        """The name with these parts. KeyError for one that is missing."""
        return _PART.sub(lambda part: parts[part[1]], self.text)

    @cached_property
    def _head(self) -> str:
        return self.text.split("{", 1)[0]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile("".join(self._pieces()))

    def _pieces(self) -> Iterator[str]:
        at = 0
        for part in _PART.finditer(self.text):
            yield re.escape(self.text[at : part.start()])
            words = part[2]
            if words is None:
                yield f"(?P<{part[1]}>{_NUMBER})"
            elif words == "*":
                yield f"(?P<{part[1]}>.+)"
            else:
                yield f"(?P<{part[1]}>{'|'.join(map(re.escape, words.split('|')))})"
            at = part.end()
        yield re.escape(self.text[at:])
