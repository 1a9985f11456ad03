"""Ranges of a tensor's elements as boxes, and boxes as ranges of stored payloads. Pure index arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "Box",
    "Part",
    "SourceBox",
    "Transfer",
    "intersect",
    "range_boxes",
    "split_runs",
    "split_transfer",
    "transfer_of",
]


class Box(NamedTuple):
    """``sizes`` elements from ``offsets`` on; ``first`` is the C-order position of its first element."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int


class SourceBox(NamedTuple):
    """A part of a copy that one stored chunk has.

    The box ``offsets``/``lengths`` is relative to the copy's. Its first element is at byte ``begin`` of the
    chunk's payload, which is ``payload_bytes`` at ``payload_offset`` of file number ``file``; ``strides`` are
    in bytes, and may be in any order.
    """

    chunk: int
    file: int
    payload_offset: int
    payload_bytes: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    begin: int
    strides: tuple[int, ...]


class Part(NamedTuple):
    """What a box and a source box have in common: where it begins relative to the copy, and its extent."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class Transfer(NamedTuple):
    """Elements from payload bytes on to bytes of a buffer: ``begin`` and ``target`` are the places of the
    first one, strides are in bytes. Dimensions that lie together in both are merged into one."""

    begin: int
    target: int
    lengths: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    @property
    def is_run(self) -> bool:
        """Whether it is one range of bytes on both sides."""
        return not self.lengths

    def extent(self, itemsize: int) -> int:
        """Payload bytes from the first to the last element."""
        return itemsize + sum((n - 1) * s for n, s in zip(self.lengths, self.source_strides, strict=True))


def range_boxes(shape: Sequence[int], begin: int, end: int) -> Iterator[Box]:
    """Boxes that have the elements ``begin`` to ``end`` of an array in C order; at most two a dimension."""
    yield from _range_boxes(tuple(shape), begin, end, (), 0)


def _range_boxes(
    shape: tuple[int, ...], begin: int, end: int, outer: tuple[int, ...], before: int
) -> Iterator[Box]:
    if begin >= end:
        return
    ones = (1,) * len(outer)
    if begin == 0 and end == math.prod(shape):
        yield Box((*outer, *(0 for _ in shape)), (*ones, *shape), before)
        return
    row = math.prod(shape[1:])
    first, at = divmod(begin, row)
    last, rest = divmod(end, row)
    if first == last:
        yield from _range_boxes(shape[1:], at, rest, (*outer, first), before + first * row)
        return
    if at:
        yield from _range_boxes(shape[1:], at, row, (*outer, first), before + first * row)
        first += 1
    if first < last:
        offsets = (*outer, first, *(0 for _ in shape[1:]))
        yield Box(offsets, (*ones, last - first, *shape[1:]), before + first * row)
    if rest:
        yield from _range_boxes(shape[1:], 0, rest, (*outer, last), before + last * row)


def intersect(box: Box, source: SourceBox) -> Part | None:
    """The part of ``box`` that ``source`` has."""
    offsets, lengths = [], []
    for a, n, b, m in zip(box.offsets, box.sizes, source.offsets, source.lengths, strict=True):
        low, high = max(a, b), min(a + n, b + m)
        if high <= low:
            return None
        offsets.append(low)
        lengths.append(high - low)
    return Part(tuple(offsets), tuple(lengths))


def transfer_of(
    part: Part, source: SourceBox, strides: Sequence[int], origin: int, itemsize: int
) -> Transfer:
    """How ``part`` gets to a buffer whose byte 0 is byte ``origin`` of the copy, which has ``strides``."""
    begin, target = source.begin, -origin
    for low, base, own, stride in zip(part.offsets, source.offsets, source.strides, strides, strict=True):
        begin += (low - base) * own
        target += low * stride
    lengths: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    run = itemsize
    for n, s, t in zip(reversed(part.lengths), reversed(source.strides), reversed(strides), strict=True):
        if n == 1:
            continue
        if not lengths and s == t == run:
            run *= n
        elif lengths and s == sources[-1] * lengths[-1] and t == targets[-1] * lengths[-1]:
            lengths[-1] *= n
        else:
            lengths.append(n)
            sources.append(s)
            targets.append(t)
    if run > itemsize and lengths:  # the innermost run is a dimension of its own again
        lengths.insert(0, run // itemsize)
        sources.insert(0, itemsize)
        targets.insert(0, itemsize)
    return Transfer(begin, target, tuple(lengths[::-1]), tuple(sources[::-1]), tuple(targets[::-1]))


def split_runs(transfer: Transfer, itemsize: int, cost_bytes: int) -> list[Transfer]:
    """One part for each run of bytes that lie together in the source; none if all of its extent is cheaper to
    read, where a run costs as much as ``cost_bytes``."""
    dimension = next((d for d, s in enumerate(transfer.source_strides) if s == itemsize), -1)
    others = [d for d in range(len(transfer.lengths)) if d != dimension]
    if math.prod(transfer.lengths[d] for d in others) * cost_bytes > transfer.extent(itemsize):
        return []
    run = (
        ((transfer.lengths[dimension],), (transfer.target_strides[dimension],))
        if dimension >= 0
        else ((1,), (0,))
    )
    parts = []
    for numbers in itertools.product(*(range(transfer.lengths[d]) for d in others)):
        begin = sum(n * transfer.source_strides[d] for n, d in zip(numbers, others, strict=True))
        target = sum(n * transfer.target_strides[d] for n, d in zip(numbers, others, strict=True))
        parts.append(
            Transfer(
                transfer.begin + begin,
                transfer.target + target,
                run[0],
                (itemsize,),
                run[1],
            )
        )
    return parts


def split_transfer(transfer: Transfer, itemsize: int, limit_bytes: int) -> Iterator[Transfer]:
    """Parts whose payload extents are at most ``limit_bytes``, cut along the source's largest strides."""
    extent = transfer.extent(itemsize)
    if extent <= limit_bytes or not transfer.lengths:
        yield transfer
        return
    dimensions = [d for d, n in enumerate(transfer.lengths) if n > 1]
    cut = max(dimensions, key=lambda d: transfer.source_strides[d])
    stride, length = transfer.source_strides[cut], transfer.lengths[cut]
    row = extent - (length - 1) * stride
    step = max(1, (limit_bytes - row) // stride + 1) if row <= limit_bytes else 1
    for first in range(0, length, step):
        count = min(step, length - first)
        part = transfer._replace(
            begin=transfer.begin + first * stride,
            target=transfer.target + first * transfer.target_strides[cut],
            lengths=(*transfer.lengths[:cut], count, *transfer.lengths[cut + 1 :]),
        )
        yield from split_transfer(part, itemsize, limit_bytes)
