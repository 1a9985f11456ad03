"""The global save plan: all ranks' boxes in, one index and one list of writes a rank out.

Every box is written exactly once. Ranks that hold the same box are replicas: one of them writes it, or
several write a part each. Vectorised over boxes; the coordinator plans a thousand ranks in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dcp.planners.columns import SaveColumns
from dcp.planners.save.balance import Balancer, Replicated, WritePart, tie_clusters
from dcp.planners.save.merge import MergedObjects, MergedTensors, merge_objects, merge_tensors
from dcp.planners.save.replica_sets import Holders
from dcp.planners.save.validate import (
    check_bounds,
    check_boxes,
    check_kinds,
    check_replica_digests,
    check_volumes,
    raise_problems,
)
from dcp.storage.engine.write_tables import WriteColumns
from dcp.storage.formats.container_notes import Note, Noted, merge_notes, structure_of_notes
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, Int64, ObjectColumns, Path, itemsizes, starts
from dcp.storage.formats.native.format import DCP
from dcp.storage.geometry.ragged import expand_ranges, gather_rows, row_products

__all__ = ["INDEX_FORMAT", "SPLIT_BYTES", "GlobalSavePlan", "plan_save"]

INDEX_FORMAT = DCP.name
SPLIT_BYTES = 64 << 20
"""A replicated box above this is written by several of its holders, a part each."""

LARGE_OBJECT_BYTES = 64 << 10
"""Objects above this are balanced over ranks; smaller ones go to the lowest rank that has them."""


@dataclass(frozen=True, eq=False)
class GlobalSavePlan:
    """``index`` says what the checkpoint will hold (files, offsets and CRCs still to come), ``writes[r]``
    what rank r has to write. ``holders`` is None where replicas were not compared."""

    index: CheckpointIndex
    writes: list[WriteColumns]
    holders: Holders | None = None


@dataclass(frozen=True, eq=False)
class Items:
    """The boxes of all ranks, one after the other: rank, row in that rank's columns, merged tensor row,
    box."""

    ranks: Int64
    rows: Int64
    tensors: Int64
    start: Int64
    offsets: Int64
    sizes: Int64
    local_offsets: Int64
    sources: Int64
    digests: npt.NDArray[np.uint64]
    ties: Int64
    volumes: Int64


def _gather_items(all_columns: Sequence[SaveColumns], tensors: MergedTensors) -> Items:
    counts = [len(columns.item_tensors) for columns in all_columns]
    rows = [np.arange(count, dtype=np.int64) for count in counts]
    mapped = [rows[columns.item_tensors] for columns, rows in zip(all_columns, tensors.rows, strict=True)]
    ndims = [np.diff(columns.box_start) for columns in all_columns]
    start = starts(np.concatenate(ndims))
    sizes = np.concatenate([columns.item_sizes for columns in all_columns])
    return Items(
        ranks=np.repeat(np.arange(len(counts), dtype=np.int64), counts),
        rows=np.concatenate(rows),
        tensors=np.concatenate(mapped),
        start=start,
        offsets=np.concatenate([columns.item_offsets for columns in all_columns]),
        sizes=sizes,
        local_offsets=np.concatenate([columns.item_local_offsets for columns in all_columns]),
        sources=np.concatenate([columns.item_sources for columns in all_columns]),
        digests=np.concatenate([columns.item_digests for columns in all_columns]),
        ties=np.concatenate([columns.item_ties for columns in all_columns]),
        volumes=row_products(sizes, start),
    )


def _positions(items: Items, chosen: Int64, tensors: MergedTensors) -> Int64:
    """A sort key by item of ``chosen``: tensor first, then the box's first element in C order."""
    shape_start, shape_values = tensors.shape_start, tensors.shape_values
    ndims = np.diff(shape_start)
    volumes = np.maximum(row_products(shape_values, shape_start), 1)
    base = starts(volumes)[:-1]
    strides = np.ones(len(shape_values), np.int64)
    for back in range(2, int(ndims.max(initial=0)) + 1):
        places = shape_start[1:][ndims >= back] - back
        strides[places] = strides[places + 1] * shape_values[places + 1]
    keys = base[items.tensors[chosen]]
    item_ndims = ndims[items.tensors[chosen]]
    for ndim in np.unique(item_ndims[item_ndims > 0]).tolist():
        of_ndim = np.flatnonzero(item_ndims == ndim)
        boxes = items.start[chosen[of_ndim]][:, None] + np.arange(ndim)
        places = shape_start[items.tensors[chosen[of_ndim]]][:, None] + np.arange(ndim)
        keys[of_ndim] += (items.offsets[boxes] * strides[places]).sum(axis=1)
    return keys


