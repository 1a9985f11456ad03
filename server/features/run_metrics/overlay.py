"""Chart of several runs: coordinates of lines, ticks, and labels for SVG in a template.

The table beside the chart has the same points; a script redraws the chart from the table, with values at the
pointer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from dcp.server.catalog.timeline import Series, SeriesPoint
from dcp.server.core.pages.formatting import seconds_text

Axis = Literal["step", "elapsed", "date"]
"""``elapsed``: time since the run's first checkpoint with the metric."""
Scale = Literal["linear", "log"]

_SIDE: Final = 1000.0
_TICKS: Final = 5
_LABEL_ROOM: Final = 5.0
"""Per cent of the height reserved for the letter at a line's end."""


@dataclass(frozen=True, slots=True)
class OverlayPoint:
    """Point, as in its row of the table."""

    of: SeriesPoint
    elapsed_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class OverlayLine:
    """Line of the run ``place``: ``points`` in a square of 1000, and the height in per cent of the run's
    letter at the line's end."""

    place: int
    points: str
    label: float


@dataclass(frozen=True, slots=True)
class Overlay:
    """Chart: ``x_ticks`` and ``y_ticks`` are positions in per cent, and texts. ``left_out`` counts points
    without a position on a logarithmic axis."""

    lines: tuple[OverlayLine, ...]
    rows: tuple[tuple[int, OverlayPoint], ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    left_out: int


def overlay(series: Sequence[Series | None], by: Axis, scale: Scale) -> Overlay | None:
    """Return the picture of the means of ``series`` over steps or time; None without a point."""
    rows = [(place, point) for place, one in enumerate(series) if one for point in _points(one)]
    if not rows:
        return None
    shown = [row for row in rows if scale == "linear" or row[1].of.mean > 0]
    across = _Range([_x(point, by) for _, point in shown])
    scaled: Callable[[float], float] = math.log10 if scale == "log" else float
    up = _Range([scaled(point.of.mean) for _, point in shown])
    lines: dict[int, list[tuple[float, float]]] = {}
    for place, point in shown:
        at = across.share(_x(point, by)), 1 - up.share(scaled(point.of.mean))
        lines.setdefault(place, []).append(at)
    labels = _labels({place: 100 * ends[-1][1] for place, ends in lines.items()})
    return Overlay(
        tuple(OverlayLine(place, _drawn(ends), labels[place]) for place, ends in lines.items()),
        tuple(rows),
        tuple(_x_ticks(across, by)) if shown else (),
        tuple(_y_ticks(up, scale)) if shown else (),
        len(rows) - len(shown),
    )


def _points(series: Series) -> Iterator[OverlayPoint]:
    begin = min((point.last_at.timestamp() for point in series.points), default=0.0)
    for point in series.points:
        seconds = point.last_at.timestamp()
        yield OverlayPoint(point, seconds - begin, seconds)


def _x(point: OverlayPoint, by: Axis) -> float:
    return {"step": float(point.of.last_step), "elapsed": point.elapsed_seconds, "date": point.seconds}[by]


class _Range:
    """Range between the smallest and the largest of some values."""

    def __init__(self, values: Sequence[float]) -> None:
        self.low, self.high = min(values, default=0.0), max(values, default=0.0)

    def share(self, value: float) -> float:
        """Return the position of a value from 0 to 1; the middle for equal values."""
        half = self.high / 2 - self.low / 2  # the difference may exceed the range of a float
        return (value / 2 - self.low / 2) / half if half else 0.5


def _drawn(points: Sequence[tuple[float, float]]) -> str:
    places = [(x * _SIDE, y * _SIDE) for x, y in points]
    if len(places) == 1:  # makes a single point visible as a dash
        (x, y), wide = places[0], _SIDE / 100
        places = [(max(0.0, x - wide), y), (min(_SIDE, x + wide), y)]
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _labels(wanted: Mapping[int, float]) -> dict[int, float]:
    """Return positions near the wanted positions without overlaps."""
    found: dict[int, float] = {}
    last = -_LABEL_ROOM
    order = sorted(wanted, key=lambda place: wanted[place])
    for place in order:
        last = found[place] = max(wanted[place], last + _LABEL_ROOM)
    low = 100 + _LABEL_ROOM / 2
    for place in reversed(order):
        low = found[place] = round(min(found[place], low - _LABEL_ROOM), 2)
    return found


# -- ticks ---------------------------------------------------------------------------------------------------


def _x_ticks(across: _Range, by: Axis) -> Iterator[tuple[float, str]]:
    if by == "step":
        yield from ((100 * across.share(at), f"{at:,.0f}") for at in _round(across, whole=True))
        return
    for part in range(_TICKS):
        at = across.low + (across.high - across.low) * part / (_TICKS - 1)
        text = seconds_text(at) if by == "elapsed" else f"{datetime.fromtimestamp(at, UTC):%m-%d %H:%M}"
        if part and across.low == across.high:
            return
        yield 100 * across.share(at), text


def _y_ticks(up: _Range, scale: Scale) -> Iterator[tuple[float, str]]:
    if scale == "linear":
        yield from ((100 - 100 * up.share(at), f"{at:.5g}") for at in _round(up))
        return
    powers = range(math.ceil(up.low), math.floor(up.high) + 1)
    if len(powers) >= 2:
        step = max(1, len(powers) // (_TICKS + 1))
        yield from ((100 - 100 * up.share(power), f"1e{power}") for power in powers[::step])
        return
    for part in range(_TICKS):
        at = up.low + (up.high - up.low) * part / (_TICKS - 1)
        if not (part and up.low == up.high):
            yield 100 - 100 * up.share(at), f"{10.0**at:.4g}"


def _round(of: _Range, *, whole: bool = False) -> Iterator[float]:
    """Return multiples of 1, 2, or 5 times a power of ten within the range, about `_TICKS` of them."""
    span = of.high - of.low
    if not 0 < span < math.inf:
        yield of.low
        return
    power = 10.0 ** math.floor(math.log10(span / _TICKS))
    size = next((power * part for part in (1, 2, 5) if span / (power * part) <= _TICKS), power * 10)
    size = max(size, 1.0) if whole else size
    number = math.ceil(of.low / size)
    while number * size <= of.high:
        yield number * size
        number += 1
