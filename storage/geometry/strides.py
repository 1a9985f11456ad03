"""Ragged columns, strides and payload ranges.

A ragged column is a flat array of values and ``start`` of n+1 positions; row i is ``values[start[i]:start[i
+ 1]]``. Strides are in the caller's unit: elements, or bytes with an ``itemsize``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
_N = TypeVar("_N", bound=np.number[Any])


class BoxGroup(NamedTuple):
    """Boxes of equal dimensionality from ragged columns: ``rows`` are their row numbers."""

    rows: Int64
    offsets: Int64
    sizes: Int64


def starts(counts: npt.ArrayLike) -> Int64:
    """Return the start positions of ragged rows by length: ``[0, c0, c0 + c1, ...]``, int64, n+1 values."""
    lengths = np.asarray(counts, dtype=np.int64)
    result = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=result[1:])
    return result


def expand_ranges(first: Int64, counts: Int64) -> Int64:
    """Return ``first[0], first[0] + 1, ... (counts[0] of them), first[1], ...``."""
    begin = starts(counts)
    total = int(begin[-1])
    return np.repeat(first - begin[:-1], counts) + np.arange(total, dtype=np.int64)


def gather_rows(values: npt.NDArray[_N], start: Int64, rows: Int64) -> npt.NDArray[_N]:
    """Return the ragged rows ``rows`` of (values, start), concatenated."""
    first = start[rows]
    return values[expand_ranges(first, start[rows + 1] - first)]


def row_matrix(values: Int64, start: Int64, rows: Int64, ndim: int) -> Int64:
    """Return the ragged rows ``rows`` of (values, start), all of length ``ndim``, as (rows, ndim)."""
    matrix: Int64 = values[start[rows][:, None] + np.arange(ndim, dtype=np.int64)]
    return matrix


def row_products(values: npt.NDArray[_N], start: Int64) -> npt.NDArray[_N]:
    """Return the product of each ragged row; 1 for an empty row."""
    counts = np.diff(start)
    products = np.ones(len(counts), values.dtype)
    filled = counts > 0
    if filled.any():
        products[filled] = np.multiply.reduceat(values, start[:-1][filled])
    return products


def row_sums(values: Int64, start: Int64) -> Int64:
    """Return the sum of each ragged row; 0 for an empty row."""
    return np.diff(np.concatenate([[0], np.cumsum(values)])[start])


def by_ndim(rows: Int64, start: Int64, offsets: Int64, sizes: Int64) -> Iterator[BoxGroup]:
    """Yield the boxes ``rows`` of ragged columns in groups by number of dimensions."""
    counts = start[rows + 1] - start[rows]
    for ndim in np.unique(counts).tolist():
        chosen = rows[counts == ndim]
        yield BoxGroup(
            chosen, row_matrix(offsets, start, chosen, ndim), row_matrix(sizes, start, chosen, ndim)
        )


def c_strides(sizes: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """Return the strides of a C-ordered array, like torch."""
    strides, step = [], itemsize
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_c_ordered(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return True if elements are in C order without gaps; ``strides`` in elements."""
    pairs = zip(sizes, strides, c_strides(sizes), strict=True)
    return 0 in sizes or all(size == 1 or stride == step for size, stride, step in pairs)


def dense_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Return the dimensions from slowest to fastest for dense elements without repetition (``strides`` in
    elements), else None. Prefer C order.
    """
    if is_c_ordered(sizes, strides):
        return tuple(range(len(sizes)))
    order = tuple(sorted(range(len(sizes)), key=lambda d: (sizes[d] != 1, -strides[d], d)))
    return order if is_c_ordered([sizes[d] for d in order], [strides[d] for d in order]) else None


def extent(sizes: Sequence[int], strides: Sequence[int], itemsize: int = 1) -> int:
    """Return the length from the first element of a box to the end of the last; 0 for an empty box."""
    if 0 in sizes:
        return 0
    return itemsize + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))


# -- many at once --------------------------------------------------------------------------------------------


class Positions(NamedTuple):
    """For each box, whether the elements are contiguous, and the position of the first."""

    is_run: npt.NDArray[np.bool_]
    first: Int64


def contiguous_positions(sizes: Int64, offsets: Int64, lengths: Int64) -> Positions:
    """Return `dcp.storage.geometry.boxes.contiguous_position` of many boxes in C-ordered arrays of
    ``sizes``.

    All arguments are (boxes, dimensions). Empty and out-of-range boxes count as not contiguous.
    """
    is_full = lengths == sizes
    full_behind, steps = np.ones_like(is_full), np.ones_like(sizes)
    full_behind[:, :-1] = np.logical_and.accumulate(is_full[:, :0:-1], axis=1)[:, ::-1]
    steps[:, :-1] = np.cumprod(sizes[:, :0:-1], axis=1)[:, ::-1]
    inside = (offsets >= 0) & (lengths > 0) & (lengths <= sizes - offsets)
    is_run = (inside & (full_behind | (lengths == 1))).all(axis=1)
    return Positions(is_run, (offsets * steps).sum(axis=1))


def c_strides_by_row(sizes: Int64, itemsizes: Int64) -> Int64:
    """Return `c_strides` of many arrays: ``sizes`` (arrays, dimensions), one of ``itemsizes`` each."""
    steps = np.empty_like(sizes)
    steps[:, -1:] = itemsizes[:, None]
    for dim in range(sizes.shape[1] - 1, 0, -1):
        steps[:, dim - 1] = steps[:, dim] * np.maximum(sizes[:, dim], 1)
    return steps


def ragged_c_strides(sizes: Int64, start: Int64, itemsizes: Int64) -> Int64:
    """Return `c_strides` of arrays with different numbers of dimensions; ``sizes`` are ragged rows."""
    found, ndims = np.empty(len(sizes), np.int64), np.diff(start)
    for ndim in np.unique(ndims[ndims > 0]).tolist():
        rows = np.flatnonzero(ndims == ndim)
        places = start[rows][:, None] + np.arange(ndim, dtype=np.int64)
        found[places] = c_strides_by_row(sizes[places], itemsizes[rows])
    return found


# -- parts of strided elements -------------------------------------------------------------------------------


AxisPart = tuple[int, int]
"""First index and count along an axis."""


def parts_between(
    lengths: Sequence[int], steps: Sequence[int], low: int, high: int
) -> Iterator[tuple[AxisPart, ...]]:
    """Yield the positions ``i * steps[0] + j * steps[1] + ...`` from ``low`` to below ``high``.

    Parts are disjoint, by axis, in ascending order; at most two per axis plus one. Each step covers the
    reach of all later axes.
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


