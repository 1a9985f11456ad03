"""Pieces: elements of source tensors with their positions in target tensors. A weight map becomes pieces once
names and shapes are known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Final, NamedTuple

import numpy as np

from dcp.planners.columns import HeldBoxes
from dcp.planners.load.plan import LoadProblems, intersect
from dcp.storage.engine.read import ReadEngine
from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes
from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.strides import Int64, gather_rows, parts_between, ragged_c_strides, row_sums, starts

_PACKED: Final = frozenset(
    dtypes.BY_NAME[name].code for name in ("float4_e2m1fn_x2", "bits1x8", "bits2x4", "bits4x2")
)
_MAX_LISTED: Final = 10

_MAX_BOXES: Final = 4096
"""Largest number of boxes that one box may be split into."""


class PieceSide(NamedTuple):
    """Positions of a piece's elements in one tensor.

    By axis of the piece: the dimension (``dims``) and the stride (``steps``); ``base`` is the position of the
    first element, by dimension.
    """

    name: str
    dims: tuple[int, ...]
    steps: tuple[int, ...]
    base: tuple[int, ...]

    def strides(self, strides: Sequence[int]) -> tuple[int, ...]:
        """Return the strides by axis, where the tensor's dimensions have ``strides``."""
        return tuple(step * strides[dim] for dim, step in zip(self.dims, self.steps, strict=True))

    def place(self, strides: Sequence[int], origin: Sequence[int]) -> int:
        """Return the place of the first element, seen from ``origin``."""
        return sum((at - low) * s for at, low, s in zip(self.base, origin, strides, strict=True))


