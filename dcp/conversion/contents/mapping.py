"""A source as a weight map makes another model definition's checkpoint of it, before a byte moves."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from dcp.conversion.contents.entries import check_patterns
from dcp.planners.load.selection import Patterns, Selection
from dcp.planners.weight_maps.pieces import MappedTensor, refuse_torn
from dcp.planners.weight_maps.weight_map import MapSource, WeightMap, config_of
from dcp.storage.errors import PlanError
from dcp.storage.formats.container_notes import notes_above
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, starts
from dcp.storage.formats.opening.sources import complete_index, open_source
from dcp.storage.stores.base import Store
from dcp.storage.stores.opening import OpenWith

__all__ = ["MappedIndex", "map_all", "map_index", "map_source", "model_config"]

_CONFIG: Final = "config.json"
_MAX_CONFIG_BYTES: Final = 4 << 20


@dataclass(frozen=True, eq=False)
class MappedIndex:
    """What there is after the map. In ``index`` each tensor is whole, at no known place: it is made of the
    pieces of ``tensors``, by row. Values that are no tensors are those of the source, with its rows, of which
    ``objects`` are selected. ``unknown`` are tensors that are as they were, since no rule knows them."""

    index: CheckpointIndex
    tensors: Sequence[MappedTensor]
    objects: frozenset[int]
    unknown: frozenset[str] = frozenset()

    @property
    def identity(self) -> str:
        """Equal for maps that make the same of the same source."""
        rows = [(tensor.name, tensor.shape, tensor.dtype_code, tensor.pieces) for tensor in self.tensors]
        return hashlib.sha256(repr(rows).encode()).hexdigest()


def map_source(
    source: str | os.PathLike[str],
    weights: WeightMap,
    *,
    only: Patterns | None = None,
    exclude: Patterns | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> MappedIndex:
    """What ``weights`` make of the tensors of a checkpoint that ``only`` and ``exclude`` select; none of
    these is read. Raises what `map_index` raises, and errors of the storage."""
    found = open_source(source, open_store=OpenWith(storage_options))
    return map_index(complete_index(found.store, found.index), found.store, weights, only, exclude)


def map_index(
    index: CheckpointIndex, store: Store, weights: WeightMap, only: Patterns | None, exclude: Patterns | None
) -> MappedIndex:
    """The selected tensors of ``index`` under ``weights``, whose configuration may be beside them.

    PlanError with all names that do not fit; MissingKeyError for patterns that match nothing.
    """
    selection = Selection.of(only, exclude)
    unread = index.provenance.get("refused_objects")
    unread = unread if isinstance(unread, dict) else {}
    if selection is not None:
        check_patterns(selection, [*index.fqns, *index.objects.fqns, *unread])
        unread = {name: need for name, need in unread.items() if selection.selects(name)}
        index = replace(index, provenance={**index.provenance, "refused_objects": unread})
    weights = weights.beside(model_config(store))
    selects = selection.selects if selection is not None else lambda _: True
    wanted = (source for source in _sources(index) if selects(source[0]))
    tensors = weights.apply(wanted, is_whole=selection is None)
    chosen = [row for row, name in enumerate(index.objects.fqns) if selects(name)]
    return MappedIndex(_index_of(index, _checked(index, tensors, chosen)), tensors, frozenset(chosen))


def map_all(index: CheckpointIndex, weights: WeightMap) -> MappedIndex:
    """All of ``index`` under ``weights``; tensors that no rule knows stay as they are, as values do.

    PlanError as of `map_index`.
    """
    known: list[MapSource] = []
    unknown: list[MappedTensor] = []
    for source in _sources(index):
        if weights.knows(source[0]):
            known.append(source)
        else:
            unknown.append(MappedTensor.same(*source))
    tensors, rows = weights.apply(known, is_whole=True), range(len(index.objects))
    names = {tensor.name for tensor in tensors}
    twice = [tensor.name for tensor in unknown if tensor.name in names]
    if twice:
        raise PlanError(
            f"the map gives a tensor the name {twice[0]!r}, which is that of another one that no rule knows"
        )
    tensors += unknown
    left = frozenset(tensor.name for tensor in unknown)
    return MappedIndex(_index_of(index, _checked(index, tensors, rows)), tensors, frozenset(rows), left)


def _sources(index: CheckpointIndex) -> Iterator[MapSource]:
    shapes, bounds = index.shape_values.tolist(), index.shape_start.tolist()
    codes, grads = index.dtype_codes.tolist(), index.requires_grad.tolist()
    for row, name in enumerate(index.fqns):
        yield name, tuple(shapes[bounds[row] : bounds[row + 1]]), codes[row], bool(grads[row])


def _checked(
    index: CheckpointIndex, tensors: Sequence[MappedTensor], chosen: Iterable[int]
) -> Sequence[MappedTensor]:
    """``tensors``. PlanError for names that values have, and for elements that cannot be moved."""
    twice = {tensor.name for tensor in tensors} & {index.objects.fqns[row] for row in chosen}
    if twice:
        raise PlanError(f"the map gives a tensor the name {min(twice)!r}, which is that of another value")
    refuse_torn(tensors)
    return tensors


def _index_of(index: CheckpointIndex, tensors: Sequence[MappedTensor]) -> CheckpointIndex:
    count = len(tensors)
    extents = np.array([size for tensor in tensors for size in tensor.shape], np.int64)
    nowhere = np.full(count, UNKNOWN, np.int64)
    return replace(
        index,
        fqns=[tensor.name for tensor in tensors],
        dtype_codes=np.array([tensor.dtype_code for tensor in tensors], np.uint8),
        shape_start=starts([len(tensor.shape) for tensor in tensors]),
        shape_values=extents,
        requires_grad=np.array([tensor.requires_grad for tensor in tensors], np.uint8),
        chunk_start=np.arange(count + 1, dtype=np.int64),
        chunk_offsets=np.zeros_like(extents),
        chunk_sizes=extents,
        chunk_files=np.zeros(count, np.int64),
        record_offsets=np.arange(count, dtype=np.int64),  # none of them is tied to another
        record_lengths=nowhere,
        payload_offsets=nowhere,
        payload_lengths=nowhere,
        crc_start=np.zeros(count + 1, np.int64),
        crcs=np.zeros(0, np.uint32),
        stride_orders={},
        payload_strides={},
        record_crcs={},
        digests=(),
        **_nesting(index, tensors),
    )


def _nesting(index: CheckpointIndex, tensors: Sequence[MappedTensor]) -> dict[str, Any]:
    """Where values are in the nested state; a tensor is what its name says."""
    provenance = dict(index.provenance)
    structure, known = provenance.pop("structure", None), index.planner_data
    if not isinstance(known, Mapping):
        return {"planner_data": None, "provenance": provenance}
    paths = {name: known[name] for name in index.objects.fqns if isinstance(known.get(name), tuple)}
    if isinstance(structure, dict) and isinstance(structure.get("containers"), list):
        notes = notes_above(structure["containers"], paths.values())
        provenance["structure"] = {**structure, "containers": notes}
    return {
        "planner_data": {tensor.name: (tensor.name,) for tensor in tensors} | paths,
        "provenance": provenance,
    }


def model_config(store: Store) -> Mapping[str, Any]:
    """What ``config.json`` beside the weights says of the model; empty where there is none."""
    if store.stat(_CONFIG) is None:
        return {}
    return config_of(store.read(_CONFIG, limit_bytes=_MAX_CONFIG_BYTES), f"{_CONFIG} of {store.url}")