BLOCK_BYTES = 4 << 20
"""Payload bytes per CRC of the manifest; the last block of a payload may be shorter."""


class BoxPart(NamedTuple):
    """Part of a box: ``lengths`` elements from ``offsets``, within payload bytes ``begin`` to ``end``."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    begin: int
    end: int


class Reach(NamedTuple):
    """Payload bytes to read for a part."""

    begin: int
    end: int


def box_parts(
    begin: int,
    lengths: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    *,
    limit_bytes: int,
    gap_bytes: int,
) -> Iterator[BoxPart]:
    """Yield parts of a box in payload order, each spanning at most ``limit_bytes``.

    Rows farther apart than ``gap_bytes`` become separate parts. ``begin`` is the position of the first
    element. An empty box has no parts.
    """
    if 0 not in lengths:
        yield from _parts((0,) * len(lengths), lengths, strides, itemsize, begin, 0, limit_bytes, gap_bytes)


def _parts(
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    begin: int,
    dim: int,
    limit_bytes: int,
    gap_bytes: int,
) -> Iterator[BoxPart]:
    """Yield parts of a box with a single index in the dimensions before ``dim``."""
    while dim < len(lengths) and lengths[dim] == 1:
        dim += 1
    size = extent(lengths, strides, itemsize)
    skips = is_sparse(lengths, strides, itemsize, gap_bytes)
    if dim == len(lengths) or (size <= limit_bytes and not skips):
        yield BoxPart(offsets, lengths, begin, begin + size)
        return
    stride = strides[dim]
    row = size - (lengths[dim] - 1) * stride
    step = 1 if skips or row > limit_bytes else (limit_bytes - row) // stride + 1
    before, behind, rest = offsets[:dim], offsets[dim + 1 :], lengths[dim + 1 :]
    # Large transposed boxes have many parts: equal parts are made in bulk.
    is_done = row <= limit_bytes and not (skips and is_sparse(rest, strides[dim + 1 :], itemsize, gap_bytes))
    for first in range(0, lengths[dim], step):
        count = min(step, lengths[dim] - first)
        place, sizes = (*before, offsets[dim] + first, *behind), (*lengths[:dim], count, *rest)
        at = begin + first * stride
        if is_done:
            yield BoxPart(place, sizes, at, at + row + (count - 1) * stride)
        else:
            yield from _parts(place, sizes, strides, itemsize, at, dim, limit_bytes, gap_bytes)


def is_sparse(lengths: Sequence[int], strides: Sequence[int], itemsize: int, gap_bytes: int) -> bool:
    """Return True if rows of any dimension are farther apart than ``gap_bytes``; ``strides`` descend."""
    size = itemsize
    for n, stride in zip(reversed(lengths), reversed(strides), strict=True):
        if n > 1:
            if stride - size > gap_bytes:
                return True
            size += (n - 1) * stride
    return False


def reaches(
    parts: Sequence[BoxPart], payload_bytes: int, *, gap_bytes: int, whole_blocks: bool
) -> Iterator[Reach]:
    """Yield the bytes to read for each of ``parts`` (in payload order) to verify block checksums.

    Bytes between two parts that are read in any case belong to the first. With ``whole_blocks`` the end
    blocks are completed, otherwise only near the payload's ends.
    """
    previous = 0
    for number, part in enumerate(parts):
        begin, end = part.begin, part.end
        if number:
            begin = previous if previous >= 0 else _floor(begin) if whole_blocks else begin
        elif whole_blocks:
            begin = _floor(begin)
        elif begin <= gap_bytes:
            begin = 0
        following = parts[number + 1].begin if number + 1 < len(parts) else None
        previous = -1
        if following is not None and _is_near(end, following, gap_bytes, whole_blocks=whole_blocks):
            end = previous = following
        elif whole_blocks:
            end = min(_ceil(end), payload_bytes)
        elif following is None and payload_bytes - end <= gap_bytes:
            end = payload_bytes
        yield Reach(begin, end)


def _is_near(end: int, begin: int, gap_bytes: int, *, whole_blocks: bool) -> bool:
    return _ceil(end) > _floor(begin) if whole_blocks else begin - end <= gap_bytes


def _floor(position: int) -> int:
    return position // BLOCK_BYTES * BLOCK_BYTES


def _ceil(position: int) -> int:
    return -(-position // BLOCK_BYTES) * BLOCK_BYTES
