"""Tables of all ranks' tensors, boxes and objects, with equal boxes identified, and checks.

Equal name tables of ranks are recognized and processed once. All problems are raised in one error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dcp.planners.columns import SaveColumns
from dcp.planners.value_digests import NOT_COMPARABLE, is_made_on_device
from dcp.storage.errors import PlanError, ReplicaMismatchError
from dcp.storage.formats import dtypes
from dcp.storage.formats.container_notes import ContainerNote
from dcp.storage.formats.index import CheckpointIndex, Path
from dcp.storage.formats.registry import DCP
from dcp.storage.geometry.boxes import BoxSet, overlapping_pairs
from dcp.storage.geometry.strides import Int64, by_ndim, gather_rows, row_products, row_sums, starts
from dcp.storage.near_names import listed

_MAX_LISTED_RANKS = 8
_NO_ROWS: Final = np.zeros(0, np.int64).copy


def rank_list(ranks: Sequence[int]) -> str:
    """Return ranks as text: ``rank 3``, ``ranks 0, 1, 2 and 5 more``."""
    shown = ", ".join(str(rank) for rank in ranks[:_MAX_LISTED_RANKS])
    more = len(ranks) - _MAX_LISTED_RANKS
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}" + (f" and {more} more" if more > 0 else "")


def _numbered(fqns: Sequence[str], position: dict[str, int]) -> Int64:
    """Return the number of each name in order of appearance; ``position`` has all names."""
    if not position:
        position.update(zip(fqns, range(len(fqns)), strict=True))
        if len(position) == len(fqns):
            return np.arange(len(fqns), dtype=np.int64)
        position.clear()
    return np.array([position.setdefault(fqn, len(position)) for fqn in fqns], np.int64)


def global_tensors(all_columns: Sequence[SaveColumns]) -> tuple[CheckpointIndex, list[Int64], list[str]]:
    """Return all tensors by first appearance as an index without chunks, the tensor numbers by rank, and
    problems: different dtypes and shapes.
    """
    position: dict[str, int] = {}
    tables: dict[tuple[object, ...], tuple[SaveColumns, Int64, npt.NDArray[np.bool_], list[int]]] = {}
    rows: list[Int64] = []
    orders: dict[int, tuple[int, ...]] = {}
    for rank, columns in enumerate(all_columns):
        shapes = columns.shape_start.tobytes(), columns.shape_values.tobytes()
        key = (tuple(columns.fqns), columns.dtype_codes.tobytes(), *shapes)
        if key not in tables:
            known, numbers = len(position), _numbered(columns.fqns, position)
            tables[key] = (columns, numbers, numbers >= known, [])
        tables[key][-1].append(rank)
        rows.append(tables[key][1])
        for row, order in columns.stride_orders.items():
            orders.setdefault(int(rows[-1][row]), tuple(order))
    ndims, shape_values, codes, grads = [], [], [], []
    for columns, _, new, _ in tables.values():
        ndims.append(columns.ndims[new])
        shape_values.append(gather_rows(columns.shape_values, columns.shape_start, np.flatnonzero(new)))
        codes.append(columns.dtype_codes[new])
        grads.append(columns.requires_grad[new])
    found = CheckpointIndex(
        format=DCP.name,
        fqns=list(position),
        dtype_codes=np.concatenate(codes),
        requires_grad=np.concatenate(grads),
        shape_start=starts(np.concatenate(ndims)),
        shape_values=np.concatenate(shape_values),
        stride_orders=orders,
    )
    problems: list[str] = []
    for columns, numbers, new, ranks in tables.values():
        for row, text in [] if new.all() else _differing(columns, numbers, found):
            first = next(holders for _, others, new, holders in tables.values() if row in others[new])
            theirs = _described(int(found.dtype_codes[row]), found.shape(row))
            problems.append(
                f"tensor {found.fqns[row]!r} is {theirs} on {rank_list(first)}, "
                f"but {text} on {rank_list(ranks)}"
            )
    return found, rows, problems


def _differing(columns: SaveColumns, rows: Int64, found: CheckpointIndex) -> Iterator[tuple[int, str]]:
    """Yield row and description of each tensor that differs in ``found``."""
    same_ndim = columns.ndims == found.ndims[rows]
    differs = ~same_ndim | (columns.dtype_codes != found.dtype_codes[rows])
    chosen = np.flatnonzero(same_ndim)
    mine = gather_rows(columns.shape_values, columns.shape_start, chosen)
    theirs = gather_rows(found.shape_values, found.shape_start, rows[chosen])
    differs[chosen] |= row_sums((mine != theirs).astype(np.int64), starts(columns.ndims[chosen])) > 0
    for local in np.flatnonzero(differs).tolist():
        shape = columns.shape_values[columns.shape_start[local] : columns.shape_start[local + 1]]
        yield int(rows[local]), _described(int(columns.dtype_codes[local]), shape.tolist())


def _described(code: int, shape: Sequence[int]) -> str:
    dtype = dtypes.BY_CODE.get(code)
    return f"{dtype.name if dtype else f'dtype {code}'} {list(shape)}"


@dataclass(frozen=True, eq=False)
class GlobalObjects:
    """Objects by first appearance.

    ``owners`` is the lowest rank of each; ``rows[r]`` maps rank r's object rows to rows here.
    ``mismatches`` describes objects with different digests, or objects of several ranks without comparable
    state.
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
    """Return the table of all ranks' objects."""
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
        # A value without comparable state differs from all comparable values.
        differs[rows] |= is_known & (mine != known)
        opaque[rows] |= is_known & (mine == NOT_COMPARABLE)
        digests[rows] = np.where(known == 0, mine, known)
    found = GlobalObjects(list(position), owners, sizes, rows_by_rank)
    if check_replicas:
        for row in np.flatnonzero(differs).tolist():
            values = [
                (int(columns.objects.digests[place]), rank)
                for rank, (rows, columns) in enumerate(zip(rows_by_rank, all_columns, strict=True))
                for place in np.flatnonzero(rows == row).tolist()
            ]
            text = f"object {found.fqns[row]!r} differs: {describe_sides(values)}"
            found.mismatches.append((found.fqns[row], text))
        for row in np.flatnonzero(opaque & ~differs).tolist():
            fqn, ranks = found.fqns[row], rank_list(found.holders(row))
            why = (
                "it has no pickle state, or contains itself: remove it from the state dict, or convert it to "
                "plain data"
            )
            found.mismatches.append((fqn, f"object {fqn!r} of {ranks} cannot be compared ({why})"))
    return found


