"""Heat map of the drift of a run: a row for one or several layers, a column for each pair of steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Literal

__all__ = ["DriftPicture", "DriftRow", "DriftValue", "drift_picture"]

DriftValue = Literal["relative_l2", "changed"]

_ROWS: Final = 64
_GROUPS: Final = 16
_LEVELS: Final = 8
_DECADES: Final = 4
"""Distances that are smaller than the maximum by more decades have the lowest level."""


@dataclass(frozen=True, slots=True)
class DriftRow:
    """Layers from ``first`` on, ``count`` of them, with the maximum of their values. ``y``: the row in
    the picture; a heading (``count`` 0) has no values."""

    y: int
    label: str
    name: str
    first: int
    count: int
    values: tuple[float | None, ...] = ()
    nonfinite: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class DriftPicture:
    """``paths``: the cells of each level, "l0" (nothing changed) to "l8", and those with NaN or infinity
    ("nan"), as one path each, a unit a cell. ``edges`` are the minimum values of the levels from l1 on.
    ``maximum`` and ``first_nonfinite``: row and column of the maximum, and of the first NaN or infinity."""

    rows: tuple[DriftRow, ...]
    height: int
    width: int
    paths: Mapping[str, str]
    edges: tuple[float, ...]
    maximum: tuple[DriftRow, int] | None
    first_nonfinite: tuple[DriftRow, int] | None


def drift_picture(
    layers: Sequence[Any], width: int, value: DriftValue, first: int = 0, count: int | None = None
) -> DriftPicture:
    """The picture of the layers of a `RunDrift` over ``width`` pairs of steps; of ``count`` layers from
    ``first`` on."""
    end = len(layers) if count is None else min(len(layers), first + count)
    rows = tuple(_rows(layers, range(min(first, end), end), value))
    edges = _edges([each for row in rows for each in row.values if each], value)
    cells = [
        (f"l{_level(each, edges)}", row, x)
        for row in rows
        for x, (each, wrong) in enumerate(zip(row.values, row.nonfinite, strict=True))
        if each is not None and (each or not wrong)  # a cell with NaN is not unchanged
    ]
    flags = [("nan", row, x) for row in rows for x, each in enumerate(row.nonfinite) if each]
    known = [(each, row, x) for row in rows for x, each in enumerate(row.values) if each]
    top = max(known, key=lambda one: one[0], default=None)
    first_flag = min(flags, key=lambda one: one[2], default=None)
    return DriftPicture(
        rows,
        len(rows),
        width,
        _paths(cells + flags),
        edges,
        top and (top[1], top[2]),
        first_flag and (first_flag[1], first_flag[2]),
    )


def _paths(cells: Iterable[tuple[str, DriftRow, int]]) -> dict[str, str]:
    found: dict[str, list[str]] = defaultdict(list)
    for kind, row, x in cells:
        found[kind].append(f"M{x} {row.y}h1v1h-1z")
    return {kind: "".join(parts) for kind, parts in sorted(found.items())}


# -- rows ----------------------------------------------------------------------------------------------------


def _rows(layers: Sequence[Any], places: range, value: DriftValue) -> Iterable[DriftRow]:
    """The rows, with headings where names have a common beginning, and bins within those."""
    groups = [
        (group, [*members]) for group, members in groupby(places, key=lambda at: _parted(layers[at].name)[0])
    ]
    has_headings = len(groups) <= min(_GROUPS, len(places) // 2)
    if not has_headings:
        groups = [("", [*places])] if len(places) else []
    size = -(-len(places) // _ROWS) or 1
    y = 0
    for group, members in groups:
        if has_headings and group:
            yield DriftRow(y, group, group, members[0], 0)
            y += 1
        for begin in range(0, len(members), size):
            yield _row(y, layers, members[begin : begin + size], value, is_short=has_headings)
            y += 1


def _parted(name: str) -> tuple[str, str]:
    before, _, last = name.rpartition(".")
    return before, last


def _row(
    y: int, layers: Sequence[Any], members: Sequence[int], value: DriftValue, *, is_short: bool
) -> DriftRow:
    some = [layers[at] for at in members]
    ends = [some[0].name, some[-1].name]
    name = ends[0] if len(some) == 1 else " \N{EN DASH} ".join(ends)
    label = " \N{EN DASH} ".join([_parted(one)[1] for one in ends][: len(some)]) if is_short else name
    return DriftRow(
        y,
        label,
        name,
        members[0],
        len(some),
        tuple(map(_maximum, zip(*(getattr(one, value) for one in some), strict=True))),
        tuple(map(_maximum, zip(*(one.nonfinite for one in some), strict=True))),
    )


def _maximum(values: Iterable[Any]) -> Any:
    return max((one for one in values if one is not None), default=None)


# -- levels --------------------------------------------------------------------------------------------------


def _edges(values: Sequence[float], value: DriftValue) -> tuple[float, ...]:
    """The lower ends of the levels: shares by equal parts, distances by equal factors."""
    if not values:
        return ()
    if value == "changed":
        return tuple(level / _LEVELS for level in range(_LEVELS))
    high = max(values)
    low = max(min(values), high / 10**_DECADES)
    factor = (high / low) ** (1 / _LEVELS)
    return tuple(low * factor**level for level in range(_LEVELS)) if factor > 1 else (low,)


def _level(value: float, edges: Sequence[float]) -> int:
    """The level of a value: 0 of no change, then those of ``edges`` from 1 on."""
    if not value or math.isnan(value):
        return 0
    return max(1, sum(value >= edge * (1 - 1e-9) for edge in edges))
