"""A slice of a tensor as coloured cells, and which elements each of them is of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = ["Heat", "HeatCell", "Span", "default_parts", "heat_of", "spans_of"]

_LEVELS: Final = 10
"""Colours are levels from 0 (the least) over 5 (zero) to this (the greatest)."""


@dataclass(frozen=True, slots=True)
class HeatCell:
    """``level`` None: it has no finite value."""

    value: float | None
    level: int | None
    nonfinite: int


@dataclass(frozen=True, slots=True)
class Span:
    """One row or column of cells: the elements from ``begin`` to before ``end`` of a dimension."""

    begin: int
    end: int

    @property
    def part(self) -> str:
        """As a slice has it."""
        return f"{self.begin}:{self.end}"


@dataclass(frozen=True, slots=True)
class Heat:
    """Rows of cells; ``scale`` is the magnitude that the colours end with."""

    rows: tuple[tuple[HeatCell, ...], ...]
    scale: float
    nonfinite: int
    has_negative: bool


def heat_of(grid: Any, value: str) -> Heat:
    """The picture of a grid as the API has it, by one of its values."""
    values = getattr(grid, value)
    known = [abs(one) for one in values if one is not None]
    scale = max(known, default=0.0)
    cells = [
        HeatCell(one, _level(one, scale), wrong) for one, wrong in zip(values, grid.nonfinite, strict=True)
    ]
    rows = tuple(
        tuple(cells[begin : begin + grid.columns]) for begin in range(0, len(cells), max(1, grid.columns))
    )
    has_negative = any(one is not None and one < 0 for one in values)
    return Heat(rows, scale, sum(grid.nonfinite), has_negative)


def _level(value: float | None, scale: float) -> int | None:
    if value is None:
        return None
    middle = _LEVELS // 2
    return middle + round(middle * value / scale) if scale and math.isfinite(scale) else middle


def default_parts(shape: Sequence[int]) -> list[str]:
    """The two longest dimensions whole, the first index of each other one."""
    longest = sorted(range(len(shape)), key=lambda at: (-shape[at], at))[:2]
    return [":" if at in longest else "0" for at in range(len(shape))]


def spans_of(
    parts: Sequence[str], shape: Sequence[int], counts: Sequence[int]
) -> list[tuple[int, list[Span]]]:
    """The dimensions that ``parts`` leave, and which elements each of the ``counts`` cells along them is of.

    Empty where a part says more than from where to where.
    """
    left = [at for at, part in enumerate(parts) if ":" in part]
    counts = counts[-len(left) :] if left else ()
    found = []
    for at, count in zip(left, counts, strict=True):
        begin, end = _ends(parts[at], shape[at])
        if begin is None or end is None:
            return []
        size = end - begin
        edges = [begin + place * size // count for place in range(count)] + [end]
        found.append((at, [Span(edges[place], edges[place + 1]) for place in range(count)]))
    return found


def _ends(part: str, size: int) -> tuple[int | None, int | None]:
    pieces = part.split(":")
    if len(pieces) > 2 and pieces[2].strip() not in ("", "1"):
        return None, None
    try:
        begin, end, _ = slice(*(int(piece) if piece.strip() else None for piece in pieces[:2])).indices(size)
    except ValueError:
        return None, None
    return begin, max(begin, end)