def describe_sides(values: Sequence[tuple[int, int]]) -> str:
    """Return (value, rank) pairs as text: ``ranks 0, 1 have one value, rank 2 another``."""
    sides: dict[int, list[int]] = defaultdict(list)
    for value, rank in values:
        sides[value].append(rank)
    words = chain(("one value", "another"), repeat("yet another"))
    sides_named = [
        f"{rank_list(side)} ha{'ve' if len(side) > 1 else 's'} {word}"
        for side, word in zip(sides.values(), words, strict=False)
    ]
    return listed(sides_named, most=4, show=str)


@dataclass(frozen=True, eq=False)
class Items:
    """Boxes of all ranks, concatenated: rank, row in the rank's columns, tensor row, box, and ``item_*``
    columns.

    Distinct boxes are sorted by tensor and position: holders of box b are items ``members[member_start[b]:
    member_start[b + 1]]``, ascending by rank; ``first`` is one item of each.
    """

    ranks: Int64
    rows: Int64
    tensors: Int64
    box_start: Int64
    volumes: Int64
    offsets: Int64
    sizes: Int64
    local_offsets: Int64
    sources: Int64
    digests: npt.NDArray[np.uint64]
    ties: Int64
    members: Int64 = field(default_factory=_NO_ROWS)
    member_start: Int64 = field(default_factory=_NO_ROWS)
    first: Int64 = field(default_factory=_NO_ROWS)

    def of_box(self, box: int) -> Int64:
        """Return the items of a distinct box."""
        return self.members[self.member_start[box] : self.member_start[box + 1]]

    def box_text(self, item: int) -> str:
        """Return a box as text: ``[0:4, 2:3]``."""
        begin, end = self.box_start[item], self.box_start[item + 1]
        pairs = zip(self.offsets[begin:end].tolist(), self.sizes[begin:end].tolist(), strict=True)
        return "[" + ", ".join(f"{offset}:{offset + size}" for offset, size in pairs) + "]"


def gather_items(
    all_columns: Sequence[SaveColumns], tensors: CheckpointIndex, tensor_rows: Sequence[Int64]
) -> Items:
    """Return the items of all ranks, in rank order."""
    own_rows = list(map(attrgetter("item_tensors"), all_columns))
    counts = list(map(len, own_rows))
    mapped = np.concatenate(list(map(np.take, tensor_rows, own_rows)))
    box_start = starts(tensors.ndims[mapped])
    joined: dict[str, Any] = {}
    for name in ("offsets", "sizes", "local_offsets", "sources", "digests", "ties"):
        joined[name] = np.concatenate([*map(attrgetter(f"item_{name}"), all_columns)])
    return Items(
        np.repeat(np.arange(len(counts)), counts),
        np.concatenate(list(map(np.arange, counts))),
        mapped,
        box_start,
        row_products(joined["sizes"], box_start),
        **joined,
    )


