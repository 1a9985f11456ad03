"""Layout of a conversion's target, known before any data is copied: files, literal bytes, copied boxes.

Literals (headers, pickles, directories) and copies tile each output file exactly. A copy is one box of one
source tensor in C order, possibly cast. CRC-32s of copied bytes in a zip are `Holes` in the literals, filled
in after the copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise, starmap
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dcp.planners.weight_maps.pieces import MappedTensor, StoredTensors, stored_parts
from dcp.storage.engine.read import ReadEngine
from dcp.storage.errors import PlanError
from dcp.storage.formats.index import CheckpointIndex, itemsizes
from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.strides import (
    Int64,
    c_strides,
    expand_ranges,
    gather_rows,
    ragged_c_strides,
    row_products,
    row_sums,
    starts,
)
from dcp.storage.stores.base import check_name


class Literal(NamedTuple):
    """``data`` at ``offset`` of file number ``file``."""

    file: int
    offset: int
    data: bytes


@dataclass(frozen=True, eq=False)
class Literals:
    """Literals by column, since each tensor may have one."""

    files: Int64
    offsets: Int64
    data: Sequence[bytes]

    @classmethod
    def of(cls, literals: Sequence[Literal]) -> Literals:
        """Return the columns of ``literals``."""
        files, offsets = (np.array([literal[field] for literal in literals], np.int64) for field in (0, 1))
        return cls(files, offsets, [literal.data for literal in literals])

    def __iter__(self) -> Iterator[Literal]:
        return starmap(Literal, zip(self.files.tolist(), self.offsets.tolist(), self.data, strict=True))


class Hole(NamedTuple):
    """Four bytes of a literal, at ``offset`` of file number ``file``: the CRC-32 of copy number ``copy``."""

    copy: int
    file: int
    offset: int


@dataclass(frozen=True, eq=False)
class Copies:
    """Boxes of tensors to copy, by column.

    Columns: rows of the source's index, the box (flat, sliced by ``box_start``), the target's dtype code, and
    ``size_bytes`` at ``offsets`` of file number ``files``.
    """

    tensors: Int64
    box_start: Int64
    box_offsets: Int64
    box_sizes: Int64
    dtype_codes: Int64
    files: Int64
    offsets: Int64
    size_bytes: Int64

    @classmethod
    def of_tensors(
        cls,
        index: CheckpointIndex,
        tensors: Sequence[int] | Int64,
        dtype_codes: Sequence[int] | Int64,
        files: Sequence[int] | Int64,
        offsets: Sequence[int] | Int64,
        size_bytes: Sequence[int] | Int64,
    ) -> Copies:
        """Return copies of whole tensors: rows of ``index``, and their positions in the target."""
        rows, *columns = np.array((tensors, dtype_codes, files, offsets, size_bytes), np.int64)
        box_sizes = gather_rows(index.shape_values, index.shape_start, rows)
        box_start = starts(index.ndims[rows])
        return cls(rows, box_start, np.zeros_like(box_sizes), box_sizes, *columns)


@dataclass(frozen=True, eq=False)
class TargetLayout:
    """The whole output.

    ``file_names`` and ``file_sizes`` (bytes) are exact. A ``dcp`` target has an ``index``, complete except
    for checksums, and ``chunk_copies``, the copy of each chunk. ``last_files`` are small files by path,
    written after all others. ``replaced`` selects files that a replaced folder loses besides checkpoint
    files, by folder ("" or a direct subfolder) and name. ``tensor_copies`` gives the copy of each tensor with
    a single copy.
    """

    file_names: Sequence[str]
    file_sizes: Sequence[int]
    literals: Literals
    copies: Copies
    holes: Sequence[Hole] = ()
    index: CheckpointIndex | None = None
    chunk_copies: Int64 | None = None
    last_files: Mapping[str, bytes] = field(default_factory=dict)
    tensor_copies: Mapping[str, int] = field(default_factory=dict)
    replaced: Callable[[str, Collection[str]], frozenset[str]] = lambda folder, names: frozenset()

    def check(self) -> None:
        """Raise PlanError unless literals and copies tile each file and file names are unique.

        Gaps would be zeros. CheckpointFormatError for names outside of the folder.
        """
        names = list(map(check_name, self.file_names))
        for path in self.last_files:  # in the folder, or in one directly below it
            folder, slash, name = path.partition("/")
            names.append(f"{check_name(folder)}/{check_name(name)}" if slash else check_name(path))
        if len(set(names)) < len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise PlanError(f"two files would have the name {twice}: rename one of their tensors")
        sizes = np.array(list(map(len, self.literals.data)), np.int64)
        files = np.concatenate([self.literals.files, self.copies.files])
        offsets = np.concatenate([self.literals.offsets, self.copies.offsets])
        sizes = np.concatenate([sizes, self.copies.size_bytes])
        order = np.lexsort((sizes, offsets, files))
        files, offsets, sizes = files[order], offsets[order], sizes[order]
        for number, (name, size) in enumerate(zip(self.file_names, self.file_sizes, strict=True)):
            rows = slice(*np.searchsorted(files, (number, number + 1)).tolist())
            ends = offsets[rows] + sizes[rows]
            begins = np.concatenate([offsets[rows], [size]])
            if not np.array_equal(begins, np.concatenate([[0], ends])):
                raise PlanError(
                    f"the layout of {name} has gaps or overlaps; please report this bug of dcphub"
                )


# -- objects of a window -------------------------------------------------------------------------------------


class SourcePart(NamedTuple):
    """Part of a copy from one stored chunk: ``lengths`` elements by axis, the copy's slowest axis first.

    The first element is at byte ``begin`` of the chunk's payload, which is ``payload_bytes`` at
    ``payload_offset`` of file number ``file``. ``strides`` are in bytes, in any order. ``target`` is the
    position in the copy (C order), and ``target_strides`` are in elements, descending.
    """

    chunk: int
    file: int
    payload_offset: int
    payload_bytes: int
    begin: int
    target: int
    lengths: tuple[int, ...]
    strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    def is_run(self, itemsize: int) -> bool:
        """Test for elements that are contiguous and in equal order in copy and payload."""
        run = 1
        axes = zip(reversed(self.lengths), reversed(self.strides), reversed(self.target_strides), strict=True)
        for n, own, target in axes:
            if n != 1:
                if target != run or own != run * itemsize:
                    return False
                run *= n
        return True


class Term(NamedTuple):
    """A summand with a ``weight``: an element of ``gathers`` with type ``codes``, or with a ``rank`` the
    product of two gathers (rows of ``rank`` elements, and ``rank`` rows of ``width``)."""

    weight: float
    rank: int
    width: int
    codes: tuple[int, ...]
    gathers: tuple[tuple[SourcePart, ...], ...]


class TaskCopy(NamedTuple):
    """A copy of the layout: ``size_bytes`` from byte ``begin`` of the target file.

    ``is_padded``: elements without a source are zero. A copy with ``terms`` is a sum and has no ``sources``.
    """

    copy: int
    begin: int
    size_bytes: int
    source_code: int
    target_code: int
    is_padded: int
    sources: tuple[SourcePart, ...]
    terms: tuple[Term, ...] = ()


# -- columns -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SourceColumns:
    """`SourcePart`s of copies or of gathers: number n has rows ``start[n]`` to ``start[n + 1]``.

    ``rows`` has the fields of a part as columns; ``axes``, sliced by ``axis_start``, has lengths, strides and
    target strides.
    """

    start: Int64
    rows: Int64
    axis_start: Int64
    axes: Int64

    @classmethod
    def of(cls, engine: ReadEngine, start: Int64, chunks: Int64, places: Any, *axes: Any) -> SourceColumns:
        """Make columns of parts of ``chunks``: ``places`` are (begin, target); ``axes`` are axis_start and
        the columns."""
        index = engine.index
        lengths = index.payload_lengths[chunks]
        payloads = index.chunk_files[chunks], engine.payloads.offsets[chunks], lengths
        return cls(start, np.column_stack([chunks, *payloads, *places]), axes[0], np.column_stack(axes[1:]))

    @property
    def chunks(self) -> Int64:
        """Chunk of each part."""
        chunks: Int64 = self.rows[:, 0]
        return chunks

    def take(self, numbers: Int64) -> SourceColumns:
        """Return the parts of ``numbers``, in order."""
        counts = self.start[numbers + 1] - self.start[numbers]
        rows = expand_ranges(self.start[numbers], counts)
        ndims = self.axis_start[rows + 1] - self.axis_start[rows]
        axes = self.axes[expand_ranges(self.axis_start[rows], ndims)]
        return SourceColumns(starts(counts), self.rows[rows], starts(ndims), axes)

    def parts(self, first: int, last: int) -> Iterator[tuple[SourcePart, ...]]:
        """Yield the parts of each number from ``first`` to ``last``."""
        bounds = self.start[first : last + 1].tolist()
        low, high = bounds[0], bounds[-1]
        places = (self.axis_start[low : high + 1] - self.axis_start[low]).tolist()
        columns = self.axes[self.axis_start[low] : self.axis_start[high]].T.tolist()
        found = []
        for row, (begin, end) in zip(self.rows[low:high].tolist(), pairwise(places), strict=True):
            axes = [tuple(column[begin:end]) for column in columns]
            found.append(SourcePart(*row, *axes))
        for begin, end in pairwise(bounds):
            yield tuple(found[begin - low : end - low])


@dataclass(frozen=True, eq=False)
class TermColumns:
    """`Term`s of copies, added in order in the type ``accumulate``: copy n has rows ``start[n]`` to ``start[n
    + 1]``; ``codes`` are by gather."""

    accumulate: int
    start: Int64
    weights: npt.NDArray[np.float64]
    ranks: Int64
    widths: Int64
    codes: Int64

    @cached_property
    def gathers(self) -> Int64:
        """First gather of each row."""
        return starts(1 + (self.ranks > 0))

    def take(self, copies: Int64) -> tuple[TermColumns, Int64]:
        """Return the terms of ``copies`` in order, and the numbers of their gathers."""
        counts = self.start[copies + 1] - self.start[copies]
        rows = expand_ranges(self.start[copies], counts)
        gathers = expand_ranges(self.gathers[rows], 1 + (self.ranks[rows] > 0))
        columns = (self.weights[rows], self.ranks[rows], self.widths[rows], self.codes[gathers])
        return TermColumns(self.accumulate, starts(counts), *columns), gathers

    def terms(self, first: int, last: int, sources: SourceColumns) -> Iterator[tuple[Term, ...]]:
        """Yield the terms of the copies ``first`` to ``last``; ``sources`` are of all gathers."""
        bounds = self.start[first : last + 1].tolist()
        rows = slice(bounds[0], bounds[-1])
        low, high = self.gathers[self.start[[first, last]]].tolist()
        gathers = zip(self.codes[low:high].tolist(), sources.parts(low, high), strict=True)
        columns = (column[rows].tolist() for column in (self.weights, self.ranks, self.widths))
        found = []
        for weight, rank, width in zip(*columns, strict=True):
            codes, parts = zip(*islice(gathers, 2 if rank else 1), strict=True)
            found.append(Term(weight, rank, width, codes, parts))
        for begin, end in pairwise(bounds):
            yield tuple(found[begin - bounds[0] : end - bounds[0]])


@dataclass(frozen=True, eq=False)
class TaskCopies:
    """Copies of one file, or of a range, in file order.

    ``rows`` has the fields of a `TaskCopy` as columns. With ``terms`` the copies are sums, and ``sources``
    belong to the gathers.
    """

    rows: Int64
    sources: SourceColumns
    terms: TermColumns | None = None

    @classmethod
    def of(
        cls, copies: Copies, rows: Int64, codes: Int64, sources: SourceColumns, terms: TermColumns | None
    ) -> TaskCopies:
        """Return the copies in ``rows`` of a layout's copies; ``codes`` are the source's dtypes of all of
        these."""
        summed, gathers = (None, rows) if terms is None else terms.take(rows)
        own = sources.take(gathers)
        target_codes, sizes = copies.dtype_codes[rows], copies.size_bytes[rows]
        # The smallest element count of a copy or gather without factors; the rest is padding.
        least = row_sums(row_products(own.axes[:, 0], own.axis_start), own.start)
        if summed is not None and len(rows):
            whole = np.where(summed.ranks > 0, np.iinfo(np.int64).max, least[summed.gathers[:-1]])
            least = np.minimum.reduceat(whole, summed.start[:-1])
        padded = least < sizes // itemsizes(target_codes.astype(np.uint8))
        columns = [rows, copies.offsets[rows], sizes, codes[rows], target_codes, padded]
        return cls(np.column_stack(columns), own, summed)

    def rows_between(self, begin: int, end: int) -> tuple[int, int]:
        """Return the range of rows that overlap bytes ``begin`` to ``end`` of the file."""
        begins = self.rows[:, 1]
        first = int(np.searchsorted(begins, begin, "right"))
        if first and int(self.rows[first - 1, 1:3].sum()) > begin:
            first -= 1
        return first, max(first, int(np.searchsorted(begins, end, "left")))

    def end_of(self, begin: int, count: int) -> int | None:
        """Return the end of the window from byte ``begin`` that overlaps ``count`` copies; None if fewer
        remain."""
        last = self.rows_between(begin, begin)[0] + count
        return int(self.rows[last, 1]) if last < len(self.rows) else None

    def between(self, begin: int, end: int) -> Iterator[TaskCopy]:
        """Yield the copies that overlap bytes ``begin`` to ``end`` of the file, in order."""
        first, last = self.rows_between(begin, end)
        rows = self.rows[first:last].tolist() if first < last else ()
        if self.terms is None:
            for row, sources in zip(rows, self.sources.parts(first, last), strict=True):
                yield TaskCopy._make((*row, sources, ()))
            return
        for row, terms in zip(rows, self.terms.terms(first, last, self.sources), strict=True):
            copy, only = TaskCopy._make((*row, (), terms)), terms[0]
            if len(terms) == 1 and only.weight == 1.0 and not only.rank and only.codes[0] == copy.target_code:
                # a single term with weight 1 is copied without computing
                copy = copy._replace(sources=only.gathers[0], terms=())
            yield copy


# -- sums ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TensorTerms:
    """Sums by tensor: row n has the terms ``start[n]`` to ``start[n + 1]``, in the order of addition.

    A term is a weight times the tensor in row ``lefts`` of the source, or with ``ranks`` (the inner size) the
    product with row ``rights``. ``turned``: the factors are stored for the transposed product.
    """

    start: Int64
    weights: npt.NDArray[np.float64]
    lefts: Int64
    rights: Int64
    ranks: Int64
    turned: npt.NDArray[np.bool_]

    def products(self, tensor: int) -> list[tuple[Any, ...]]:
        """Return the product terms of a tensor."""
        own = slice(int(self.start[tensor]), int(self.start[tensor + 1]))
        columns = (self.weights, self.lefts, self.rights, self.ranks, self.turned)
        return [term for term in zip(*(column[own].tolist() for column in columns), strict=True) if term[3]]


# -- from a layout's copies to their sources -----------------------------------------------------------------


def sum_sources(
    engine: ReadEngine,
    copies: Copies,
    terms: TensorTerms,
    accumulate: int,
    mapped: Sequence[MappedTensor] | None = None,
) -> tuple[SourceColumns, TermColumns]:
    """Return the sources of copies as sums of source or ``mapped`` tensors, in the type of code
    ``accumulate``.

    Without terms, as `copy_sources`.
    """
    counts = terms.start[copies.tensors + 1] - terms.start[copies.tensors]
    own = expand_ranges(terms.start[copies.tensors], counts)
    copy_of = np.repeat(np.arange(len(counts)), counts)
    gathers = _gathers(copies, terms, own, copy_of)
    codes = np.array([tensor.dtype_code for tensor in mapped]) if mapped else engine.index.dtype_codes
    ranks = terms.ranks[own]
    widths, products = np.zeros_like(ranks), np.flatnonzero(ranks)
    widths[products] = copies.box_sizes[copies.box_start[copy_of[products]] + 1]
    columns = terms.weights[own], ranks, widths, codes[gathers.tensors].astype(np.int64)
    turned = np.repeat(terms.turned[own], 1 + (ranks > 0))
    sources = copy_sources(engine, gathers, mapped, turned)
    return sources, TermColumns(accumulate, starts(counts), *columns)


def _gathers(copies: Copies, terms: TensorTerms, own: Int64, copy_of: Int64) -> Copies:
    """Return the boxes read for the terms ``own`` of copies; a product needs all rows and columns of its
    factors."""
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
    for right in (0, 1):
        factors = np.flatnonzero((ranks[term_of] > 0) & (is_right == right))
        inner = box_start[factors] + 1 - right  # the inner dimension of the product
        offsets[inner], sizes[inner] = 0, ranks[term_of[factors]]
        flat = box_start[factors[terms.turned[own][term_of[factors]]]]
        for column in (offsets, sizes):
            column[flat], column[flat + 1] = column[flat + 1], column[flat]
    nothing = np.zeros(len(tensors), np.int64)
    return Copies(tensors, box_start, offsets, sizes, nothing, nothing, nothing, nothing)


def copy_sources(
    engine: ReadEngine,
    copies: Copies,
    mapped: Sequence[MappedTensor] | None = None,
    turned: npt.NDArray[np.bool_] | None = None,
) -> SourceColumns:
    """Return the parts of each copy with their positions in the source's files.

    ``mapped`` are tensors made of source tensors. ``turned`` copies have two dimensions, the second is the
    slowest. Opens records of foreign formats whose payload positions are unknown. PlanError for elements that
    are not stored.
    """
    if mapped is not None:
        return _mapped_sources(engine, copies, mapped)
    rows, tensor_of = np.unique(copies.tensors, return_inverse=True)
    stored = stored_parts(engine, rows, tensor_of.astype(np.int64), copies.box_offsets, copies.box_sizes)
    wanted, axis_start = stored.wanted, stored.axis_start
    sizes = gather_rows(copies.box_sizes, copies.box_start, wanted)
    target_strides = ragged_c_strides(sizes, axis_start, np.ones_like(wanted))
    axes = [stored.lengths, stored.strides, target_strides, stored.offsets]
    if turned is not None and turned.any():
        slow = axis_start[np.flatnonzero(turned[wanted])]
        target_strides[slow], target_strides[slow + 1] = 1, sizes[slow]
        order = np.arange(len(sizes))
        order[slow], order[slow + 1] = slow + 1, slow
        axes = [column[order] for column in axes]
    *axes, offsets = axes
    places = stored.begins, row_sums(offsets * axes[2], axis_start)
    start = starts(np.bincount(wanted, minlength=len(copies.tensors)))
    return SourceColumns.of(engine, start, stored.chunks, places, axis_start, *axes)


def _mapped_sources(engine: ReadEngine, copies: Copies, tensors: Sequence[MappedTensor]) -> SourceColumns:
    """Return the sources of copies of mapped tensors."""
    stored = StoredTensors(engine, tensors)
    counts: list[int] = []
    found: list[tuple[int, int, int]] = []  # chunk, begin, target
    axes: list[list[tuple[int, int, int]]] = []  # (target stride, length, stride)
    boxes = [column.tolist() for column in (copies.box_start, copies.box_offsets, copies.box_sizes)]
    for copy, row in enumerate(copies.tensors.tolist()):
        flat = slice(boxes[0][copy], boxes[0][copy + 1])
        box = Box(tuple(boxes[1][flat]), tuple(boxes[2][flat]))
        before, steps = len(found), c_strides(box.sizes)
        for chunk, begin, strides, own in stored.within(tensors[row], box):
            found.append((chunk, begin, own.target.place(steps, box.offsets)))
            by_axis = zip(own.target.strides(steps), own.lengths, strides, strict=True)
            axes.append(sorted((axis for axis in by_axis if axis[1] != 1), reverse=True))
        counts.append(len(found) - before)
    chunks, *places = np.array(found, np.int64).reshape(-1, 3).T
    targets, lengths, own_strides = (
        np.array([axis for row in axes for axis in row], np.int64).reshape(-1, 3).T
    )
    axis_start = starts(list(map(len, axes)))
    return SourceColumns.of(engine, starts(counts), chunks, places, axis_start, lengths, own_strides, targets)


def payload_crcs(index: CheckpointIndex) -> dict[int, int]:
    """Return the CRC-32 of whole tensors in C order, by row, for unchanged tensors in one checksummed
    chunk."""
    rows = np.flatnonzero(np.diff(index.chunk_start) == 1)
    chunks = index.chunk_start[rows]
    counts = np.diff(index.crc_start)[chunks]
    if index.payload_strides:
        counts = np.where(np.isin(chunks, list(index.payload_strides)), 0, counts)
    # A chunk as large as its tensor is the whole tensor.
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
