"""Grids: matrices as cells with the mean, minimum and maximum of the elements they cover, read in blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.inspection.values.elements import decode, is_opaque
from dcp.inspection.values.statistics import statistics_of_row
from dcp.inspection.values.tensor_reading import Slices, TensorReader
from dcp.server.catalog.values import clean_text
from dcp.server.core.data.opening import OpenCheckpoint
from dcp.server.core.problems import UnprocessableError
from dcp.server.features.statistics.job import statistics_json
from dcp.server.records.drawings import TensorGrid, TensorStatistics

__all__ = ["tensor_grid", "tensor_statistics"]

_BLOCK: Final = 1 << 21
"""Elements that are read at a time."""
_READ: Final = 1 << 26
"""Elements that are read at most, or one of each cell: of more a part is."""
_MAX_BYTES: Final = 64 << 20
_BINS: Final = 64
_DIGITS: Final = 7
"""Of a number in an answer: as float32 has them."""

Floats = npt.NDArray[np.float64]


def tensor_grid(
    opened: OpenCheckpoint, fqn: str, slices: Slices | None = None, *, rows: int = 128, columns: int = 128
) -> TensorGrid:
    """The slice of a tensor, of two dimensions at most, as up to ``rows`` times ``columns`` cells.

    A vector is one row. Memory is bounded by some 128 MiB; where more than `_READ` elements would be read, a
    part of each cell is. Raises NotFoundError, UnprocessableError, PlanError and errors of reading.
    """
    row = opened.row(fqn)
    dtype = opened.index.dtype(row)
    if is_opaque(dtype) or "complex" in dtype.name:
        raise UnprocessableError(f"{dtype.name} has no values that can be ordered", field="fqn")
    with TensorReader(opened.store, opened.index) as reader:
        shape = reader.shape_of(row, slices)
        if len(shape) > 2:
            taken = ", ".join([":", ":", *["0"] * (len(shape) - 2)])
            raise UnprocessableError(
                f"{len(shape)} dimensions are left; give a slice that leaves two, such as {taken}",
                field="slice",
            )
        height, width = shape if len(shape) == 2 else (1, math.prod(shape))
        grid = _Grid.of(height, width, min(rows, height), min(columns, width))
        for across, along in grid.blocks():
            part = [across, along][2 - len(shape) :]
            array = decode(reader.read(row, slices, part), dtype)
            size = (across.stop - across.start, along.stop - along.start)
            grid.add(across.start, along.start, array.reshape(size))
    return TensorGrid(
        clean_text(fqn),
        dtype.name,
        (height, width),
        len(grid.row_starts),
        len(grid.column_starts),
        grid.read < height * width,
        grid.read,
        **grid.columns(),
    )


def tensor_statistics(opened: OpenCheckpoint, fqn: str) -> TensorStatistics:
    """The statistics of a tensor of up to 64 MiB, all of which is read. Raises NotFoundError,
    UnprocessableError for a larger one, and errors of reading."""
    row = opened.row(fqn)
    dtype, shape = opened.index.dtype(row), opened.index.shape(row)
    if math.prod(shape) * dtype.itemsize > _MAX_BYTES:
        raise UnprocessableError(
            f"{fqn[:200]!r} is too large to be read at once: have a job of the kind stats compute them",
            field="fqn",
        )
    with TensorReader(opened.store, opened.index, verify="full") as reader:
        found = statistics_of_row(reader, row, bins=_BINS)
    return TensorStatistics(
        clean_text(fqn), dtype.name, shape, statistics_json(found, histogram=True), is_kept=False
    )


@dataclass(slots=True)
class _Grid:
    height: int
    width: int
    row_starts: npt.NDArray[np.int64]
    column_starts: npt.NDArray[np.int64]
    sums: Floats
    counts: npt.NDArray[np.int64]
    least: Floats
    most: Floats
    nonfinite: npt.NDArray[np.int64]
    read: int = field(default=0)

    @classmethod
    def of(cls, height: int, width: int, rows: int, columns: int) -> _Grid:
        size = (rows, columns)
        return cls(
            height,
            width,
            np.arange(rows, dtype=np.int64) * height // max(1, rows),
            np.arange(columns, dtype=np.int64) * width // max(1, columns),
            np.zeros(size),
            np.zeros(size, np.int64),
            np.full(size, math.inf),
            np.full(size, -math.inf),
            np.zeros(size, np.int64),
        )

    def blocks(self) -> list[tuple[slice, slice]]:
        """What is read: all, or of each row of cells the first rows, and of each cell the first columns."""
        factor = -(-self.height * self.width // _READ)
        across = _taken(self.row_starts, self.height, factor)
        read_rows = sum(one.stop - one.start for one in across)
        along = _taken(self.column_starts, self.width, -(-read_rows * self.width // _READ))
        return [
            (slice(top, min(top + height, one.stop)), slice(left, min(left + width, other.stop)))
            for one in across
            for other in along
            for width in [min(other.stop - other.start, _BLOCK)]
            for height in [max(1, _BLOCK // max(1, width))]
            for top in range(one.start, one.stop, height)
            for left in range(other.start, other.stop, width)
        ]

    def add(self, top: int, left: int, array: npt.NDArray[Any]) -> None:
        """The elements of a block, whose first one is at (top, left)."""
        if not array.size:
            return
        self.read += array.size
        values = array.astype(np.float64)
        is_finite = np.isfinite(values)
        rows, at_rows = _cells(self.row_starts, top, array.shape[0])
        columns, at_columns = _cells(self.column_starts, left, array.shape[1])
        cells = np.ix_(rows, columns)

        def reduced(by: np.ufunc, what: npt.NDArray[Any]) -> npt.NDArray[Any]:
            found: npt.NDArray[Any] = by.reduceat(by.reduceat(what, at_columns, axis=1), at_rows, axis=0)
            return found

        self.sums[cells] += reduced(np.add, np.where(is_finite, values, 0.0))
        self.counts[cells] += reduced(np.add, is_finite.astype(np.int64))
        self.nonfinite[cells] += reduced(np.add, (~is_finite).astype(np.int64))
        self.least[cells] = np.minimum(
            self.least[cells], reduced(np.minimum, np.where(is_finite, values, math.inf))
        )
        self.most[cells] = np.maximum(
            self.most[cells], reduced(np.maximum, np.where(is_finite, values, -math.inf))
        )

    def columns(self) -> dict[str, tuple[Any, ...]]:
        """Those of `TensorGrid`."""
        has = self.counts > 0
        mean = np.where(has, self.sums / np.maximum(1, self.counts), np.nan)
        greatest = np.maximum(np.abs(self.least), np.abs(self.most))
        found = {"mean": mean, "min": self.least, "max": self.most, "abs_max": greatest}
        return {
            **{name: _numbers(values, has) for name, values in found.items()},
            "nonfinite": tuple(self.nonfinite.reshape(-1).tolist()),
        }


def _taken(starts: npt.NDArray[np.int64], size: int, factor: int) -> list[slice]:
    """All of ``size`` in one, or of each part the ``factor``-th part of it."""
    if factor <= 1:
        return [slice(0, size)] if size else []
    ends = [*starts[1:].tolist(), size]
    return [
        slice(begin, begin + max(1, (end - begin) // factor))
        for begin, end in zip(starts.tolist(), ends, strict=True)
    ]


def _cells(
    starts: npt.NDArray[np.int64], begin: int, size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The cells of elements from ``begin`` on, and where each begins among them."""
    first = int(np.searchsorted(starts, begin, "right")) - 1
    last = int(np.searchsorted(starts, begin + size - 1, "right"))
    cells = np.arange(first, last)
    return cells, np.maximum(starts[cells] - begin, 0)


def _numbers(values: Floats, has: npt.NDArray[np.bool_]) -> tuple[float | None, ...]:
    pairs = zip(values.reshape(-1).tolist(), has.reshape(-1).tolist(), strict=True)
    return tuple(float(f"{value:.{_DIGITS}g}") if is_known else None for value, is_known in pairs)
