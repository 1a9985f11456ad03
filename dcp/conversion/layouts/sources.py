"""Where the parts of a layout's copies are in the source's files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dcp.conversion.layouts.columns import SourceColumns
from dcp.conversion.layouts.layout import Copies, TargetLayout
from dcp.planners.columns import WantedColumns
from dcp.planners.load.plan import plan_load
from dcp.planners.weight_maps.pieces import MappedTensor, Piece
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.formats.index import CheckpointIndex, Int64, starts
from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.ragged import gather_rows, row_products
from dcp.storage.geometry.strides import c_strides, c_strides_by_row

__all__ = ["copy_sources", "payload_crcs", "source_files"]


def copy_sources(
    engine: ReadEngine, layout: TargetLayout, mapped: Sequence[MappedTensor] | None = None
) -> SourceColumns:
    """The parts of each copy, with their places in the source's files.

    With ``mapped`` the tensors that are copied are these, made of the source's. Opens the records of foreign
    formats whose payloads' places are not known. PlanError for tensors of which elements are not stored.
    """
    index, copies = engine.index, layout.copies
    if mapped is not None:
        return _mapped_sources(engine, copies, mapped)
    rows, tensor_of = np.unique(copies.tensors, return_inverse=True)
    stored = _stored_parts(engine, rows, tensor_of.astype(np.int64), copies.box_offsets, copies.box_sizes)
    target_strides = _c_strides(copies, stored.wanted)
    return SourceColumns(
        start=starts(np.bincount(stored.wanted, minlength=len(copies))),
        chunks=stored.chunks,
        files=index.chunk_files[stored.chunks],
        payload_offsets=engine.payloads.offsets[stored.chunks],
        payload_bytes=index.payload_lengths[stored.chunks],
        begins=stored.begins,
        targets=_sums(stored.offsets * target_strides, stored.axis_start),
        axis_start=stored.axis_start,
        lengths=stored.lengths,
        strides=stored.strides,
        target_strides=target_strides,
    )


@dataclass(frozen=True, eq=False)
class _StoredParts:
    """What of wanted boxes the chunks have, in the order of the boxes: by row the number of the box
    (``wanted``), the chunk, and the first element's place in its payload (bytes); flat, sliced by
    ``axis_start``, ``offsets`` in the box, ``lengths``, and the payload's ``strides`` (bytes)."""

    wanted: Int64
    chunks: Int64
    begins: Int64
    axis_start: Int64
    offsets: Int64
    lengths: Int64
    strides: Int64


def _stored_parts(
    engine: ReadEngine, rows: Int64, tensor_of: Int64, box_offsets: Int64, box_sizes: Int64
) -> _StoredParts:
    """Of boxes of the tensors ``rows``; ``tensor_of`` says by box which of these."""
    index = engine.index
    plan = plan_load(
        index,
        WantedColumns(
            fqns=[index.fqns[row] for row in rows.tolist()],
            dtype_codes=index.dtype_codes[rows],
            shape_start=starts(index.ndims[rows]),
            shape_values=gather_rows(index.shape_values, index.shape_start, rows),
            item_tensors=tensor_of,
            item_offsets=box_offsets,
            item_sizes=box_sizes,
            item_local_offsets=np.zeros(len(box_offsets), np.int64),
            item_sources=np.arange(len(tensor_of), dtype=np.int64),
        ),
    )
    engine.resolve(np.unique(plan.chunks))
    order = np.argsort(plan.dests, kind="stable")
    chunks, axis_start = plan.chunks[order], starts(np.diff(plan.box_start)[order])
    at, lengths, offsets = (
        gather_rows(column, plan.box_start, order)
        for column in (plan.storage_offsets, plan.lengths, plan.dest_offsets)
    )
    strides = _strides(engine, chunks, axis_start)
    begins = _sums(at * strides, axis_start)
    return _StoredParts(plan.dests[order], chunks, begins, axis_start, offsets, lengths, strides)


class _TensorParts(NamedTuple):
    """Where one tensor of the source is stored: by part its box in the tensor, the chunk, and how it lies in
    the payload."""

    low: Int64
    high: Int64
    chunks: Int64
    begins: Int64
    strides: Int64


