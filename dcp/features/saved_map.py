"""Saves through a weight map (``map=``): a rank's memory as boxes of another model definition's tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from dcp.planners.columns import SaveColumns, box_columns
from dcp.planners.garbage_collection import garbage_collection_paused
from dcp.planners.layout.local import item_ties
from dcp.planners.rank_state import RankState
from dcp.planners.weight_maps.mapped_index import map_sources
from dcp.planners.weight_maps.pieces import MappedTensor, Piece, check_mapped
from dcp.planners.weight_maps.weight_map import MapSource, WeightMap
from dcp.saving.feature import SaveFeature
from dcp.storage.errors import CheckpointError, PlanError
from dcp.storage.formats.container_notes import notes_above
from dcp.storage.formats.index import CheckpointIndex, Path
from dcp.storage.geometry.boxes import Box
from dcp.storage.geometry.strides import Int64
from dcp.storage.near_names import listed
from dcp.storage.tensors import LocalMemory, torch_dtype

if TYPE_CHECKING:
    from dcp.saving.save import SavingRank


_MAX_LISTED = 10

_MAX_ITEMS = 2_000_000
"""Largest number of items, over all ranks, searched for missing sources; takes some seconds."""


class SavedMap(SaveFeature):
    """Save a rank's tensors through a weight map."""

    name = "map"
    option = "map"

    @property
    def _map(self) -> WeightMap:
        return cast("WeightMap", self.options.map)

    def agreed(self) -> dict[str, Any]:
        """Return the map as a short text."""
        return {"map": self._map.mark}

    def held(self, local: RankState, at: SavingRank) -> RankState:
        """Return boxes of the other model definition."""
        is_part = at.world_size > 1 and self.options.use_collectives  # search for gaps only in this case
        return mapped_state(local, self._map, is_part=is_part, must_invert=self.options.map_must_invert)

    def explained(self, error: PlanError, parts: Sequence[SaveColumns]) -> PlanError | None:
        """Explain missing items of a plan by the saved state dict."""
        missing = missing_sources(parts, self._map)
        if not missing:
            return None
        names = listed(missing, most=_MAX_LISTED)
        text = f"all ranks together lack tensors, or parts of them: {names}: {error}"
        return PlanError(text, fqns=missing[:_MAX_LISTED])

    def manifest(self, index: CheckpointIndex, rows: Int64, found: Sequence[Any]) -> CheckpointIndex:
        """Note the map's name."""
        return replace(index, provenance={**index.provenance, "map": self._map.label})


_MappedBox = tuple[int, Box, torch.Tensor, bool, bool]
"""Number of a tensor, a box, its elements; whether sharded, and possibly replicated."""


@garbage_collection_paused()
def mapped_state(
    local: RankState, weights: WeightMap, *, is_part: bool = False, must_invert: bool = False
) -> RankState:
    """Convert ``local`` by ``weights``, as views of its memory where possible, else as copies. Tensors
    outside of the model stay.

    ``is_part``: other ranks may have more of a stack. ``must_invert``: the inverse has to restore ``local``.
    PlanError as `WeightMap.apply`, for names of values, and for too many boxes.
    """
    columns = local.columns
    sources = list(map_sources(columns))
    beside = [MappedTensor.same(*source) for source in sources if weights.is_beside(source[0])]
    mapped = weights.apply((one for one in sources if not weights.is_beside(one[0])), is_part=is_part)
    kept = [*columns.objects.fqns, *(tensor.name for tensor in beside)]
    check_mapped(mapped, kept)
    tensors = [*mapped, *beside]
    if must_invert:
        weights.require_invertible(sources, tensors)
    held = sorted([*_held(local, tensors), *_zeros(tensors)], key=lambda each: each[:2])
    rows, boxes, elements, sharded, replicated = zip(*held, strict=True) if held else ((),) * 5
    made = box_columns(
        [tensor.name for tensor in tensors],
        [tensor.dtype_code for tensor in tensors],
        [tensor.requires_grad for tensor in tensors],
        [tensor.shape for tensor in tensors],
        rows,
        [box.offsets for box in boxes],
        [box.sizes for box in boxes],
        sharded,
        objects=columns.objects,
        **_nested(columns, mapped, kept),
    )
    memory = LocalMemory.of(elements)
    made = replace(made, item_ties=item_ties(made, memory))
    return RankState(made, memory, local.objects, np.array(replicated, np.uint8))


