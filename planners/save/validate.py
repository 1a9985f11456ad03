"""Checks of a global plan, whose findings are raised together, in one error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from dcp.planners.columns import SaveColumns
from dcp.planners.digest import is_made_on_device
from dcp.planners.save.tables import Boxes, GlobalObjects, GlobalTensors, Items, describe_sides, rank_list
from dcp.storage.errors import PlanError, ReplicaMismatchError
from dcp.storage.formats.container_notes import ContainerNote
from dcp.storage.formats.index import Path
from dcp.storage.geometry.boxes import BoxSet, overlapping_pairs
from dcp.storage.geometry.strides import Int64, by_ndim, starts

__all__ = [
    "check_bounds",
    "check_boxes",
    "check_kinds",
    "check_nesting",
    "check_replica_digests",
    "check_volumes",
    "invalid_plan",
]

MAX_LISTED = 20
"""Problems named in one message; the rest is counted."""

MAX_VOLUME_LOG2 = 60
"""Elements of one tensor; positions of elements are sort keys of 63 bits."""


def invalid_plan(problems: Sequence[str], mismatches: Sequence[tuple[str, str]]) -> PlanError:
    """Make one error for everything found; ``mismatches`` are (fqn, description) of replicas that differ."""
    texts = [*problems, *(text for _, text in mismatches)]
    shown = texts[:MAX_LISTED]
    more = f"; and {len(texts) - len(shown)} more" if len(texts) > len(shown) else ""
    plural = "s" if len(texts) > 1 else ""
    message = f"Failed to validate global plan: {len(texts)} problem{plural}: {'; '.join(shown)}{more}"
    if mismatches:
        message += (
            ". Only one of the differing values would be stored: synchronise them, "
            "or wrap state that is meant to differ by rank in dcp.PerRank"
        )
        if any(text.startswith("tensor ") for _, text in mismatches):
            message += (
                ". Buffers such as those of BatchNorm under DDP: give all ranks rank 0's before each save, "
                "for buffer in model.buffers(): torch.distributed.broadcast(buffer, 0)"
            )
    fqns = sorted({fqn for fqn, _ in mismatches})[:MAX_LISTED]
    kind = PlanError if problems else ReplicaMismatchError
    return kind(message, problems=shown, fqns=fqns)


def check_volumes(tensors: GlobalTensors) -> list[str]:
    """List tensors of more elements than can be counted, which no memory holds."""
    logs = np.log2(np.maximum(tensors.shape_values, 1).astype(np.float64))
    sums = np.concatenate([[0.0], np.cumsum(logs)])
    sizes = sums[tensors.shape_start[1:]] - sums[tensors.shape_start[:-1]]
    if (sizes > MAX_VOLUME_LOG2).any():
        return [
            f"{tensors.fqns[row]!r} of shape {tensors.shape(row)} has too many elements"
            for row in np.flatnonzero(sizes > MAX_VOLUME_LOG2).tolist()
        ]
    is_too_much = float(np.exp2(sizes).sum()) > 2.0**62
    return ["the tensors have too many elements together"] if is_too_much else []


def check_kinds(tensors: GlobalTensors, objects: GlobalObjects) -> list[str]:
    """List names that are a tensor on one rank and another value on another."""
    both = set(objects.fqns).intersection(tensors.fqns) if objects.fqns else ()
    if not both:
        return []
    problems = []
    for row, fqn in enumerate(tensors.fqns):
        if fqn not in both:
            continue
        holders = [rank for rank, rows in enumerate(tensors.rows) if (rows == row).any()]
        others = objects.holders(objects.fqns.index(fqn))
        problems.append(
            f"{fqn!r} is a tensor on {rank_list(holders)}, but another value on {rank_list(others)}"
        )
    return problems


def check_nesting(
    all_columns: Sequence[SaveColumns], paths: Mapping[str, Path], notes: Sequence[ContainerNote]
) -> list[str]:
    """List names that are a value on one rank and a dict or list on another, which no state can hold.

    ``paths`` and ``notes`` are those of all ranks together.
    """
    if len({*map(id, map(attrgetter("planner_data"), all_columns))}) == 1:
        return []
    level = {path[:-1] for path in paths.values()} | {tuple(note["path"]) for note in notes}
    problems, seen = set[Path](), set[Path]()
    while level := level - seen:
        seen |= level
        problems |= {path for path in level if paths.get(".".join(map(str, path))) == path}
        level = {path[:-1] for path in level if path}
    return [_nesting_problem(path, all_columns) for path in sorted(problems, key=str)]


def _nesting_problem(path: Path, all_columns: Sequence[SaveColumns]) -> str:
    name = ".".join(map(str, path))
    holders = [rank for rank, part in enumerate(all_columns) if (part.planner_data or {}).get(name) == path]
    opened = [
        rank
        for rank, part in enumerate(all_columns)
        if any(other[: len(path)] == path != other for other in (part.planner_data or {}).values())
        or any(tuple(note["path"]) == path for note in part.notes)
    ]
    return (
        f"{name!r} is one value on {rank_list(holders)} (so is a list without tensors and dicts), but has "
        f"entries of its own on {rank_list(opened)}"
    )


def check_bounds(items: Items, tensors: GlobalTensors) -> tuple[npt.NDArray[np.bool_], list[str]]:
    """Return (items inside of their tensors, what is wrong with the others)."""
    counts = np.diff(items.start)
    inside = np.ones(len(items.tensors), bool)
    filled = np.flatnonzero(counts > 0)
    if not len(filled):
        return inside, []
    first = np.repeat(tensors.shape_start[items.tensors] - items.start[:-1], counts)
    limits = tensors.shape_values[first + np.arange(len(items.offsets), dtype=np.int64)]
    bad = (items.offsets < 0) | (items.sizes < 0) | (items.sizes > limits - items.offsets)
    if not bad.any():
        return inside, []
    inside[filled] = ~np.logical_or.reduceat(bad, items.start[:-1][filled])
    problems = [
        f"rank {items.ranks[item]}: box {items.box_text(item)} of "
        f"{tensors.fqns[int(items.tensors[item])]!r} is outside of its shape "
        f"{tensors.shape(int(items.tensors[item]))}"
        for item in np.flatnonzero(~inside).tolist()
    ]
    return inside, problems


def check_boxes(
    items: Items, first: Int64, tensors: GlobalTensors, volumes: Int64, *, complete: bool
) -> list[str]:
    """List overlaps of distinct boxes (one item each: ``first``), and, if ``complete``, parts that are
    missing."""
    box_tensors = items.tensors[first]
    by_tensor = np.bincount(box_tensors, minlength=len(tensors.fqns))
    several = first[by_tensor[box_tensors] > 1]
    problems, overlapped = [], set[int]()
    if not len(several) and not complete:
        return []
    for group in by_ndim(several, items.start, items.offsets, items.sizes):
        boxes = BoxSet(items.tensors[group.rows], group.offsets, group.offsets + group.sizes)
        for i, j in zip(*(side.tolist() for side in overlapping_pairs(boxes)), strict=True):
            one, other = int(group.rows[i]), int(group.rows[j])
            overlapped.add(int(items.tensors[one]))
            problems.append(
                f"{tensors.fqns[int(items.tensors[one])]!r}: box {items.box_text(one)} of rank "
                f"{items.ranks[one]} and {items.box_text(other)} of rank {items.ranks[other]} overlap"
            )
    if complete:
        problems += _gaps(items.volumes[first], box_tensors, tensors, volumes, overlapped)
    return problems


def _gaps(
    box_volumes: Int64, box_tensors: Int64, tensors: GlobalTensors, volumes: Int64, overlapped: set[int]
) -> list[str]:
    running = starts(box_volumes)
    edges = np.searchsorted(box_tensors, np.arange(len(tensors.fqns) + 1))
    sums = running[edges[1:]] - running[edges[:-1]]
    return [
        f"{tensors.fqns[row]!r} of shape {tensors.shape(row)}: the ranks hold {sums[row]} of its "
        f"{volumes[row]} elements; all ranks that have a part must take part"
        for row in np.flatnonzero(sums != volumes).tolist()
        if row not in overlapped
    ]


def check_replica_digests(items: Items, boxes: Boxes, tensors: GlobalTensors) -> list[tuple[str, str]]:
    """List (fqn, description) of boxes whose known digests differ between ranks."""
    holders = np.diff(boxes.start)
    if not len(holders) or (holders == 1).all():
        return []
    digests = items.digests[boxes.members]
    highest = np.maximum.reduceat(digests, boxes.start[:-1])
    known = np.where(digests == 0, np.uint64(2**64 - 1), digests)
    lowest = np.minimum.reduceat(known, boxes.start[:-1])
    mismatches = []
    for box in np.flatnonzero((highest != 0) & (highest != lowest)).tolist():
        members = boxes.of(box)
        sides: dict[int, list[int]] = {}
        for item in members.tolist():
            if items.digests[item]:
                sides.setdefault(int(items.digests[item]), []).append(int(items.ranks[item]))
        fqn = tensors.fqns[int(items.tensors[members[0]])]
        where = f"tensor {fqn!r}, box {items.box_text(int(members[0]))}, differs between replicas"
        if len(set(map(is_made_on_device, sides))) > 1:
            where += (
                ", or is in host memory on one rank and on an accelerator on another, which are compared "
            )
            where += 'by samples only: DefaultSavePlanner(replica_check="sampled")'
        mismatches.append((fqn, f"{where}: {describe_sides(list(sides.values()))}"))
    return mismatches
