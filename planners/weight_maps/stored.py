"""Places in stored payloads: of wanted boxes, and of the pieces that a map's tensors are made of.

They do not depend on how a tensor is cut into chunks, nor on the order of its payloads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dcp.planners.columns import HeldBoxes
from dcp.planners.load.plan import LoadProblems, intersect
from dcp.planners.weight_maps.pieces import MappedTensor, Piece
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.formats.index import Int64, starts
from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.ragged import gather_rows, row_sums
from dcp.storage.geometry.strides import ragged_c_strides

__all__ = ["StoredParts", "StoredPiece", "StoredTensors", "stored_parts"]


@dataclass(frozen=True, eq=False)
class StoredParts:
    """Parts of wanted boxes that chunks have, in the order of the boxes.

    A row has the number of its box (``wanted``), its chunk, and the place in the payload of its first element
    (bytes). Flat columns are sliced by ``axis_start``: ``offsets`` in the box, ``lengths``, and the payload's
    ``strides`` (bytes).
    """

    wanted: Int64
    chunks: Int64
    begins: Int64
    axis_start: Int64
    offsets: Int64
    lengths: Int64
    strides: Int64


def stored_parts(
    engine: ReadEngine, rows: Int64, tensor_of: Int64, box_offsets: Int64, box_sizes: Int64
) -> StoredParts:
    """Find where boxes of the tensors ``rows`` are stored; ``tensor_of`` says of each box which of these
    tensors it is of.

    Opens the records of foreign formats whose payloads' places are not known. PlanError for boxes of which
    elements are not stored.
    """
    index = engine.index
    names = index.fqns
    if len(rows) < len(names):
        names = [names[row] for row in rows.tolist()]
    wanted = HeldBoxes(
        fqns=names,
        dtype_codes=index.dtype_codes[rows],
        shape_start=starts(index.ndims[rows]),
        shape_values=gather_rows(index.shape_values, index.shape_start, rows),
        item_tensors=tensor_of,
        item_offsets=box_offsets,
        item_sizes=box_sizes,
        item_local_offsets=np.zeros_like(box_offsets),
        item_sources=np.arange(len(tensor_of), dtype=np.int64),
    )
    problems = LoadProblems({})
    pieces = intersect(index, wanted, rows, np.ones(len(rows), bool), problems)
    if problems.texts:
        problems.raise_all()
    chunks, axis_start = pieces.chunks, pieces.box_start
    engine.resolve(np.unique(chunks))
    strides = _strides(engine, chunks, axis_start)
    begins = row_sums(pieces.storage_offsets * strides, axis_start)
    return StoredParts(pieces.dests, chunks, begins, axis_start, pieces.dest_offsets, pieces.lengths, strides)


def _strides(engine: ReadEngine, chunks: Int64, box_start: Int64) -> Int64:
    """Return bytes from one element to the next in each of ``chunks``, by dimension."""
    index = engine.index
    sizes = gather_rows(index.chunk_sizes, index.box_start, chunks)
    found = ragged_c_strides(sizes, box_start, index.itemsizes[index.chunk_tensors[chunks]])
    permuted = engine.payloads.permuted_chunks
    for row in np.flatnonzero(np.isin(chunks, permuted)).tolist() if len(permuted) else ():
        order, own = engine.payloads.layout(int(chunks[row]))
        for dimension, step in zip(order, own, strict=True):
            found[box_start[row] + dimension] = step
    return found


class StoredPiece(NamedTuple):
    """The part that one chunk has of ``piece``: the first element is at byte ``begin`` of its payload,
    ``strides`` are bytes of that, by axis."""

    chunk: int
    begin: int
    strides: tuple[int, ...]
    piece: Piece


class _TensorParts(NamedTuple):
    """The stored parts of one tensor of the source: by part its box in the tensor, the chunk, and how it
    lies in the payload."""

    low: Int64
    high: Int64
    chunks: Int64
    begins: Int64
    strides: Int64


class StoredTensors:
    """Places in which the sources of ``tensors`` are stored.

    Opens the records of foreign formats whose payloads' places are not known. PlanError for tensors of which
    elements are not stored.
    """

    def __init__(self, engine: ReadEngine, tensors: Iterable[MappedTensor]) -> None:
        names = dict.fromkeys(piece.source.name for tensor in tensors for piece in tensor.pieces)
        self._parts = _whole_tensors(engine, list(names))

    def within(self, tensor: MappedTensor, box: Box) -> Iterator[StoredPiece]:
        """Yield the parts that the chunks have of ``box`` of ``tensor``, each element once."""
        for piece in tensor.pieces:
            for part in piece.within_target(box):
                yield from _stored_pieces(part, self._parts[piece.source.name])


def _whole_tensors(engine: ReadEngine, names: list[str]) -> dict[str, _TensorParts]:
    index = engine.index
    rows = np.array([index.position[name] for name in names], np.int64)
    shapes = gather_rows(index.shape_values, index.shape_start, rows)
    stored = stored_parts(engine, rows, np.arange(len(rows), dtype=np.int64), np.zeros_like(shapes), shapes)
    bounds = np.searchsorted(stored.wanted, np.arange(len(rows) + 1)).tolist()
    found = {}
    for name, ndim, (first, last) in zip(names, index.ndims[rows].tolist(), pairwise(bounds), strict=True):
        flat = slice(int(stored.axis_start[first]), int(stored.axis_start[last]))
        low, lengths, strides = (
            column[flat].reshape(last - first, ndim)
            for column in (stored.offsets, stored.lengths, stored.strides)
        )
        own = slice(first, last)
        found[name] = _TensorParts(low, low + lengths, stored.chunks[own], stored.begins[own], strides)
    return found


def _stored_pieces(piece: Piece, stored: _TensorParts) -> Iterator[StoredPiece]:
    side = piece.source
    reach = np.array(side.base, np.int64) + 1
    for dim, step, length in zip(side.dims, side.steps, piece.lengths, strict=True):
        reach[dim] += step * (length - 1)
    met = ((stored.low < reach) & (stored.high > np.array(side.base, np.int64))).all(axis=1)
    for row in np.flatnonzero(met).tolist():
        box = Box.between(stored.low[row].tolist(), stored.high[row].tolist())
        strides = stored.strides[row].tolist()
        for part in piece.within_source(box):
            begin = int(stored.begins[row]) + part.source.place(strides, box.offsets)
            yield StoredPiece(int(stored.chunks[row]), begin, part.source.strides(strides), part)
