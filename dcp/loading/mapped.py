"""Loads through a weight map: stored elements, and the places of local tensors that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from dcp.planners.columns import LoadColumns
from dcp.planners.weight_maps.pieces import MappedTensor
from dcp.planners.weight_maps.stored import StoredPiece, StoredTensors
from dcp.storage.engine.reading.engine import ReadEngine
from dcp.storage.engine.reading.requests import Elements
from dcp.storage.geometry.boxes import Box
from dcp.storage.tensors import LocalMemory, narrow
from dcp.storage.torch_storage.destinations import Filled, refuse_shared

__all__ = ["mapped_fills"]


def mapped_fills(
    engine: ReadEngine, tensors: Sequence[MappedTensor], columns: LoadColumns, memory: LocalMemory
) -> Iterator[Filled]:
    """What ``columns``, whose chunks are whole ``tensors`` by row, take of the engine's checkpoint.

    Boxes that are padded are set to zero before.
    """
    rows = columns.chunks.tolist()
    stored = StoredTensors(engine, [tensors[row] for row in dict.fromkeys(rows)])
    bounds = columns.box_start.tolist()
    flat = [each.tolist() for each in (columns.storage_offsets, columns.lengths, columns.dest_offsets)]
    for number, (row, dest) in enumerate(zip(rows, columns.dests.tolist(), strict=True)):
        offsets, sizes, local = (tuple(values[bounds[number] : bounds[number + 1]]) for values in flat)
        view = narrow(memory.tensors[dest].detach(), local, sizes)
        refuse_shared(tensors[row].name, view)
        if tensors[row].padding:
            _clear(view)
        box = Box(offsets, sizes)
        for piece in stored.within(tensors[row], box):
            if 0 not in piece.piece.lengths:
                yield _filled(piece, box, view)


@torch.inference_mode()
def _clear(view: torch.Tensor) -> None:
    view.zero_()


def _filled(stored: StoredPiece, box: Box, view: torch.Tensor) -> Filled:
    """``view`` has the elements of ``box``."""
    piece, steps = stored.piece, view.stride()
    axes = zip(stored.strides, piece.lengths, piece.target.strides(steps), strict=True)
    ordered = sorted((axis for axis in axes if axis[1] != 1), key=lambda axis: -axis[0])
    own, lengths, strides = (tuple(axis[at] for axis in ordered) for at in range(3))
    first = view.storage_offset() + piece.target.place(steps, box.offsets)
    return Filled(
        Elements(stored.chunk, stored.begin, lengths, own), view.as_strided(lengths, strides, first)
    )
