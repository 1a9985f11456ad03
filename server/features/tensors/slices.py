"""Slices of a tensor as heat maps on a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from dcp.server.core.ask import Ask
from dcp.server.core.problems import ProblemError, UnprocessableError
from dcp.server.features.tensors import GridValue, TensorGrid, feature, parse_slices
from dcp.server.features.tensors.page import NamedDep, NamedTensor

_CELLS: Final = 16
_LEVELS: Final = 10
"""Colours are levels from 0 (the minimum) over 5 (zero) to this (the maximum)."""


@dataclass(frozen=True, slots=True)
class HeatCell:
    """A cell of a heat map; ``level`` None: without a finite value."""

    value: float | None
    level: int | None
    nonfinite: int


@dataclass(frozen=True, slots=True)
class Span:
    """The elements that a row or column of cells covers: from ``begin`` to before ``end``."""

    begin: int
    end: int

    @property
    def part(self) -> str:
        """The span as a part of a slice."""
        return f"{self.begin}:{self.end}"


@dataclass(frozen=True, slots=True)
class Heat:
    """Rows of cells; ``scale`` is the magnitude at which the colours end."""

    rows: tuple[tuple[HeatCell, ...], ...]
    scale: float
    nonfinite: int
    has_negative: bool


@feature.page("/checkpoints/{checkpoint_id}/tensors/slice", "slice.html")
def slice_page(named: NamedDep, ask: Ask, value: GridValue = "mean") -> dict[str, Any]:
    """Return a matrix of the tensor as coloured cells; ``d0``, ``d1`` and so on are the parts of the
    slice."""
    shape = named.of.shape
    usual = _default_parts(shape)
    parts = [ask.request.query_params.get(f"d{at}", part) for at, part in enumerate(usual)]
    grid, fault = None, None
    try:
        grid = _grid(named, parts)
    except ProblemError as error:
        if error.status != UnprocessableError.status:
            raise
        fault = error.detail
    query = {"fqn": named.fqn, **({"slice": ",".join(parts)} if parts else {})}
    path = f"/api/v1/checkpoints/{named.found.id}/tensors/grid"
    return {
        "twin": f"{path}?{urlencode({**query, 'value': value})}",
        "named": named,
        "found": named.found,
        "tensor": named.of,
        "dims": parts,
        "is_zoomed": parts != usual,
        "value": value,
        "grid": grid,
        "heat": None if grid is None else _heat_of(grid, value),
        "spans": [] if grid is None else _spans_of(parts, shape, (grid.rows, grid.columns)),
        "fault": fault,
        "cells": f"{path}?" + urlencode([*query.items(), ("value", value), ("value", "nonfinite")]),
    }


def _grid(named: NamedTensor, parts: list[str]) -> TensorGrid:
    from dcp.server.features.tensors.values import tensor_grid  # only here, as all that reads tensors

    slices = parse_slices(",".join(parts))
    with named.readable.problems():
        return tensor_grid(named.readable.opened, named.of.fqn, slices, rows=_CELLS, columns=_CELLS)


def _heat_of(grid: TensorGrid, value: GridValue) -> Heat:
    """Return the heat map of one of the values of a grid."""
    values = getattr(grid, value)
    known = [one for one in values if one is not None]
    scale = max(map(abs, known), default=0.0)
    cells = [
        HeatCell(one, _level(one, scale), wrong) for one, wrong in zip(values, grid.nonfinite, strict=True)
    ]
    rows = tuple(
        tuple(cells[begin : begin + grid.columns]) for begin in range(0, len(cells), max(1, grid.columns))
    )
    return Heat(rows, scale, sum(grid.nonfinite), any(one < 0 for one in known))


def _level(value: float | None, scale: float) -> int | None:
    if value is None:
        return None
    middle = _LEVELS // 2
    return middle + round(middle * value / scale) if scale and math.isfinite(scale) else middle


def _default_parts(shape: Sequence[int]) -> list[str]:
    """Return the two longest dimensions whole, the first index of each other one."""
    longest = sorted(range(len(shape)), key=lambda at: (-shape[at], at))[:2]
    return [":" if at in longest else "0" for at in range(len(shape))]


def _spans_of(
    parts: Sequence[str], shape: Sequence[int], counts: Sequence[int]
) -> list[tuple[int, list[Span]]]:
    """Return the dimensions that ``parts`` leave, with the elements that each of the ``counts`` cells along
    them covers; nothing where a part has a step."""
    left = [at for at, part in enumerate(parts) if ":" in part]
    counts = counts[-len(left) :] if left else ()
    found = []
    for at, count in zip(left, counts, strict=True):
        ends = _ends(parts[at], shape[at])
        if ends is None:
            return []
        begin, size = ends[0], ends[1] - ends[0]
        edges = [begin + place * size // count for place in range(count)] + [ends[1]]
        found.append((at, [Span(edges[place], edges[place + 1]) for place in range(count)]))
    return found


def _ends(part: str, size: int) -> tuple[int, int] | None:
    pieces = part.split(":")
    if len(pieces) > 2 and pieces[2].strip() not in ("", "1"):
        return None
    try:
        begin, end, _ = slice(*(int(piece) if piece.strip() else None for piece in pieces[:2])).indices(size)
    except ValueError:
        return None
    return begin, max(begin, end)