def find_boxes(items: Items, chosen: Int64, tensors: CheckpointIndex, volumes: Int64) -> Items:
    """Find the distinct boxes of the items ``chosen``, sorted by tensor and first element; ``volumes`` are
    those of the tensors.
    """
    shape_start, shape_values, ndims = tensors.shape_start, tensors.shape_values, tensors.ndims
    strides = np.ones(len(shape_values), np.int64)
    for back in range(2, int(ndims.max(initial=0)) + 1):
        places = shape_start[1:][ndims >= back] - back
        strides[places] = strides[places + 1] * shape_values[places + 1]
    rows = items.tensors[chosen]
    inner = gather_rows(items.offsets, items.box_start, chosen) * gather_rows(strides, shape_start, rows)
    keys = starts(np.maximum(volumes, 1))[rows] + row_sums(inner, starts(ndims[rows]))
    order = np.argsort(keys, kind="stable")
    members, keys = chosen[order], keys[order]
    new = np.ones(len(members), bool)
    new[1:] = keys[1:] != keys[:-1]
    # equal offsets with different sizes are different boxes; their overlap is detected later
    same = np.flatnonzero(~new)
    counts = items.box_start[members[same] + 1] - items.box_start[members[same]]
    here = gather_rows(items.sizes, items.box_start, members[same])
    before = gather_rows(items.sizes, items.box_start, members[same - 1])
    new[same] = row_sums((here != before).astype(np.int64), starts(counts)) > 0
    first = np.flatnonzero(new)
    member_start = np.append(first, len(members))
    return replace(items, members=members, member_start=member_start, first=members[first])


MAX_LISTED = 20
"""Maximum number of problems in a message."""

MAX_VOLUME_LOG2 = 60
"""Maximum elements of a tensor; positions are sort keys of 63 bits."""


def invalid_plan(problems: Sequence[str], mismatches: Sequence[tuple[str, str]]) -> PlanError:
    """Return one error for all problems; ``mismatches`` are (fqn, description) of different replicas."""
    texts = [*problems, *(text for _, text in mismatches)]
    shown = texts[:MAX_LISTED]
    more = f"; and {len(texts) - len(shown)} more" if len(texts) > len(shown) else ""
    plural = "s" if len(texts) > 1 else ""
    message = f"Failed to validate global plan: {len(texts)} problem{plural}: {'; '.join(shown)}{more}"
    if mismatches:
        message += (
            ". Only one of the different values would be stored: synchronize them, or wrap state that "
            "differs by rank in dcp.PerRank"
        )
        if any(text.startswith("tensor ") for _, text in mismatches):
            message += (
                ". For buffers, such as those of BatchNorm under DDP, send rank 0's to all ranks before each "
                "save: for buffer in model.buffers(): torch.distributed.broadcast(buffer, 0)"
            )
    fqns = sorted({fqn for fqn, _ in mismatches})[:MAX_LISTED]
    kind = PlanError if problems else ReplicaMismatchError
    return kind(message, problems=shown, fqns=fqns)


def check_volumes(tensors: CheckpointIndex) -> list[str]:
    """Return problems: tensors with more elements than can be counted."""
    logs = np.log2(np.maximum(tensors.shape_values, 1).astype(np.float64))
    sums = np.concatenate([[0.0], np.cumsum(logs)])
    sizes = sums[tensors.shape_start[1:]] - sums[tensors.shape_start[:-1]]
    if (sizes > MAX_VOLUME_LOG2).any():
        return [
            f"{tensors.fqns[row]!r} of shape {list(tensors.shape(row))} has more than 2**{MAX_VOLUME_LOG2} "
            "elements"
            for row in np.flatnonzero(sizes > MAX_VOLUME_LOG2).tolist()
        ]
    is_too_much = float(np.exp2(sizes).sum()) > 2.0**62
    return ["the tensors have more than 2**62 elements in total"] if is_too_much else []


def check_kinds(tensors: CheckpointIndex, tensor_rows: Sequence[Int64], objects: GlobalObjects) -> list[str]:
    """Return problems: names of a tensor on one rank and an object on another."""
    problems = []
    both = set(objects.fqns).intersection(tensors.fqns) if objects.fqns else ()
    for fqn in sorted(both, key=tensors.fqns.index):
        row = tensors.fqns.index(fqn)
        holders = [rank for rank, rows in enumerate(tensor_rows) if (rows == row).any()]
        others = objects.holders(objects.fqns.index(fqn))
        problems.append(
            f"{fqn!r} is a tensor on {rank_list(holders)}, but another value on {rank_list(others)}"
        )
    return problems


