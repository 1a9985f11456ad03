"""Pages of a tensor: values, chunks, optimizer states, values in other steps, and heat maps of slices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from itertools import islice
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Depends, Query

from dcp.server.catalog.filters import CheckpointFilter, Sort
from dcp.server.catalog.inputs import short_name
from dcp.server.catalog.listing import list_checkpoints, neighbour
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask, AskDep
from dcp.server.core.data.access import Readable
from dcp.server.core.pages.drawing import polyline
from dcp.server.core.problems import ProblemError, UnprocessableError
from dcp.server.features.checkpoints import Snippet
from dcp.server.features.shards import Chunk, ShardedTensor
from dcp.server.features.tensors import (
    LARGE,
    GridValue,
    MeasuredTensor,
    StatsKind,
    StatsParams,
    TensorGrid,
    feature,
    largest_of,
    mark_of,
)
from dcp.server.features.tensors.histograms import histogram_picture, linear_picture
from dcp.server.features.tensors.routes import kept_statistics, parse_slices
from dcp.server.records.checkpoints import Checkpoint, CheckpointDetail

_SMALL_BYTES: Final = 1 << 20
"""Bytes read for a page; larger content is loaded by a second request."""
_LARGE_BYTES: Final = 64 << 20
_MAX_GLOB: Final = 256
_CHUNKS: Final = 200
_MAX_BOXES: Final = 1024
"""More boxes cannot be distinguished, and make the page too large."""
_PANELS: Final = 4
_SMALL_COUNT: Final = 2_000
"""Maximum number of tensors for reading an index per step."""
_STEPS: Final = 24


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """Readable tensor. ``fqn``: its name in the catalog; ``of``: its chunks."""

    found: CheckpointDetail
    readable: Readable
    fqn: str
    row: int
    of: ShardedTensor

    @property
    def elements(self) -> int:
        """The elements of the whole tensor."""
        return math.prod(self.of.shape)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all chunks."""
        index = self.readable.opened.index
        chunks = index.chunks(self.row)
        return int(index.payload_lengths[chunks.start : chunks.stop].sum())

    @property
    def is_plain(self) -> bool:
        """True if the name contains no glob characters, and can be a filter."""
        return len(self.fqn) <= _MAX_GLOB and not any(sign in self.fqn for sign in "*?[")

    @property
    def twin(self) -> str:
        """Path of the JSON: statistics, or chunks for a tensor too large to read."""
        if self.stored_bytes <= _LARGE_BYTES or not self.is_plain:
            path, query = "tensors/statistics", {"fqn": self.fqn}
        else:
            path, query = "shards", {"glob": self.fqn}
        return f"/api/v1/checkpoints/{self.found.id}/{path}?{urlencode(query)}"

    def url(self, path: str = "", **query: str) -> str:
        """Return the path of the tensor's page, or of a page below."""
        return f"/checkpoints/{self.found.id}/tensors{path}?{urlencode({'fqn': self.fqn, **query})}"


def _named(
    checkpoint_id: IdPath, fqn: Annotated[str, Query(min_length=1, max_length=4096)], ask: AskDep
) -> NamedTensor:
    from dcp.server.features.shards.chunks import sharded_tensors  # imports numpy

    readable = ask.data.open(checkpoint_id)
    row = readable.opened.row(fqn)
    _, tensor = next(sharded_tensors(readable.opened.index, after_row=row - 1))
    return NamedTensor(readable.row, readable, short_name(tensor.fqn), row, tensor)


NamedDep = Annotated[NamedTensor, Depends(_named)]


def statistics_of(
    ask: Ask, readable: Readable, fqn: str, most_bytes: int, *, with_histogram: bool = False
) -> MeasuredTensor | None:
    """Return statistics from a job; without a job or histogram, read a tensor of at most ``most_bytes``. None
    for a larger tensor."""
    from dcp.server.features.tensors.values import tensor_statistics

    kept = kept_statistics(ask, readable.row.id, fqn)
    if kept is not None and not (with_histogram and (kept.statistics or {}).get("histogram") is None):
        return kept
    index = readable.opened.index
    row = readable.opened.row(fqn)
    if math.prod(index.shape(row)) * index.dtype(row).itemsize > most_bytes:
        return kept
    with readable.problems():
        return tensor_statistics(readable.opened, fqn)