class Piece(NamedTuple):
    """Elements of ``source`` that become elements of ``target``: ``lengths`` by axis."""

    lengths: tuple[int, ...]
    source: PieceSide
    target: PieceSide

    @property
    def inverse(self) -> Piece:
        """The piece with source and target exchanged."""
        return Piece(self.lengths, self.target, self.source)

    def within_source(self, box: Box) -> list[Piece]:
        """Return the part inside ``box`` of the source tensor, as disjoint pieces."""
        return [piece.inverse for piece in self.inverse.within_target(box)]

    def within_target(self, box: Box) -> list[Piece]:
        """Return the part inside ``box`` of the target tensor, as disjoint pieces."""
        chosen: list[list[tuple[tuple[int, int, int], ...]]] = []  # by dimension: (axis, first, count)
        side = self.target
        for dim, (low, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            axes = [axis for axis, own in enumerate(side.dims) if own == dim]
            axes.sort(key=lambda axis: (-side.steps[axis], -self.lengths[axis]))
            parts = parts_between(
                [self.lengths[axis] for axis in axes],
                [side.steps[axis] for axis in axes],
                low - side.base[dim],
                low + size - side.base[dim],
            )
            found = [tuple((axis, *part) for axis, part in zip(axes, way, strict=True)) for way in parts]
            if not found:
                return []
            chosen.append(found)
        return [self._part([part for way in ways for part in way]) for ways in product(*chosen)]

    def target_boxes(self) -> Iterator[tuple[Box, Piece]]:
        """Yield parts that fill whole boxes of the target tensor, with positions and axes in the box's
        element order. PlanError for too many boxes."""
        apart: list[int] = []
        inner: list[int] = []
        for dim in range(len(self.target.base)):
            own, loose = self._together(dim)
            inner += own
            apart += loose
        count = math.prod(self.lengths[axis] for axis in apart)
        if count > _MAX_BOXES:
            raise PlanError(
                f"the elements of {self.source.name!r} would be {count} boxes of {self.target.name!r}, more "
                f"than the limit of {_MAX_BOXES}: write a rule with larger contiguous parts"
            )
        for at in product(*(range(self.lengths[axis]) for axis in apart)):
            piece = self._part([(axis, index, 1) for axis, index in zip(apart, at, strict=True)])
            sizes = [1] * len(self.target.base)
            for axis in inner:
                sizes[self.target.dims[axis]] *= self.lengths[axis]
            yield Box(piece.target.base, tuple(sizes)), piece._of_axes(inner)

    def _together(self, dim: int) -> tuple[list[int], list[int]]:
        """Return (axes contiguous along ``dim`` of the target, slowest first; other axes along ``dim``)."""
        axes = [axis for axis, own in enumerate(self.target.dims) if own == dim and self.lengths[axis] != 1]
        axes.sort(key=lambda axis: self.target.steps[axis])
        run, reach = 0, 1
        while run < len(axes) and self.target.steps[axes[run]] == reach:
            reach *= self.lengths[axes[run]]
            run += 1
        return axes[:run][::-1], axes[run:]

    def _of_axes(self, axes: Sequence[int]) -> Piece:
        """Return the piece restricted to these axes."""
        sides = (
            side._replace(
                dims=tuple(side.dims[axis] for axis in axes), steps=tuple(side.steps[axis] for axis in axes)
            )
            for side in (self.source, self.target)
        )
        return Piece(tuple(self.lengths[axis] for axis in axes), *sides)

    def _part(self, parts: Sequence[tuple[int, int, int]]) -> Piece:
        firsts, lengths = [0] * len(self.lengths), list(self.lengths)
        for axis, first, count in parts:
            firsts[axis], lengths[axis] = first, count
        return Piece(tuple(lengths), _moved(self.source, firsts), _moved(self.target, firsts))


def _moved(side: PieceSide, firsts: Sequence[int]) -> PieceSide:
    base = list(side.base)
    for dim, step, first in zip(side.dims, side.steps, firsts, strict=True):
        base[dim] += step * first
    return side._replace(base=tuple(base))


@dataclass(frozen=True, slots=True)
class MappedTensor:
    """A tensor of the target, zero outside of ``pieces``: ``padding`` elements.

    ``dtype_code`` and ``requires_grad`` come from the source tensors.
    """

    name: str
    shape: tuple[int, ...]
    pieces: Sequence[Piece]
    dtype_code: int
    requires_grad: bool = False
    padding: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def same(cls, name: str, shape: tuple[int, ...], dtype_code: int, requires_grad: bool) -> MappedTensor:
        """Return the unchanged source tensor of this name."""
        side = PieceSide(name, tuple(range(len(shape))), (1,) * len(shape), (0,) * len(shape))
        return cls(name, shape, [Piece(shape, side, side)], dtype_code, requires_grad)

    @property
    def sources(self) -> list[str]:
        """Names of the source tensors."""
        return list(dict.fromkeys(piece.source.name for piece in self.pieces))

    @property
    def is_renamed(self) -> bool:
        """Test for a single unchanged source tensor, possibly renamed."""
        if self.padding or len(self.pieces) != 1:
            return False
        (piece,) = self.pieces
        return piece.source._replace(name="") == piece.target._replace(name="")


def check_mapped(tensors: Sequence[MappedTensor], taken: Iterable[str]) -> None:
    """Raise PlanError for names already ``taken``, and for moved elements smaller than a byte."""
    twice = {tensor.name for tensor in tensors}.intersection(taken)
    if twice:
        raise PlanError(
            f"the map renames a tensor to {min(twice)!r}, the name of another entry without a rule: rename "
            "or exclude that entry",
            fqns=sorted(twice)[:_MAX_LISTED],
        )
    split = [tensor.name for tensor in tensors if tensor.dtype_code in _PACKED and not tensor.is_renamed]
    if split:
        raise PlanError(
            f"{', '.join(map(repr, split[:_MAX_LISTED]))}: packed dtypes store several elements in a byte, "
            f"so a map can only rename these tensors",
            fqns=split[:_MAX_LISTED],
        )


@dataclass(frozen=True, eq=False)
class StoredParts:
    """Stored parts of wanted boxes, in the order of the boxes.

    A row has the number of its box (``wanted``), its chunk, and the byte position of its first element in the
    payload. Flat columns are sliced by ``axis_start``: ``offsets`` in the box, ``lengths``, and ``strides``
    of the payload in bytes.
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
    """Find the stored parts of boxes of the tensors ``rows``; ``tensor_of`` gives the tensor of each box.

    Opens records of foreign formats whose payload positions are unknown. PlanError for elements that are not
    stored.
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
    """Return byte strides of each of ``chunks``, by dimension."""
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
    """The part of ``piece`` in one chunk: first byte ``begin`` of the payload, byte ``strides`` by axis."""

    chunk: int
    begin: int
    strides: tuple[int, ...]
    piece: Piece


class StoredTensors:
    """Storage locations of the sources of ``tensors``.

    Opens records of foreign formats whose payload positions are unknown. PlanError for elements that are not
    stored.
    """

    def __init__(self, engine: ReadEngine, tensors: Iterable[MappedTensor]) -> None:
        index = engine.index
        names = dict.fromkeys(piece.source.name for tensor in tensors for piece in tensor.pieces)
        rows = np.array([index.position[name] for name in names], np.int64)
        shapes = gather_rows(index.shape_values, index.shape_start, rows)
        origins = np.zeros_like(shapes)
        self._stored = stored_parts(engine, rows, np.arange(len(rows), dtype=np.int64), origins, shapes)
        bounds = np.searchsorted(self._stored.wanted, np.arange(len(rows) + 1)).tolist()
        self._rows = dict(zip(names, pairwise(bounds), strict=True))

    def within(self, tensor: MappedTensor, box: Box) -> Iterator[StoredPiece]:
        """Yield the stored parts of ``box`` of ``tensor``, each element once."""
        for piece in tensor.pieces:
            for part in piece.within_target(box):
                yield from self._stored_pieces(part)

    def _stored_pieces(self, piece: Piece) -> Iterator[StoredPiece]:
        stored, side = self._stored, piece.source
        first, last = self._rows[side.name]
        flat = slice(int(stored.axis_start[first]), int(stored.axis_start[last]))
        low, lengths, strides = (
            column[flat].reshape(last - first, len(side.base))
            for column in (stored.offsets, stored.lengths, stored.strides)
        )
        reach = np.array(side.base, np.int64) + 1
        for dim, step, length in zip(side.dims, side.steps, piece.lengths, strict=True):
            reach[dim] += step * (length - 1)
        met = ((low < reach) & (low + lengths > np.array(side.base, np.int64))).all(axis=1)
        for row in np.flatnonzero(met).tolist():
            box, own = Box(tuple(low[row].tolist()), tuple(lengths[row].tolist())), strides[row].tolist()
            for part in piece.within_source(box):
                begin = int(stored.begins[first + row]) + part.source.place(own, box.offsets)
                yield StoredPiece(int(stored.chunks[first + row]), begin, part.source.strides(own), part)
