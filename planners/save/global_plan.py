"""Global save plan: from the boxes of all ranks to one index and a list of writes per rank.

Every box is written exactly once. Ranks with the same box are replicas: one writes it, or several write a
part each. Boxes and objects are distributed to balance bytes: largest first, to the least loaded holder
(Graham's LPT rule). A box larger than the split size is cut into row ranges that level the load of its
holders. Deterministic.

Vectorized over boxes; a thousand ranks take seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from dcp.planners.columns import RankSets, SaveColumns
from dcp.planners.save.tables import (
    GlobalObjects,
    Items,
    check_bounds,
    check_boxes,
    check_kinds,
    check_nesting,
    check_replica_digests,
    check_volumes,
    find_boxes,
    gather_items,
    global_objects,
    global_tensors,
    invalid_plan,
)
from dcp.storage.engine.write import WriteColumns
from dcp.storage.formats.container_notes import join_notes, structure_of_notes
from dcp.storage.formats.index import CheckpointIndex, ObjectColumns, Path
from dcp.storage.geometry.strides import Int64, expand_ranges, gather_rows, row_products, starts

LARGE_OBJECT_BYTES = 64 << 10
"""Minimum size of objects balanced over ranks; smaller ones go to the lowest holder."""


Split = Mapping[int, Sequence[tuple[int, "Part"]]]
"""Items that write a split box, and their parts in order."""

Part = tuple[int, int, int, int]
"""Rank, dimension and rows [begin, end) to write; dimension -1 for the whole box."""


def deal_boxes(
    items: Items, nbytes: Int64, world_size: int, split_bytes: int | None
) -> tuple[Int64, Split, list[int]]:
    """Distribute boxes of ``nbytes`` each; replicas above ``split_bytes`` are cut.

    Returns:
        The item that writes each box, the split boxes, and the bytes by rank.
    """
    owners = items.first.copy()
    shared = np.diff(items.member_start) > 1
    own_bytes = np.bincount(items.ranks[owners[~shared]], weights=nbytes[~shared], minlength=world_size)
    loads: list[int] = own_bytes.astype(np.int64).tolist()
    split: dict[int, list[tuple[int, Part]]] = {}
    several = np.flatnonzero(shared)
    clusters = _clusters(items, several)
    # a leader precedes its followers: equal sizes, lowest number
    followers = [box for cluster in clusters.values() for box in cluster[1:]]
    order = several[np.argsort(-nbytes[several], kind="stable")]
    order = order[~np.isin(order, followers)]
    # boxes to split come first, because they are the largest; tied boxes are few
    special = np.isin(order, list(clusters)) | (nbytes[order] > (split_bytes or np.inf))
    ranks, start = items.ranks[items.members].tolist(), items.member_start.tolist()
    sizes = nbytes.tolist()
    for box, is_special in zip(order.tolist(), special.tolist(), strict=True):
        if is_special:
            cluster = clusters.get(box, [box])
            parts = _parts_of(items, cluster, sizes[box], loads, split_bytes)
            for tied in cluster:
                own = {int(items.ranks[item]): item for item in reversed(items.of_box(tied).tolist())}
                if len(parts) == 1:
                    owners[tied] = own[parts[0][0]]
                else:
                    split[tied] = [(own[part[0]], part) for part in parts]
        else:
            holders = ranks[start[box] : start[box + 1]]
            levels = [*map(loads.__getitem__, holders)]
            place = levels.index(min(levels))
            owners[box] = items.members[start[box] + place]
            loads[holders[place]] += sizes[box]
    return owners, split, loads


def _clusters(items: Items, shared: Int64) -> dict[int, list[int]]:
    """Return tied replicated boxes that one rank can write together, by their first box."""
    first = items.first[shared]
    tied = items.ties[first] >= 0
    by_tie: dict[tuple[int, int], list[int]] = defaultdict(list)
    ties = zip(items.ranks[first[tied]].tolist(), items.ties[first[tied]].tolist(), strict=True)
    for box, tie in zip(shared[tied].tolist(), ties, strict=True):
        by_tie[tie].append(box)
    clusters = [cluster for cluster in by_tie.values() if len(cluster) > 1]
    return {cluster[0]: cluster for cluster in clusters if len(_common_ranks(items, cluster))}


def _common_ranks(items: Items, cluster: Sequence[int]) -> Int64:
    """Return the ranks, ascending, that hold all boxes of ``cluster``."""
    common = items.ranks[items.of_box(cluster[0])]
    for box in cluster[1:]:
        common = np.intersect1d(common, items.ranks[items.of_box(box)])
    return common


def deal_objects(objects: GlobalObjects, loads: list[int]) -> Int64:
    """Return the writer of each object; ``loads`` are bytes by rank, and are updated."""
    owners = objects.owners.copy()
    large = np.flatnonzero(objects.sizes > LARGE_OBJECT_BYTES)
    for row in large[np.argsort(-objects.sizes[large], kind="stable")].tolist():
        owner = min(objects.holders(row), key=loads.__getitem__)
        owners[row] = owner
        loads[owner] += int(objects.sizes[row])
    return owners


def _parts_of(
    items: Items, cluster: Sequence[int], nbytes: int, loads: list[int], split_bytes: int | None
) -> Sequence[Part]:
    """Distribute a box, or tied boxes, to ranks: in parts by rows, or whole if not cut."""
    item = int(items.first[cluster[0]])
    sizes = items.sizes[items.box_start[item] : items.box_start[item + 1]].tolist()
    holders: list[int] = _common_ranks(items, cluster).tolist()
    if split_bytes is not None and nbytes > split_bytes and len(holders) > 1:
        parts = _split(sizes, nbytes, holders, loads, split_bytes)
        if len(parts) > 1:
            for rank, dim, begin, end in parts:
                loads[rank] += round((end - begin) * nbytes / sizes[dim])
            return parts
    rank = min(holders, key=loads.__getitem__)
    loads[rank] += nbytes
    return [(rank, -1, 0, 0)]


def _split(
    sizes: Sequence[int], nbytes: int, holders: Sequence[int], loads: Sequence[int], split_bytes: int
) -> list[Part]:
    most = min(len(holders), -(-nbytes // max(split_bytes, 1)))
    dim = next((d for d, size in enumerate(sizes) if size >= most), None)
    if dim is None:
        dim = max(range(len(sizes)), key=lambda d: sizes[d], default=-1)
    if dim < 0 or sizes[dim] < 2:
        return []
    ranks = sorted(holders, key=lambda rank: (loads[rank], rank))[: min(most, sizes[dim])]
    shares = _pour(nbytes, [loads[rank] for rank in ranks])
    row_bytes, parts, begin, poured = nbytes / sizes[dim], list[Part](), 0, 0.0
    for rank, share in sorted(zip(ranks, shares, strict=True)):
        poured += share
        end = min(round(poured / row_bytes), sizes[dim])
        if end > begin:
            parts.append((rank, dim, begin, end))
            begin = end
    parts[-1] = (*parts[-1][:-1], sizes[dim])
    return parts


def _pour(amount: int, levels: Sequence[int]) -> list[float]:
    """Distribute ``amount`` to ``levels`` (ascending) such that the lowest become equal."""
    level, total = 0.0, 0
    for count, own in enumerate(levels, start=1):
        total += own
        level = (amount + total) / count
        if count == len(levels) or level <= levels[count]:
            break
    return [max(level - own, 0.0) for own in levels]


SPLIT_BYTES = 64 << 20
"""Maximum size of a replicated box written by a single rank."""


@dataclass(frozen=True, eq=False)
class GlobalSavePlan:
    """``index`` describes the checkpoint (files, offsets and CRCs follow), ``writes[r]`` the writes of rank
    r. ``sets`` are rows to compare between ranks when the plan is reused; None if impossible or not
    requested.
    """

    index: CheckpointIndex
    writes: list[WriteColumns]
    sets: list[RankSets] | None = None


def _chunks(items: Items, owners: Int64, split: Split) -> tuple[Int64, Int64, Int64, Int64]:
    """Return (source item, offsets, sizes, offsets in the source) of each chunk of the index."""
    counts = np.ones(len(owners), np.int64)
    for box, parts in split.items():
        counts[box] = len(parts)
    chunk_items, begin = np.repeat(owners, counts), starts(counts)
    for box, parts in split.items():
        chunk_items[begin[box] : begin[box + 1]] = [item for item, _ in parts]
    start = starts(items.box_start[chunk_items + 1] - items.box_start[chunk_items])
    offsets = gather_rows(items.offsets, items.box_start, chunk_items)
    sizes = gather_rows(items.sizes, items.box_start, chunk_items)
    local_offsets = gather_rows(items.local_offsets, items.box_start, chunk_items)
    for box, parts in split.items():
        for number, (_, (_, dim, first, end)) in enumerate(parts):
            place = start[begin[box] + number] + dim
            offsets[place] += first
            local_offsets[place] += first
            sizes[place] = end - first
    return chunk_items, offsets, sizes, local_offsets


def _writes(
    items: Items,
    index: CheckpointIndex,
    chunk_items: Int64,
    local_offsets: Int64,
    object_rows: Sequence[Int64],
    object_owners: Int64,
) -> list[WriteColumns]:
    """Return each rank's chunks of the index, in the order of its columns."""
    ranks, rows = items.ranks[chunk_items], items.rows[chunk_items]
    width = int(rows.max(initial=0)) + 1
    order = np.argsort(ranks * width + rows, kind="stable")
    bounds = np.searchsorted(ranks[order], np.arange(len(object_rows) + 1))
    ndims = np.diff(index.box_start)[order]
    box_start = starts(ndims)
    flat = expand_ranges(index.box_start[order], ndims)
    sizes, local_offsets = index.chunk_sizes[flat], local_offsets[flat]
    ties, sources = items.ties[chunk_items][order], items.sources[chunk_items][order]
    shares, seen = np.full(len(order), -1, np.int64), dict[tuple[int, int, bytes, bytes], int]()
    for row in np.flatnonzero(ties >= 0).tolist():
        box, rank = slice(int(box_start[row]), int(box_start[row + 1])), int(ranks[order[row]])
        key = (rank, int(ties[row]), sizes[box].tobytes(), local_offsets[box].tobytes())
        earlier = seen.setdefault(key, row)
        if earlier != row:
            shares[row] = earlier - bounds[rank]
    writes = []
    for rank, own_objects in enumerate(object_rows):
        begin, end = int(bounds[rank]), int(bounds[rank + 1])
        box = slice(int(box_start[begin]), int(box_start[end]))
        mine = np.flatnonzero(object_owners[own_objects] == rank)
        writes.append(
            WriteColumns(
                sources=sources[begin:end],
                box_start=box_start[begin : end + 1] - box_start[begin],
                sizes=sizes[box],
                local_offsets=local_offsets[box],
                chunks=order[begin:end],
                shares=shares[begin:end],
                objects=mine,
                object_rows=own_objects[mine],
            )
        )
    return writes


