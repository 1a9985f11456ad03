"""All ranks' tensors, boxes and objects, one table each; which boxes are the same; and checks of them.

Ranks mostly have equal tables of names, which are recognised and taken once, whatever the number of ranks.
What the checks find is raised together, in one error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp.planners.columns import SaveColumns
from dcp.planners.value_digests import NOT_COMPARABLE, is_made_on_device
from dcp.storage.errors import PlanError, ReplicaMismatchError
from dcp.storage.formats import dtypes
from dcp.storage.formats.container_notes import ContainerNote
from dcp.storage.formats.index import Path
from dcp.storage.geometry.boxes import BoxSet, overlapping_pairs
from dcp.storage.geometry.strides import Int64, by_ndim, gather_rows, row_products, row_sums, starts
from dcp.storage.near_names import listed

_MAX_LISTED_RANKS = 8


def rank_list(ranks: Sequence[int]) -> str:
    """List ranks in words: ``rank 3``, ``ranks 0, 1, 2 and 5 more``."""
    shown = ", ".join(str(rank) for rank in ranks[:_MAX_LISTED_RANKS])
    more = len(ranks) - _MAX_LISTED_RANKS
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, eq=False)
class GlobalTensors:
    """Tensors by first appearance; ``rows[r]`` maps rank r's tensor rows to rows here."""

    fqns: list[str]
    dtype_codes: npt.NDArray[np.uint8]
    requires_grad: npt.NDArray[np.uint8]
    shape_start: Int64
    shape_values: Int64
    rows: list[Int64]
    stride_orders: dict[int, tuple[int, ...]]
    problems: list[str] = field(default_factory=list)

    def shape(self, row: int) -> list[int]:
        """Return the global shape of a row."""
        shape: list[int] = self.shape_values[self.shape_start[row] : self.shape_start[row + 1]].tolist()
        return shape


class _Table(NamedTuple):
    """Columns that ``ranks`` have alike: their ``rows`` in the table of all, and which are ``new``."""

    columns: SaveColumns
    rows: Int64
    new: npt.NDArray[np.bool_]
    ranks: list[int]


def _numbered(fqns: Sequence[str], position: dict[str, int]) -> Int64:
    """Return the number of each name, in the order in which they come; ``position`` is all of them."""
    if not position:
        position.update(zip(fqns, range(len(fqns)), strict=True))
        if len(position) == len(fqns):
            return np.arange(len(fqns), dtype=np.int64)
        position.clear()
    return np.array([position.setdefault(fqn, len(position)) for fqn in fqns], np.int64)


def global_tensors(all_columns: Sequence[SaveColumns]) -> GlobalTensors:
    """Return one table of all ranks' tensors; differing dtypes and shapes are listed as problems."""
    position: dict[str, int] = {}
    tables: dict[tuple[object, ...], _Table] = {}
    rows: list[Int64] = []
    orders: dict[int, tuple[int, ...]] = {}
    for rank, columns in enumerate(all_columns):
        shapes = columns.shape_start.tobytes(), columns.shape_values.tobytes()
        key = (tuple(columns.fqns), columns.dtype_codes.tobytes(), *shapes)
        table = tables.get(key)
        if table is None:
            known = len(position)
            numbers = _numbered(columns.fqns, position)
            table = tables[key] = _Table(columns, numbers, numbers >= known, [])
        table.ranks.append(rank)
        rows.append(table.rows)
        for row, order in columns.stride_orders.items():
            orders.setdefault(int(table.rows[row]), tuple(order))
    ndims, shape_values, codes, grads = [], [], [], []
    for columns, _, new, _ in tables.values():
        ndims.append(columns.ndims[new])
        shape_values.append(gather_rows(columns.shape_values, columns.shape_start, np.flatnonzero(new)))
        codes.append(columns.dtype_codes[new])
        grads.append(columns.requires_grad[new])
    found = GlobalTensors(
        fqns=list(position),
        dtype_codes=np.concatenate(codes),
        requires_grad=np.concatenate(grads),
        shape_start=starts(np.concatenate(ndims)),
        shape_values=np.concatenate(shape_values),
        rows=rows,
        stride_orders=orders,
    )
    for table in tables.values():
        if not table.new.all():
            _compare(table, found, [*tables.values()])
    return found


