"""The boxes that ranks hold, one table of all ranks; and which of them are the same box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dcp.planners.columns import SaveColumns
from dcp.planners.save.global_tables import GlobalTensors
from dcp.storage.formats.index import Int64, starts
from dcp.storage.geometry.ragged import gather_rows, row_products

__all__ = ["Boxes", "Items", "distinct_boxes", "gather_items"]


@dataclass(frozen=True, eq=False)
class Items:
    """The boxes of all ranks, one after the other: rank, row in that rank's columns, global tensor row,
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

    def box_text(self, item: int) -> str:
        """``[0:4, 2:3]``, for messages."""
        begin, end = self.start[item], self.start[item + 1]
        pairs = zip(self.offsets[begin:end].tolist(), self.sizes[begin:end].tolist(), strict=True)
        return "[" + ", ".join(f"{offset}:{offset + size}" for offset, size in pairs) + "]"


def gather_items(all_columns: Sequence[SaveColumns], tensors: GlobalTensors) -> Items:
    """The items of all ranks, in rank order."""
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


def _positions(items: Items, chosen: Int64, tensors: GlobalTensors) -> Int64:
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

    def of(self, box: int) -> Int64:
        """The items of a box."""
        return self.members[self.start[box] : self.start[box + 1]]


def distinct_boxes(items: Items, chosen: Int64, tensors: GlobalTensors) -> Boxes:
    """The boxes of the items ``chosen``."""
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