@feature.page("/checkpoints/{checkpoint_id}/tensors", "tensor.html")
def tensor_page(named: NamedDep, ask: Ask, read: bool = False) -> dict[str, Any]:
    """Show the tensor; ``read`` also reads slow values."""
    found = named.found
    before, after = (
        ask.find(neighbour, found, ask.visible, is_next=is_next, tensor=named.fqn) if named.is_plain else None
        for is_next in (False, True)
    )
    return {
        "twin": named.twin,
        "named": named,
        "found": found,
        "tensor": named.of,
        "boxes": _boxes_of(named.of),
        "chunks": named.of.chunks[:_CHUNKS],
        "before": before,
        "after": after,
        "snippets": _snippets(named, ask),
        "is_readable": named.stored_bytes <= _LARGE_BYTES,
        "job": ask.last_job(StatsKind, StatsParams(checkpoint_id=found.id)),
        "large": LARGE,
        "read": read,
        **_values(named, ask, _LARGE_BYTES if read else _SMALL_BYTES),
    }


def _snippets(named: NamedTensor, ask: Ask) -> list[Snippet]:
    """Return code that loads only this tensor."""
    place, fqn = ask.place_of(named.found), named.of.fqn
    return [
        Snippet("As a tensor", f"import dcp\n\nstate = dcp.read({place!r}, only={escape(fqn)!r})"),
        Snippet(
            "From this catalog, as an array",
            "from dcp.server.client import Client\n\n"
            f"with Client({str(ask.request.base_url).rstrip('/')!r}) as client:\n"
            f"    array = client.tensor({named.found.id}, {fqn!r})",
        ),
    ]


def _values(named: NamedTensor, ask: Ask, most_bytes: int) -> dict[str, Any]:
    """Return statistics, histogram, and panels that are stored or small enough to read."""
    from dcp.server.features.tensors.optimizers import OptimizerStates, panel_of

    def values_of(fqn: str, may_read: bool) -> Mapping[str, Any] | None:
        try:
            found = statistics_of(ask, named.readable, fqn, most_bytes if may_read else 0)
        except ProblemError:
            return None
        return None if found is None else found.statistics

    statistics, fault = None, None
    try:
        statistics = statistics_of(ask, named.readable, named.of.fqn, most_bytes, with_histogram=True)
    except ProblemError as error:
        fault = error.detail
    histogram = None if statistics is None else (statistics.statistics or {}).get("histogram")
    with named.readable.problems():
        states = OptimizerStates(named.readable.opened.whole_index)
    return {
        "statistics": statistics,
        "fault": fault,
        "histogram": histogram_picture({named.of.fqn: histogram}),
        "linear": linear_picture(named.of.fqn, None if statistics is None else statistics.statistics),
        "mark": None if statistics is None else mark_of(statistics.dtype, statistics.statistics),
        "panels": [
            panel_of(kept, named.readable.opened.index, values_of)
            for kept in islice(states.beside(named.of.fqn), _PANELS)
        ],
        "is_state": states.is_state(named.of.fqn),
    }


# -- chunks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrawnBox:
    """A chunk, in per cent of width and height. All chunks of a rank have the same ``colour``."""

    x: float
    y: float
    width: float
    height: float
    colour: int
    of: Chunk


@dataclass(frozen=True, slots=True)
class BoxPicture:
    """Boxes over two ``dimensions``: down (None for one dimension) and across."""

    boxes: tuple[DrawnBox, ...]
    dimensions: tuple[int | None, int]


def _boxes_of(tensor: ShardedTensor) -> BoxPicture | None:
    """Return the chunks as boxes over the two sharded dimensions.

    None for more sharded dimensions, too many chunks, or a tensor without elements.
    """
    shape = tensor.shape
    if not shape or 0 in shape or tensor.chunk_count > _MAX_BOXES:
        return None
    cut = [at for at, size in enumerate(shape) if any(chunk.sizes[at] != size for chunk in tensor.chunks)]
    if len(cut) > 2:
        return None
    others = sorted((at for at in range(len(shape)) if at not in cut), key=lambda at: (-shape[at], at))
    chosen = sorted([*cut, *others][:2])
    down, across = (None, chosen[0]) if len(chosen) == 1 else (chosen[0], chosen[1])
    holders = {holder: place for place, holder in enumerate(dict.fromkeys(map(_holder, tensor.chunks)))}
    boxes = []
    for chunk in tensor.chunks:
        (x, width), (y, height) = _extent(chunk, shape, across), _extent(chunk, shape, down)
        boxes.append(DrawnBox(x, y, width, height, holders[_holder(chunk)] % 6, chunk))
    return BoxPicture(tuple(boxes), (down, across))


def _holder(chunk: Chunk) -> str | int:
    return chunk.file if chunk.rank is None else chunk.rank


