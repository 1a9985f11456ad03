"""Suggestions for misspelled names. Names consist of parts separated by dots, like state dict keys.

To handle 100,000 names in milliseconds, only names with mostly equal parts are compared as a whole.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Final

_COMPARED: Final = 2_000
"""Maximum number of texts compared letter by letter."""

_SHARED: Final = 2
"""Required length of a common prefix or suffix, and maximum difference in length, for larger sets of texts.
"""


def near_names(name: str, names: Iterable[str], *, most: int = 3) -> list[str]:
    """Return up to ``most`` of ``names`` similar to ``name``, most likely first.

    Candidates differ in the letters of one part, or in the leading parts.
    """
    candidates = [other for other in names if other != name]
    found = [*_alike_but_for_a_part(name, candidates), *_alike_at_the_end(name, candidates)]
    if not found:
        found = close_to(name, candidates, most=most)
    return list(dict.fromkeys(found))[:most]


def close_to(text: str, texts: Iterable[str], *, most: int = 3) -> list[str]:
    """Return up to ``most`` of ``texts`` with a spelling close to ``text``, ignoring case."""
    lowered = text.lower()
    originals: dict[str, str] = {}
    for other in texts:
        originals.setdefault(other.lower(), other)
    few: Sequence[str] = list(originals)
    if len(few) > _COMPARED:
        begin, end = lowered[:_SHARED], lowered[-_SHARED:]
        few = [
            other
            for other in few
            if abs(len(other) - len(lowered)) <= _SHARED and (other.startswith(begin) or other.endswith(end))
        ][:_COMPARED]
    return [originals[other] for other in difflib.get_close_matches(lowered, few, n=most)]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence that suggests ``names`` for ``name``; "" without a suggestion."""
    near = close_to(name, names, most=1)
    return f". Did you mean {near[0]!r}?" if near else ""


def listed(names: Sequence[str], *, most: int = 3, show: Callable[[str], str] = repr) -> str:
    """Return the first ``most`` of ``names`` as text, and the number of further names."""
    first = ", ".join(map(show, names[:most]))
    return first if len(names) <= most else f"{first} and {len(names) - most:,} more"


def _alike_but_for_a_part(name: str, names: Sequence[str]) -> list[str]:
    """Return names with one misspelled part and equal other parts."""
    parts = name.split(".")
    prefix, rest = "", list(names)
    for depth, part in enumerate(parts):
        tail = "".join(f".{other}" for other in parts[depth + 1 :])
        whole = {other[len(prefix) :]: other for other in rest if other.endswith(tail)}
        others = [key.removesuffix(tail) if tail else key for key in whole]
        close = close_to(part, (other for other in others if "." not in other))
        if close:
            return [whole[other + tail] for other in close]
        prefix = f"{prefix}{part}."
        rest = [other for other in rest if other.startswith(prefix)]
        if not rest:
            break
    return []


def _alike_at_the_end(name: str, names: Sequence[str]) -> list[str]:
    """Return names with other leading parts and the longest common end."""
    parts = name.split(".")
    for first in range(len(parts) - 1 if len(parts) > 1 else 1):
        suffix = ".".join(parts[first:])
        found = [other for other in names if other == suffix or other.endswith(f".{suffix}")]
        if found:
            return sorted(found, key=len)
    return []
