"""Who writes which box: replicated boxes are dealt out so that all ranks write about as many bytes.

Largest first to the least loaded of the ranks that hold it (Graham's LPT rule); a box larger than the split
size is cut into row ranges, poured into its holders like water into vessels of unequal level. Deterministic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Balancer", "Replicated", "WritePart"]


class Replicated(NamedTuple):
    """A box that several ranks hold: sizes, bytes, and the ranks (ascending)."""

    sizes: tuple[int, ...]
    nbytes: int
    holders: Sequence[int]


class WritePart(NamedTuple):
    """Rows ``[begin, end)`` along ``dim`` of a box, written by ``rank``; the whole box where ``dim`` is
    -1."""

    rank: int
    dim: int
    begin: int
    end: int


class Balancer:
    """Deals boxes out to ranks; ``loads`` are bytes by rank, and grow as boxes are dealt."""

    def __init__(self, loads: Sequence[int], *, split_bytes: int | None) -> None:
        self.loads = list(loads)
        self._split_bytes = split_bytes

    def choose(self, ranks: Sequence[int], begin: int, end: int, nbytes: int) -> int:
        """The position in ``ranks[begin:end]`` of the least loaded, which takes ``nbytes``."""
        loads = self.loads
        best, least = begin, loads[ranks[begin]]
        for position in range(begin + 1, end):
            load = loads[ranks[position]]
            if load < least:
                best, least = position, load
        loads[ranks[best]] = least + nbytes
        return best

    def deal(self, box: Replicated) -> list[WritePart]:
        """The parts of one box, in order of their rows; one part with ``dim`` -1 where it is not cut."""
        if self._split_bytes is not None and box.nbytes > self._split_bytes and len(box.holders) > 1:
            parts = self._split(box, self._split_bytes)
            if parts:
                return parts
        return [self._whole(box, min(box.holders, key=self.loads.__getitem__))]

    def _whole(self, box: Replicated, rank: int) -> WritePart:
        self.loads[rank] += box.nbytes
        return WritePart(rank, -1, 0, 0)

    def _split(self, box: Replicated, split_bytes: int) -> list[WritePart]:
        most = min(len(box.holders), -(-box.nbytes // max(split_bytes, 1)))
        dim = next((d for d, size in enumerate(box.sizes) if size >= most), None)
        if dim is None:
            dim = max(range(len(box.sizes)), key=lambda d: box.sizes[d], default=-1)
        if dim < 0 or box.sizes[dim] < 2:
            return []
        ranks = sorted(box.holders, key=lambda rank: (self.loads[rank], rank))[: min(most, box.sizes[dim])]
        shares = _pour(box.nbytes, [self.loads[rank] for rank in ranks])
        row_bytes = box.nbytes / box.sizes[dim]
        parts, begin, poured = [], 0, 0.0
        for rank, share in sorted(zip(ranks, shares, strict=True)):
            poured += share
            end = min(round(poured / row_bytes), box.sizes[dim])
            if end > begin:
                parts.append([rank, begin, end])
                begin = end
        parts[-1][2] = box.sizes[dim]
        if len(parts) < 2:
            return []
        for rank, first, last in parts:
            self.loads[rank] += round((last - first) * row_bytes)
        return [WritePart(rank, dim, first, last) for rank, first, last in parts]


def _pour(amount: int, levels: Sequence[int]) -> list[float]:
    """What each vessel (ascending levels) takes so that the lowest become level."""
    level, total = 0.0, 0
    for count, own in enumerate(levels, start=1):
        total += own
        level = (amount + total) / count
        if count == len(levels) or level <= levels[count]:
            break
    return [max(level - own, 0.0) for own in levels]


def tie_clusters(ties: Sequence[tuple[int, int, int]]) -> dict[int, list[int]]:
    """Boxes that share memory: ``(box, rank, tie number)`` in, boxes of one cluster by its first box out."""
    by_tie: dict[tuple[int, int], list[int]] = defaultdict(list)
    for box, rank, tie in ties:
        by_tie[rank, tie].append(box)
    return {boxes[0]: boxes for boxes in by_tie.values() if len(boxes) > 1}
