"""Parts of stored payloads, and how their elements get to a buffer. Pure index arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dcp.storage.geometry.lattices import AxisPart
from dcp.storage.geometry.payload_parts import BoxPart

__all__ = ["SourcePart", "Transfer", "transfer_of"]


class SourcePart(NamedTuple):
    """A part of a copy that one stored chunk has: ``lengths`` elements by axis, the copy's slowest first.

    The first one is at byte ``begin`` of the chunk's payload, which is ``payload_bytes`` at
    ``payload_offset`` of file number ``file``; ``strides`` are in bytes, in any order. In the copy it is
    element ``target`` (C order), and ``target_strides`` are in elements, descending.
    """

    chunk: int
    file: int
    payload_offset: int
    payload_bytes: int
    begin: int
    target: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    def has(self, elements: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these elements of the copy it has."""
        left = elements - self.target
        found: npt.NDArray[np.bool_] = left >= 0
        for n, step in zip(self.lengths, self.target_strides, strict=True):
            if n > 1:
                at = left // step
                found &= at < n
                left = left - at * step
        found &= left == 0
        return found

    def is_run(self, itemsize: int) -> bool:
        """Whether its elements lie together in the copy, and in the payload in the same order."""
        run = 1
        axes = zip(reversed(self.lengths), reversed(self.strides), reversed(self.target_strides), strict=True)
        for n, own, target in axes:
            if n != 1:
                if target != run or own != run * itemsize:
                    return False
                run *= n
        return True


class Transfer(NamedTuple):
    """Elements from payload bytes on to bytes of a buffer: ``begin`` and ``target`` are the places of the
    first one, strides are in bytes. Dimensions that lie together in both are one; the source's slowest is the
    first."""

    begin: int
    target: int
    lengths: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    @property
    def is_run(self) -> bool:
        """Whether it is one range of bytes on both sides."""
        return not self.lengths

    def run_bytes(self, itemsize: int) -> int:
        """Payload bytes that lie together."""
        return self.lengths[-1] * itemsize if self.source_strides[-1] == itemsize else itemsize

    def part(self, part: BoxPart) -> Transfer:
        """The transfer of a part of the box."""
        target = self.target
        for offset, stride in zip(part.offsets, self.target_strides, strict=True):
            target += offset * stride
        return Transfer(part.begin, target, part.lengths, self.source_strides, self.target_strides)


def transfer_of(source: SourcePart, part: Sequence[AxisPart], first: int, itemsize: int) -> Transfer:
    """How ``part`` of the axes of ``source`` gets to a buffer that begins with element ``first`` of the
    copy."""
    begin, target = source.begin, (source.target - first) * itemsize
    lengths: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    run = itemsize
    axes = zip(part, source.strides, source.target_strides, strict=True)
    for (low, n), s, step in reversed(list(axes)):
        t = step * itemsize
        begin += low * s
        target += low * t
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
    if not lengths:
        return Transfer(begin, target, (), (), ())
    if run > itemsize:  # the innermost run is a dimension of its own again
        lengths.insert(0, run // itemsize)
        sources.insert(0, itemsize)
        targets.insert(0, itemsize)
    order = sorted(range(len(lengths)), key=lambda d: (-sources[d], -d))
    columns = (tuple(column[d] for d in order) for column in (lengths, sources, targets))
    return Transfer(begin, target, *columns)
