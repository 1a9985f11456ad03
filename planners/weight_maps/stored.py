"""What of a map's pieces is in which stored chunk, and where in its payload."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dcp.planners.load.stored_parts import stored_parts
from dcp.planners.weight_maps.pieces import MappedTensor, Piece
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.formats.index import Int64
from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.ragged import gather_rows

__all__ = ["StoredPiece", "StoredTensors"]


class StoredPiece(NamedTuple):
    """What one chunk has of ``piece``: the first element is at byte ``begin`` of its payload, ``strides`` are
    bytes of that, by axis."""

    chunk: int
    begin: int
    strides: tuple[int, ...]
    piece: Piece


class _TensorParts(NamedTuple):
    """Where one tensor of the source is stored: by part its box in the tensor, the chunk, and how it lies in
    the payload."""

    low: Int64
    high: Int64
    chunks: Int64
    begins: Int64
    strides: Int64


class StoredTensors:
    """Where the sources of ``tensors`` are stored.

    Opens the records of foreign formats whose payloads' places are not known. PlanError for tensors of which
    elements are not stored.
    """

    def __init__(self, engine: ReadEngine, tensors: Iterable[MappedTensor]) -> None:
        names = dict.fromkeys(piece.source.name for tensor in tensors for piece in tensor.pieces)
        self._parts = _whole_tensors(engine, list(names))

    def within(self, tensor: MappedTensor, box: Box) -> Iterator[StoredPiece]:
        """Yield what the chunks have of ``box`` of ``tensor``, each element once."""
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
