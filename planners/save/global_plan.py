"""The global save plan: all ranks' boxes in, one index and one list of writes a rank out.

Every box is written exactly once. Ranks that hold the same box are replicas: one of them writes it, or
several write a part each. Boxes and objects are dealt out so that all ranks write about as many bytes:
largest first to the least loaded of the ranks that hold it (Graham's LPT rule); a box larger than the split
size is cut into row ranges, poured into its holders like water into vessels of unequal level. Deterministic.

Vectorised over boxes; the coordinator plans a thousand ranks in seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dcp.planners.rank_state import RankSets, SaveColumns
from dcp.planners.save.tables import (
    Boxes,
    GlobalObjects,
    GlobalTensors,
    Items,
    check_bounds,
    check_boxes,
    check_kinds,
    check_nesting,
    check_replica_digests,
    check_volumes,
    distinct_boxes,
    gather_items,
    global_objects,
    global_tensors,
    invalid_plan,
)
from dcp.storage.engine.write_tables import WriteColumns
from dcp.storage.formats.container_notes import ContainerNote, Noted, join_notes, structure_of_notes
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, Int64, ObjectColumns, Path, itemsizes, starts
from dcp.storage.formats.native.format import DCP
from dcp.storage.geometry.ragged import expand_ranges, gather_rows, row_products

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


SPLIT_BYTES = 64 << 20
"""A replicated box above this is written by several of its holders, a part each."""


@dataclass(frozen=True, eq=False)
class GlobalSavePlan:
    """``index`` says what the checkpoint will hold (files, offsets and CRCs still to come), ``writes[r]``
    what rank r has to write. ``sets`` are by rank the rows to compare with other ranks' when the plan serves
    again; None where it cannot, or was not wanted."""

    index: CheckpointIndex
    writes: list[WriteColumns]
    sets: list[RankSets] | None = None


def _chunks(items: Items, dealt: Dealt) -> tuple[Int64, Int64, Int64, Int64]:
    """Return (the item whose memory has it, offsets, sizes, offsets in that memory) of each chunk of the
    index."""
    counts = np.ones(len(dealt.owners), np.int64)
    for box, parts in dealt.split.items():
        counts[box] = len(parts)
    chunk_items = np.repeat(dealt.owners, counts)
    begin = starts(counts)
    for box, parts in dealt.split.items():
        chunk_items[begin[box] : begin[box + 1]] = [item for item, _ in parts]
    start = starts(items.start[chunk_items + 1] - items.start[chunk_items])
    offsets = gather_rows(items.offsets, items.start, chunk_items)
    sizes = gather_rows(items.sizes, items.start, chunk_items)
    local_offsets = gather_rows(items.local_offsets, items.start, chunk_items)
    for box, parts in dealt.split.items():
        for number, (_, part) in enumerate(parts):
            place = start[begin[box] + number] + part.dim
            offsets[place] += part.begin
            local_offsets[place] += part.begin
            sizes[place] = part.end - part.begin
    return chunk_items, offsets, sizes, local_offsets


def _index(
    tensors: GlobalTensors,
    objects: GlobalObjects,
    chunk_tensors: Int64,
    offsets: Int64,
    sizes: Int64,
    paths: dict[str, Path] | None,
    notes: Sequence[ContainerNote],
) -> CheckpointIndex:
    """Make the index, without the places of bytes."""
    chunks, count = len(chunk_tensors), len(objects.fqns)
    box_start = starts(np.diff(tensors.shape_start)[chunk_tensors])
    zeros = np.zeros(chunks, np.int64)
    return CheckpointIndex(
        format=DCP.name,
        fqns=tensors.fqns,
        dtype_codes=tensors.dtype_codes,
        shape_start=tensors.shape_start,
        shape_values=tensors.shape_values,
        requires_grad=tensors.requires_grad,
        chunk_start=np.searchsorted(chunk_tensors, np.arange(len(tensors.fqns) + 1)).astype(np.int64),
        chunk_offsets=offsets,
        chunk_sizes=sizes,
        chunk_files=zeros,
        record_offsets=zeros,
        record_lengths=zeros,
        payload_offsets=zeros,
        payload_lengths=row_products(sizes, box_start) * itemsizes(tensors.dtype_codes)[chunk_tensors],
        crc_start=np.zeros(chunks + 1, np.int64),
        objects=ObjectColumns(
            fqns=objects.fqns,
            files=np.full(count, -1, np.int64),
            offsets=np.zeros(count, np.int64),
            lengths=np.zeros(count, np.int64),
            crcs=np.full(count, UNKNOWN, np.int64),
            plain=np.full(count, -1, np.int64),
        ),
        stride_orders=tensors.stride_orders,
        planner_data=paths,
        provenance=structure_of_notes(notes),
    )


def _writes(
    items: Items,
    index: CheckpointIndex,
    chunk_items: Int64,
    local_offsets: Int64,
    objects: GlobalObjects,
    owners: Int64,
    world_size: int,
) -> list[WriteColumns]:
    """List each rank's chunks of the index, in the order of its own columns."""
    ranks, rows = items.ranks[chunk_items], items.rows[chunk_items]
    width = int(rows.max(initial=0)) + 1
    order = np.argsort(ranks * width + rows, kind="stable")
    bounds = np.searchsorted(ranks[order], np.arange(world_size + 1))
    ndims = np.diff(index.box_start)[order]
    box_start = starts(ndims)
    flat = expand_ranges(index.box_start[order], ndims)
    sizes, local_offsets = index.chunk_sizes[flat], local_offsets[flat]
    ties, sources = items.ties[chunk_items][order], items.sources[chunk_items][order]
    writes = []
    for rank in range(world_size):
        begin, end = int(bounds[rank]), int(bounds[rank + 1])
        box = slice(int(box_start[begin]), int(box_start[end]))
        own_start = box_start[begin : end + 1] - box_start[begin]
        object_rows = objects.rows[rank]
        mine = np.flatnonzero(owners[object_rows] == rank)
        shares = _shares(ties[begin:end], own_start, sizes[box], local_offsets[box])
        writes.append(
            WriteColumns(
                sources=sources[begin:end],
                box_start=own_start,
                sizes=sizes[box],
                local_offsets=local_offsets[box],
                chunks=order[begin:end],
                shares=shares,
                objects=mine,
                object_rows=object_rows[mine],
            )
        )
    return writes


