"""A source as a weight map makes another model definition's checkpoint of it, before a byte moves."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from dcp.conversion.contents.entries import check_patterns
from dcp.planners.load.selection import Patterns, Selection
from dcp.planners.weight_maps.pieces import MappedTensor
from dcp.planners.weight_maps.weight_map import WeightMap, config_of
from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex, starts
from dcp.storage.formats.opening.sources import complete_index, open_source
from dcp.storage.stores.base import Store
from dcp.storage.stores.opening import OpenWith

__all__ = ["MappedIndex", "map_index", "map_source"]

_CONFIG: Final = "config.json"
_PACKED: Final = frozenset(
    dtypes.BY_NAME[name].code for name in ("float4_e2m1fn_x2", "bits1x8", "bits2x4", "bits4x2")
)
_MAX_LISTED: Final = 10
_MAX_CONFIG_BYTES: Final = 4 << 20


@dataclass(frozen=True, eq=False)
class MappedIndex:
    """What there is after the map. In ``index`` each tensor is whole, at no known place: it is made of the
    pieces of ``tensors``, by row. Values that are no tensors are those of the source, with its rows, of which
    ``objects`` are selected."""

    index: CheckpointIndex
    tensors: Sequence[MappedTensor]
    objects: frozenset[int]

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
    weights = replace(weights, config={**_model_config(store), **weights.config})
    shapes, bounds = index.shape_values.tolist(), index.shape_start.tolist()
    codes, grads = index.dtype_codes.tolist(), index.requires_grad.tolist()
    tensors = weights.apply(
        (name, tuple(shapes[bounds[row] : bounds[row + 1]]), codes[row], bool(grads[row]))
        for row, name in enumerate(index.fqns)
        if selection is None or selection.selects(name)
    )
    chosen = [
        row for row, name in enumerate(index.objects.fqns) if selection is None or selection.selects(name)
    ]
    twice = {tensor.name for tensor in tensors} & {index.objects.fqns[row] for row in chosen}
    if twice:
        raise PlanError(f"the map gives a tensor the name {min(twice)!r}, which is that of another value")
    split = [tensor.name for tensor in tensors if tensor.dtype_code in _PACKED and not tensor.is_renamed]
    if split:
        raise PlanError(
            f"{', '.join(map(repr, split[:_MAX_LISTED]))}: several elements are one byte there, which a map "
            "would take for one; such a tensor can only be renamed",
            fqns=split[:_MAX_LISTED],
        )
    return MappedIndex(_index_of(index, tensors), tensors, frozenset(chosen))


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
        planner_data=None,
        provenance={name: value for name, value in index.provenance.items() if name != "structure"},
    )


def _model_config(store: Store) -> Mapping[str, Any]:
    """What ``config.json`` beside the weights says of the model; empty where there is none."""
    if store.stat(_CONFIG) is None:
        return {}
    return config_of(store.read(_CONFIG, limit_bytes=_MAX_CONFIG_BYTES), f"{_CONFIG} of {store.url}")