def missing_sources(parts: Sequence[SaveColumns], weights: WeightMap) -> list[str]:
    """Return sources that ``weights`` needs for the tensors of ``parts`` (all ranks) and no rank has
    completely.

    Returns nothing if the inverse is ambiguous, ranks disagree, or items are too many.
    """
    if sum(len(columns.item_tensors) for columns in parts) > _MAX_ITEMS:
        return []
    sources: dict[str, MapSource] = {}
    boxes: dict[str, set[Box]] = {}
    for columns in parts:
        for source in map_sources(columns):
            if sources.setdefault(source[0], source)[:3] != source[:3]:
                return []
        for name, box in _boxes(columns):
            boxes.setdefault(name, set()).add(box)
    back = weights.inverse
    try:
        made = back.apply(source for source in sources.values() if back.knows(source[0]))
    except CheckpointError:
        return []
    return [one.name for one in made if _held_elements(one, boxes) < math.prod(one.shape) - one.padding]


def _boxes(columns: SaveColumns) -> Iterator[tuple[str, Box]]:
    bounds = columns.box_start.tolist()
    flat = [values.tolist() for values in (columns.item_offsets, columns.item_sizes)]
    for item, row in enumerate(columns.item_tensors.tolist()):
        yield columns.fqns[row], Box(*(tuple(values[bounds[item] : bounds[item + 1]]) for values in flat))


def _held_elements(tensor: MappedTensor, boxes: Mapping[str, Iterable[Box]]) -> int:
    parts = (
        part
        for piece in tensor.pieces
        for box in boxes.get(piece.source.name, ())
        for part in piece.within_source(box)
    )
    return sum(math.prod(part.lengths) for part in parts)


def _nested(columns: SaveColumns, tensors: Sequence[MappedTensor], kept: Iterable[str]) -> dict[str, Any]:
    """Return the places of ``kept`` entries; ``tensors`` are placed by name."""
    known = columns.planner_data
    if known is None:
        return {"planner_data": None, "notes": columns.notes}
    paths = {name: known[name] for name in kept if name in known}
    names: dict[str, Path] = {tensor.name: (tensor.name,) for tensor in tensors}
    return {"planner_data": names | paths, "notes": notes_above(columns.notes, paths.values())}


def _held(local: RankState, tensors: Sequence[MappedTensor]) -> Iterator[_MappedBox]:
    """Yield the tensors of the boxes of ``local``."""
    columns = local.columns
    by_source: dict[str, list[tuple[int, Piece]]] = {}
    for number, tensor in enumerate(tensors):
        for piece in tensor.pieces:
            by_source.setdefault(piece.source.name, []).append((number, piece))
    views = local.views(np.arange(len(columns.item_tensors)))
    for item, ((name, own), view) in enumerate(zip(_boxes(columns), views, strict=True)):
        marks = bool(columns.item_sharded[item]), bool(local.replicated[item])
        for number, piece in by_source.get(name, ()):
            for part in piece.within_source(own):
                for box, elements in part.target_boxes() if 0 not in part.lengths else ():
                    source, steps = elements.source, view.stride()
                    first = view.storage_offset() + source.place(steps, own.offsets)
                    inner = view.detach().as_strided(elements.lengths, source.strides(steps), first)
                    yield number, box, inner.reshape(box.sizes), *marks


def _zeros(tensors: Sequence[MappedTensor]) -> Iterator[_MappedBox]:
    """Yield elements of padded tensors outside of all pieces; every rank holds them."""
    for number, tensor in enumerate(tensors):
        if not tensor.padding:
            continue
        holes: list[Box] = [Box.whole(tensor.shape)]
        for piece in tensor.pieces:
            for box, _ in piece.target_boxes() if 0 not in piece.lengths else ():
                holes = [part for hole in holes for part in hole.without(box)]
        zero = torch.zeros((), dtype=torch_dtype(tensor.dtype_code))
        for hole in holes:
            yield number, hole, zero.expand(hole.sizes), False, True
