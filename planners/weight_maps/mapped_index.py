"""Mapped indexes: a checkpoint after a weight map, before any data moves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from dcp.planners.columns import SaveColumns
from dcp.planners.load.selection import Patterns, Selection, check_patterns
from dcp.planners.weight_maps.axes import model_config
from dcp.planners.weight_maps.pieces import MappedTensor, check_mapped
from dcp.planners.weight_maps.weight_map import MapSource, WeightMap
from dcp.storage.formats.container_notes import notes_above
from dcp.storage.formats.index import UNKNOWN, CheckpointIndex
from dcp.storage.geometry.strides import starts
from dcp.storage.stores.base import Store


@dataclass(frozen=True, eq=False)
class MappedIndex:
    """A checkpoint after the map.

    In ``index`` each mapped tensor is one chunk without a known place; ``tensors`` gives its pieces by row.
    Values are the source's, with the same rows; ``objects`` are the selected ones. ``unknown`` are unchanged
    tensors without a rule.
    """

    index: CheckpointIndex
    tensors: Sequence[MappedTensor]
    objects: frozenset[int]
    unknown: frozenset[str] = frozenset()


def map_index(
    index: CheckpointIndex, store: Store, weights: WeightMap, only: Patterns | None, exclude: Patterns | None
) -> MappedIndex:
    """Map the selected tensors of ``index`` by ``weights``; the configuration may be beside them.

    PlanError with all names that do not fit; MissingKeyError for patterns without a match.
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
    wanted = (source for source in map_sources(index) if selects(source[0]))
    tensors = weights.apply(wanted, is_whole=selection is None, names=index.position)
    chosen = [row for row, name in enumerate(index.objects.fqns) if selects(name)]
    check_mapped(tensors, (index.objects.fqns[row] for row in chosen))
    return MappedIndex(_index_of(index, tensors), tensors, frozenset(chosen))


def map_all(index: CheckpointIndex, weights: WeightMap) -> MappedIndex:
    """Map all tensors of ``index``; tensors without a rule and values stay unchanged.

    PlanError as `map_index`.
    """
    known: list[MapSource] = []
    unknown: list[MappedTensor] = []
    for source in map_sources(index):
        if weights.knows(source[0]):
            known.append(source)
        else:
            unknown.append(MappedTensor.same(*source))
    left = frozenset(tensor.name for tensor in unknown)
    mapped = weights.apply(known, is_whole=True, names=index.position)
    check_mapped(mapped, left.union(index.objects.fqns))
    tensors = [*mapped, *unknown]
    made = _index_of(index, tensors, left)
    return MappedIndex(made, tensors, frozenset(range(len(index.objects))), left)


class Misfit(NamedTuple):
    """A tensor that does not load: "missing", "shape", "dtype" or "unexpected", with both sides."""

    kind: str
    fqn: str
    wanted: str
    found: str


def misfits(mapped: MappedIndex, wanted: CheckpointIndex) -> Iterator[Misfit]:
    """Yield tensors of the checkpoint ``wanted`` that a mapped load would leave unfilled, and tensors without
    a destination."""
    index = mapped.index
    for row, fqn in enumerate(wanted.fqns):
        at, own = index.position.get(fqn), _described(wanted, row)
        if at is None:
            yield Misfit("missing", fqn, own, "")
        elif index.shape(at) != wanted.shape(row):
            yield Misfit("shape", fqn, own, _described(index, at))
        elif index.dtype(at) != wanted.dtype(row):
            yield Misfit("dtype", fqn, own, _described(index, at))
    for row, fqn in enumerate(index.fqns):
        if fqn not in wanted.position:
            yield Misfit("unexpected", fqn, "", _described(index, row))


def _described(index: CheckpointIndex, row: int) -> str:
    shape = "x".join(map(str, index.shape(row))) or "scalar"
    return f"{index.dtype(row).name} {shape}"


def map_sources(held: CheckpointIndex | SaveColumns) -> Iterator[MapSource]:
    """Yield the tensors of a checkpoint or a rank as input of `WeightMap.apply`."""
    shapes, bounds = held.shape_values.tolist(), held.shape_start.tolist()
    facts = zip(held.fqns, held.dtype_codes.tolist(), held.requires_grad.tolist(), strict=True)
    for row, (name, code, requires_grad) in enumerate(facts):
        yield name, tuple(shapes[bounds[row] : bounds[row + 1]]), code, bool(requires_grad)


def _index_of(
    index: CheckpointIndex, tensors: Sequence[MappedTensor], unknown: frozenset[str] = frozenset()
) -> CheckpointIndex:
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
        record_offsets=np.arange(count, dtype=np.int64),  # distinct, so that no tensors are tied
        record_lengths=nowhere,
        payload_offsets=nowhere,
        payload_lengths=nowhere,
        crc_start=np.zeros(count + 1, np.int64),
        crcs=np.zeros(0, np.uint32),
        stride_orders={},
        payload_strides={},
        record_crcs={},
        digests=[b""] * count if len(index.digests) else (),  # requested, computed later
        **_nesting(index, tensors, unknown),
    )


def _nesting(
    index: CheckpointIndex, tensors: Sequence[MappedTensor], unknown: frozenset[str]
) -> dict[str, Any]:
    """Return the nested places of values and ``unknown`` tensors; other tensors are placed by name."""
    provenance = dict(index.provenance)
    structure, known = provenance.pop("structure", None), index.planner_data
    if not isinstance(known, Mapping):
        return {"planner_data": None, "provenance": provenance}
    kept = [*index.objects.fqns, *unknown]
    paths = {name: known[name] for name in kept if isinstance(known.get(name), tuple)}
    if isinstance(structure, dict) and isinstance(structure.get("containers"), list):
        notes = notes_above(structure["containers"], paths.values())
        provenance["structure"] = {**structure, "containers": notes}
    return {
        "planner_data": {tensor.name: (tensor.name,) for tensor in tensors} | paths,
        "provenance": provenance,
    }