def check_nesting(
    all_columns: Sequence[SaveColumns], paths: Mapping[str, Path], notes: Sequence[ContainerNote]
) -> list[str]:
    """Return problems: names of a value on one rank and a container on another.

    ``paths`` and ``notes`` are those of all ranks.
    """
    if len({*map(id, map(attrgetter("planner_data"), all_columns))}) == 1:
        return []
    level = {path[:-1] for path in paths.values()} | {tuple(note["path"]) for note in notes}
    problems, seen = set[Path](), set[Path]()
    while level := level - seen:
        seen |= level
        problems |= {path for path in level if paths.get(".".join(map(str, path))) == path}
        level = {path[:-1] for path in level if path}
    texts = []
    for path in sorted(problems, key=str):
        name = ".".join(map(str, path))
        named = [part.planner_data or {} for part in all_columns]
        holders = [rank for rank, names in enumerate(named) if names.get(name) == path]
        opened = [
            rank
            for rank, names in enumerate(named)
            if any(other[: len(path)] == path != other for other in names.values())
            or any(tuple(note["path"]) == path for note in all_columns[rank].notes)
        ]
        texts.append(
            f"{name!r} is a single value on {rank_list(holders)} (such as a list without tensors and dicts), "
            f"but a container with entries on {rank_list(opened)}"
        )
    return texts


def check_bounds(items: Items, tensors: CheckpointIndex) -> tuple[npt.NDArray[np.bool_], list[str]]:
    """Return (items inside of their tensors, problems of the others)."""
    limits = gather_rows(tensors.shape_values, tensors.shape_start, items.tensors)
    bad = (items.offsets < 0) | (items.sizes < 0) | (items.sizes > limits - items.offsets)
    inside = row_sums(bad.astype(np.int64), items.box_start) == 0
    problems = []
    for item in np.flatnonzero(~inside).tolist():
        tensor = int(items.tensors[item])
        problems.append(
            f"rank {items.ranks[item]}: box {items.box_text(item)} of "
            f"{tensors.fqns[tensor]!r} is outside of its shape {list(tensors.shape(tensor))}"
        )
    return inside, problems


def check_boxes(items: Items, tensors: CheckpointIndex, volumes: Int64, *, complete: bool) -> list[str]:
    """Return problems: overlaps of distinct boxes and, if ``complete``, gaps."""
    first, box_tensors = items.first, items.tensors[items.first]
    several = first[np.bincount(box_tensors, minlength=len(tensors.fqns))[box_tensors] > 1]
    problems, overlapped = [], set[int]()
    for group in by_ndim(several, items.box_start, items.offsets, items.sizes):
        boxes = BoxSet(items.tensors[group.rows], group.offsets, group.offsets + group.sizes)
        for i, j in zip(*(side.tolist() for side in overlapping_pairs(boxes)), strict=True):
            one, other = int(group.rows[i]), int(group.rows[j])
            overlapped.add(int(items.tensors[one]))
            problems.append(
                f"{tensors.fqns[int(items.tensors[one])]!r}: box {items.box_text(one)} of rank "
                f"{items.ranks[one]} and {items.box_text(other)} of rank {items.ranks[other]} overlap"
            )
    if complete:
        edges = np.searchsorted(box_tensors, np.arange(len(tensors.fqns) + 1))
        sums = np.diff(starts(items.volumes[first])[edges])
        problems += [
            f"{tensors.fqns[row]!r} of shape {list(tensors.shape(row))}: the ranks hold {sums[row]} of its "
            f"{volumes[row]} elements; all ranks with a shard must take part in the save"
            for row in np.flatnonzero(sums != volumes).tolist()
            if row not in overlapped
        ]
    return problems


def check_replica_digests(items: Items, tensors: CheckpointIndex) -> list[tuple[str, str]]:
    """Return (fqn, description) of boxes with different digests on several ranks."""
    if len(items.members) == len(items.first):
        return []
    digests = items.digests[items.members]
    highest = np.maximum.reduceat(digests, items.member_start[:-1])
    known = np.where(digests == 0, np.uint64(2**64 - 1), digests)
    lowest = np.minimum.reduceat(known, items.member_start[:-1])
    mismatches = []
    for box in np.flatnonzero((highest != 0) & (highest != lowest)).tolist():
        members = items.of_box(box)
        values = list(zip(items.digests[members].tolist(), items.ranks[members].tolist(), strict=True))
        values = [(digest, rank) for digest, rank in values if digest]
        fqn = tensors.fqns[int(items.tensors[members[0]])]
        where = f"tensor {fqn!r}, box {items.box_text(int(members[0]))}, differs between replicas"
        if len({is_made_on_device(digest) for digest, _ in values}) > 1:
            where += (
                ", or is in host memory on one rank and on an accelerator on another, which are compared "
                'by samples only: DefaultSavePlanner(replica_check="sampled")'
            )
        mismatches.append((fqn, f"{where}: {describe_sides(values)}"))
    return mismatches
