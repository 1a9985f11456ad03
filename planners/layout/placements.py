"""A rank's part of a global tensor, from mesh shape, coordinate and placements alone.

Along each dimension the local tensor is a sequence of runs ``(global start, length)`` in local order. Plain
sharding gives one run; FSDP2 over tensor parallelism (`_StridedShard`) may give several, and then the local
tensor is not one box of the global one, but the product of its runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["LocalBox", "PositionRun", "Split", "boxes_of_runs", "local_runs", "local_shape"]

PositionRun = tuple[int, int]
"""(global start, length) of consecutive global positions that are consecutive locally."""


class LocalBox(NamedTuple):
    """A part of a global tensor, and where it begins in the local one."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


class Split(NamedTuple):
    """One sharding step: dimension ``dim`` over ``parts`` ranks, of which this is number ``coordinate``.

    ``split_factor`` above 1 is torch's `_StridedShard`: first into that many pieces, then each over the
    ranks.
    """

    dim: int
    parts: int
    coordinate: int
    split_factor: int = 1


def _chunk(length: int, parts: int, position: int) -> tuple[int, int]:
    """Return (start, stop) of a part, by the rule of `torch.chunk`: equal parts, the last ones shorter or
    empty."""
    full = -(-length // parts)
    return min(position * full, length), min((position + 1) * full, length)


def _take(runs: Sequence[PositionRun], start: int, stop: int, taken: list[PositionRun]) -> None:
    """Append local positions ``[start, stop)`` of ``runs`` to ``taken``, joining what is adjacent."""
    position = 0
    for first, length in runs:
        low, high = max(start - position, 0), min(stop - position, length)
        position += length
        if low >= high:
            continue
        if taken and sum(taken[-1]) == first + low:
            taken[-1] = (taken[-1][0], taken[-1][1] + high - low)
        else:
            taken.append((first + low, high - low))


def _split_runs(runs: Sequence[PositionRun], split: Split) -> list[PositionRun]:
    length = sum(size for _, size in runs)
    taken: list[PositionRun] = []
    for piece in range(split.split_factor):
        begin, end = _chunk(length, split.split_factor, piece)
        start, stop = _chunk(end - begin, split.parts, split.coordinate)
        _take(runs, begin + start, begin + stop, taken)
    return taken


def local_runs(shape: Sequence[int], splits: Sequence[Split]) -> list[list[PositionRun]]:
    """Return runs by dimension; ``splits`` are applied in order."""
    runs: list[list[PositionRun]] = [[(0, size)] if size else [] for size in shape]
    for split in splits:
        runs[split.dim] = _split_runs(runs[split.dim], split)
    return runs


def local_shape(runs: Sequence[Sequence[PositionRun]]) -> tuple[int, ...]:
    """Return shape of the local tensor."""
    return tuple(sum(length for _, length in dim) for dim in runs)


def boxes_of_runs(runs: Sequence[Sequence[PositionRun]]) -> tuple[LocalBox, ...]:
    """Return the boxes of a local tensor, in local C order; none where it is empty."""
    located: list[list[tuple[int, int, int]]] = []
    for dim in runs:
        positions = itertools.accumulate((length for _, length in dim), initial=0)
        located.append([(first, length, at) for (first, length), at in zip(dim, positions, strict=False)])
    boxes = []
    for product in itertools.product(*located):
        offsets, sizes, local = (tuple(entry[part] for entry in product) for part in range(3))
        if math.prod(sizes):
            boxes.append(LocalBox(offsets, sizes, local))
    return tuple(boxes)
