"""One box of a tensor at a time, in Python's ints; for many at once there is `dcp.storage.geometry.joins`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Box", "contiguous_position", "range_boxes", "split_box"]


class Box(NamedTuple):
    """``sizes`` elements from ``offsets`` on, in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """Return all of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def between(cls, low: Sequence[int], high: Sequence[int]) -> Box:
        """Return ``low <= x < high`` in each dimension."""
        return cls(tuple(low), tuple(b - a for a, b in zip(low, high, strict=True)))

    @property
    def high(self) -> tuple[int, ...]:
        """One behind the last position, in each dimension."""
        return tuple(o + n for o, n in zip(self.offsets, self.sizes, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that take it out of an array."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.sizes, strict=True))

    def moved(self, by: Sequence[int]) -> Box:
        """Return the same box, ``by`` farther on."""
        return Box(tuple(o + d for o, d in zip(self.offsets, by, strict=True)), self.sizes)

    def seen_from(self, origin: Sequence[int]) -> Box:
        """Return the same box, in coordinates that begin at ``origin``."""
        return Box(tuple(o - d for o, d in zip(self.offsets, origin, strict=True)), self.sizes)

    def permuted(self, order: Sequence[int]) -> Box:
        """Return the same box of a tensor whose dimensions stand in another ``order``."""
        return Box(tuple(self.offsets[d] for d in order), tuple(self.sizes[d] for d in order))

    def intersection(self, other: Box) -> Box | None:
        """Return the box that both have; None if there is none."""
        offsets, sizes = [], []
        for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            low, high = max(a, b), min(a + n, b + m)
            if high <= low:
                return None
            offsets.append(low)
            sizes.append(high - low)
        return Box(tuple(offsets), tuple(sizes))

    def without(self, hole: Box) -> Iterator[Box]:
        """Yield the rest without ``hole``: slabs before and behind it, one dimension after the other."""
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
    """Return the first element's place if ``box`` is one run of a C-ordered array of ``sizes``, else None."""
    position, step, is_open = 0, 1, True
    for size, offset, length in zip(reversed(sizes), reversed(box.offsets), reversed(box.sizes), strict=True):
        if not is_open and length != 1:
            return None
        is_open = is_open and length == size
        position += offset * step
        step *= size
    return position


def split_box(box: Box, max_elements: int) -> Iterator[Box]:
    """Yield boxes of up to ``max_elements``, in C order, each one run of ``box``'s elements."""
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
    """Yield boxes that have the elements ``begin`` to ``end`` of a C-ordered array, in that order; at most
    two a dimension."""
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
