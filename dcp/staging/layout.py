"""Where the sources of a save lie in an arena, and the views of it that stand for them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from dcp.planners.columns import SaveColumns
from dcp.staging.memory.arena import HostArena
from dcp.storage.formats.index import Int64
from dcp.storage.tensors import LocalMemory

__all__ = ["ALIGNMENT_BYTES", "ArenaLayout", "SourceStructure", "pointers_of", "ties_of"]

ALIGNMENT_BYTES = 64

_numbers = itertools.count(1)


@dataclass(frozen=True, eq=False)
class SourceStructure:
    """What must be equal of two lists of sources so that one can be staged in the place of the other.

    ``keys`` determine all shapes and dtypes. ``first`` is, by source, the number of the first one that is the
    same memory, mostly its own.
    """

    keys: tuple[object, ...]
    first: Int64

    @classmethod
    def of(cls, sources: Sequence[torch.Tensor], first: Int64) -> SourceStructure:
        """The structure of any tensors."""
        return cls(([source.shape for source in sources], [source.dtype for source in sources]), first)

    @classmethod
    def of_columns(cls, columns: SaveColumns, first: Int64) -> SourceStructure:
        """The same from the columns of a save: the boxes of a source tile it, so they give its shape without
        a look at each tensor."""
        keys = (
            columns.dtype_codes,
            columns.shape_start,
            columns.item_tensors,
            columns.item_sources,
            columns.item_local_offsets,
            columns.item_sizes,
        )
        return cls(keys, first)

    def same_as(self, other: SourceStructure) -> bool:
        """Whether both need the same views."""
        return (
            len(self.keys) == len(other.keys)
            and np.array_equal(self.first, other.first)
            and all(_equal(mine, others) for mine, others in zip(self.keys, other.keys, strict=True))
        )


def _equal(mine: object, others: object) -> bool:
    if isinstance(mine, np.ndarray) and isinstance(others, np.ndarray):
        return np.array_equal(mine, others)
    return type(mine) is type(others) and bool(mine == others)


@dataclass(frozen=True, eq=False)
class ArenaLayout:
    """Views of an arena by source: contiguous, of the sources' shapes and dtypes, the same one for ties.

    ``number`` is another one for every layout made in this process. ``memory`` has the views. ``copied`` are
    the sources to copy: all but ties of earlier ones and empty ones. ``offsets`` and ``sizes_bytes`` are by
    source.
    """

    number: int
    structure: SourceStructure
    generation: int
    offsets: Int64
    sizes_bytes: Int64
    itemsizes: Int64
    memory: LocalMemory
    copied: Int64

    @classmethod
    def make(
        cls, structure: SourceStructure, sources: Sequence[torch.Tensor], arena: HostArena
    ) -> ArenaLayout:
        """Reserve what the sources need and view it."""
        count = len(sources)
        sizes = np.fromiter((source.nbytes for source in sources), np.int64, count)
        itemsizes = np.fromiter((source.itemsize for source in sources), np.int64, count)
        own = structure.first == np.arange(count)
        padded = np.where(own, -(-sizes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, 0)
        offsets = (np.cumsum(padded) - padded)[structure.first]
        arena.reserve(int(padded.sum()))
        with torch.inference_mode(False):  # else the next save could not write to them outside of that mode
            views = _views(sources, offsets.tolist(), structure.first.tolist(), arena)
        copied = np.flatnonzero(own & (sizes > 0))
        memory = LocalMemory.of(views)
        return cls(next(_numbers), structure, arena.generation, offsets, sizes, itemsizes, memory, copied)

    def fits(self, structure: SourceStructure, arena: HostArena) -> bool:
        """Whether the views can take what ``structure`` describes."""
        return self.generation == arena.generation and self.structure.same_as(structure)


def _views(
    sources: Sequence[torch.Tensor], offsets: Sequence[int], first: Sequence[int], arena: HostArena
) -> list[torch.Tensor]:
    """One view a source. Each has a storage of its own, so that pickling or saving one takes no more than its
    bytes."""
    memory = cast(bytearray, arena.memory)
    views: list[torch.Tensor] = []
    for number, source in enumerate(sources):
        if first[number] != number:
            views.append(views[first[number]])
        elif source.numel() == 0:
            views.append(torch.empty(source.shape, dtype=source.dtype, device="cpu"))
        else:
            flat = torch.frombuffer(memory, dtype=source.dtype, count=source.numel(), offset=offsets[number])
            views.append(flat.view(source.shape))
    return views


def ties_of(sources: Sequence[torch.Tensor], pointers: Int64) -> Int64:
    """By source, the number of the first that is the same memory read the same way: equal address, dtype,
    shape and strides."""
    first = np.arange(len(sources))
    order = np.argsort(pointers, kind="stable")
    repeats = pointers[order][1:] == pointers[order][:-1]
    shared = np.zeros(len(sources), np.bool_)
    shared[order[1:]] = repeats
    shared[order[:-1]] |= repeats
    seen: dict[tuple[object, ...], int] = {}
    for number in np.flatnonzero(shared & (pointers != 0)).tolist():
        source = sources[number]
        reading = (source.dtype, source.shape, source.stride(), source.is_conj(), source.is_neg())
        key = (int(pointers[number]), source.device, *reading)
        first[number] = seen.setdefault(key, number)
    return first


def pointers_of(tensors: Sequence[torch.Tensor]) -> Int64:
    """The address of each tensor, on whatever device."""
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64, len(tensors))