def _shares(ties: Int64, start: Int64, sizes: Int64, local_offsets: Int64) -> Int64:
    """Find the earlier row with the same bytes, by row; -1 where there is none."""
    shares = np.full(len(ties), -1, np.int64)
    seen: dict[tuple[int, bytes, bytes], int] = {}
    for row in np.flatnonzero(ties >= 0).tolist():
        box = slice(int(start[row]), int(start[row + 1]))
        key = (int(ties[row]), sizes[box].tobytes(), local_offsets[box].tobytes())
        earlier = seen.setdefault(key, row)
        if earlier != row:
            shares[row] = earlier
    return shares


def join_planner_data(parts: Sequence[Mapping[str, Path] | None]) -> dict[str, Path] | None:
    """Join all ranks' paths in one mapping; the lowest rank's where they differ. None where no rank has
    any."""
    joined: dict[str, Path] | None = None
    previous: Mapping[str, Path] | None = None
    for part in parts:
        if part is None or part is previous or part == previous:
            continue
        previous = part
        joined = (
            dict(part) if joined is None else {**joined, **{k: v for k, v in part.items() if k not in joined}}
        )
    return joined


def plan_save(
    all_columns: Sequence[SaveColumns],
    *,
    dedup_to_lowest_rank: bool = False,
    split_bytes: int | None = SPLIT_BYTES,
    check_replicas: bool = True,
    with_sets: bool = False,
) -> GlobalSavePlan:
    """Plan a save from the columns of all ranks, in rank order.

    ``dedup_to_lowest_rank`` lets the lowest holder write each replicated box; otherwise bytes are balanced,
    and replicated boxes above ``split_bytes`` are cut (None: never). Boxes must fill their tensors where
    there is more than one rank: a single rank may save its own part alone. ``with_sets`` finds what a plan
    that is kept needs to compare replicas again.

    Raises PlanError listing all problems: out of bounds, overlap, gaps, differing shapes, dtypes or kinds;
    ReplicaMismatchError where that is the only kind of problem and replicas differ (`PerRank` is for state
    that does so on purpose).
    """
    world_size = len(all_columns)
    tensors = global_tensors(all_columns)
    objects = global_objects(all_columns, check_replicas=check_replicas)
    items = gather_items(all_columns, tensors)
    notes, mixed_keys = join_notes([Noted(part.notes, part.planner_data or {}) for part in all_columns])
    paths = join_planner_data([columns.planner_data for columns in all_columns])
    # here already: what follows compares boxes of one tensor, which must be one
    problems = [*tensors.problems, *check_volumes(tensors), *check_kinds(tensors, objects), *mixed_keys]
    if world_size > 1:
        problems += check_nesting(all_columns, paths or {}, notes)
    if problems:
        raise invalid_plan(problems, objects.mismatches)
    inside, problems = check_bounds(items, tensors)
    volumes = row_products(tensors.shape_values, tensors.shape_start)
    held = np.flatnonzero(inside & ((items.volumes > 0) | (volumes[items.tensors] == 0)))
    boxes = distinct_boxes(items, held, tensors)
    complete = world_size > 1 and not problems
    problems += check_boxes(items, boxes.first, tensors, volumes, complete=complete)
    mismatches = [*objects.mismatches]
    if check_replicas:
        mismatches += check_replica_digests(items, boxes, tensors)
    if problems or mismatches:
        raise invalid_plan(problems, mismatches)
    nbytes = items.volumes[boxes.first] * itemsizes(tensors.dtype_codes)[items.tensors[boxes.first]]
    dealt, owners = Dealt(boxes.first, {}, []), objects.owners
    if world_size > 1 and not dedup_to_lowest_rank:
        dealt = deal_boxes(items, boxes, nbytes, world_size, split_bytes)
        owners = deal_objects(objects, dealt.loads)
    chunk_items, offsets, sizes, local_offsets = _chunks(items, dealt)
    index = _index(tensors, objects, items.tensors[chunk_items], offsets, sizes, paths, notes)
    return GlobalSavePlan(
        index=index,
        writes=_writes(items, index, chunk_items, local_offsets, objects, owners, world_size),
        sets=replica_sets(items, boxes, objects, all_columns) if with_sets else None,
    )