@dataclass(frozen=True, eq=False)
class Boxes:
    """The distinct boxes, by tensor and position: those who hold box b are items ``members[start[b]:start[b +
    1]]``, ascending by rank."""

    members: Int64
    start: Int64

    @cached_property
    def first(self) -> Int64:
        """One item of each box."""
        return self.members[self.start[:-1]]


def _dedup(items: Items, chosen: Int64, tensors: MergedTensors) -> Boxes:
    keys = _positions(items, chosen, tensors)
    order = np.argsort(keys, kind="stable")
    members, keys = chosen[order], keys[order]
    new = np.ones(len(members), bool)
    new[1:] = keys[1:] != keys[:-1]
    # equal beginnings with different sizes are different boxes; that they overlap is found later
    same = np.flatnonzero(~new)
    counts = items.start[members[same] + 1] - items.start[members[same]]
    filled = same[counts > 0]
    if len(filled):
        here = gather_rows(items.sizes, items.start, members[filled])
        before = gather_rows(items.sizes, items.start, members[filled - 1])
        new[filled] = np.logical_or.reduceat(here != before, starts(counts[counts > 0])[:-1])
    return Boxes(members, np.append(np.flatnonzero(new), len(members)))


@dataclass(frozen=True, eq=False)
class _WrittenChunks:
    """What is written, one row a chunk of the index: the item whose memory has it, and the box."""

    items: Int64
    start: Int64
    offsets: Int64
    sizes: Int64
    local_offsets: Int64


def _deal(
    items: Items, boxes: Boxes, nbytes: Int64, world_size: int, *, lowest_rank: bool, split_bytes: int | None
) -> tuple[_WrittenChunks, list[int]]:
    """Who writes each box, and the bytes by rank that this makes."""
    owners = boxes.first.copy()
    if lowest_rank:
        return _pieces(items, owners, {}), [0] * world_size
    shared = np.diff(boxes.start) > 1
    loads = np.bincount(items.ranks[owners[~shared]], weights=nbytes[~shared], minlength=world_size)
    balancer = Balancer(loads.astype(np.int64).tolist(), split_bytes=split_bytes)
    several = np.flatnonzero(shared)
    order = several[np.argsort(-nbytes[several], kind="stable")]
    if not len(order):
        return _pieces(items, owners, {}), balancer.loads
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
    return _pieces(items, owners, split), balancer.loads


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
        own = {int(items.ranks[item]): item for item in reversed(_members(boxes, tied))}
        if len(parts) == 1:
            owners[tied] = own[parts[0].rank]
        else:
            split[tied] = [(own[part.rank], part) for part in parts]


def _members(boxes: Boxes, box: int) -> list[int]:
    members: list[int] = boxes.members[boxes.start[box] : boxes.start[box + 1]].tolist()
    return members


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
    ranks = items.ranks[boxes.members[boxes.start[cluster[0]] : boxes.start[cluster[0] + 1]]]
    common: list[int] = ranks.tolist() if len(cluster) == 1 else np.unique(ranks).tolist()
    for box in cluster[1:]:
        others = set(items.ranks[_members(boxes, box)].tolist())
        common = [rank for rank in common if rank in others]
    return common


def _pieces(
    items: Items, owners: Int64, split: Mapping[int, Sequence[tuple[int, WritePart]]]
) -> _WrittenChunks:
    counts = np.ones(len(owners), np.int64)
    for box, parts in split.items():
        counts[box] = len(parts)
    piece_items = np.repeat(owners, counts)
    begin = starts(counts)
    for box, parts in split.items():
        piece_items[begin[box] : begin[box + 1]] = [item for item, _ in parts]
    start = starts(items.start[piece_items + 1] - items.start[piece_items])
    offsets = gather_rows(items.offsets, items.start, piece_items)
    sizes = gather_rows(items.sizes, items.start, piece_items)
    local_offsets = gather_rows(items.local_offsets, items.start, piece_items)
    for box, parts in split.items():
        for number, (_, part) in enumerate(parts):
            place = start[begin[box] + number] + part.dim
            offsets[place] += part.begin
            local_offsets[place] += part.begin
            sizes[place] = part.end - part.begin
    return _WrittenChunks(piece_items, start, offsets, sizes, local_offsets)


