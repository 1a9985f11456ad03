"""Boxes of tensors: single boxes with Python integers, sets of boxes with numpy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import PlanError
from dcp.storage.geometry.strides import Int64, expand_ranges


class Box(NamedTuple):
    """Box of ``sizes`` elements from ``offsets`` in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def between(cls, low: Sequence[int], high: Sequence[int]) -> Box:
        """Return ``low <= x < high`` in each dimension."""
        return cls(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))

    @property
    def high(self) -> tuple[int, ...]:
        """End of the box in each dimension."""
        return tuple(o + n for o, n in zip(self.offsets, self.sizes, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices that select the box in an array."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def moved(self, by: Sequence[int]) -> Box:
        """Return the box shifted by ``by``."""
        return Box(tuple(o + d for o, d in zip(self.offsets, by, strict=True)), self.sizes)

    def seen_from(self, origin: Sequence[int]) -> Box:
        """Return the box relative to ``origin``."""
        return Box(tuple(o - d for o, d in zip(self.offsets, origin, strict=True)), self.sizes)

    def permuted(self, order: Sequence[int]) -> Box:
        """Return the box with dimensions in another ``order``."""
        return Box(tuple(self.offsets[d] for d in order), tuple(self.sizes[d] for d in order))

    def intersection(self, other: Box) -> Box | None:
        """Return the common box; None if empty."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if high <= low:
                return None
            offsets.append(low)
            sizes.append(high - low)
        return Box(tuple(offsets), tuple(sizes))

    def without(self, hole: Box) -> Iterator[Box]:
        """Yield slabs that cover the box without ``hole``."""
        common = self.intersection(hole)
        if common is None:
            yield self
            return
        low, high = list(self.offsets), list(self.high)
        for dim, (begin, end) in enumerate(zip(common.offsets, common.high, strict=True)):
            if low[dim] < begin:
                yield Box.between(low, (*high[:dim], begin, *high[dim + 1 :]))
                low[dim] = begin
            if end < high[dim]:
                yield Box.between((*low[:dim], end, *low[dim + 1 :]), high)
                high[dim] = end


def contiguous_position(sizes: Sequence[int], box: Box) -> int | None:
    """Return the position of the first element if ``box`` is a contiguous run in a C-ordered array of
    ``sizes``, else None.
    """
    position, step, is_open = 0, 1, True
    for size, offset, length in zip(reversed(sizes), reversed(box.offsets), reversed(box.sizes), strict=True):
        if not is_open and length != 1:
            return None
        is_open = is_open and length == size
        position += offset * step
        step *= size
    return position


def split_box(box: Box, max_elements: int) -> Iterator[Box]:
    """Yield boxes of up to ``max_elements`` in C order, each a contiguous run of ``box``."""
    sizes, ndim = box.sizes, len(box.sizes)
    if box.volume <= max_elements:
        if box.volume:
            yield box
        return
    inner = 1
    dim = ndim - 1
    while dim > 0 and inner * sizes[dim] <= max_elements:
        inner *= sizes[dim]
        dim -= 1
    step = max(1, max_elements // inner)
    for outer in itertools.product(*(range(n) for n in sizes[:dim])):
        first = tuple(o + i for o, i in zip(box.offsets, outer, strict=False))
        for begin in range(0, sizes[dim], step):
            yield Box(
                (*first, box.offsets[dim] + begin, *box.offsets[dim + 1 :]),
                (*(1,) * dim, min(step, sizes[dim] - begin), *sizes[dim + 1 :]),
            )


def range_boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Yield boxes that cover elements ``begin`` to ``end`` of a C-ordered array in order; at most two per
    dimension.
    """
    yield from _range_boxes(tuple(shape), begin, end, ())


def _range_boxes(shape: tuple[int, ...], begin: int, end: int, outer: tuple[int, ...]) -> Iterator[Box]:
    if begin >= end:
        return
    ones = (1,) * len(outer)
    if begin == 0 and end == math.prod(shape):
        yield Box((*outer, *(0 for _ in shape)), (*ones, *shape))
        return
    row = math.prod(shape[1:])
    first, at = divmod(begin, row)
    last, rest = divmod(end, row)
    if first == last:
        yield from _range_boxes(shape[1:], at, rest, (*outer, first))
        return
    if at:
        yield from _range_boxes(shape[1:], at, row, (*outer, first))
        first += 1
    if first < last:
        yield Box((*outer, first, *(0 for _ in shape[1:])), (*ones, last - first, *shape[1:]))
    if rest:
        yield from _range_boxes(shape[1:], 0, rest, (*outer, last))


MAX_PAIRS = 100_000_000
"""Maximum number of intersecting pairs, a memory limit against invalid input."""

MAX_CUTS = 100_000
"""Maximum number of boxes after cutting overlaps, a limit against invalid input."""

MAX_CUT_TESTS = 100_000
"""Maximum number of cut tests, a time limit against invalid input."""

_KEY_LIMIT = 2.0**62
_GOOD_SELECTIVITY = 4


class BoxSet(NamedTuple):
    """Boxes of equal dimensionality: ``groups`` (n), ``low`` and ``high`` (n, dimensions)."""

    groups: Int64
    low: Int64
    high: Int64

    def take(self, rows: npt.NDArray[np.generic]) -> BoxSet:
        """Return the boxes at ``rows`` (positions or a mask)."""
        return BoxSet(self.groups[rows], self.low[rows], self.high[rows])


def _keys(groups: list[Int64], coordinates: list[Int64]) -> list[Int64]:
    """Return a sortable int64 per (group, coordinate), consistent over all given pairs."""
    top = max((int(column.max()) for column in coordinates if len(column)), default=0) + 1
    group_top = max((int(column.max()) for column in groups if len(column)), default=0) + 1
    if float(top) * group_top >= _KEY_LIMIT:
        # replace huge coordinates by their ranks, which compare equally
        values = np.unique(np.concatenate(coordinates))
        coordinates = [np.searchsorted(values, column).astype(np.int64) for column in coordinates]
        top = len(values)
    return [group * top + column for group, column in zip(groups, coordinates, strict=True)]


def _sorted(keys: Int64) -> tuple[Int64 | None, Int64]:
    """Return (order, sorted keys); order is None for sorted keys, the usual case."""
    if len(keys) < 2 or bool((keys[1:] >= keys[:-1]).all()):
        return None, keys
    order = np.argsort(keys, kind="stable")
    return order, keys[order]


class _Join(NamedTuple):
    """Overlapping intervals as ranges of sorted positions.

    Every overlap of a and b counts once: b begins within a, or a begins strictly within b.
    """

    order_b: Int64 | None
    first_b: Int64
    count_b: Int64
    order_a: Int64 | None
    first_a: Int64
    count_a: Int64

    @property
    def total(self) -> int:
        return int(self.count_a.sum()) + int(self.count_b.sum())

    def pairs(self) -> tuple[Int64, Int64]:
        if self.total > MAX_PAIRS:
            raise PlanError(
                f"{self.total} pairs of boxes meet, more than a sound plan has; boxes of a tensor overlap"
            )
        within_a = expand_ranges(self.first_b, self.count_b)
        within_b = expand_ranges(self.first_a, self.count_a)
        a = np.repeat(np.arange(len(self.count_b), dtype=np.int64), self.count_b)
        b = np.repeat(np.arange(len(self.count_a), dtype=np.int64), self.count_a)
        other_b = within_a if self.order_b is None else self.order_b[within_a]
        other_a = within_b if self.order_a is None else self.order_a[within_b]
        return np.concatenate([a, other_a]), np.concatenate([other_b, b])


def _join_intervals(
    group_a: Int64, low_a: Int64, high_a: Int64, group_b: Int64, low_b: Int64, high_b: Int64
) -> _Join:
    key_low_a, key_high_a, key_low_b, key_high_b = _keys(
        [group_a, group_a, group_b, group_b], [low_a, high_a, low_b, high_b]
    )
    order_b, sorted_b = _sorted(key_low_b)
    first_b = np.searchsorted(sorted_b, key_low_a, "left")
    count_b = np.searchsorted(sorted_b, key_high_a, "left") - first_b
    order_a, sorted_a = _sorted(key_low_a)
    first_a = np.searchsorted(sorted_a, key_low_b, "right")
    count_a = np.maximum(np.searchsorted(sorted_a, key_high_b, "left") - first_a, 0)
    return _Join(order_b, first_b, count_b, order_a, first_a, count_a)


def _reorder_dimensions(a: BoxSet, b: BoxSet) -> tuple[BoxSet, BoxSet]:
    """Return both sets with the dimensions of each group ordered by the number of overlaps, fewest first."""
    groups = int(max(a.groups.max(), b.groups.max())) + 1
    ndim = a.low.shape[1]
    meetings = np.zeros((groups, ndim))
    for dim in range(ndim):
        join = _join_intervals(
            a.groups, a.low[:, dim], a.high[:, dim], b.groups, b.low[:, dim], b.high[:, dim]
        )
        meetings[:, dim] += np.bincount(a.groups, weights=join.count_b, minlength=groups)
        meetings[:, dim] += np.bincount(b.groups, weights=join.count_a, minlength=groups)
    order = np.argsort(meetings, axis=1, kind="stable")

    def turned(boxes: BoxSet) -> BoxSet:
        turn = order[boxes.groups]
        low = np.take_along_axis(boxes.low, turn, axis=1)
        return BoxSet(boxes.groups, low, np.take_along_axis(boxes.high, turn, axis=1))

    return turned(a), turned(b)


class _Classes(NamedTuple):
    """Classes of boxes with equal interval and group in the present dimension."""

    groups: Int64
    low: Int64
    high: Int64
    members: Int64
    start: Int64


def _classes(groups: Int64, low: Int64, high: Int64) -> _Classes:
    order = np.lexsort((high, low, groups))
    ordered = (groups[order], low[order], high[order])
    new = np.ones(len(order), bool)
    new[1:] = (ordered[0][1:] != ordered[0][:-1]) | (ordered[1][1:] != ordered[1][:-1])
    new[1:] |= ordered[2][1:] != ordered[2][:-1]
    first = np.flatnonzero(new)
    start = np.append(first, len(order))
    return _Classes(ordered[0][first], ordered[1][first], ordered[2][first], order, start)


def _join_levels(a: BoxSet, b: BoxSet) -> tuple[Int64, Int64]:
    """Return pairs of overlapping rows of a and b, dimension by dimension.

    Boxes with a common interval are joined as one, and a grid of n chunks costs n, not n squared.
    """
    rows_a, group_a = np.arange(len(a.groups), dtype=np.int64), a.groups
    rows_b, group_b = np.arange(len(b.groups), dtype=np.int64), b.groups
    ndim = a.low.shape[1]
    for dim in range(ndim - 1):
        classes_a = _classes(group_a, a.low[rows_a, dim], a.high[rows_a, dim])
        classes_b = _classes(group_b, b.low[rows_b, dim], b.high[rows_b, dim])
        met_a, met_b = _join_intervals(*classes_a[:3], *classes_b[:3]).pairs()
        count_a = classes_a.start[met_a + 1] - classes_a.start[met_a]
        count_b = classes_b.start[met_b + 1] - classes_b.start[met_b]
        if int(count_a.sum()) + int(count_b.sum()) > MAX_PAIRS:
            raise PlanError("the boxes of a tensor are too many and too irregular to be matched")
        pair = np.arange(len(met_a), dtype=np.int64)
        rows_a = rows_a[classes_a.members[expand_ranges(classes_a.start[met_a], count_a)]]
        rows_b = rows_b[classes_b.members[expand_ranges(classes_b.start[met_b], count_b)]]
        group_a, group_b = np.repeat(pair, count_a), np.repeat(pair, count_b)
    last = ndim - 1
    in_a, in_b = _join_intervals(
        group_a, a.low[rows_a, last], a.high[rows_a, last], group_b, b.low[rows_b, last], b.high[rows_b, last]
    ).pairs()
    return rows_a[in_a], rows_b[in_b]


def intersecting_pairs(a: BoxSet, b: BoxSet) -> tuple[Int64, Int64]:
    """Return rows (of a, of b) of all pairs of a group with common volume, sorted by a, then b.

    Empty boxes overlap nothing; boxes without dimensions overlap within their group.
    """
    if a.low.shape[1] == 0:
        zeros_a, zeros_b = np.zeros(len(a.groups), np.int64), np.zeros(len(b.groups), np.int64)
        join = _join_intervals(a.groups, zeros_a, zeros_a + 1, b.groups, zeros_b, zeros_b + 1)
        return _ascending(*join.pairs())
    real_a = np.flatnonzero((a.high > a.low).all(axis=1))
    real_b = np.flatnonzero((b.high > b.low).all(axis=1))
    if not len(real_a) or not len(real_b):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    full_a, full_b = a.take(real_a), b.take(real_b)
    first = _join_intervals(
        full_a.groups, full_a.low[:, 0], full_a.high[:, 0], full_b.groups, full_b.low[:, 0], full_b.high[:, 0]
    )
    if first.total <= _GOOD_SELECTIVITY * (len(real_a) + len(real_b)):
        in_a, in_b = first.pairs()
        if a.low.shape[1] > 1:
            low = np.maximum(full_a.low[in_a, 1:], full_b.low[in_b, 1:])
            high = np.minimum(full_a.high[in_a, 1:], full_b.high[in_b, 1:])
            met = (high > low).all(axis=1)
            in_a, in_b = in_a[met], in_b[met]
    else:
        in_a, in_b = _join_levels(*_reorder_dimensions(full_a, full_b))
    return _ascending(real_a[in_a], real_b[in_b])


def _ascending(a: Int64, b: Int64) -> tuple[Int64, Int64]:
    if bool((a[1:] >= a[:-1]).all()) and bool(((b[1:] > b[:-1]) | (a[1:] > a[:-1])).all()):
        return a, b
    order = np.lexsort((b, a))
    return a[order], b[order]


def _crowded_groups(boxes: BoxSet, dim: int) -> Int64:
    """Return groups with overlapping intervals along one dimension."""
    (low,) = _keys([boxes.groups], [boxes.low[:, dim]])
    order = np.argsort(low, kind="stable")
    groups, high = boxes.groups[order], boxes.high[order, dim]
    meets = (groups[1:] == groups[:-1]) & (boxes.low[order, dim][1:] < high[:-1])
    return np.unique(groups[1:][meets])


def overlapping_pairs(boxes: BoxSet) -> tuple[Int64, Int64]:
    """Return rows (i < j) of all pairs of a group with common volume.

    Boxes separated along one dimension, as in almost all shardings, take a single sort.
    """
    rows = np.arange(len(boxes.groups), dtype=np.int64)
    if boxes.low.shape[1]:
        rows = rows[(boxes.high > boxes.low).all(axis=1)]
    for dim in range(boxes.low.shape[1]):
        if not len(rows):
            break
        crowded = _crowded_groups(boxes.take(rows), dim)
        rows = rows[np.isin(boxes.groups[rows], crowded)]
    if len(rows) < 2:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    rest = boxes.take(rows)
    i, j = intersecting_pairs(rest, rest)
    return rows[i[i < j]], rows[j[i < j]]


def cut_overlaps(boxes: BoxSet, earlier: Int64, later: Int64) -> tuple[Int64, BoxSet]:
    """Return (rows, parts of boxes) that cover each element once, with the first box that contains it.

    ``earlier`` and ``later`` come from `overlapping_pairs`. Later duplicates of a box are dropped.
    """
    low, high = boxes.low, boxes.high
    equal = (low[earlier] == low[later]).all(axis=1) & (high[earlier] == high[later]).all(axis=1)
    dropped = np.zeros(len(boxes.groups), np.bool_)
    dropped[later[equal]] = True
    partial = ~dropped[earlier] & ~dropped[later]
    cutters: dict[int, list[int]] = {}
    for cutter, row in zip(earlier[partial].tolist(), later[partial].tolist(), strict=True):
        cutters.setdefault(row, []).append(cutter)
    rows: list[int] = []
    rests: list[Box] = []
    tests = 0
    for row, holes in cutters.items():
        rest = [_box(boxes, row)]
        for hole in holes:
            tests += len(rest)
            if tests > MAX_CUT_TESTS or len(rows) + len(rest) > MAX_CUTS:
                raise PlanError(
                    "the stored chunks of a tensor overlap in too many ways; the checkpoint is not sound"
                )
            rest = [part for box in rest for part in box.without(_box(boxes, hole))]
        rows += [row] * len(rest)
        rests += rest
        dropped[row] = True
    kept = np.flatnonzero(~dropped)
    found = np.concatenate([kept, np.array(rows, np.int64)])
    shape = len(rows), low.shape[1]
    cut_low = np.array([box.offsets for box in rests], np.int64).reshape(shape)
    cut_high = np.array([box.high for box in rests], np.int64).reshape(shape)
    parts = BoxSet(
        boxes.groups[found], np.concatenate([low[kept], cut_low]), np.concatenate([high[kept], cut_high])
    )
    return found, parts


def _box(boxes: BoxSet, row: int) -> Box:
    return Box.between(boxes.low[row].tolist(), boxes.high[row].tolist())


def disjoint(boxes: Sequence[Box]) -> list[tuple[int, Box]]:
    """Return (box number, part) such that each element is in a single part, of the first box that contains
    it, in ascending order.
    """
    firsts: dict[Box, int] = {}
    for number, box in enumerate(boxes):
        if 0 not in box.sizes:
            firsts.setdefault(box, number)
    if len(firsts) > 1:
        shape = len(firsts), len(boxes[0].sizes)
        low = np.array([box.offsets for box in firsts], np.int64).reshape(shape)
        high = np.array([box.high for box in firsts], np.int64).reshape(shape)
        several = BoxSet(np.zeros(len(firsts), np.int64), low, high)
        earlier, later = overlapping_pairs(several)
        if len(earlier):
            rows, parts = cut_overlaps(several, earlier, later)
            numbers = [*firsts.values()]
            firsts = {_box(parts, at): numbers[row] for at, row in enumerate(rows.tolist())}
    return sorted(((number, box) for box, number in firsts.items()), key=lambda part: part[1].offsets)
