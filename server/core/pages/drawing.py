"""Small pictures without scripts: lines and bars as coordinates for SVG templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_GONE: Final = frozenset({"deleted", "purged"})
_LOST: Final = frozenset({"unreadable", "vanished"})
_FLAG_ROOM: Final = 9.0
"""Percentage of the width used by a flag with its name."""


def polyline(values: Sequence[float], width: float = 100, height: float = 24) -> str:
    """Return the ``points`` of a line from left to right, with the maximum at the top."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    step = width / max(1, len(values) - 1)
    inner = height - 4
    heights = [f"{2 + inner * (1 - (value - low) / span):.1f}" for value in values]
    if len(heights) == 1:
        return f"0,{heights[0]} {width:g},{heights[0]}"
    return " ".join(f"{index * step:.1f},{y}" for index, y in enumerate(heights))


@dataclass(frozen=True, slots=True)
class Bar:
    """Neighbouring checkpoints: ``x``, ``middle`` and ``width`` in percent, ``height`` in percent of the
    maximum.

    ``kind``: good, plain, bad, open or gone. ``row``: the row of its flag, if an alias names one of them.
    """

    x: float
    middle: float
    width: float
    height: float
    kind: str
    row: int
    of: Any


@dataclass(frozen=True, slots=True)
class Timeline:
    """Bars by step, with gaps for missing steps. ``kinds`` are the kinds in use."""

    bars: tuple[Bar, ...]
    kinds: frozenset[str]
    first_step: int
    last_step: int


def timeline(bins: Sequence[Any]) -> Timeline | None:
    """Return the picture of the bins of a run timeline; None without bins."""
    if not bins:
        return None
    first, last = bins[0].first_step, bins[-1].last_step
    span = (last - first) or 1
    width = max(0.25, min(2.5, 70 / len(bins)))
    largest = max((one.bytes.mean for one in bins if one.bytes), default=0) or 1
    bars: list[Bar] = []
    ends = [-_FLAG_ROOM, -_FLAG_ROOM]  # ends of the last flags in each row
    for one in bins:
        x = (100 - width) * ((one.first_step + one.last_step) / 2 - first) / span
        height = 100 * one.bytes.mean / largest if one.bytes else 30
        middle = round(x + width / 2, 2)
        row = _row_of_flag(middle, ends) if one.aliases else -1
        bars.append(Bar(round(x, 2), middle, round(width, 2), round(max(height, 5)), _kind(one), row, one))
    return Timeline(tuple(bars), frozenset(bar.kind for bar in bars), first, last)


def _row_of_flag(middle: float, ends: list[float]) -> int:
    """Return a free row, so no name covers the line of another flag.

    On the left half names begin at their lines; on the right half they end there.
    """
    first = 0 if middle < 50 else 1
    row = first if middle >= ends[first] + _FLAG_ROOM or ends[first] <= ends[1 - first] else 1 - first
    ends[row] = middle
    return row


def _kind(one: Any) -> str:
    """Return the worst kind of a bin."""
    states = set(one.states)
    if one.verifications.get("damaged") or states & _LOST:
        return "bad"
    if states <= _GONE:
        return "gone"
    if "incomplete" in states:
        return "open"
    good = one.verifications.get("good", 0)
    return "good" if good and good == one.states.get("committed") else "plain"
