"""Selections of slices: the elements of a tensor that they take, and those of them that a box has. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp.storage.errors import PlanError
from dcp.storage.geometry.boxes import Box

__all__ = ["StridedSelection", "select"]

Corner = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StridedSelection:
    """Elements that slices take of a tensor: in each dimension ``counts`` from ``first`` on, each ``steps``
    behind the one before. ``flipped`` and ``dropped`` are the dimensions that are turned round, and those
    taken by a number."""

    first: Corner
    steps: Corner
    counts: Corner
    flipped: tuple[bool, ...]
    dropped: tuple[bool, ...]

    def finish(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the result, from its elements in ascending order."""
        turned = array[tuple(slice(None, None, -1 if flip else 1) for flip in self.flipped)]
        return np.ascontiguousarray(turned).reshape(self.shape)

    def within(self, box: Box) -> tuple[Corner, tuple[slice, ...]] | None:
        """Return the first element of it that ``box`` of the tensor has, and the places of all of these in
        the result; None if there is none."""
        offsets, places = [], []
        columns = box.offsets, box.high, self.first, self.steps, self.counts
        for low, high, first, step, count in zip(*columns, strict=True):
            begin, end = max(0, -((first - low) // step)), min(count, -((first - high) // step))
            if begin >= end:
                return None
            offsets.append(first + begin * step)
            places.append(slice(begin, end))
        return tuple(offsets), tuple(places)

    @property
    def shape(self) -> Corner:
        """The shape of the result."""
        return tuple(n for n, drop in zip(self.counts, self.dropped, strict=True) if not drop)

    def is_whole(self, shape: Corner) -> bool:
        """Return whether it is all of a tensor of ``shape``, as it is."""
        return self.counts == shape and not any((*self.flipped, *self.dropped))

    def slabs(self, max_elements: int) -> Iterator[StridedSelection]:
        """Yield parts along the first dimension of the result, in its order."""
        dim = next((dim for dim, drop in enumerate(self.dropped) if not drop), None)
        if dim is None or math.prod(self.counts) <= max_elements:
            yield self
            return
        count = self.counts[dim]
        rows = max(1, max_elements * count // math.prod(self.counts))
        for begin in range(0, count, rows):
            yield self._narrowed(dim, begin, min(count, begin + rows))

    def part(self, places: Sequence[slice]) -> StridedSelection:
        """Select a part of it: ``places`` are of step 1, one for each dimension of the result."""
        part, dims = self, [dim for dim, drop in enumerate(self.dropped) if not drop]
        for dim, place in zip(dims, places, strict=True):
            begin, end, _ = place.indices(self.counts[dim])
            part = part._narrowed(dim, begin, end)
        return part

    def _narrowed(self, dim: int, begin: int, end: int) -> StridedSelection:
        """Return elements ``begin`` to ``end`` of the result's along one of the tensor's dimensions."""
        low = self.counts[dim] - end if self.flipped[dim] else begin
        first = self.first[dim] + low * self.steps[dim]
        return replace(
            self,
            first=(*self.first[:dim], first, *self.first[dim + 1 :]),
            counts=(*self.counts[:dim], end - begin, *self.counts[dim + 1 :]),
        )


def select(shape: Corner, slices: tuple[object, ...] | None, fqn: str) -> StridedSelection:
    """Select ``slices`` of a tensor of ``shape``. Raises PlanError for too many, wrong kinds, bad bounds."""
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
