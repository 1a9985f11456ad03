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

from dcp.planners.columns import RankSets, SaveColumns
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
from dcp.storage.engine.write import WriteColumns
from dcp.storage.formats.container_notes import ContainerNote, join_notes, structure_of_notes
from dcp.storage.formats.index import CheckpointIndex, ObjectColumns, Path, itemsizes
from dcp.storage.formats.registry import DCP
from dcp.storage.geometry.strides import Int64, expand_ranges, gather_rows, row_products, starts

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
    own_bytes = np.bincount(items.ranks[owners[~shared]], weights=nbytes[~shared], minlength=world_size)
    loads: list[int] = own_bytes.astype(np.int64).tolist()
    split: dict[int, list[tuple[int, WritePart]]] = {}
    several = np.flatnonzero(shared)
    clusters = _clusters(items, boxes, several)
    # a leader is dealt before its followers: all are of one size, and it has the lowest number
    followers = [box for cluster in clusters.values() for box in cluster[1:]]
    order = several[np.argsort(-nbytes[several], kind="stable")]
    order = order[~np.isin(order, followers)]
    # boxes to split come first, being the largest; tied ones are few
    special = np.isin(order, list(clusters)) | (nbytes[order] > (split_bytes or np.inf))
    ranks, start, sizes = items.ranks[boxes.members].tolist(), boxes.start.tolist(), nbytes.tolist()
    for box, is_special in zip(order.tolist(), special.tolist(), strict=True):
        if is_special:
            cluster = clusters.get(box, [box])
            parts = _parts_of(items, boxes, cluster, sizes[box], loads, split_bytes)
            for tied in cluster:
                own = {int(items.ranks[item]): item for item in reversed(boxes.of(tied).tolist())}
                if len(parts) == 1:
                    owners[tied] = own[parts[0].rank]
                else:
                    split[tied] = [(own[part.rank], part) for part in parts]
        else:
            holders = ranks[start[box] : start[box + 1]]
            levels = [*map(loads.__getitem__, holders)]
            place = levels.index(min(levels))
            owners[box] = boxes.members[start[box] + place]
            loads[holders[place]] += sizes[box]
    return Dealt(owners, split, loads)


def _clusters(items: Items, boxes: Boxes, shared: Int64) -> dict[int, list[int]]:
    """Find replicated boxes that are tied on their lowest rank and can be written by one rank together, by
    the first of them."""
    first = boxes.first[shared]
    tied = items.ties[first] >= 0
    by_tie: dict[tuple[int, int], list[int]] = defaultdict(list)
    ties = zip(items.ranks[first[tied]].tolist(), items.ties[first[tied]].tolist(), strict=True)
    for box, tie in zip(shared[tied].tolist(), ties, strict=True):
        by_tie[tie].append(box)
    clusters = [cluster for cluster in by_tie.values() if len(cluster) > 1]
    return {cluster[0]: cluster for cluster in clusters if len(_common_ranks(items, boxes, cluster))}


def _common_ranks(items: Items, boxes: Boxes, cluster: Sequence[int]) -> Int64:
    """Return the ranks, ascending, that hold all boxes of ``cluster``."""
    common = items.ranks[boxes.of(cluster[0])]
    for box in cluster[1:]:
        common = np.intersect1d(common, items.ranks[boxes.of(box)])
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


def _parts_of(
    items: Items,
    boxes: Boxes,
    cluster: Sequence[int],
    nbytes: int,
    loads: list[int],
    split_bytes: int | None,
) -> list[WritePart]:
    """Deal a box, or tied boxes, which go to the same ranks: in parts in order of their rows, or in one with
    ``dim`` -1 where it is not cut."""
    item = int(boxes.first[cluster[0]])
    sizes = items.sizes[items.start[item] : items.start[item + 1]].tolist()
    holders: list[int] = _common_ranks(items, boxes, cluster).tolist()
    if split_bytes is not None and nbytes > split_bytes and len(holders) > 1:
        parts = _split(sizes, nbytes, holders, loads, split_bytes)
        if len(parts) > 1:
            for part in parts:
                loads[part.rank] += round((part.end - part.begin) * nbytes / sizes[part.dim])
            return parts
    rank = min(holders, key=loads.__getitem__)
    loads[rank] += nbytes
    return [WritePart(rank, -1, 0, 0)]