def _writes(
    items: Items, pieces: _WrittenChunks, objects: MergedObjects, owners: Int64, world_size: int
) -> list[WriteColumns]:
    ranks, rows = items.ranks[pieces.items], items.rows[pieces.items]
    width = int(rows.max(initial=0)) + 1
    order = np.argsort(ranks * width + rows, kind="stable")
    bounds = np.searchsorted(ranks[order], np.arange(world_size + 1))
    ndims = np.diff(pieces.start)[order]
    box_start = starts(ndims)
    flat = expand_ranges(pieces.start[order], ndims)
    sizes, local_offsets = pieces.sizes[flat], pieces.local_offsets[flat]
    ties, sources = items.ties[pieces.items][order], items.sources[pieces.items][order]
    writes = []
    for rank in range(world_size):
        begin, end = int(bounds[rank]), int(bounds[rank + 1])
        box = slice(int(box_start[begin]), int(box_start[end]))
        own_start = box_start[begin : end + 1] - box_start[begin]
        object_rows = objects.rows[rank]
        mine = np.flatnonzero(owners[object_rows] == rank)
        writes.append(
            WriteColumns(
                sources=sources[begin:end],
                box_start=own_start,
                sizes=sizes[box],
                local_offsets=local_offsets[box],
                chunks=order[begin:end],
                shares=_shares(ties[begin:end], own_start, sizes[box], local_offsets[box]),
                objects=mine,
                object_rows=object_rows[mine],
            )
        )
    return writes


def _shares(ties: Int64, start: Int64, sizes: Int64, local_offsets: Int64) -> Int64:
    """The earlier row with the same bytes, by row; -1 where there is none."""
    shares = np.full(len(ties), -1, np.int64)
    seen: dict[tuple[int, bytes, bytes], int] = {}
    for row in np.flatnonzero(ties >= 0).tolist():
        box = slice(int(start[row]), int(start[row + 1]))
        key = (int(ties[row]), sizes[box].tobytes(), local_offsets[box].tobytes())
        earlier = seen.setdefault(key, row)
        if earlier != row:
            shares[row] = earlier
    return shares


def _object_owners(objects: MergedObjects, loads: list[int], *, lowest_rank: bool) -> Int64:
    owners = objects.owners.copy()
    large = np.flatnonzero(objects.sizes > LARGE_OBJECT_BYTES)
    if lowest_rank:
        return owners
    for row in large[np.argsort(-objects.sizes[large], kind="stable")].tolist():
        owner = min(objects.holders(row), key=loads.__getitem__)
        owners[row] = owner
        loads[owner] += int(objects.sizes[row])
    return owners


def merge_planner_data(parts: Sequence[Mapping[str, Path] | None]) -> dict[str, Path] | None:
    """All ranks' paths in one mapping; the lowest rank's where they differ. None where no rank has any."""
    merged: dict[str, Path] | None = None
    previous: Mapping[str, Path] | None = None
    for part in parts:
        if part is None or part is previous or part == previous:
            continue
        previous = part
        merged = (
            dict(part) if merged is None else {**merged, **{k: v for k, v in part.items() if k not in merged}}
        )
    return merged


