"""Strides: the places of a box's elements in memory or in a payload, their order, and parts that are one
run.

Strides are in whatever unit the caller counts in: elements, or bytes with an ``itemsize``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dcp.storage.geometry.ragged import Int64

__all__ = [
    "AxisPart",
    "Positions",
    "c_strides",
    "c_strides_by_row",
    "contiguous_positions",
    "dense_order",
    "extent",
    "is_c_ordered",
    "parts_between",
    "ragged_c_strides",
]


def c_strides(sizes: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """Return the strides, from one element to the next in each dimension of a C-ordered array, as torch
    has them."""
    strides, step = [], itemsize
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_c_ordered(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements (``strides`` in elements) stand in C order without gaps."""
    pairs = zip(sizes, strides, c_strides(sizes), strict=True)
    return 0 in sizes or all(size == 1 or stride == step for size, stride, step in pairs)


def dense_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return dimensions from slowest to fastest if elements (``strides`` in elements) are dense in some
    order and none is there twice, else None. C order wins where several would do."""
    if is_c_ordered(sizes, strides):
        return tuple(range(len(sizes)))
    order = tuple(sorted(range(len(sizes)), key=lambda d: (sizes[d] != 1, -strides[d], d)))
    return order if is_c_ordered([sizes[d] for d in order], [strides[d] for d in order]) else None


def extent(sizes: Sequence[int], strides: Sequence[int], itemsize: int = 1) -> int:
    """Return the length from the first element of a box to the end of its last one; 0 for an empty box."""
    if 0 in sizes:
        return 0
    return itemsize + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


# -- many at once --------------------------------------------------------------------------------------------


class Positions(NamedTuple):
    """By box: whether it is one run of elements, and the place of its first one."""

    is_run: npt.NDArray[np.bool_]
    first: Int64


def contiguous_positions(sizes: Int64, offsets: Int64, lengths: Int64) -> Positions:
    """`dcp.storage.geometry.boxes.contiguous_position` of many boxes of C-ordered arrays of ``sizes``.

    All are (boxes, dimensions). Boxes that are empty, or reach outside of their array, are no run here.
    """
    is_full = lengths == sizes
    full_behind, steps = np.ones_like(is_full), np.ones_like(sizes)
    full_behind[:, :-1] = np.logical_and.accumulate(is_full[:, :0:-1], axis=1)[:, ::-1]
    steps[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
    inside = (offsets >= 0) & (lengths > 0) & (lengths <= sizes - offsets)
    is_run = (inside & (full_behind | (lengths == 1))).all(axis=1)
    return Positions(is_run, (offsets * steps).sum(axis=1))


def c_strides_by_row(sizes: Int64, itemsizes: Int64) -> Int64:
    """`c_strides` of many arrays: ``sizes`` are (arrays, dimensions), ``itemsizes`` one for each."""
    steps = np.empty_like(sizes)
    steps[:, -1:] = itemsizes[:, None]
    for dim in range(sizes.shape[1] - 1, 0, -1):
        steps[:, dim - 1] = steps[:, dim] * np.maximum(sizes[:, dim], 1)
    return steps


def ragged_c_strides(sizes: Int64, start: Int64, itemsizes: Int64) -> Int64:
    """`c_strides` of arrays of any numbers of dimensions: ``sizes`` are ragged rows."""
    found, ndims = np.empty(len(sizes), np.int64), np.diff(start)
    for ndim in np.unique(ndims[ndims > 0]).tolist():
        rows = np.flatnonzero(ndims == ndim)
        places = start[rows][:, None] + np.arange(ndim, dtype=np.int64)
        found[places] = c_strides_by_row(sizes[places], itemsizes[rows])
    return found


# -- parts of strided elements -------------------------------------------------------------------------------


AxisPart = tuple[int, int]
"""Of an axis: the first index, and how many."""


def parts_between(
    lengths: Sequence[int], steps: Sequence[int], low: int, high: int
) -> Iterator[tuple[AxisPart, ...]]:
    """Yield the positions ``i * steps[0] + j * steps[1] + ...`` that are at least ``low`` and below ``high``.

    Disjoint parts, by axis, in the order of their positions; at most two an axis and one more. Each step is
    at least what all axes behind it reach, so that positions ascend in C order.
    """
    if not lengths:
        if low <= 0 < high:
            yield ()
        return
    step, rest, inner = steps[0], lengths[1:], steps[1:]
    reach = 1 + sum((n - 1) * s for n, s in zip(rest, inner, strict=True))
    first, last = max(0, (low - reach) // step + 1), min(lengths[0], -(-high // step))
    begin, end = max(first, -(-low // step)), min(last, (high - reach) // step + 1)
    if begin >= end:
        begin = end = last
    for index in range(first, begin):
        yield from _at(index, rest, inner, low - index * step, high - index * step)
    if begin < end:
        yield ((begin, end - begin), *((0, n) for n in rest))
    for index in range(end, last):
        yield from _at(index, rest, inner, low - index * step, high - index * step)


def _at(
    index: int, lengths: Sequence[int], steps: Sequence[int], low: int, high: int
) -> Iterator[tuple[AxisPart, ...]]:
    for part in parts_between(lengths, steps, low, high):
        yield ((index, 1), *part)