def _mapped_sources(engine: ReadEngine, copies: Copies, tensors: Sequence[MappedTensor]) -> SourceColumns:
    """Of copies of tensors that are made of the source's."""
    index = engine.index
    names = dict.fromkeys(piece.source.name for tensor in tensors for piece in tensor.pieces)
    stored = _whole_tensors(engine, list(names))
    counts: list[int] = []
    found: list[tuple[int, int, int]] = []  # chunk, begin, target
    axes: list[tuple[tuple[int, int, int], ...]] = []  # (target stride, length, stride)
    boxes = [column.tolist() for column in (copies.box_start, copies.box_offsets, copies.box_sizes)]
    for copy, row in enumerate(copies.tensors.tolist()):
        flat = slice(boxes[0][copy], boxes[0][copy + 1])
        box = Box(tuple(boxes[1][flat]), tuple(boxes[2][flat]))
        before = len(found)
        for piece in tensors[row].pieces:
            for part in piece.within_target(box):
                for chunk, begin, strides, own in _stored_pieces(part, stored[piece.source.name]):
                    steps = c_strides(box.sizes)
                    found.append((chunk, begin, own.target.place(steps, box.offsets)))
                    rows = zip(own.target.strides(steps), own.lengths, strides, strict=True)
                    axes.append(tuple(sorted((axis for axis in rows if axis[1] != 1), reverse=True)))
        counts.append(len(found) - before)
    chunks, begins, targets = np.array(found, np.int64).reshape(-1, 3).T
    by_axis = np.array([axis for row in axes for axis in row], np.int64).reshape(-1, 3).T
    return SourceColumns(
        start=starts(counts),
        chunks=chunks,
        files=index.chunk_files[chunks],
        payload_offsets=engine.payloads.offsets[chunks],
        payload_bytes=index.payload_lengths[chunks],
        begins=begins,
        targets=targets,
        axis_start=starts(list(map(len, axes))),
        lengths=by_axis[1],
        strides=by_axis[2],
        target_strides=by_axis[0],
    )


def _whole_tensors(engine: ReadEngine, names: Sequence[str]) -> dict[str, _TensorParts]:
    index = engine.index
    rows = np.array([index.position[name] for name in names], np.int64)
    shapes = gather_rows(index.shape_values, index.shape_start, rows)
    stored = _stored_parts(engine, rows, np.arange(len(rows), dtype=np.int64), np.zeros_like(shapes), shapes)
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


def _stored_pieces(piece: Piece, stored: _TensorParts) -> Iterator[tuple[int, int, tuple[int, ...], Piece]]:
    """By part: (chunk, the first element's place in its payload, strides by axis in bytes, the part)."""
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
            yield int(stored.chunks[row]), begin, part.source.strides(strides), part


def _sums(values: Int64, start: Int64) -> Int64:
    return np.diff(np.concatenate([[0], np.cumsum(values)])[start])


def _c_strides(copies: Copies, rows: Int64) -> Int64:
    """From one element to the next in the boxes of ``rows`` of the copies, by dimension."""
    sizes = gather_rows(copies.box_sizes, copies.box_start, rows)
    return _c_strides_of(
        sizes, starts(copies.box_start[rows + 1] - copies.box_start[rows]), np.ones_like(rows)
    )


def _c_strides_of(sizes: Int64, start: Int64, itemsizes: Int64) -> Int64:
    found, ndims = np.empty(len(sizes), np.int64), np.diff(start)
    for ndim in np.unique(ndims[ndims > 0]).tolist():
        rows = np.flatnonzero(ndims == ndim)
        places = start[rows][:, None] + np.arange(ndim, dtype=np.int64)
        found[places] = c_strides_by_row(sizes[places], itemsizes[rows])
    return found


def _strides(engine: ReadEngine, chunks: Int64, box_start: Int64) -> Int64:
    """How each of ``chunks`` is stored: bytes from one element to the next, by dimension."""
    index = engine.index
    sizes = gather_rows(index.chunk_sizes, index.box_start, chunks)
    found = _c_strides_of(sizes, box_start, index.itemsizes[index.chunk_tensors[chunks]])
    permuted = engine.payloads.permuted_chunks
    for row in np.flatnonzero(np.isin(chunks, permuted)).tolist() if len(permuted) else ():
        order, own = engine.payloads.layout(int(chunks[row]))
        for dimension, step in zip(order, own, strict=True):
            found[box_start[row] + dimension] = step
    return found


def payload_crcs(index: CheckpointIndex) -> dict[int, int]:
    """The CRC-32 of all bytes of a tensor in C order, by row, of those that one chunk has as they are and
    whose blocks have checksums."""
    rows = np.flatnonzero(np.diff(index.chunk_start) == 1)
    chunks = index.chunk_start[rows]
    counts = np.diff(index.crc_start)[chunks]
    if index.payload_strides:
        counts = np.where(np.isin(chunks, list(index.payload_strides)), 0, counts)
    # A chunk as large as its tensor is all of it, since chunks lie within.
    elements = row_products(index.shape_values, index.shape_start)[rows]
    counts = np.where(index.payload_lengths[chunks] == elements * index.itemsizes[rows], counts, 0)
    single, several = counts == 1, np.flatnonzero(counts > 1).tolist()
    crcs = index.crcs[index.crc_start[chunks[single]]]
    found = dict(zip(rows[single].tolist(), crcs.tolist(), strict=True))
    for place in several:
        crc = index.payload_crc(int(chunks[place]))
        if crc is not None:
            found[int(rows[place])] = crc
    return found


def source_files(index: CheckpointIndex, sources: SourceColumns) -> dict[int, tuple[str, int]]:
    """(name, size in bytes) by number of the files that ``sources`` are in."""
    numbers = np.unique(sources.files).tolist()
    return {number: (index.files[number], int(index.file_sizes[number])) for number in numbers}