def _compare(table: _Table, found: GlobalTensors, tables: Sequence[_Table]) -> None:
    columns, rows = table.columns, table.rows
    differs = columns.dtype_codes != found.dtype_codes[rows]
    ndims = np.diff(columns.shape_start)
    same_ndim = ndims == np.diff(found.shape_start)[rows]
    differs |= ~same_ndim
    chosen = np.flatnonzero(same_ndim)
    mine = gather_rows(columns.shape_values, columns.shape_start, chosen)
    theirs = gather_rows(found.shape_values, found.shape_start, rows[chosen])
    differs[chosen] |= row_sums((mine != theirs).astype(np.int64), starts(ndims[chosen])) > 0
    for local in np.flatnonzero(differs).tolist():
        row = int(rows[local])
        begin, end = columns.shape_start[local], columns.shape_start[local + 1]
        mine_text = _described(int(columns.dtype_codes[local]), columns.shape_values[begin:end].tolist())
        first = next(other.ranks for other in tables if row in other.rows[other.new])
        found.problems.append(
            f"tensor {found.fqns[row]!r} is "
            f"{_described(int(found.dtype_codes[row]), found.shape(row))} on {rank_list(first)}, "
            f"but {mine_text} on {rank_list(table.ranks)}"
        )


def _described(code: int, shape: list[int]) -> str:
    dtype = dtypes.BY_CODE.get(code)
    return f"{dtype.name if dtype else f'dtype {code}'} {shape}"


@dataclass(frozen=True, eq=False)
class GlobalObjects:
    """Objects by first appearance.

    ``owners`` is the lowest rank that has each; ``rows[r]`` maps rank r's object rows to rows here.
    ``mismatches`` describes objects whose known digests differ, or that several ranks have and that cannot be
    compared.
    """

    fqns: list[str]
    owners: Int64
    sizes: Int64
    rows: list[Int64]
    mismatches: list[tuple[str, str]] = field(default_factory=list)

    def holders(self, row: int) -> list[int]:
        """Return all ranks that have an object."""
        return [rank for rank, rows in enumerate(self.rows) if (rows == row).any()]


def global_objects(all_columns: Sequence[SaveColumns], *, check_replicas: bool) -> GlobalObjects:
    """Return one table of all ranks' objects."""
    position: dict[str, int] = {}
    tables: dict[tuple[str, ...], tuple[Int64, list[int]]] = {}
    rows_by_rank: list[Int64] = []
    for rank, columns in enumerate(all_columns):
        key = tuple(columns.objects.fqns)
        if key not in tables:
            tables[key] = (_numbered(key, position), [])
        tables[key][1].append(rank)
        rows_by_rank.append(tables[key][0])
    count = len(position)
    owners, sizes = np.full(count, len(all_columns), np.int64), np.zeros(count, np.int64)
    digests = np.zeros(count, np.uint64)
    differs, opaque = np.zeros(count, bool), np.zeros(count, bool)
    for rank, (columns, rows) in enumerate(zip(all_columns, rows_by_rank, strict=True)):
        if not len(rows):
            continue
        is_known = owners[rows] < len(all_columns)
        owners[rows] = np.minimum(owners[rows], rank)
        sizes[rows] = np.maximum(sizes[rows], columns.objects.sizes)
        mine, known = columns.objects.digests, digests[rows]
        # A value that cannot be compared is another one than those that can.
        differs[rows] |= is_known & (mine != known)
        opaque[rows] |= is_known & (mine == NOT_COMPARABLE)
        digests[rows] = np.where(known == 0, mine, known)
    found = GlobalObjects(list(position), owners, sizes, rows_by_rank)
    if check_replicas:
        for row in np.flatnonzero(differs).tolist():
            sides = _sides(row, rows_by_rank, [columns.objects.digests for columns in all_columns])
            found.mismatches.append((found.fqns[row], f"object {found.fqns[row]!r} differs: {sides}"))
        for row in np.flatnonzero(opaque & ~differs).tolist():
            fqn, ranks = found.fqns[row], rank_list(found.holders(row))
            why = (
                "pickle gets no state of it, or it contains itself: keep it out of the state dict, "
                "or give what describes it as plain data"
            )
            found.mismatches.append((fqn, f"object {fqn!r} of {ranks} cannot be compared ({why})"))
    return found


def _sides(row: int, rows_by_rank: list[Int64], digests: Sequence[npt.NDArray[np.uint64]]) -> str:
    sides: dict[int, list[int]] = {}
    for rank, (rows, values) in enumerate(zip(rows_by_rank, digests, strict=True)):
        for place in np.flatnonzero(rows == row).tolist():
            sides.setdefault(int(values[place]), []).append(rank)
    return describe_sides(list(sides.values()))


