"""A source as a weight map makes another model definition's checkpoint of it, before a byte moves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from dcp.planners.load.selection import Selection
from dcp.planners.weight_maps.pieces import MappedTensor
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.storage.errors import CheckpointFormatError, PlanError
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, starts
from dcp.storage.stores.base import Store

__all__ = ["MappedIndex", "map_index", "model_config"]

_CONFIG: Final = "config.json"
_MAX_CONFIG_BYTES: Final = 4 << 20


@dataclass(frozen=True, eq=False)
class MappedIndex:
    """What there is after the map. In ``index`` each tensor is whole, at no known place: it is made of the
    pieces of ``tensors``, by row. Values that are no tensors are those of the source, with its rows."""

    index: CheckpointIndex
    tensors: Sequence[MappedTensor]

    @property
    def identity(self) -> str:
        """Equal for maps that make the same of the same source."""
        rows = [(tensor.name, tensor.shape, tensor.dtype_code, tensor.pieces) for tensor in self.tensors]
        return hashlib.sha256(repr(rows).encode()).hexdigest()


def map_index(index: CheckpointIndex, weights: WeightMap, selection: Selection | None) -> MappedIndex:
    """The selected tensors of ``index`` under ``weights``. PlanError with all names that do not fit."""
    shapes = index.shape_values.tolist()
    bounds = index.shape_start.tolist()
    grads = index.requires_grad.tolist()
    tensors = weights.apply(
        (name, tuple(shapes[bounds[row] : bounds[row + 1]]), code, bool(grads[row]))
        for row, (name, code) in enumerate(zip(index.fqns, index.dtype_codes.tolist(), strict=True))
        if selection is None or selection.selects(name)
    )
    twice = {tensor.name for tensor in tensors} & set(index.objects.fqns)
    if twice:
        raise PlanError(f"the map gives a tensor the name {min(twice)!r}, which is that of another value")
    return MappedIndex(_index_of(index, tensors), tensors)


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
        planner_data=None,
        provenance={name: value for name, value in index.provenance.items() if name != "structure"},
    )


def model_config(store: Store) -> Mapping[str, Any]:
    """What ``config.json`` beside the weights says of the model; empty where there is none. The part of a
    text model within another counts where that has more to say."""
    if store.stat(_CONFIG) is None:
        return {}
    try:
        found = json.loads(store.read(_CONFIG, limit_bytes=_MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"{_CONFIG} of {store.url} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointFormatError(f"{_CONFIG} of {store.url} is no table")
    inner = found.get("text_config")
    return {**found, **inner} if isinstance(inner, dict) else found
