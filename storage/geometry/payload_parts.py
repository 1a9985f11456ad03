"""Boxes of a stored chunk as ranges of its payload: where the rows lie, and which of them are read together.

Pure: index arithmetic on shapes and strides, in bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dcp.storage.geometry.strides import extent

__all__ = ["BLOCK_BYTES", "BoxPart", "Reach", "box_parts", "is_sparse", "reaches"]

BLOCK_BYTES = 4 << 20
"""Payload bytes covered by one CRC of the manifest; the last block of a payload may be shorter."""


class BoxPart(NamedTuple):
    """``lengths`` elements from ``offsets`` of a box on; payload bytes ``begin`` to ``end`` have them all."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    begin: int
    end: int


class Reach(NamedTuple):
    """The payload bytes that are read for a part."""

    begin: int
    end: int


def box_parts(
    begin: int,
    lengths: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    *,
    limit_bytes: int,
    gap_bytes: int,
) -> Iterator[BoxPart]:
    """Yield parts of a box in the order of the payload, each of at most ``limit_bytes`` from end to end.

    Rows that lie farther apart than ``gap_bytes`` are parts of their own. ``begin`` is the first element's
    place. A box without elements has no parts.
    """
    if 0 not in lengths:
        yield from _parts((0,) * len(lengths), lengths, strides, itemsize, begin, 0, limit_bytes, gap_bytes)


def _parts(
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    strides: tuple[int, ...],
    itemsize: int,
    begin: int,
    dim: int,
    limit_bytes: int,
    gap_bytes: int,
) -> Iterator[BoxPart]:
    """Yield parts of a box that has one index only in the dimensions before ``dim``."""
    while dim < len(lengths) and lengths[dim] == 1:
        dim += 1
    size = extent(lengths, strides, itemsize)
    skips = is_sparse(lengths, strides, itemsize, gap_bytes)
    if dim == len(lengths) or (size <= limit_bytes and not skips):
        yield BoxPart(offsets, lengths, begin, begin + size)
        return
    stride = strides[dim]
    row = size - (lengths[dim] - 1) * stride
    step = 1 if skips or row > limit_bytes else (limit_bytes - row) // stride + 1
    before, behind, rest = offsets[:dim], offsets[dim + 1 :], lengths[dim + 1 :]
    # Of a large transposed box there are very many: parts that need no look at their own are made at once.
    is_done = row <= limit_bytes and not (skips and is_sparse(rest, strides[dim + 1 :], itemsize, gap_bytes))
    for first in range(0, lengths[dim], step):
        count = min(step, lengths[dim] - first)
        place, sizes = (*before, offsets[dim] + first, *behind), (*lengths[:dim], count, *rest)
        at = begin + first * stride
        if is_done:
            yield BoxPart(place, sizes, at, at + row + (count - 1) * stride)
        else:
            yield from _parts(place, sizes, strides, itemsize, at, dim, limit_bytes, gap_bytes)


def is_sparse(lengths: Sequence[int], strides: Sequence[int], itemsize: int, gap_bytes: int) -> bool:
    """Return whether rows of any dimension lie farther apart than ``gap_bytes``; ``strides`` descend."""
    size = itemsize
    for n, stride in zip(reversed(lengths), reversed(strides), strict=True):
        if n > 1:
            if stride - size > gap_bytes:
                return True
            size += (n - 1) * stride
    return False


def reaches(
    parts: Sequence[BoxPart], payload_bytes: int, *, gap_bytes: int, whole_blocks: bool
) -> Iterator[Reach]:
    """Yield the bytes that are read for each of ``parts`` (in payload order), so that checksums of blocks
    can be compared.

    Bytes between two parts that are read in any case belong to the first one's. With ``whole_blocks`` the
    blocks at the ends are completed; without, only if they are the payload's own ends and near.
    """
    previous = 0
    for number, part in enumerate(parts):
        begin, end = part.begin, part.end
        if number:
            begin = previous if previous >= 0 else _floor(begin) if whole_blocks else begin
        elif whole_blocks:
            begin = _floor(begin)
        elif begin <= gap_bytes:
            begin = 0
        following = parts[number + 1].begin if number + 1 < len(parts) else None
        previous = -1
        if following is not None and _is_near(end, following, gap_bytes, whole_blocks=whole_blocks):
            end = previous = following
        elif whole_blocks:
            end = min(_ceil(end), payload_bytes)
        elif following is None and payload_bytes - end <= gap_bytes:
            end = payload_bytes
        yield Reach(begin, end)


def _is_near(end: int, begin: int, gap_bytes: int, *, whole_blocks: bool) -> bool:
    return _ceil(end) > _floor(begin) if whole_blocks else begin - end <= gap_bytes


def _floor(position: int) -> int:
    return position // BLOCK_BYTES * BLOCK_BYTES


def _ceil(position: int) -> int:
    return -(-position // BLOCK_BYTES) * BLOCK_BYTES