def describe_sides(sides: Sequence[Sequence[int]]) -> str:
    """Describe sides as ``ranks 0, 1 have one value, rank 2 another``."""
    words = ["one value", "another", *["yet another"] * len(sides)]
    told = [
        f"{rank_list(side)} ha{'ve' if len(side) > 1 else 's'} {word}"
        for side, word in zip(sides, words, strict=False)
    ]
    return listed(told, most=4, show=str)


@dataclass(frozen=True, eq=False)
class Items:
    """The boxes of all ranks, one after the other: rank, row in that rank's columns, global tensor row, box;
    and what its columns ``item_*`` have."""

    ranks: Int64
    rows: Int64
    tensors: Int64
    start: Int64
    volumes: Int64
    offsets: Int64
    sizes: Int64
    local_offsets: Int64
    sources: Int64
    digests: npt.NDArray[np.uint64]
    ties: Int64

    def box_text(self, item: int) -> str:
        """Write a box as ``[0:4, 2:3]``, for messages."""
        begin, end = self.start[item], self.start[item + 1]
        pairs = zip(self.offsets[begin:end].tolist(), self.sizes[begin:end].tolist(), strict=True)
        return "[" + ", ".join(f"{offset}:{offset + size}" for offset, size in pairs) + "]"


def gather_items(all_columns: Sequence[SaveColumns], tensors: GlobalTensors) -> Items:
    """Join the items of all ranks, in rank order."""
    own_rows = list(map(attrgetter("item_tensors"), all_columns))
    counts = list(map(len, own_rows))
    mapped = np.concatenate(list(map(np.take, tensors.rows, own_rows)))
    start = starts(np.diff(tensors.shape_start)[mapped])
    joined: dict[str, Any] = {}
    for name in ("offsets", "sizes", "local_offsets", "sources", "digests", "ties"):
        joined[name] = np.concatenate([*map(attrgetter(f"item_{name}"), all_columns)])
    return Items(
        np.repeat(np.arange(len(counts)), counts),
        np.concatenate(list(map(np.arange, counts))),
        mapped,
        start,
        row_products(joined["sizes"], start),
        **joined,
    )


def _positions(items: Items, chosen: Int64, tensors: GlobalTensors) -> Int64:
    """Make a sort key of each item of ``chosen``: tensor first, then the box's first element in C order."""
    shape_start, shape_values = tensors.shape_start, tensors.shape_values
    ndims = np.diff(shape_start)
    volumes = np.maximum(row_products(shape_values, shape_start), 1)
    base = starts(volumes)[:-1]
    strides = np.ones(len(shape_values), np.int64)
    for back in range(2, int(ndims.max(initial=0)) + 1):
        places = shape_start[1:][ndims >= back] - back
        strides[places] = strides[places + 1] * shape_values[places + 1]
    rows = items.tensors[chosen]
    offsets = gather_rows(items.offsets, items.start, chosen)
    places = offsets * gather_rows(strides, shape_start, rows)
    keys: Int64 = base[rows] + row_sums(places, starts(ndims[rows]))
    return keys


@dataclass(frozen=True, eq=False)
class Boxes:
    """The distinct boxes, by tensor and position: those who hold box b are items ``members[start[b]:start[b +
    1]]``, ascending by rank."""

    members: Int64
    start: Int64
    first: Int64
    """One item of each box."""

    def of(self, box: int) -> Int64:
        """Return the items of a box."""
        return self.members[self.start[box] : self.start[box + 1]]


def distinct_boxes(items: Items, chosen: Int64, tensors: GlobalTensors) -> Boxes:
    """Find the distinct boxes of the items ``chosen``."""
    keys = _positions(items, chosen, tensors)
    order = np.argsort(keys, kind="stable")
    members, keys = chosen[order], keys[order]
    new = np.ones(len(members), bool)
    new[1:] = keys[1:] != keys[:-1]
    # equal beginnings with different sizes are different boxes; that they overlap is found later
    same = np.flatnonzero(~new)
    counts = items.start[members[same] + 1] - items.start[members[same]]
    here = gather_rows(items.sizes, items.start, members[same])
    before = gather_rows(items.sizes, items.start, members[same - 1])
    new[same] = row_sums((here != before).astype(np.int64), starts(counts)) > 0
    first = np.flatnonzero(new)
    return Boxes(members, np.append(first, len(members)), members[first])


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
    limits = gather_rows(tensors.shape_values, tensors.shape_start, items.tensors)
    bad = (items.offsets < 0) | (items.sizes < 0) | (items.sizes > limits - items.offsets)
    inside = row_sums(bad.astype(np.int64), items.start) == 0
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
