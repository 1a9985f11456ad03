"""Which elements of a source's tensors are which of a target's: what a weight map is once names and shapes
are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import NamedTuple

from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.lattices import parts_between

__all__ = ["MappedTensor", "Piece", "PieceSide"]


class PieceSide(NamedTuple):
    """Where the elements of a piece are in one tensor.

    By axis of the piece ``dims``, the dimension along which it goes, and ``steps``, how far from one index to
    the next; ``base`` is the position of the first element, by dimension.
    """

    name: str
    dims: tuple[int, ...]
    steps: tuple[int, ...]
    base: tuple[int, ...]

    def strides(self, strides: Sequence[int]) -> tuple[int, ...]:
        """By axis, where the tensor's dimensions have ``strides``."""
        return tuple(step * strides[dim] for dim, step in zip(self.dims, self.steps, strict=True))

    def place(self, strides: Sequence[int], origin: Sequence[int]) -> int:
        """Of the first element, seen from ``origin``."""
        return sum((at - low) * s for at, low, s in zip(self.base, origin, strides, strict=True))


class Piece(NamedTuple):
    """Elements of ``source`` that are those of ``target``: ``lengths`` by axis."""

    lengths: tuple[int, ...]
    source: PieceSide
    target: PieceSide

    @property
    def inverse(self) -> Piece:
        """The same the other way."""
        return Piece(self.lengths, self.target, self.source)

    def within_source(self, box: Box) -> list[Piece]:
        """What of it ``box`` of the source's tensor has, in disjoint pieces."""
        return [piece.inverse for piece in self.inverse.within_target(box)]

    def within_target(self, box: Box) -> list[Piece]:
        """What of it ``box`` of the target's tensor has, in disjoint pieces."""
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
    """A tensor of the target. Elements that are in none of ``pieces`` are zeros: ``padding`` of them.

    ``dtype_code`` and ``requires_grad`` are those of the source's tensors.
    """

    name: str
    shape: tuple[int, ...]
    pieces: Sequence[Piece]
    dtype_code: int
    requires_grad: bool = False
    padding: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def sources(self) -> list[str]:
        """Names of the tensors that it is made of."""
        return list(dict.fromkeys(piece.source.name for piece in self.pieces))

    @property
    def is_renamed(self) -> bool:
        """Whether it is one tensor of the source as that is, under whatever name."""
        if self.padding or len(self.pieces) != 1:
            return False
        (piece,) = self.pieces
        return piece.source._replace(name="") == piece.target._replace(name="")
