"""Parts of stored payloads, and how their elements get to a buffer. Pure index arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.payload_parts import BoxPart

__all__ = ["SourceBox", "Transfer", "transfer_of"]


class SourceBox(NamedTuple):
    """A part of a copy that one stored chunk has.

    ``box`` is relative to the copy's. Its first element is at byte ``begin`` of the chunk's payload, which is
    ``payload_bytes`` at ``payload_offset`` of file number ``file``; ``strides`` are in bytes, in any order.
    """

    chunk: int
    file: int
    payload_offset: int
    payload_bytes: int
    box: Box
    begin: int
    strides: tuple[int, ...]


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


def transfer_of(part: Box, source: SourceBox, strides: Sequence[int], origin: int, itemsize: int) -> Transfer:
    """How ``part`` gets to a buffer whose byte 0 is byte ``origin`` of the copy, which has ``strides``."""
    begin, target = source.begin, -origin
    places = zip(part.offsets, source.box.offsets, source.strides, strides, strict=True)
    for low, base, own, stride in places:
        begin += (low - base) * own
        target += low * stride
    lengths: list[int] = []
    sources: list[int] = []
    targets: list[int] = []
    run = itemsize
    for n, s, t in zip(reversed(part.sizes), reversed(source.strides), reversed(strides), strict=True):
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
