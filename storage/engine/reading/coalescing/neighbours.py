"""Which neighbours in a file are read together. Pure: no I/O, no memory is touched.

One rule in two forms: for ranges that come one by one, and for columns of very many. Where a request is dear
there is more to gain by more rules: `dcp.storage.engine.reading.coalescing.joining`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dcp.storage.geometry.ragged import Int64

__all__ = ["FileRange", "coalesce", "coalesce_columns", "span_bytes"]


class FileRange(Protocol):
    """Bytes of a file."""

    @property
    def file(self) -> int:
        """Its number."""

    @property
    def offset(self) -> int:
        """Where they begin."""

    @property
    def size_bytes(self) -> int:
        """How many there are."""


R = TypeVar("R", bound=FileRange)


def coalesce(
    ranges: Iterable[R], *, gap_bytes: int, limit_bytes: int, join_below_bytes: int | None = None
) -> Iterator[list[R]]:
    """Groups of ``ranges``, which come in the order of the files, that are read at once.

    Between two of a group are at most ``gap_bytes``; a group spans at most ``limit_bytes``, unless it is one
    range that does. Ranges that share bytes with the one before begin a new group, and ranges above
    ``join_below_bytes`` are one of their own.
    """
    group: list[R] = []
    file = begin = end = 0
    is_closed = True
    for range_ in ranges:
        offset, size_bytes = range_.offset, range_.size_bytes
        is_large = join_below_bytes is not None and size_bytes > join_below_bytes
        joins = not is_closed and not is_large and range_.file == file and 0 <= offset - end <= gap_bytes
        if not joins or offset + size_bytes - begin > limit_bytes:
            if group:
                yield group
            group, file, begin = [], range_.file, offset
        group.append(range_)
        end = offset + size_bytes
        is_closed = is_large
    if group:
        yield group


def coalesce_columns(
    files: Int64,
    offsets: Int64,
    ends: Int64,
    may_join: npt.NDArray[np.bool_],
    *,
    gap_bytes: int,
    limit_bytes: int,
) -> Int64:
    """The rows at which groups begin, as `coalesce` makes them of the ranges that ``may_join``.

    Of two that share bytes both are alone.
    """
    if not len(offsets):
        return np.zeros(0, np.int64)
    gaps = offsets[1:] - ends[:-1]
    same_file = files[1:] == files[:-1]
    usable = may_join.copy()
    shares = same_file & (gaps < 0)
    usable[1:] &= ~shares
    usable[:-1] &= ~shares
    is_first = np.ones(len(offsets), np.bool_)
    is_first[1:] = ~(usable[1:] & usable[:-1] & same_file & (gaps <= gap_bytes))
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(offsets))
    long = np.flatnonzero(ends[last - 1] - offsets[first] > limit_bytes)
    cuts: list[int] = []
    for row, behind in zip(first[long].tolist(), last[long].tolist(), strict=True):
        group_ends, at = ends[row:behind].data, 0
        while (at := max(at + 1, bisect_right(group_ends, int(offsets[row + at]) + limit_bytes, at))) < len(
            group_ends
        ):
            cuts.append(row + at)
    is_first[cuts] = True
    return np.flatnonzero(is_first)


def span_bytes(group: Sequence[FileRange]) -> int:
    """From the first byte of a group to the end of its last range."""
    return group[-1].offset + group[-1].size_bytes - group[0].offset
