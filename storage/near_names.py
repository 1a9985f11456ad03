"""Suggest the names that a wrong name may stand for. Names have parts between dots, as keys of state dicts.

A hundred thousand names take some tens of milliseconds: they are compared as wholes only where most of their
parts are equal.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Final

_COMPARED: Final = 2_000
"""Texts that are compared letter by letter, a few microseconds each."""

_SHARED: Final = 2
"""Of more texts, those are compared that have so many letters at the beginning or the end in common with the
given one, and at most so many more or fewer in all."""


def near_names(name: str, names: Iterable[str], *, most: int = 3) -> list[str]:
    """Find up to ``most`` of ``names`` that are like ``name``, the most likely first.

    They differ in the letters of one part, or in the parts before the same last ones.
    """
    candidates = [other for other in names if other != name]
    found = [*_alike_but_for_a_part(name, candidates), *_alike_at_the_end(name, candidates)]
    if not found:
        found = close_to(name, candidates, most=most)
    return list(dict.fromkeys(found))[:most]


def close_to(text: str, texts: Iterable[str], *, most: int = 3) -> list[str]:
    """Find up to ``most`` of ``texts`` that are spelled almost as ``text``, case aside."""
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
    """Return the end of a sentence on ``name``: which of ``names`` it may stand for, if any."""
    near = close_to(name, names, most=1)
    return f". Did you mean {near[0]!r}?" if near else ""


def listed(names: Sequence[str], *, most: int = 3, show: Callable[[str], str] = repr) -> str:
    """List the first ``most`` of ``names``, and count the others."""
    first = ", ".join(map(show, names[:most]))
    return first if len(names) <= most else f"{first} and {len(names) - most:,} more"


def _alike_but_for_a_part(name: str, names: Sequence[str]) -> list[str]:
    """Find names of which one part is spelled almost as in ``name``, and all others are equal."""
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
    """Find names that begin otherwise and share the longest end with ``name``, in whole parts."""
    parts = name.split(".")
    for first in range(len(parts) - 1 if len(parts) > 1 else 1):
        suffix = ".".join(parts[first:])
        found = [other for other in names if other == suffix or other.endswith(f".{suffix}")]
        if found:
            return sorted(found, key=len)
    return []
