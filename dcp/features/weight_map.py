"""Loads through a weight map: positions of stored elements in local tensors."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dcp.loading.feature import LoadFeature, LoadReport, View
from dcp.planners.weight_maps.axes import model_config
from dcp.planners.weight_maps.mapped_index import map_all
from dcp.planners.weight_maps.pieces import StoredPiece, StoredTensors
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.storage.engine.read import ReadEngine
from dcp.storage.engine.requests import ByteRuns, Elements, Pieces
from dcp.storage.errors import OptionError, PlanError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.opening import saved_by_rank
from dcp.storage.geometry.boxes import Box
from dcp.storage.tensors import LocalMemory, narrow
from dcp.storage.torch_storage.destinations import Filled, refuse_shared
from dcp.storage.torch_storage.reader import FileSystemReader

logger = logging.getLogger(__name__)


class LoadedMap(LoadFeature):
    """Present the checkpoint as the model of ``map=``."""

    name = option = "map"

    @property
    def _weights(self) -> WeightMap:
        if self.options.map is None:
            raise PlanError("the load has no weight map")
        return self.options.map

    def agreed(self) -> dict[str, Any]:
        """Return the map as a short text."""
        return {"map": self._weights.mark}

    def beside(self, reader: FileSystemReader) -> str:
        """Return the config.json beside the weights, which has the sizes."""
        if reader.place.file is None and saved_by_rank(reader.store):
            raise OptionError(
                f"{reader.store.url}: map= needs one index for all ranks, but this checkpoint has one index "
                "for each rank; convert the checkpoint first (dcp convert)"
            )
        return json.dumps(model_config(reader.store))

    def view(self, view: View, beside: Any) -> View:
        """Return the checkpoint through the map."""
        return MappedView(view.index, self._weights.beside(json.loads(beside)))

    def done(self, report: LoadReport, *, is_coordinator: bool) -> None:
        """Warn of a map without a match in the checkpoint."""
        view = self.call.view
        if is_coordinator and view is not None and view.unmapped and view.unmapped >= {*view.index.fqns}:
            logger.warning(
                "map: no rule of %s matches a tensor of the checkpoint, such as %r: all tensors are "
                "loaded unchanged",
                self._weights.label,
                view.index.fqns[0],
            )


class MappedView(View):
    """The checkpoint mapped by ``weights``; tensors without a rule stay."""

    def __init__(self, index: CheckpointIndex, weights: WeightMap) -> None:
        self._mapped = map_all(index, weights)
        super().__init__(self._mapped.index, self._mapped.unknown)

    def reads(
        self, engine: ReadEngine, pieces: Pieces, memory: LocalMemory
    ) -> tuple[ByteRuns, Iterator[Filled]]:
        """Return the reads of ``pieces``, whose chunks are whole tensors by row, from the engine's
        checkpoint."""
        return ByteRuns.none(), self._fills(engine, pieces, memory)

    def lost(self, unexpected: Sequence[str]) -> list[str]:
        """Return tensors without a rule and without a place on any rank, beside tensors of the map."""
        unknown = self._mapped.unknown
        mapped = (tensor for tensor in self._mapped.tensors if tensor.name not in unknown)
        tops = {name.partition(".")[0] for tensor in mapped if unknown for name in tensor.sources}
        pairs = zip(self._mapped.index.fqns, self.index.fqns, strict=True)  # `renamed` keeps the rows
        gone = {shown for name, shown in pairs if name in unknown and name.partition(".")[0] in tops}
        return [name for name in unexpected if name in gone]

    def _fills(self, engine: ReadEngine, pieces: Pieces, memory: LocalMemory) -> Iterator[Filled]:
        """Yield filled parts, after setting padded boxes to zero."""
        tensors, rows = self._mapped.tensors, pieces.chunks.tolist()
        stored = StoredTensors(engine, [tensors[row] for row in dict.fromkeys(rows)])
        bounds = pieces.box_start.tolist()
        flat = [each.tolist() for each in (pieces.storage_offsets, pieces.lengths, pieces.dest_offsets)]
        for number, (row, dest) in enumerate(zip(rows, pieces.dests.tolist(), strict=True)):
            offsets, sizes, local = (tuple(values[bounds[number] : bounds[number + 1]]) for values in flat)
            view = narrow(memory.tensors[dest].detach(), local, sizes)
            refuse_shared(tensors[row].name, view)
            if tensors[row].padding:
                with torch.inference_mode():
                    view.zero_()
            box = Box(offsets, sizes)
            for piece in stored.within(tensors[row], box):
                if 0 not in piece.piece.lengths:
                    yield _filled(piece, box, view)


def _filled(stored: StoredPiece, box: Box, view: torch.Tensor) -> Filled:
    """Test whether ``view`` contains the elements of ``box``."""
    piece, steps = stored.piece, view.stride()
    axes = zip(stored.strides, piece.lengths, piece.target.strides(steps), strict=True)
    ordered = sorted((axis for axis in axes if axis[1] != 1), key=lambda axis: -axis[0])
    own, lengths, strides = (tuple(axis[at] for axis in ordered) for at in range(3))
    first = view.storage_offset() + piece.target.place(steps, box.offsets)
    elements = Elements(stored.chunk, stored.begin, lengths, own)
    return elements, view.as_strided(lengths, strides, first)
