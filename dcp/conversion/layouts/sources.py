"""The parts of the source that copies are made of, as columns: a checkpoint may have millions.

A task carries a window of these columns, and makes the objects that reading needs (`TaskCopy`, `SourceBox`)
of those that it is at.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dcp.conversion.layouts.layout import Copies, TargetLayout
from dcp.conversion.layouts.pieces import SourceBox
from dcp.planners.columns import WantedColumns
from dcp.planners.load.plan import plan_load
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.formats.index import CheckpointIndex, Int64, starts
from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.ragged import expand_ranges, gather_rows, row_products
from dcp.storage.geometry.strides import c_strides_by_row

__all__ = ["SourceColumns", "TaskCopies", "TaskCopy", "copy_sources", "payload_crcs", "source_files"]


class TaskCopy(NamedTuple):
    """A copy of the layout: ``size_bytes`` from ``begin`` of the target file on."""

    copy: int
    begin: int
    size_bytes: int
    shape: tuple[int, ...]
    source_code: int
    target_code: int
    sources: tuple[SourceBox, ...]


@dataclass(frozen=True, eq=False)
class SourceColumns:
    """The `SourceBox`es of copies: those of copy n are rows ``start[n]`` to ``start[n + 1]``.

    Boxes are flat, sliced by ``box_start``.
    """

    start: Int64
    chunks: Int64
    files: Int64
    payload_offsets: Int64
    payload_bytes: Int64
    begins: Int64
    box_start: Int64
    offsets: Int64
    lengths: Int64
    strides: Int64

    def take(self, copies: Int64) -> SourceColumns:
        """Those of ``copies``, in that order."""
        counts = self.start[copies + 1] - self.start[copies]
        rows = expand_ranges(self.start[copies], counts)
        flat = {name: gather_rows(getattr(self, name), self.box_start, rows) for name in _BY_DIMENSION}
        return SourceColumns(
            start=starts(counts),
            box_start=starts(self.box_start[rows + 1] - self.box_start[rows]),
            **{name: getattr(self, name)[rows] for name in _BY_ROW},
            **flat,
        )

    def boxes(self, first: int, last: int) -> Iterator[tuple[SourceBox, ...]]:
        """Those of the copies ``first`` to ``last``, copy by copy."""
        bounds = self.start[first : last + 1].tolist()
        rows = slice(bounds[0], bounds[-1])
        places = self.box_start[bounds[0] : bounds[-1] + 1].tolist()
        flat = [getattr(self, name)[places[0] : places[-1]].tolist() for name in _BY_DIMENSION]
        columns = [getattr(self, name)[rows].tolist() for name in _BY_ROW]
        found = []
        low = 0
        for row, (chunk, file, payload_offset, payload_bytes, begin) in enumerate(zip(*columns, strict=True)):
            high = places[row + 1] - places[0]
            offsets, lengths, strides = (tuple(values[low:high]) for values in flat)
            box = Box(offsets, lengths)
            found.append(SourceBox(chunk, file, payload_offset, payload_bytes, box, begin, strides))
            low = high
        for begin, end in pairwise(bounds):
            yield tuple(found[begin - bounds[0] : end - bounds[0]])

    def chunks_of(self, first: int, last: int) -> Int64:
        """The chunks of the copies ``first`` to ``last``."""
        return np.unique(self.chunks[self.start[first] : self.start[last]])

    @property
    def is_sequential(self) -> bool:
        """Whether rows of each copy follow one another in the stored payloads, so that a range of a copy is a
        few ranges of payloads."""
        counts = np.diff(self.box_start)
        wide = self.lengths > 1
        rows = np.repeat(np.arange(len(counts)), counts)[wide]
        steps = self.strides[wide]
        return not ((rows[1:] == rows[:-1]) & (steps[1:] > steps[:-1])).any()


_BY_ROW = ("chunks", "files", "payload_offsets", "payload_bytes", "begins")
_BY_DIMENSION = ("offsets", "lengths", "strides")


@dataclass(frozen=True, eq=False)
class TaskCopies:
    """Copies of one file in the order of their places: of a whole file, or of a range of it.

    ``shapes`` are flat, sliced by ``shape_start``.
    """

    numbers: Int64
    begins: Int64
    size_bytes: Int64
    shape_start: Int64
    shapes: Int64
    source_codes: Int64
    target_codes: Int64
    sources: SourceColumns

    @classmethod
    def of(cls, copies: Copies, rows: Int64, source_codes: Int64, sources: SourceColumns) -> TaskCopies:
        """Those in ``rows`` of a layout's copies."""
        return cls(
            rows,
            copies.offsets[rows],
            copies.size_bytes[rows],
            starts(copies.box_start[rows + 1] - copies.box_start[rows]),
            gather_rows(copies.box_sizes, copies.box_start, rows),
            source_codes[rows],
            copies.dtype_codes[rows],
            sources.take(rows),
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def rows_between(self, begin: int, end: int) -> tuple[int, int]:
        """The first and the one behind the last that reach into bytes ``begin`` to ``end`` of the file."""
        first = int(np.searchsorted(self._ends, begin, "right"))
        return first, max(first, int(np.searchsorted(self.begins, end, "left")))

    @cached_property
    def _ends(self) -> Int64:
        return self.begins + self.size_bytes

    def end_of(self, begin: int, count: int) -> int | None:
        """Where the window from byte ``begin`` on ends that ``count`` copies reach into; None if that is all
        there are."""
        last = self.rows_between(begin, begin)[0] + count
        return int(self.begins[last]) if last < len(self) else None

    def between(self, begin: int, end: int) -> Iterator[TaskCopy]:
        """Those that reach into bytes ``begin`` to ``end`` of the file, in order."""
        first, last = self.rows_between(begin, end)
        if first == last:
            return
        bounds = self.shape_start[first : last + 1].tolist()
        shapes = self.shapes[bounds[0] : bounds[-1]].tolist()
        columns = (self.numbers, self.begins, self.size_bytes, self.source_codes, self.target_codes)
        rows = zip(
            *(column[first:last].tolist() for column in columns), self.sources.boxes(first, last), strict=True
        )
        low = 0
        for row, (number, at, size, source_code, target_code, boxes) in enumerate(rows):
            high = bounds[row + 1] - bounds[0]
            shape = tuple(shapes[low:high])
            low = high
            yield TaskCopy(number, at, size, shape, source_code, target_code, boxes)


def copy_sources(engine: ReadEngine, layout: TargetLayout) -> SourceColumns:
    """The parts of each copy, with their places in the source's files.

    Opens the records of foreign formats whose payloads' places are not known. PlanError for tensors of which
    elements are not stored.
    """
    index, copies = engine.index, layout.copies
    rows, tensor_of = np.unique(copies.tensors, return_inverse=True)
    counts = index.ndims[rows]
    plan = plan_load(
        index,
        WantedColumns(
            fqns=[index.fqns[row] for row in rows.tolist()],
            dtype_codes=index.dtype_codes[rows],
            shape_start=starts(counts),
            shape_values=gather_rows(index.shape_values, index.shape_start, rows),
            item_tensors=tensor_of.astype(np.int64),
            item_offsets=copies.box_offsets,
            item_sizes=copies.box_sizes,
            item_local_offsets=np.zeros(len(copies.box_offsets), np.int64),
            item_sources=np.arange(len(copies), dtype=np.int64),
        ),
    )
    engine.resolve(np.unique(plan.chunks))
    order = np.argsort(plan.dests, kind="stable")
    chunks, box_start = plan.chunks[order], starts(np.diff(plan.box_start)[order])
    at, lengths, target = (
        gather_rows(column, plan.box_start, order)
        for column in (plan.storage_offsets, plan.lengths, plan.dest_offsets)
    )
    strides = _strides(engine, chunks, box_start)
    places = np.concatenate([[0], np.cumsum(at * strides)])
    return SourceColumns(
        start=starts(np.bincount(plan.dests, minlength=len(copies))),
        chunks=chunks,
        files=index.chunk_files[chunks],
        payload_offsets=engine.payloads.offsets[chunks],
        payload_bytes=index.payload_lengths[chunks],
        begins=np.diff(places[box_start]),
        box_start=box_start,
        offsets=target,
        lengths=lengths,
        strides=strides,
    )


def _strides(engine: ReadEngine, chunks: Int64, box_start: Int64) -> Int64:
    """How each of ``chunks`` is stored: bytes from one element to the next, by dimension."""
    index = engine.index
    itemsizes = index.itemsizes[index.chunk_tensors[chunks]]
    sizes = gather_rows(index.chunk_sizes, index.box_start, chunks)
    found = np.empty(len(sizes), np.int64)
    ndims = np.diff(box_start)
    for ndim in np.unique(ndims[ndims > 0]).tolist():
        rows = np.flatnonzero(ndims == ndim)
        places = box_start[rows][:, None] + np.arange(ndim, dtype=np.int64)
        found[places] = c_strides_by_row(sizes[places], itemsizes[rows])
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