def _extent(chunk: Chunk, shape: Sequence[int], dimension: int | None) -> tuple[float, float]:
    """Return the begin and length of a chunk along ``dimension``, in per cent."""
    if dimension is None:
        return 0.0, 100.0
    size = shape[dimension]
    return round(100 * chunk.offsets[dimension] / size, 3), round(100 * chunk.sizes[dimension] / size, 3)


# -- other steps ---------------------------------------------------------------------------------------------


@feature.page("/checkpoints/{checkpoint_id}/tensors/steps", "steps.html")
def steps_page(named: NamedDep, ask: Ask) -> dict[str, Any]:
    """Show the tensor in adjacent checkpoints, with known values."""
    rows: list[tuple[Checkpoint, Any, float | None, Any]] = []
    for one in _around(named, ask):
        found = _values_at(one, named, ask)
        values = None if found is None else found.statistics
        if found is None or values is None:
            rows.append((one, None, None, None))
        else:
            rows.append((one, values, largest_of(values), mark_of(found.dtype, values)))
    query = {"run_id": named.found.run_id, "tensor": named.fqn, "sort": "step"}
    known = [(values, largest) for _, values, largest, _ in rows if values is not None]
    return {
        "twin": f"/api/v1/checkpoints?{urlencode(query)}" if named.is_plain else named.twin,
        "named": named,
        "found": named.found,
        "rows": rows,
        "norms": polyline([values["norm"] for values, _ in known if values["norm"] is not None]),
        "largest": polyline([one for _, one in known if one is not None and math.isfinite(one)]),
        "known": len(known),
    }


def _values_at(one: Checkpoint, named: NamedTensor, ask: Ask) -> MeasuredTensor | None:
    """Return statistics from a job; for a small tensor in a small checkpoint, read the tensor."""
    if named.stored_bytes > _SMALL_BYTES or (named.found.tensor_count or 0) > _SMALL_COUNT:
        return kept_statistics(ask, one.id, named.of.fqn)
    try:
        return statistics_of(ask, ask.data.open(one.id), named.of.fqn, _SMALL_BYTES)
    except ProblemError:  # the page of that checkpoint shows the error
        return None


def _around(named: NamedTensor, ask: Ask) -> list[Checkpoint]:
    """Return adjacent checkpoints by step, including this checkpoint."""
    step = named.found.step
    if step is None or not named.is_plain:
        return [named.found]
    later = _listed(named, ask, "step", min_step=step)
    return [*_listed(named, ask, "-step", max_step=step - 1)[::-1], *later] if step else later


def _listed(named: NamedTensor, ask: Ask, order: str, **steps: int) -> list[Checkpoint]:
    wanted = CheckpointFilter(run_id=named.found.run_id, tensor=named.fqn, **steps)  # type: ignore[arg-type]
    sort = Sort.parse(order)
    return list(ask.find(list_checkpoints, wanted, sort, limit=_STEPS // 2, visible=ask.visible).items)


# -- slices --------------------------------------------------------------------------------------------------


_CELLS: Final = 16
_COLOURS: Final = 10
"""Largest colour level: 0 is the minimum, 5 is zero."""


@dataclass(frozen=True, slots=True)
class HeatCell:
    """A cell of a heat map; ``level`` None: without a finite value."""

    value: float | None
    level: int | None
    nonfinite: int


@dataclass(frozen=True, slots=True)
class Span:
    """Elements of a row or column of cells: from ``begin`` to before ``end``."""

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
    """Show a matrix of the tensor as coloured cells; ``d0``, ``d1``, ... select the slice."""
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
    from dcp.server.features.tensors.values import tensor_grid  # imports numpy

    slices = parse_slices(",".join(parts))
    with named.readable.problems():
        return tensor_grid(named.readable.opened, named.of.fqn, slices, rows=_CELLS, columns=_CELLS)


def _heat_of(grid: TensorGrid, value: GridValue) -> Heat:
    """Return the heat map of a value of the grid."""
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
    middle = _COLOURS // 2
    return middle + round(middle * value / scale) if scale and math.isfinite(scale) else middle


def _default_parts(shape: Sequence[int]) -> list[str]:
    """Return the two longest dimensions whole, and the first index of all others."""
    longest = sorted(range(len(shape)), key=lambda at: (-shape[at], at))[:2]
    return [":" if at in longest else "0" for at in range(len(shape))]


def _spans_of(
    parts: Sequence[str], shape: Sequence[int], counts: Sequence[int]
) -> list[tuple[int, list[Span]]]:
    """Return the dimensions left by ``parts``, with the elements of each of ``counts`` cells; empty for parts
    with a step."""
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