def _split(
    sizes: Sequence[int], nbytes: int, holders: Sequence[int], loads: Sequence[int], split_bytes: int
) -> list[WritePart]:
    most = min(len(holders), -(-nbytes // max(split_bytes, 1)))
    dim = next((d for d, size in enumerate(sizes) if size >= most), None)
    if dim is None:
        dim = max(range(len(sizes)), key=lambda d: sizes[d], default=-1)
    if dim < 0 or sizes[dim] < 2:
        return []
    ranks = sorted(holders, key=lambda rank: (loads[rank], rank))[: min(most, sizes[dim])]
    shares = _pour(nbytes, [loads[rank] for rank in ranks])
    row_bytes, parts, begin, poured = nbytes / sizes[dim], list[WritePart](), 0, 0.0
    for rank, share in sorted(zip(ranks, shares, strict=True)):
        poured += share
        end = min(round(poured / row_bytes), sizes[dim])
        if end > begin:
            parts.append(WritePart(rank, dim, begin, end))
            begin = end
    parts[-1] = parts[-1]._replace(end=sizes[dim])
    return parts


def _pour(amount: int, levels: Sequence[int]) -> list[float]:
    """Return what each vessel (ascending levels) takes so that the lowest become level."""
    level, total = 0.0, 0
    for count, own in enumerate(levels, start=1):
        total += own
        level = (amount + total) / count
        if count == len(levels) or level <= levels[count]:
            break
    return [max(level - own, 0.0) for own in levels]


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
        chunk_files=np.zeros(len(chunk_tensors), np.int64),
        objects=ObjectColumns(fqns=objects.fqns),
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
    notes, mixed_keys = join_notes([(part.notes, part.planner_data or {}) for part in all_columns])
    paths = join_planner_data([columns.planner_data for columns in all_columns])
    # here already: what follows compares boxes of one tensor, which must be one
    problems = [*tensors.problems, *check_volumes(tensors), *check_kinds(tensors, objects), *mixed_keys]
    if world_size > 1:
        problems += check_nesting(all_columns, paths or {}, notes)
    if problems:
        raise invalid_plan(problems, objects.mismatches)
    items = gather_items(all_columns, tensors)
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


def replica_sets(
    items: Items, boxes: Boxes, objects: GlobalObjects, all_columns: Sequence[SaveColumns]
) -> list[RankSets] | None:
    """Find the sets, by rank, of what has digests; None where a rank holds a box twice, which only a full
    plan compares."""
    known = items.digests[boxes.members] != 0
    members, count = boxes.members[known], len(boxes.start) - 1
    groups, ranks = np.repeat(np.arange(count), np.diff(boxes.start))[known], items.ranks[members]
    if ((groups[1:] == groups[:-1]) & (ranks[1:] == ranks[:-1])).any():
        return None
    compared = [np.flatnonzero(columns.objects.digests) for columns in all_columns]
    object_groups = [of[mine] + count for of, mine in zip(objects.rows, compared, strict=True)]
    groups = np.concatenate([groups, *object_groups])
    ranks = np.concatenate([ranks, np.repeat(np.arange(len(compared)), [*map(len, compared)])])
    rows = np.concatenate([items.rows[members], *(-1 - mine for mine in compared)])
    order = np.argsort(groups, kind="stable")
    groups, ranks, rows = groups[order], ranks[order], rows[order]
    first = np.flatnonzero(np.append(True, groups[1:] != groups[:-1])[: len(groups)])
    counts = np.diff(first, append=len(groups))
    # Sums of scattered numbers. Two sets with one key would do no harm: folds differ, plans are made anew.
    keys = np.add.reduceat(_scattered(ranks), first) if len(first) else np.zeros(0, np.uint64)
    several = np.repeat(counts > 1, counts)
    ranks, rows = ranks[several], rows[several]
    numbers = np.unique(np.repeat(keys, counts)[several], return_inverse=True)[1]
    by_rank = []
    for rank in range(len(all_columns)):
        mine = np.flatnonzero(ranks == rank)
        mine = mine[np.argsort(numbers[mine], kind="stable")]
        sets, begins = np.unique(numbers[mine], return_index=True)
        by_rank.append(RankSets(sets, np.append(begins, len(mine)), rows[mine]))
    return by_rank


def _scattered(ranks: Int64) -> npt.NDArray[np.uint64]:
    """64 mixed bits by rank (the finaliser of SplitMix64)."""
    mixed = (ranks + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
