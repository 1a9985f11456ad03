"""Where the parts of a layout's copies are in the source's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dcp.conversion.layouts.columns import SourceColumns
from dcp.conversion.layouts.layout import Copies, TargetLayout
from dcp.conversion.layouts.terms import TensorTerms, TermColumns
from dcp.planners.load.stored_parts import stored_parts
from dcp.planners.weight_maps.pieces import MappedTensor
from dcp.planners.weight_maps.stored import StoredTensors
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.formats.index import CheckpointIndex, Int64, starts
from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.ragged import expand_ranges, gather_rows, row_products, row_sums
from dcp.storage.geometry.strides import c_strides, ragged_c_strides

__all__ = ["copy_sources", "payload_crcs", "source_files", "sum_sources"]


def copy_sources(
    engine: ReadEngine, layout: TargetLayout, mapped: Sequence[MappedTensor] | None = None
) -> SourceColumns:
    """The parts of each copy, with their places in the source's files.

    With ``mapped`` the tensors that are copied are these, made of the source's. Opens the records of foreign
    formats whose payloads' places are not known. PlanError for tensors of which elements are not stored.
    """
    if mapped is not None:
        return _mapped_sources(engine, layout.copies, mapped)
    return _box_sources(engine, layout.copies)


def sum_sources(
    engine: ReadEngine,
    copies: Copies,
    terms: TensorTerms,
    accumulate: int,
    mapped: Sequence[MappedTensor] = (),
) -> tuple[SourceColumns, TermColumns]:
    """The sources of copies that are sums of the source's tensors, or of those ``mapped``, which are made of
    them: ``terms`` are by row of what is copied. Else as `copy_sources`."""
    counts = terms.start[copies.tensors + 1] - terms.start[copies.tensors]
    own = expand_ranges(terms.start[copies.tensors], counts)
    copy_of = np.repeat(np.arange(len(copies)), counts)
    gathers = _gathers(copies, terms, own, copy_of)
    codes = np.array([tensor.dtype_code for tensor in mapped]) if mapped else engine.index.dtype_codes
    gathers = replace(gathers, dtype_codes=codes[gathers.tensors].astype(np.int64))
    found = TermColumns(
        accumulate,
        starts(counts),
        terms.weights[own],
        terms.ranks[own],
        _widths(copies, terms.ranks[own], copy_of),
        gathers.dtype_codes,
    )
    if mapped:
        return _mapped_sources(engine, gathers, mapped), found
    turned = np.repeat(terms.turned[own], 1 + (terms.ranks[own] > 0))
    return _box_sources(engine, gathers, turned), found


def _gathers(copies: Copies, terms: TensorTerms, own: Int64, copy_of: Int64) -> Copies:
    """What is read for the terms ``own`` of copies, as copies of the source's tensors: the box that a copy
    is or, of the two factors of a product, all rows and all columns that this needs."""
    ranks = terms.ranks[own]
    count = 1 + (ranks > 0)
    term_of = np.repeat(np.arange(len(own)), count)
    is_right = np.zeros(len(term_of), bool)
    is_right[1:] = term_of[1:] == term_of[:-1]
    tensors = np.where(is_right, terms.rights[own][term_of], terms.lefts[own][term_of])
    boxes = copy_of[term_of]
    offsets, sizes = (
        gather_rows(column, copies.box_start, boxes) for column in (copies.box_offsets, copies.box_sizes)
    )
    box_start = starts(copies.box_start[boxes + 1] - copies.box_start[boxes])
    for factors, right in ((np.flatnonzero((ranks[term_of] > 0) & (is_right == one)), one) for one in (0, 1)):
        inner = box_start[factors] + 1 - right  # the dimension that is added up
        offsets[inner], sizes[inner] = 0, ranks[term_of[factors]]
        flat = box_start[factors[terms.turned[own][term_of[factors]]]]
        for column in (offsets, sizes):
            column[flat], column[flat + 1] = column[flat + 1], column[flat]
    nothing = np.zeros(len(tensors), np.int64)
    return Copies(tensors, box_start, offsets, sizes, nothing, nothing, nothing, nothing)


def _widths(copies: Copies, ranks: Int64, copy_of: Int64) -> Int64:
    """The inner sizes of the products among terms; 0 of others."""
    found = np.zeros_like(ranks)
    products = np.flatnonzero(ranks)
    found[products] = copies.box_sizes[copies.box_start[copy_of[products]] + 1]
    return found


def _box_sources(
    engine: ReadEngine, copies: Copies, turned: npt.NDArray[np.bool_] | None = None
) -> SourceColumns:
    """The sources of boxes of the source's tensors; those that are ``turned`` have two dimensions, of which
    the second is the slowest in what is made of them."""
    index = engine.index
    rows, tensor_of = np.unique(copies.tensors, return_inverse=True)
    stored = stored_parts(engine, rows, tensor_of.astype(np.int64), copies.box_offsets, copies.box_sizes)
    lengths, strides = stored.lengths, stored.strides
    target_strides = _c_strides(copies, stored.wanted)
    offsets = stored.offsets
    if turned is not None and turned.any():
        parts = np.flatnonzero(turned[stored.wanted])
        slow = stored.axis_start[parts]
        target_strides[slow], target_strides[slow + 1] = (
            1,
            copies.box_sizes[copies.box_start[stored.wanted[parts]]],
        )
        order = np.arange(len(lengths))
        order[slow], order[slow + 1] = slow + 1, slow
        lengths, strides, target_strides, offsets = (
            column[order] for column in (lengths, strides, target_strides, offsets)
        )
    return SourceColumns(
        start=starts(np.bincount(stored.wanted, minlength=len(copies))),
        chunks=stored.chunks,
        files=index.chunk_files[stored.chunks],
        payload_offsets=engine.payloads.offsets[stored.chunks],
        payload_bytes=index.payload_lengths[stored.chunks],
        begins=stored.begins,
        targets=row_sums(offsets * target_strides, stored.axis_start),
        axis_start=stored.axis_start,
        lengths=lengths,
        strides=strides,
        target_strides=target_strides,
    )


def _mapped_sources(engine: ReadEngine, copies: Copies, tensors: Sequence[MappedTensor]) -> SourceColumns:
    """The sources of copies of tensors that are made of the source's."""
    index = engine.index
    stored = StoredTensors(engine, tensors)
    counts: list[int] = []
    found: list[tuple[int, int, int]] = []  # chunk, begin, target
    axes: list[tuple[tuple[int, int, int], ...]] = []  # (target stride, length, stride)
    boxes = [column.tolist() for column in (copies.box_start, copies.box_offsets, copies.box_sizes)]
    for copy, row in enumerate(copies.tensors.tolist()):
        flat = slice(boxes[0][copy], boxes[0][copy + 1])
        box = Box(tuple(boxes[1][flat]), tuple(boxes[2][flat]))
        before, steps = len(found), c_strides(box.sizes)
        for chunk, begin, strides, own in stored.within(tensors[row], box):
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


def _c_strides(copies: Copies, rows: Int64) -> Int64:
    """From one element to the next in the boxes of ``rows`` of the copies, by dimension."""
    sizes = gather_rows(copies.box_sizes, copies.box_start, rows)
    return ragged_c_strides(
        sizes, starts(copies.box_start[rows + 1] - copies.box_start[rows]), np.ones_like(rows)
    )


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
