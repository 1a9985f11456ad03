"""What slices take of a tensor, and which boxes of its chunks cover that. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import PlanError
from dcp.storage.geometry.boxes import Box

__all__ = ["ChunkPart", "StridedSelection", "covering_boxes", "select"]

Corner = tuple[int, ...]

_SKIPPED_BYTES: Final = 64 << 10
"""Between two elements farther apart than this, a request of their own is cheaper than reading on."""
_MAX_SKIPS: Final = 1 << 16


class ChunkPart(NamedTuple):
    """The part of a tensor that is taken from ``chunk``, in the tensor's coordinates."""

    chunk: int
    box: Box


@dataclass(frozen=True, slots=True)
class StridedSelection:
    """What slices take of a tensor: in each dimension ``counts`` elements from ``first`` on, each ``steps``
    behind the one before. ``flipped`` and ``dropped`` are the dimensions that are turned round, and those
    taken by a number."""

    first: Corner
    steps: Corner
    counts: Corner
    flipped: tuple[bool, ...]
    dropped: tuple[bool, ...]

    def finish(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The result, from its elements in ascending order."""
        turned = array[tuple(slice(None, None, -1 if flip else 1) for flip in self.flipped)]
        return np.ascontiguousarray(turned).reshape(self.shape)

    @property
    def shape(self) -> Corner:
        """Return that of the result."""
        return tuple(n for n, drop in zip(self.counts, self.dropped, strict=True) if not drop)

    def slabs(self, max_elements: int) -> Iterator[StridedSelection]:
        """Parts along the first dimension of the result, in its order."""
        dim = next((dim for dim, drop in enumerate(self.dropped) if not drop), None)
        if dim is None or math.prod(self.counts) <= max_elements:
            yield self
            return
        count = self.counts[dim]
        rows = max(1, max_elements * count // math.prod(self.counts))
        for begin in range(0, count, rows):
            yield self._narrowed(dim, begin, min(count, begin + rows))

    def part(self, places: Sequence[slice]) -> StridedSelection:
        """Return what ``places`` (of step 1, one for each dimension of the result) take of it."""
        part, dims = self, [dim for dim, drop in enumerate(self.dropped) if not drop]
        for dim, place in zip(dims, places, strict=True):
            begin, end, _ = place.indices(self.counts[dim])
            part = part._narrowed(dim, begin, end)
        return part

    def _narrowed(self, dim: int, begin: int, end: int) -> StridedSelection:
        """Elements ``begin`` to ``end`` of the result's along one of the tensor's dimensions."""
        low = self.counts[dim] - end if self.flipped[dim] else begin
        first = self.first[dim] + low * self.steps[dim]
        return replace(
            self,
            first=(*self.first[:dim], first, *self.first[dim + 1 :]),
            counts=(*self.counts[:dim], end - begin, *self.counts[dim + 1 :]),
        )


def select(shape: Corner, slices: tuple[object, ...] | None, fqn: str) -> StridedSelection:
    """``slices`` of a tensor of ``shape``. Raises PlanError for too many, wrong kinds, bad bounds."""
    given = _without_ellipsis(slices or (), len(shape), fqn)
    rows = [_along(item, size, dim, fqn) for dim, (item, size) in enumerate(zip(given, shape, strict=True))]
    first, steps, counts, flipped, dropped = zip(*rows, strict=True) if rows else ((),) * 5
    return StridedSelection(first, steps, counts, flipped, dropped)


def _without_ellipsis(slices: tuple[object, ...], ndim: int, fqn: str) -> list[object]:
    places = [place for place, item in enumerate(slices) if isinstance(item, EllipsisType)]
    given = len(slices) - len(places)
    if given > ndim or len(places) > 1:
        raise PlanError(f"{fqn!r} has {ndim} dimensions, and the slice {_shown(slices)} has more", fqn=fqn)
    place = places[0] if places else len(slices)
    return [*slices[:place], *[slice(None)] * (ndim - given), *slices[place + len(places) :]]


def _along(item: object, size: int, dim: int, fqn: str) -> tuple[int, int, int, bool, bool]:
    if isinstance(item, slice):
        try:
            taken = range(size)[item]
        except (TypeError, ValueError) as error:
            raise PlanError(f"{fqn!r} cannot be sliced by {_shown((item,))}: {error}", fqn=fqn) from error
        if not taken:
            return 0, 1, 0, False, False
        first = min(taken[0], taken[-1])
        return first, abs(taken.step) if len(taken) > 1 else 1, len(taken), taken.step < 0, False
    try:
        number = range(size)[item]  # type: ignore[call-overload]
    except IndexError as error:
        raise PlanError(
            f"{fqn!r} has {size} elements along dimension {dim}, and none at {item}", fqn=fqn
        ) from error
    except TypeError as error:
        raise PlanError(f"{fqn!r} is sliced by slices and integers, not by {item!r}", fqn=fqn) from error
    return number, 1, 1, False, True


def _shown(slices: tuple[object, ...]) -> str:
    return ",".join(
        ":".join("" if x is None else str(x) for x in (item.start, item.stop, item.step)).removesuffix(":")
        if isinstance(item, slice)
        else "..."
        if item is Ellipsis
        else str(item)
        for item in slices
    )


def covering_boxes(
    part: ChunkPart, selection: StridedSelection, itemsize: int, max_bytes: int
) -> Iterator[tuple[Box, tuple[slice, ...]]]:
    """Boxes that cover what ``selection`` takes of ``part``, and their places in the result.

    Each begins and ends with an element that is taken. Where steps leave out much, boxes have one index only
    in that dimension.
    """
    ranges = []
    columns = part.box.offsets, part.box.high, selection.first, selection.steps, selection.counts
    for low, high, first, step, count in zip(*columns, strict=True):
        begin = max(0, -((first - low) // step))
        end = min(count, -((first - high) // step))
        if begin >= end:
            return
        ranges.append(range(begin, end))
    yield from _covering(ranges, part, selection, itemsize, max_bytes)


def _covering(
    ranges: list[range], part: ChunkPart, selection: StridedSelection, itemsize: int, max_bytes: int
) -> Iterator[tuple[Box, tuple[slice, ...]]]:
    steps, first = selection.steps, selection.first
    lengths = [(len(taken) - 1) * step + 1 for taken, step in zip(ranges, steps, strict=True)]
    sizes = part.box.sizes
    dim = _dimension_to_cut(ranges, lengths, sizes, steps, itemsize, max_bytes)
    if dim is None:
        offsets = tuple(f + taken[0] * step for f, taken, step in zip(first, ranges, steps, strict=True))
        yield Box(offsets, tuple(lengths)), tuple(slice(taken[0], taken[-1] + 1) for taken in ranges)
        return
    count = 1
    if not _skips(dim, ranges, sizes, steps, itemsize):
        others = math.prod(lengths) // lengths[dim] * itemsize
        count = max(1, (max_bytes // others - 1) // steps[dim] + 1)
    for begin in range(0, len(ranges[dim]), count):
        cut = [*ranges[:dim], ranges[dim][begin : begin + count], *ranges[dim + 1 :]]
        yield from _covering(cut, part, selection, itemsize, max_bytes)


def _skips(dim: int, ranges: list[range], sizes: Corner, steps: Corner, itemsize: int) -> bool:
    """Return whether what a step leaves out of this dimension is not worth reading."""
    left_out = (steps[dim] - 1) * math.prod(sizes[dim + 1 :]) * itemsize
    return 1 < len(ranges[dim]) <= _MAX_SKIPS and left_out > _SKIPPED_BYTES


def _dimension_to_cut(
    ranges: list[range], lengths: list[int], sizes: Corner, steps: Corner, itemsize: int, max_bytes: int
) -> int | None:
    """The first dimension to be taken in several boxes, None if one box will do."""
    for dim in range(len(ranges)):
        if _skips(dim, ranges, sizes, steps, itemsize):
            return dim
    if math.prod(lengths) * itemsize > max_bytes:
        return next((dim for dim, taken in enumerate(ranges) if len(taken) > 1), None)
    return None
