"""Deal boxes and objects out to the ranks that write them, so that all write about as many bytes.

Largest first to the least loaded of the ranks that hold it (Graham's LPT rule); a box larger than the split
size is cut into row ranges, poured into its holders like water into vessels of unequal level. Deterministic.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dcp.planners.save.tables import Boxes, GlobalObjects, Items
from dcp.storage.geometry.strides import Int64

__all__ = ["LARGE_OBJECT_BYTES", "Dealt", "deal_boxes", "deal_objects"]

LARGE_OBJECT_BYTES = 64 << 10
"""Objects above this are balanced over ranks; smaller ones go to the lowest rank that has them."""


class Dealt(NamedTuple):
    """The writers of each box: the item ``owners``, or of a box that is ``split`` the items and their parts
    in order. ``loads`` are the bytes by rank that this makes."""

    owners: Int64
    split: Mapping[int, Sequence[tuple[int, WritePart]]]
    loads: list[int]


def deal_boxes(items: Items, boxes: Boxes, nbytes: Int64, world_size: int, split_bytes: int | None) -> Dealt:
    """Deal out boxes of ``nbytes`` each in balance; replicas above ``split_bytes`` are cut."""
    owners = boxes.first.copy()
    shared = np.diff(boxes.start) > 1
    loads = np.bincount(items.ranks[owners[~shared]], weights=nbytes[~shared], minlength=world_size)
    balancer = Balancer(loads.astype(np.int64).tolist(), split_bytes=split_bytes)
    several = np.flatnonzero(shared)
    order = several[np.argsort(-nbytes[several], kind="stable")]
    if not len(order):
        return Dealt(owners, {}, balancer.loads)
    clusters, followers = _clusters(items, boxes, several)
    split: dict[int, list[tuple[int, WritePart]]] = {}
    order = order[~np.isin(order, list(followers))]
    # boxes to split come first, being the largest; tied ones are few
    special = np.isin(order, list(clusters)) | (nbytes[order] > (split_bytes or np.inf))
    ranks, start = items.ranks[boxes.members].tolist(), boxes.start.tolist()
    sizes = nbytes.tolist()
    for box, is_special in zip(order.tolist(), special.tolist(), strict=True):
        if is_special:
            _deal_special(items, boxes, clusters.get(box, [box]), sizes[box], balancer, owners, split)
        else:
            owners[box] = boxes.members[balancer.choose(ranks, start[box], start[box + 1], sizes[box])]
    return Dealt(owners, split, balancer.loads)


def _deal_special(
    items: Items,
    boxes: Boxes,
    cluster: list[int],
    nbytes: int,
    balancer: Balancer,
    owners: Int64,
    split: dict[int, list[tuple[int, WritePart]]],
) -> None:
    """Deal a box that may be cut, or tied boxes, which go to one rank together."""
    first = int(boxes.first[cluster[0]])
    sizes = tuple(items.sizes[items.start[first] : items.start[first + 1]].tolist())
    parts = balancer.deal(sizes, nbytes, _common_ranks(items, boxes, cluster))
    for tied in cluster:
        own = {int(items.ranks[item]): item for item in reversed(boxes.of(tied).tolist())}
        if len(parts) == 1:
            owners[tied] = own[parts[0].rank]
        else:
            split[tied] = [(own[part.rank], part) for part in parts]


def _clusters(items: Items, boxes: Boxes, shared: Int64) -> tuple[dict[int, list[int]], set[int]]:
    """Find replicated boxes that are tied on their lowest rank and can be written by one rank together."""
    first = boxes.first[shared]
    tied = items.ties[first] >= 0
    ties = zip(
        shared[tied].tolist(),
        items.ranks[first[tied]].tolist(),
        items.ties[first[tied]].tolist(),
        strict=True,
    )
    clusters = {
        leader: cluster
        for leader, cluster in tie_clusters(list(ties)).items()
        if _common_ranks(items, boxes, cluster)
    }
    # a leader is dealt before its followers: all are of one size, and it has the lowest number
    return clusters, {box for cluster in clusters.values() for box in cluster[1:]}


def _common_ranks(items: Items, boxes: Boxes, cluster: Sequence[int]) -> list[int]:
    ranks = items.ranks[boxes.of(cluster[0])]
    common: list[int] = ranks.tolist() if len(cluster) == 1 else np.unique(ranks).tolist()
    for box in cluster[1:]:
        others = set(items.ranks[boxes.of(box)].tolist())
        common = [rank for rank in common if rank in others]
    return common


def deal_objects(objects: GlobalObjects, loads: list[int]) -> Int64:
    """Return who writes each object; ``loads`` are bytes by rank, and grow."""
    owners = objects.owners.copy()
    large = np.flatnonzero(objects.sizes > LARGE_OBJECT_BYTES)
    for row in large[np.argsort(-objects.sizes[large], kind="stable")].tolist():
        owner = min(objects.holders(row), key=loads.__getitem__)
        owners[row] = owner
        loads[owner] += int(objects.sizes[row])
    return owners


class WritePart(NamedTuple):
    """Rows ``[begin, end)`` along ``dim`` of a box, written by ``rank``; the whole box where ``dim`` is
    -1."""

    rank: int
    dim: int
    begin: int
    end: int


@dataclass(eq=False)
class Balancer:
    """Deals boxes out to ranks; ``loads`` are bytes by rank, and grow as boxes are dealt."""

    loads: list[int]
    split_bytes: int | None

    def choose(self, ranks: Sequence[int], begin: int, end: int, nbytes: int) -> int:
        """Choose the position in ``ranks[begin:end]`` of the least loaded, which takes ``nbytes``."""
        loads = self.loads
        best, least = begin, loads[ranks[begin]]
        for position in range(begin + 1, end):
            load = loads[ranks[position]]
            if load < least:
                best, least = position, load
        loads[ranks[best]] = least + nbytes
        return best

    def deal(self, sizes: Sequence[int], nbytes: int, holders: Sequence[int]) -> list[WritePart]:
        """Deal a box that the ranks ``holders`` (ascending) have, in parts in order of their rows; one part
        with ``dim`` -1 where it is not cut."""
        if self.split_bytes is not None and nbytes > self.split_bytes and len(holders) > 1:
            parts = self._split(sizes, nbytes, holders, self.split_bytes)
            if parts:
                return parts
        rank = min(holders, key=self.loads.__getitem__)
        self.loads[rank] += nbytes
        return [WritePart(rank, -1, 0, 0)]

    def _split(
        self, sizes: Sequence[int], nbytes: int, holders: Sequence[int], split_bytes: int
    ) -> list[WritePart]:
        most = min(len(holders), -(-nbytes // max(split_bytes, 1)))
        dim = next((d for d, size in enumerate(sizes) if size >= most), None)
        if dim is None:
            dim = max(range(len(sizes)), key=lambda d: sizes[d], default=-1)
        if dim < 0 or sizes[dim] < 2:
            return []
        ranks = sorted(holders, key=lambda rank: (self.loads[rank], rank))[: min(most, sizes[dim])]
        shares = _pour(nbytes, [self.loads[rank] for rank in ranks])
        row_bytes = nbytes / sizes[dim]
        parts, begin, poured = [], 0, 0.0
        for rank, share in sorted(zip(ranks, shares, strict=True)):
            poured += share
            end = min(round(poured / row_bytes), sizes[dim])
            if end > begin:
                parts.append([rank, begin, end])
                begin = end
        parts[-1][2] = sizes[dim]
        if len(parts) < 2:
            return []
        for rank, first, last in parts:
            self.loads[rank] += round((last - first) * row_bytes)
        return [WritePart(rank, dim, first, last) for rank, first, last in parts]


def _pour(amount: int, levels: Sequence[int]) -> list[float]:
    """Return what each vessel (ascending levels) takes so that the lowest become level."""
    level, total = 0.0, 0
    for count, own in enumerate(levels, start=1):
        total += own
        level = (amount + total) / count
        if count == len(levels) or level <= levels[count]:
            break
    return [max(level - own, 0.0) for own in levels]


def tie_clusters(ties: Sequence[tuple[int, int, int]]) -> dict[int, list[int]]:
    """Group boxes that share memory, given as ``(box, rank, tie number)``: boxes of a cluster by its
    first."""
    by_tie: dict[tuple[int, int], list[int]] = defaultdict(list)
    for box, rank, tie in ties:
        by_tie[rank, tie].append(box)
    return {boxes[0]: boxes for boxes in by_tie.values() if len(boxes) > 1}
