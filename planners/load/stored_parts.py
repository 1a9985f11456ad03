"""Stored parts: the places of wanted boxes in payloads, for any chunks, however these are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from dcp.planners.columns import HeldBoxes
from dcp.planners.load.plan import plan_load
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.formats.index import Int64, starts
from dcp.storage.geometry.ragged import gather_rows, row_sums
from dcp.storage.geometry.strides import ragged_c_strides

__all__ = ["StoredParts", "stored_parts"]


@dataclass(frozen=True, eq=False)
class StoredParts:
    """The parts of wanted boxes that chunks have, in the order of the boxes. A row has the number of its
    box (``wanted``), its chunk, and where in the payload its first element is (bytes). Flat columns are
    sliced by ``axis_start``: ``offsets`` in the box, ``lengths``, and the payload's ``strides`` (bytes)."""

    wanted: Int64
    chunks: Int64
    begins: Int64
    axis_start: Int64
    offsets: Int64
    lengths: Int64
    strides: Int64


class _NamesOfRows(Sequence[str]):
    """The names of ``rows``, looked up when they are asked for."""

    def __init__(self, fqns: Sequence[str], rows: Int64) -> None:
        self._fqns, self._rows = fqns, rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> list[str]: ...
    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            return [self._fqns[row] for row in self._rows[at].tolist()]
        return self._fqns[int(self._rows[at])]


def stored_parts(
    engine: ReadEngine, rows: Int64, tensor_of: Int64, box_offsets: Int64, box_sizes: Int64
) -> StoredParts:
    """Return where boxes of the tensors ``rows`` are stored; ``tensor_of`` says of each box which of these
    tensors it is of."""
    index = engine.index
    plan = plan_load(
        index,
        HeldBoxes(
            fqns=_NamesOfRows(index.fqns, rows),
            dtype_codes=index.dtype_codes[rows],
            shape_start=starts(index.ndims[rows]),
            shape_values=gather_rows(index.shape_values, index.shape_start, rows),
            item_tensors=tensor_of,
            item_offsets=box_offsets,
            item_sizes=box_sizes,
            item_local_offsets=np.zeros(len(box_offsets), np.int64),
            item_sources=np.arange(len(tensor_of), dtype=np.int64),
        ),
        rows=rows,
    ).pieces
    engine.resolve(np.unique(plan.chunks))
    order = np.argsort(plan.dests, kind="stable")
    chunks, axis_start = plan.chunks[order], starts(np.diff(plan.box_start)[order])
    at, lengths, offsets = (
        gather_rows(column, plan.box_start, order)
        for column in (plan.storage_offsets, plan.lengths, plan.dest_offsets)
    )
    strides = _strides(engine, chunks, axis_start)
    begins = row_sums(at * strides, axis_start)
    return StoredParts(plan.dests[order], chunks, begins, axis_start, offsets, lengths, strides)


def _strides(engine: ReadEngine, chunks: Int64, box_start: Int64) -> Int64:
    """Return how each of ``chunks`` is stored: bytes from one element to the next, by dimension."""
    index = engine.index
    sizes = gather_rows(index.chunk_sizes, index.box_start, chunks)
    found = ragged_c_strides(sizes, box_start, index.itemsizes[index.chunk_tensors[chunks]])
    permuted = engine.payloads.permuted_chunks
    for row in np.flatnonzero(np.isin(chunks, permuted)).tolist() if len(permuted) else ():
        order, own = engine.payloads.layout(int(chunks[row]))
        for dimension, step in zip(order, own, strict=True):
            found[box_start[row] + dimension] = step
    return found