def _index(
    tensors: MergedTensors,
    objects: MergedObjects,
    items: Items,
    pieces: _WrittenChunks,
    planner_data: dict[str, Path] | None,
    notes: Sequence[Note],
) -> CheckpointIndex:
    chunk_tensors = items.tensors[pieces.items]
    chunks, count = len(chunk_tensors), len(objects.fqns)
    payloads = row_products(pieces.sizes, pieces.start) * itemsizes(tensors.dtype_codes)[chunk_tensors]

    def zeros() -> Int64:
        return np.zeros(chunks, np.int64)

    return CheckpointIndex(
        format=INDEX_FORMAT,
        fqns=tensors.fqns,
        dtype_codes=tensors.dtype_codes,
        shape_start=tensors.shape_start,
        shape_values=tensors.shape_values,
        requires_grad=tensors.requires_grad,
        chunk_start=np.searchsorted(chunk_tensors, np.arange(len(tensors.fqns) + 1)).astype(np.int64),
        chunk_offsets=pieces.offsets,
        chunk_sizes=pieces.sizes,
        chunk_files=zeros(),
        record_offsets=zeros(),
        record_lengths=zeros(),
        payload_offsets=zeros(),
        payload_lengths=payloads,
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
        planner_data=planner_data,
        provenance=structure_of_notes(notes),
    )


def plan_save(
    all_columns: Sequence[SaveColumns],
    *,
    dedup_to_lowest_rank: bool = False,
    split_bytes: int | None = SPLIT_BYTES,
    check_replicas: bool = True,
    check_coverage: bool | None = None,
) -> GlobalSavePlan:
    """Plan a save from the columns of all ranks, in rank order.

    ``dedup_to_lowest_rank`` lets the lowest holder write each replicated box; otherwise bytes are balanced,
    and replicated boxes above ``split_bytes`` are cut (None: never). ``check_coverage`` None demands that
    boxes fill their tensors where there is more than one rank: a single rank may save its own part alone.

    Raises PlanError listing all problems: out of bounds, overlap, gaps, differing shapes, dtypes or kinds;
    ReplicaMismatchError where that is the only kind of problem and replicas differ (`PerRank` is for state
    that does so on purpose).
    """
    if not all_columns:
        return plan_save([_EMPTY])
    world_size = len(all_columns)
    tensors = merge_tensors(all_columns)
    objects = merge_objects(all_columns, check_replicas=check_replicas)
    items = _gather_items(all_columns, tensors)
    notes, mixed_keys = merge_notes([Noted(part.notes, part.planner_data or {}) for part in all_columns])
    problems = [*tensors.problems, *check_volumes(tensors), *check_kinds(tensors, objects), *mixed_keys]
    if problems:
        # what follows compares boxes of one tensor, which must be one
        raise_problems(problems, objects.mismatches)
    inside, out_of_bounds = check_bounds(items, tensors)
    volumes = row_products(tensors.shape_values, tensors.shape_start)
    boxes = _dedup(
        items, np.flatnonzero(inside & ((items.volumes > 0) | (volumes[items.tensors] == 0))), tensors
    )
    complete = world_size > 1 if check_coverage is None else check_coverage
    problems += out_of_bounds
    problems += check_boxes(items, boxes.first, tensors, volumes, complete=complete and not out_of_bounds)
    mismatches = list(objects.mismatches)
    if check_replicas:
        mismatches += check_replica_digests(items, boxes, tensors)
    raise_problems(problems, mismatches)
    nbytes = items.volumes[boxes.first] * itemsizes(tensors.dtype_codes)[items.tensors[boxes.first]]
    pieces, loads = _deal(
        items, boxes, nbytes, world_size, lowest_rank=dedup_to_lowest_rank, split_bytes=split_bytes
    )
    owners = _object_owners(objects, loads, lowest_rank=dedup_to_lowest_rank)
    planner_data = merge_planner_data([columns.planner_data for columns in all_columns])
    return GlobalSavePlan(
        index=_index(tensors, objects, items, pieces, planner_data, notes),
        writes=_writes(items, pieces, objects, owners, world_size),
        holders=Holders.of(items, boxes, objects, all_columns) if check_replicas else None,
    )


def _empty_columns() -> SaveColumns:
    none, small = np.zeros(0, np.int64), np.zeros(0, np.uint8)
    return SaveColumns(
        fqns=(),
        dtype_codes=small,
        requires_grad=small,
        shape_start=starts([]),
        shape_values=none,
        item_tensors=none,
        item_offsets=none,
        item_sizes=none,
        item_local_offsets=none,
        item_sources=none,
        item_sharded=small,
        item_digests=np.zeros(0, np.uint64),
        item_ties=none,
    )


_EMPTY = _empty_columns()
