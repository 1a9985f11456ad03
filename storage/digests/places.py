"""Places of boxes that are written in their tensors, many at once, and what each adds to a digest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from dcp.storage.digests.boxes import KEY, BoxDigest, LogicalRuns, RunDigest, logical_runs
from dcp.storage.digests.field import BLOCK_BYTES, Elements, times_powers
from dcp.storage.geometry.ragged import Int64, row_matrix, row_products
from dcp.storage.geometry.strides import contiguous_positions

__all__ = ["LogicalPlaces"]


@dataclass(frozen=True, eq=False)
class LogicalPlaces:
    """Boxes, ragged: ``shapes`` are those of their tensors, ``offsets`` and ``sizes`` say what of these.

    ``start`` has the positions of each box in all three.
    """

    start: Int64
    shapes: Int64
    offsets: Int64
    sizes: Int64
    itemsizes: Int64

    def runs(self, row: int) -> LogicalRuns:
        """Return the bytes of one box."""
        part = slice(int(self.start[row]), int(self.start[row + 1]))
        shape, offsets, sizes = (
            tuple(column[part].tolist()) for column in (self.shapes, self.offsets, self.sizes)
        )
        return logical_runs(shape, offsets, sizes, int(self.itemsizes[row]))

    @cached_property
    def _runs(self) -> tuple[npt.NDArray[np.bool_], Int64]:
        """(whether the bytes of each box follow each other, the first one's place, if so)."""
        ndims = np.diff(self.start)
        is_run, first = np.ones(len(ndims), np.bool_), np.zeros(len(ndims), np.int64)
        for ndim in np.unique(ndims[ndims > 0]).tolist():
            rows = np.flatnonzero(ndims == ndim)
            columns = (row_matrix(c, self.start, rows, ndim) for c in (self.shapes, self.offsets, self.sizes))
            is_run[rows], first[rows] = contiguous_positions(*columns)
        return is_run, first * self.itemsizes

    @property
    def is_run(self) -> npt.NDArray[np.bool_]:
        """Boxes whose bytes follow each other."""
        return self._runs[0]

    @property
    def firsts(self) -> Int64:
        """The place of the first byte of each box that is a run."""
        return self._runs[1]

    @cached_property
    def volumes(self) -> Int64:
        """Elements by box."""
        return row_products(self.sizes, self.start)

    @cached_property
    def is_simple(self) -> npt.NDArray[np.bool_]:
        """Boxes whose bytes follow each other, and begin with a block."""
        is_run, first = self._runs
        is_simple: npt.NDArray[np.bool_] = is_run & (first % BLOCK_BYTES == 0)
        return is_simple

    def digest(self, row: int) -> type[RunDigest] | Callable[[], BoxDigest]:
        """Return a factory of what takes the bytes of one box."""
        return RunDigest if self._simple[row] else partial(BoxDigest, self.runs(row))

    @cached_property
    def _simple(self) -> list[bool]:
        simple: list[bool] = self.is_simple.tolist()
        return simple

    @cached_property
    def _ends(self) -> Int64:
        """One behind the last byte of each box."""
        ends = self._runs[1] + self.volumes * self.itemsizes
        for row in np.flatnonzero(~self._runs[0]).tolist():
            ends[row] = self.runs(row).last_end
        return ends

    def placed(self, values: Elements) -> Elements:
        """Return the values that the boxes add to their tensors' sums, by the value of each
        (`BoxDigest.value`)."""
        whole = row_products(self.shapes, self.start) * self.itemsizes
        return times_powers(values, KEY, -(-whole // BLOCK_BYTES) + (-self._ends // BLOCK_BYTES))

    def alike(self, rows: Int64, others: Int64) -> npt.NDArray[np.bool_]:
        """Return whether the same bytes have the same value at ``rows`` as at ``others``, pair by pair."""
        same = self.is_simple[rows] & self.is_simple[others]
        for at in np.flatnonzero(~same).tolist():
            one, other = self.runs(int(rows[at])), self.runs(int(others[at]))
            same[at] = one.phase == other.phase and one[1:4] == other[1:4]
        return same