def join_planner_data(parts: Iterable[Mapping[str, Path] | None]) -> dict[str, Path] | None:
    """Join the paths of all ranks; at differences the lowest rank's. None if no rank has paths."""
    joined: dict[str, Path] | None = None
    previous: Mapping[str, Path] | None = None
    for part in parts:
        if part is not None and part is not previous and part != previous:
            previous = part
            joined = {**joined, **part, **joined} if joined is not None else dict(part)
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

    Args:
        all_columns: Columns by rank. With several ranks, boxes must fill their tensors.
        dedup_to_lowest_rank: Let the lowest holder write each replicated box instead of balancing.
        split_bytes: Size above which replicated boxes are cut; None for never.
        check_replicas: Compare digests of replicas.
        with_sets: Return the sets to compare when the plan is reused.

    Raises:
        PlanError: With all problems: out of bounds, overlap, gaps, different shapes, dtypes or kinds.
        ReplicaMismatchError: If replicas differ and no other problem exists; use `PerRank` for such state.
    """
    world_size = len(all_columns)
    tensors, tensor_rows, problems = global_tensors(all_columns)
    objects = global_objects(all_columns, check_replicas=check_replicas)
    notes, mixed_keys = join_notes([(part.notes, part.planner_data or {}) for part in all_columns])
    paths = join_planner_data(map(attrgetter("planner_data"), all_columns))
    # before the comparison of boxes, which requires equal shapes and kinds
    problems += [*check_volumes(tensors), *check_kinds(tensors, tensor_rows, objects), *mixed_keys]
    if world_size > 1:
        problems += check_nesting(all_columns, paths or {}, notes)
    if problems:
        raise invalid_plan(problems, objects.mismatches)
    items = gather_items(all_columns, tensors, tensor_rows)
    inside, problems = check_bounds(items, tensors)
    volumes = row_products(tensors.shape_values, tensors.shape_start)
    held = np.flatnonzero(inside & ((items.volumes > 0) | (volumes[items.tensors] == 0)))
    items = find_boxes(items, held, tensors, volumes)
    problems += check_boxes(items, tensors, volumes, complete=world_size > 1 and not problems)
    mismatches = objects.mismatches + (check_replica_digests(items, tensors) if check_replicas else [])
    if problems or mismatches:
        raise invalid_plan(problems, mismatches)
    owners, object_owners = items.first, objects.owners
    split: Split = {}
    if world_size > 1 and not dedup_to_lowest_rank:
        nbytes = items.volumes[owners] * tensors.itemsizes[items.tensors[owners]]
        owners, split, loads = deal_boxes(items, nbytes, world_size, split_bytes)
        object_owners = deal_objects(objects, loads)
    chunk_items, offsets, sizes, local_offsets = _chunks(items, owners, split)
    edges = np.searchsorted(items.tensors[chunk_items], np.arange(len(tensors.fqns) + 1))
    index = replace(
        tensors,
        chunk_start=edges.astype(np.int64),
        chunk_offsets=offsets,
        chunk_sizes=sizes,
        chunk_files=np.zeros(len(chunk_items), np.int64),
        objects=ObjectColumns(fqns=objects.fqns),
        planner_data=paths,
        provenance=structure_of_notes(notes),
    )
    return GlobalSavePlan(
        index=index,
        writes=_writes(items, index, chunk_items, local_offsets, objects.rows, object_owners),
        sets=replica_sets(items, objects, all_columns) if with_sets else None,
    )


def replica_sets(
    items: Items, objects: GlobalObjects, all_columns: Sequence[SaveColumns]
) -> list[RankSets] | None:
    """Return sets of digested rows by rank; None if a rank holds a box twice, which needs a full plan."""
    known = items.digests[items.members] != 0
    members, count = items.members[known], len(items.first)
    groups, ranks = np.repeat(np.arange(count), np.diff(items.member_start))[known], items.ranks[members]
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
    # Sums of scattered numbers. Two sets with equal keys are harmless: folds differ, plans are recomputed.
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
    """Return 64 mixed bits by rank (finalizer of SplitMix64)."""
    mixed = (ranks + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
