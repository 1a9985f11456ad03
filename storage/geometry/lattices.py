"""Elements that stand at regular steps: what a box is once its tensor was reshaped, transposed or put beside
others. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["AxisPart", "parts_between"]

AxisPart = tuple[int, int]
"""Of an axis: the first index, and how many."""


def parts_between(
    lengths: Sequence[int], steps: Sequence[int], low: int, high: int
) -> Iterator[tuple[AxisPart, ...]]:
    """Yield what of the positions ``i * steps[0] + j * steps[1] + ...`` is at least ``low`` and below
    ``high``.

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
