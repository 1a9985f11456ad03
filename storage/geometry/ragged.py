"""Ragged columns: a flat array of values, and ``start`` of n+1 positions; row i is
``values[start[i]:start[i + 1]]``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = [
    "BoxGroup",
    "Int64",
    "by_ndim",
    "expand_ranges",
    "gather_rows",
    "row_matrix",
    "row_products",
    "row_sums",
    "starts",
]

Int64 = npt.NDArray[np.int64]
_N = TypeVar("_N", bound=np.number[Any])


class BoxGroup(NamedTuple):
    """Boxes of one dimensionality taken out of ragged columns: ``rows`` are their numbers there."""

    rows: Int64
    offsets: Int64
    sizes: Int64


def starts(counts: npt.ArrayLike) -> Int64:
    """Return positions of ragged rows from their lengths: ``[0, c0, c0 + c1, ...]``, int64, n+1 long."""
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
    """Return the ragged rows ``rows`` of (values, start), one after the other."""
    first = start[rows]
    return values[expand_ranges(first, start[rows + 1] - first)]


def row_matrix(values: Int64, start: Int64, rows: Int64, ndim: int) -> Int64:
    """Return the ragged rows ``rows`` of (values, start), all of length ``ndim``, as (rows, ndim)."""
    matrix: Int64 = values[start[rows][:, None] + np.arange(ndim, dtype=np.int64)]
    return matrix


def row_products(values: npt.NDArray[_N], start: Int64) -> npt.NDArray[_N]:
    """Product of each ragged row; 1 for an empty one."""
    counts = np.diff(start)
    products = np.ones(len(counts), values.dtype)
    filled = counts > 0
    if filled.any():
        products[filled] = np.multiply.reduceat(values, start[:-1][filled])
    return products


def row_sums(values: Int64, start: Int64) -> Int64:
    """Sum of each ragged row; 0 for an empty one."""
    return np.diff(np.concatenate([[0], np.cumsum(values)])[start])


def by_ndim(rows: Int64, start: Int64, offsets: Int64, sizes: Int64) -> Iterator[BoxGroup]:
    """Yield the boxes ``rows`` of ragged columns, one group a number of dimensions."""
    counts = start[rows + 1] - start[rows]
    for ndim in np.unique(counts).tolist():
        chosen = rows[counts == ndim]
        yield BoxGroup(
            chosen, row_matrix(offsets, start, chosen, ndim), row_matrix(sizes, start, chosen, ndim)
        )
