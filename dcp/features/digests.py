"""Digests of tensors, computed by a save from the written bytes (``FileSystemWriter(digests=True)``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp.planners.columns import SaveColumns
from dcp.planners.rank_state import RankState
from dcp.saving.feature import SaveFeature
from dcp.storage.digests import (
    SUM_BYTES,
    BoxDigest,
    LogicalPlaces,
    as_elements,
    row_values,
    run_value,
)
from dcp.storage.engine.write import Observer, WriteColumns
from dcp.storage.formats.index import CheckpointIndex, itemsizes
from dcp.storage.geometry.strides import Int64, gather_rows, row_products


class Digests(SaveFeature):
    """Sum the digests of written boxes, and store digests of whole tensors in the index."""

    name = "digests"
    option = "digests"

    def observer(self, local: RankState, columns: WriteColumns) -> Observer:
        """Make the sums of the written rows."""
        return _Sums(_places(local, columns), columns.shares)

    def manifest(self, index: CheckpointIndex, rows: Int64, found: Sequence[Any]) -> CheckpointIndex:
        """Put the sums of the tensors of which all chunks are known into the index."""
        if not len(rows):
            return index
        known, added = np.zeros(index.chunk_count, np.bool_), np.zeros((index.chunk_count, 2), np.uint64)
        known[rows] = np.concatenate([has for _, has in found])
        added[rows] = np.concatenate([values for values, _ in found])
        volumes = row_products(index.chunk_sizes, index.box_start) * known
        first, filled = index.chunk_start[:-1], np.diff(index.chunk_start) > 0
        covered, sums = np.zeros(index.tensor_count, np.int64), np.zeros((index.tensor_count, 2), np.uint64)
        covered[filled] = np.add.reduceat(volumes, first[filled])
        sums[filled] = np.bitwise_xor.reduceat(added, first[filled], axis=0)
        is_whole = (covered == row_products(index.shape_values, index.shape_start)).tolist()
        digests = [one.tobytes() if whole else b"" for one, whole in zip(sums, is_whole, strict=True)]
        return replace(index, digests=digests)


class _Sums(Observer):
    """The value of each row's bytes, and its share of the tensor's sum."""

    def __init__(self, places: LogicalPlaces, shares: Int64) -> None:
        self._places = places
        self._shares = shares
        self._sizes = (places.volumes * places.itemsizes).tolist()
        self._values = np.zeros((len(shares), 2), np.uint64)
        self._simple = places.is_simple.tolist()
        self._begun: dict[int, BoxDigest] = {}

    def see(self, row: int, position: int, data: memoryview) -> None:
        """Add bytes to a row's value."""
        size = self._sizes[row]
        if self._simple[row] and len(data) == size:  # fast path for many small tensors
            value = run_value(data)
        else:
            if position == 0:
                self._begun[row] = self._places.digest(row)
            self._begun[row].update(data)
            if position + len(data) < size:
                return
            value = self._begun.pop(row).value()
        self._values[row] = as_elements(value.to_bytes(SUM_BYTES, "big"))

    def see_many(self, rows: Int64, payloads: npt.NDArray[np.uint8]) -> None:
        """Add whole rows, together where each is a contiguous part at a block boundary."""
        if self._places.is_simple[rows].all():
            self._values[rows] = row_values(payloads)
        else:
            super().see_many(rows, payloads)

    def finish(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint8]]:
        """Return the shares by row, with a mask; unknown for rows that share bytes in another layout."""
        sharing = np.flatnonzero(self._shares >= 0)
        self._values[sharing] = self._values[self._shares[sharing]]
        known = np.ones(len(self._shares), np.uint8)
        known[sharing] = self._places.alike(sharing, self._shares[sharing])
        return self._places.placed(self._values), known


def _places(local: RankState, columns: WriteColumns) -> LogicalPlaces:
    """Find the positions of a rank's rows in their tensors."""
    held = local.columns
    order = np.argsort(held.item_sources, kind="stable")
    first = np.searchsorted(held.item_sources[order], columns.sources, "left")
    count = np.searchsorted(held.item_sources[order], columns.sources, "right") - first
    items = order[first]  # the held box that contains each row
    for row in np.flatnonzero(count > 1).tolist():  # for a local tensor of several boxes
        several = order[first[row] : first[row] + count[row]].tolist()
        items[row] = next(item for item in several if _is_part(held, item, columns, row))
    offsets, inner = (
        gather_rows(values, held.box_start, items) for values in (held.item_offsets, held.item_local_offsets)
    )
    tensors = held.item_tensors[items]
    return LogicalPlaces(
        columns.box_start,
        gather_rows(held.shape_values, held.shape_start, tensors),
        offsets + columns.local_offsets - inner,
        columns.sizes,
        itemsizes(held.dtype_codes[tensors]),
    )


def _is_part(held: SaveColumns, item: int, columns: WriteColumns, row: int) -> bool:
    """Test whether a row lies in a held box of its local tensor."""
    box = slice(int(held.box_start[item]), int(held.box_start[item + 1]))
    part = slice(int(columns.box_start[row]), int(columns.box_start[row + 1]))
    inner = columns.local_offsets[part] - held.item_local_offsets[box]
    return bool(((inner >= 0) & (inner + columns.sizes[part] <= held.item_sizes[box])).all())
