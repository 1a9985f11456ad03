"""The global save plan: all ranks' boxes in, one index and one list of writes a rank out.

Every box is written exactly once. Ranks that hold the same box are replicas: one of them writes it, or
several write a part each. Vectorised over boxes; the coordinator plans a thousand ranks in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dcp.planners.columns import RankSets, SaveColumns
from dcp.planners.save.dealing import Dealt, deal_boxes, deal_objects
from dcp.planners.save.replica_sets import replica_sets
from dcp.planners.save.tables import (
    GlobalObjects,
    GlobalTensors,
    Items,
    distinct_boxes,
    gather_items,
    global_objects,
    global_tensors,
)
from dcp.planners.save.validate import (
    check_bounds,
    check_boxes,
    check_kinds,
    check_nesting,
    check_replica_digests,
    check_volumes,
    invalid_plan,
)
from dcp.storage.engine.write import WriteColumns
from dcp.storage.formats.container_notes import ContainerNote, Noted, join_notes, structure_of_notes
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, ObjectColumns, Path, itemsizes
from dcp.storage.formats.registry import DCP
from dcp.storage.geometry.strides import Int64, expand_ranges, gather_rows, row_products, starts

__all__ = ["SPLIT_BYTES", "GlobalSavePlan", "plan_save"]

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
