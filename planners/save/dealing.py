"""Who writes which box of a global plan, and which object: the balancer, asked for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dcp.planners.save.balance import Balancer, Replicated, WritePart, tie_clusters
from dcp.planners.save.boxes import Boxes, Items
from dcp.planners.save.global_tables import GlobalObjects
from dcp.storage.formats.index import Int64

__all__ = ["LARGE_OBJECT_BYTES", "Dealt", "deal_boxes", "deal_objects"]

LARGE_OBJECT_BYTES = 64 << 10
"""Objects above this are balanced over ranks; smaller ones go to the lowest rank that has them."""


class Dealt(NamedTuple):
    """Who writes each box: the item ``owners``, or of a box that is ``split`` the items and their parts in
    order. ``loads`` are the bytes by rank that this makes."""

    owners: Int64
    split: Mapping[int, Sequence[tuple[int, WritePart]]]
    loads: list[int]


def deal_boxes(
    items: Items, boxes: Boxes, nbytes: Int64, world_size: int, *, lowest_rank: bool, split_bytes: int | None
) -> Dealt:
    """Deal out boxes of ``nbytes`` each: to the lowest ranks that hold them, or so that bytes are balanced
    and replicas above ``split_bytes`` are cut."""
    owners = boxes.first.copy()
    if lowest_rank:
        return Dealt(owners, {}, [0] * world_size)
    shared = np.diff(boxes.start) > 1
    loads = np.bincount(items.ranks[owners[~shared]], weights=nbytes[~shared], minlength=world_size)
    balancer = Balancer(loads.astype(np.int64).tolist(), split_bytes=split_bytes)
    several = np.flatnonzero(shared)
    order = several[np.argsort(-nbytes[several], kind="stable")]
    if not len(order):
        return Dealt(owners, {}, balancer.loads)
    clusters, followers = _clusters(items, boxes, several)
    split: dict[int, list[tuple[int, WritePart]]] = {}
    # boxes to split come first, being the largest; tied ones are few
    special = np.isin(order, list(clusters)) | (nbytes[order] > (split_bytes or np.inf))
    ranks, start = items.ranks[boxes.members].tolist(), boxes.start.tolist()
    sizes = nbytes.tolist()
    for box, is_special in zip(order.tolist(), special.tolist(), strict=True):
        if is_special:
            _deal_special(items, boxes, clusters.get(box, [box]), sizes[box], balancer, owners, split)
        elif box not in followers:
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
    parts = balancer.deal(Replicated(sizes, nbytes, _common_ranks(items, boxes, cluster)))
    for tied in cluster:
        own = {int(items.ranks[item]): item for item in reversed(boxes.of(tied).tolist())}
        if len(parts) == 1:
            owners[tied] = own[parts[0].rank]
        else:
            split[tied] = [(own[part.rank], part) for part in parts]


def _clusters(items: Items, boxes: Boxes, shared: Int64) -> tuple[dict[int, list[int]], set[int]]:
    """Replicated boxes that are tied on their lowest rank and can be written by one rank together."""
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


def deal_objects(objects: GlobalObjects, loads: list[int], *, lowest_rank: bool) -> Int64:
    """Who writes each object; ``loads`` are bytes by rank, and grow."""
    owners = objects.owners.copy()
    large = np.flatnonzero(objects.sizes > LARGE_OBJECT_BYTES)
    if lowest_rank:
        return owners
    for row in large[np.argsort(-objects.sizes[large], kind="stable")].tolist():
        owner = min(objects.holders(row), key=loads.__getitem__)
        owners[row] = owner
        loads[owner] += int(objects.sizes[row])
    return owners