def _no_int64() -> Int64:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class _Members:
    """Rows that were compared: group (box or object), rank, row of the rank, key of all the group's ranks."""

    groups: Int64
    ranks: Int64
    rows: Int64
    keys: npt.NDArray[np.uint64]


def replica_sets(
    items: Items, boxes: Boxes, objects: GlobalObjects, all_columns: Sequence[SaveColumns]
) -> list[RankSets] | None:
    """Find the sets, by rank, of what has digests; None where a rank holds a box twice, which only a full
    plan compares."""
    of_boxes, of_objects = _members_of_boxes(items, boxes), _members_of_objects(objects, all_columns)
    if of_boxes is None:
        return None
    keys, numbers = np.unique(np.concatenate([of_boxes.keys, of_objects.keys]), return_inverse=True)
    box_numbers, object_numbers = numbers[: len(of_boxes.keys)], numbers[len(of_boxes.keys) :]
    by_rank = []
    for rank in range(len(all_columns)):
        item_sets, item_rows = _of_rank(of_boxes, box_numbers, rank)
        object_sets, object_rows = _of_rank(of_objects, object_numbers, rank)
        mine = np.union1d(item_sets, object_sets)
        by_rank.append(
            RankSets(
                numbers=mine,
                item_start=np.searchsorted(item_sets, np.append(mine, len(keys))).astype(np.int64),
                item_rows=item_rows,
                object_start=np.searchsorted(object_sets, np.append(mine, len(keys))).astype(np.int64),
                object_rows=object_rows,
            )
        )
    return by_rank


def _of_rank(members: _Members, sets: Int64, rank: int) -> tuple[Int64, Int64]:
    """Return (sets, rows) of a rank, by set and then in the order of the groups, which all ranks share."""
    mine = np.flatnonzero(members.ranks == rank)
    order = mine[np.argsort(sets[mine], kind="stable")]
    return sets[order], members.rows[order]


def _members_of_boxes(items: Items, boxes: Boxes) -> _Members | None:
    known = items.digests[boxes.members] != 0
    members, groups = boxes.members[known], np.repeat(np.arange(len(boxes.start) - 1), np.diff(boxes.start))
    found = _members(groups[known], items.ranks[members], items.rows[members])
    again = (found.groups[1:] == found.groups[:-1]) & (found.ranks[1:] == found.ranks[:-1])
    return None if again.any() else found


def _members_of_objects(objects: GlobalObjects, all_columns: Sequence[SaveColumns]) -> _Members:
    rows = [np.flatnonzero(columns.objects.digests) for columns in all_columns]
    groups = np.concatenate([of[mine] for of, mine in zip(objects.rows, rows, strict=True)])
    ranks = np.repeat(np.arange(len(rows)), [len(mine) for mine in rows])
    order = np.argsort(groups, kind="stable")
    return _members(groups[order], ranks[order], np.concatenate(rows)[order])


def _members(groups: Int64, ranks: Int64, rows: Int64) -> _Members:
    """Return those of several ranks; ``groups`` ascend."""
    first = np.flatnonzero(np.append(True, groups[1:] != groups[:-1])) if len(groups) else _no_int64()
    counts = np.diff(np.append(first, len(groups)))
    several = np.repeat(counts > 1, counts)
    # Sums of scattered numbers. Two sets with one key would do no harm: folds differ, plans are made anew.
    keys = np.add.reduceat(_scattered(ranks), first) if len(first) else np.zeros(0, np.uint64)
    return _Members(groups[several], ranks[several], rows[several], np.repeat(keys, counts)[several])


def _scattered(ranks: Int64) -> npt.NDArray[np.uint64]:
    """64 mixed bits by rank (the finaliser of SplitMix64)."""
    mixed = (ranks + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
