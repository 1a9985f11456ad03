"""Histograms of tensors as bars, of several tensors on common edges; drawn by `tensors/histogram.html`."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_ROOM: Final = 18.0
"""Per cent of the width between ticks, enough for labels on a phone."""
_LEAST: Final = 0.8
"""Minimum height of a bar in per cent, so that a single outlier is visible."""


@dataclass(frozen=True, slots=True)
class HistogramBar:
    """Values from ``low`` to ``high``; infinite beyond float64. ``x`` is in per cent. By tensor: ``counts``,
    ``shares`` of finite values, and ``heights`` in per cent."""

    low: float
    high: float
    x: float
    counts: tuple[int, ...]
    shares: tuple[float, ...]
    heights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class HistogramPicture:
    """Bars of equal width from left to right. ``ticks``: some edges as positions in per cent, and values."""

    names: tuple[str, ...]
    bars: tuple[HistogramBar, ...]
    width: float
    ticks: tuple[tuple[float, float], ...]
    is_linear: bool = False


def histogram_picture(tensors: Mapping[str, Mapping[str, Any] | None]) -> HistogramPicture | None:
    """Return the picture of the ``histogram`` in the statistics of each tensor by label.

    Edges are powers of two, so bins of different histograms are merged, never divided. Skips tensors without
    a histogram; None if no tensor has a histogram.
    """
    known = {name: found for name, found in tensors.items() if found and found["counts"]}
    if not known:
        return None
    sides = [(_numbers(found["edges"]), found["counts"]) for found in known.values()]
    edges = _common_edges([own for own, _ in sides])
    columns = [_gathered(edges, own, counts) for own, counts in sides]
    return HistogramPicture(tuple(known), *_bars(edges, columns), _ticks(edges))


def linear_picture(name: str, statistics: Mapping[str, Any] | None) -> HistogramPicture | None:
    """Return the picture of the ``linear`` histogram of a tensor; None for older statistics without this
    histogram."""
    found = None if statistics is None else statistics.get("linear")
    if not found or not found["counts"]:
        return None
    edges = _numbers(found["edges"])
    last = len(edges) - 1
    places = dict.fromkeys([0, last, *([round(part * last / 4) for part in (1, 2, 3)])])
    if 0.0 in edges:
        places = dict.fromkeys([0, last, edges.index(0.0), *places])
    ticks = _with_room([(place, edges[place]) for place in places], last)
    return HistogramPicture((name,), *_bars(edges, [found["counts"]]), ticks, is_linear=True)


def _bars(edges: Sequence[float], columns: Sequence[Sequence[int]]) -> tuple[tuple[HistogramBar, ...], float]:
    """Return the bars of the counts of each tensor, and their width in per cent."""
    parts = [[count / (sum(column) or 1) for count in column] for column in columns]
    shares = list(zip(*parts, strict=True))
    highest = max(map(max, shares)) or 1.0
    width = 100 / len(shares)
    bars = tuple(
        HistogramBar(
            edges[place],
            edges[place + 1],
            round(place * width, 3),
            tuple(column[place] for column in columns),
            of_each,
            tuple(round(max(100 * one / highest, _LEAST if one else 0), 2) for one in of_each),
        )
        for place, of_each in enumerate(shares)
    )
    return bars, round(width, 3)


def _numbers(edges: Sequence[float | None]) -> list[float]:
    """Return numbers; JSON has no infinity, so null at an end means infinity."""
    last = len(edges) - 1
    infinite = {0: -math.inf, last: math.inf}
    return [infinite.get(place, math.nan) if edge is None else edge for place, edge in enumerate(edges)]


def _common_edges(of_each: Sequence[Sequence[float]]) -> list[float]:
    """Return edges that cut no bin, from lowest to highest. Zero is inside a bin, not between two."""
    candidates = sorted({edge for edges in of_each for edge in edges})
    found = [edge for edge in candidates if all(_is_free(edge, edges) for edges in of_each)]
    inner = [edge for edge in found[1:-1] if edge != 0]
    return [found[0], *inner, found[-1]]


def _is_free(edge: float, edges: Sequence[float]) -> bool:
    return edge in edges or not edges[0] < edge < edges[-1]


def _gathered(edges: Sequence[float], own: Sequence[float], counts: Sequence[int]) -> list[int]:
    """Merge ``counts`` between the edges ``own`` into the wider bins of ``edges``."""
    found = [0] * (len(edges) - 1)
    for place, count in enumerate(counts):
        low, high = own[place], own[place + 1]
        at = bisect_right(edges, low if math.isinf(low) else low + (high - low) / 2) - 1
        found[min(max(at, 0), len(found) - 1)] += count
    return found


def _ticks(edges: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Return both ends, zero, and the middle, as far as labels fit."""
    last = len(edges) - 1
    zero = bisect_right(edges, 0.0) - 1
    wanted: list[tuple[float, float]] = [(0, edges[0]), (last, edges[last])]
    if 0 <= zero < last and edges[zero] < 0 < edges[zero + 1]:
        wanted.append((zero + 0.5, 0.0))
    elif 0 < zero < last:
        wanted.append((zero, edges[zero]))
    if 0 < zero < last:
        wanted += [(place, edges[place]) for place in (zero // 2, last - (last - zero - 1) // 2)]
    return _with_room(wanted, last)


def _with_room(wanted: Iterable[tuple[float, float]], last: int) -> tuple[tuple[float, float], ...]:
    """Return positions in per cent with their values; earlier positions have priority."""
    ticks: list[tuple[float, float]] = []
    for place, value in wanted:
        at = round(100 * place / last, 2)
        if all(abs(at - other) >= _ROOM for other, _ in ticks):
            ticks.append((at, value))
    return tuple(sorted(ticks))
