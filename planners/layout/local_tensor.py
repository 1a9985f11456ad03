"""Local tensors: boxes of any kind of tensor in plain local tensors.

The boxes of a DTensor follow from mesh shape, coordinate and placements. Along each dimension the local
tensor is a sequence of runs of global positions in local order. Plain sharding has one run; FSDP2 over
tensor parallelism (`_StridedShard`) may have several, and the local tensor is the product of its runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, Partial, Replicate

from dcp.storage.errors import PlanError
from dcp.storage.tensors import narrow
from dcp.storage.torch_compat import (
    AsyncCollectiveTensor,
    ShardedTensor,
    StridedShard,
    flatten_sharded_tensors,
    local_part,
    shard_order,
    spec_of,
)

OBJECT, PLAIN, DTENSOR, _SHARDED, _PROTOCOL, _ASYNC, WRAPPER = range(7)
"""Kinds of values: objects, tensors with their own memory, and composite tensors."""


class LocalBox(NamedTuple):
    """Box of a global tensor, with its start in the local tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]


class LocalTensor(NamedTuple):
    """Part of a global tensor on this rank.

    ``sharded`` is False if every rank has the whole; ``replicated`` is True if other ranks may hold the
    same box. ``sources`` is one plain local tensor for all ``boxes``, or one per box.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    sharded: bool
    replicated: bool
    sources: Sequence[torch.Tensor]
    boxes: Sequence[LocalBox]


Layout = tuple[tuple[int, ...], tuple[LocalBox, ...], bool]
"""Layout of DTensors of equal shape, mesh and placements: local shape, boxes, and replication."""

SpecCache = dict[Any, Layout | None]
"""Layouts by (mesh, placements, shape) for one call; None for ranks outside of the mesh."""


def _kind_of(cls: type) -> int:
    if issubclass(cls, DTensor):
        return DTENSOR
    if hasattr(cls, "__create_write_items__") and hasattr(cls, "__get_tensor_shard__"):
        return _PROTOCOL
    if issubclass(cls, ShardedTensor):
        return _SHARDED
    if issubclass(cls, AsyncCollectiveTensor):
        return _ASYNC
    if not issubclass(cls, torch.Tensor):
        return OBJECT
    return WRAPPER if hasattr(cls, "__tensor_flatten__") else PLAIN


tensor_kind: Final[Callable[[type], int]] = cache(_kind_of)
"""Kind of values by class, cached because isinstance with abstract classes is slow."""


# -- tensors that say which boxes they hold, in four attributes (torch 2.14 and newer) -----------------------


@runtime_checkable
class CheckpointableTensor(Protocol):
    """Stand-in for ``torch.distributed.checkpoint.CheckpointableTensor`` in versions without it.

    A plain local tensor with these attributes holds boxes of a global tensor: box i is at
    ``local_offsets[i]`` of this tensor and at ``global_offsets[i]`` of the tensor of ``global_shape``, with
    ``local_sizes[i]``. Elements outside of the boxes are neither saved nor loaded.
    """

    global_shape: tuple[int, ...]
    global_offsets: tuple[tuple[int, ...], ...]
    local_offsets: tuple[tuple[int, ...], ...]
    local_sizes: tuple[tuple[int, ...], ...]


Rows = tuple[tuple[int, ...], ...]
ShardClaim = tuple[tuple[int, ...], Rows, Rows, Rows]
"""The four attributes of `CheckpointableTensor`."""

_CLAIM: Final = tuple(CheckpointableTensor.__annotations__)


def claim_of(tensor: object) -> ShardClaim | None:
    """Return the attributes of a `CheckpointableTensor`; None for other tensors."""
    has_all = hasattr(tensor, "global_shape") and all(hasattr(tensor, name) for name in _CLAIM)
    claim: ShardClaim | None = attrgetter(*_CLAIM)(tensor) if has_all else None
    return claim


def with_claim(tensor: torch.Tensor, claim: ShardClaim | None) -> torch.Tensor:
    """Set these attributes on ``tensor``, and return the tensor."""
    for name, value in zip(_CLAIM, claim or (), strict=False):
        setattr(tensor, name, value)
    return tensor


def _from_claim(fqn: str, tensor: torch.Tensor, claim: ShardClaim) -> LocalTensor:
    """Return the boxes of a `CheckpointableTensor`; PlanError for attributes that torch refuses."""
    shape = tuple(claim[0])
    parts = [[tuple(row) for row in rows] for rows in claim[1:]]
    if len({len(rows) for rows in parts}) > 1:
        raise _refused(fqn, "global_offsets, local_offsets and local_sizes must have the same length")
    boxes = []
    for number, (offsets, local_offsets, sizes) in enumerate(zip(*parts, strict=True)):
        _check_within(fqn, f"global_offsets[{number}]", offsets, sizes, shape)
        _check_within(fqn, f"local_offsets[{number}]", local_offsets, sizes, tuple(tensor.shape))
        boxes.append(LocalBox(offsets, sizes, local_offsets))
    return LocalTensor(
        shape, tensor.dtype, tensor.requires_grad, True, True, [tensor] if boxes else [], boxes
    )


def _check_within(
    fqn: str, what: str, offsets: Sequence[int], sizes: Sequence[int], shape: tuple[int, ...]
) -> None:
    if not len(offsets) == len(sizes) == len(shape):
        raise _refused(fqn, f"{what} and local_sizes must have {len(shape)} dimensions")
    for begin, size, extent in zip(offsets, sizes, shape, strict=True):
        if begin < 0 or size < 0 or begin + size > extent:
            raise _refused(fqn, f"{what} {tuple(offsets)} of sizes {tuple(sizes)} is outside of {shape}")


def _refused(fqn: str, why: str) -> PlanError:
    return PlanError(f"tensor {fqn!r} is a CheckpointableTensor whose {why}", fqn=fqn)


# -- DTensors ------------------------------------------------------------------------------------------------


def _chunk(runs: Sequence[range], parts: int, number: int) -> list[range]:
    """Return a part of ``runs`` by the rule of `torch.chunk`: equal parts, the last ones shorter or empty."""
    full = -(-sum(map(len, runs)) // parts)
    begin, end = number * full, (number + 1) * full
    taken = []
    for run in runs:
        if part := run[max(begin, 0) : max(end, 0)]:
            taken.append(part)
        begin, end = begin - len(run), end - len(run)
    return taken


def _split(runs: Sequence[range], factor: int, parts: int, coordinate: int) -> list[range]:
    """Return the runs of ``coordinate`` of ``parts`` ranks; ``factor`` above 1 is torch's `_StridedShard`:
    split into that many pieces, then each over the ranks.
    """
    taken: list[range] = []
    for piece in range(factor):
        for run in _chunk(_chunk(runs, factor, piece), parts, coordinate):
            if taken and taken[-1].stop == run.start:
                taken[-1] = range(taken[-1].start, run.stop)
            else:
                taken.append(run)
    return taken


def _boxes_of_runs(runs: Sequence[Sequence[range]]) -> tuple[LocalBox, ...]:
    """Return the boxes of a local tensor in local C order; none if empty."""
    located = []
    for dim in runs:
        positions = itertools.accumulate(map(len, dim), initial=0)
        located.append([(run.start, len(run), at) for run, at in zip(dim, positions, strict=False)])
    products = itertools.product(*located)
    return tuple(LocalBox(*(tuple(entry[part] for entry in box) for part in range(3))) for box in products)


def _layout(fqn: str, spec: Any, shape: tuple[int, ...]) -> Layout | None:
    mesh, placements = spec.mesh, spec.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    # order of sharding: left to right unless specified
    listed = [mesh_dim for entry in shard_order(spec) for mesh_dim in entry.mesh_dims]
    runs, replicated = [[range(size)] if size else [] for size in shape], False
    for mesh_dim in dict.fromkeys([*listed, *range(len(placements))]):
        placement, parts = placements[mesh_dim], mesh.size(mesh_dim)
        if placement.is_shard() or isinstance(placement, StridedShard):
            factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
            runs[placement.dim] = _split(runs[placement.dim], factor, parts, coordinate[mesh_dim])
        elif isinstance(placement, Replicate):
            replicated |= parts > 1
        else:
            what = "a pending reduction (Partial)" if isinstance(placement, Partial) else repr(placement)
            raise PlanError(
                f"tensor {fqn!r} has {what}; redistribute it to Shard or Replicate first", fqn=fqn
            )
    if not math.prod(shape):
        # one empty chunk from any rank keeps the shape of an empty tensor
        zeros = (0,) * len(shape)
        return shape, (LocalBox(zeros, shape, zeros),), True
    return tuple(sum(map(len, dim)) for dim in runs), _boxes_of_runs(runs), replicated


def _from_dtensor(fqn: str, tensor: DTensor, cache: SpecCache) -> LocalTensor | None:
    local = local_part(tensor)
    kind = tensor_kind(type(local))
    if kind == _PROTOCOL:
        return _from_protocol(fqn, tensor)
    spec, shape = spec_of(tensor), tensor.shape
    order = getattr(spec, "shard_order", None) if len(spec.placements) > 1 else None
    key = (id(spec.mesh), spec.placements, shape, order)
    try:
        layout = cache[key]
    except KeyError:
        layout = cache[key] = _layout(fqn, spec, tuple(shape))
    if layout is None:
        return None
    local_shape, boxes, replicated = layout
    if kind == _ASYNC:
        local = local.wait()  # type: ignore[attr-defined]
    if local.shape != local_shape:
        if math.prod(shape):
            raise PlanError(
                f"tensor {fqn!r}: this rank's shard has shape {tuple(local.shape)}, but placements "
                f"{tensor.placements} of shape {tuple(shape)} give {local_shape}; shard it by "
                "distribute_tensor() or fully_shard()",
                fqn=fqn,
            )
        local = local.new_empty(shape)
    sources = (local,) if boxes else ()
    return LocalTensor(shape, local.dtype, tensor.requires_grad, True, replicated, sources, boxes)


# -- tensors of other kinds ----------------------------------------------------------------------------------


def _whole(fqn: str, source: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> LocalBox:
    if tuple(source.shape) != tuple(sizes):
        raise PlanError(
            f"tensor {fqn!r}: a shard has shape {tuple(source.shape)}, but its metadata has the sizes "
            f"{tuple(sizes)}",
            fqn=fqn,
        )
    return LocalBox(tuple(offsets), tuple(sizes), (0,) * len(sizes))


def _from_sharded(fqn: str, tensor: ShardedTensor) -> LocalTensor:
    sources, boxes = [], []
    for shard in tensor.local_shards():
        if isinstance(shard.tensor, ShardedTensor):
            raise PlanError(
                f"tensor {fqn!r} contains sharded tensors: pass flatten_sharded_tensors=True to the planner",
                fqn=fqn,
            )
        sources.append(shard.tensor)
        boxes.append(_whole(fqn, shard.tensor, shard.metadata.shard_offsets, shard.metadata.shard_sizes))
    facts, shape = tensor.metadata().tensor_properties, tuple(tensor.metadata().size)
    return LocalTensor(shape, facts.dtype, facts.requires_grad, True, False, sources, boxes)


def _from_protocol(fqn: str, value: Any) -> LocalTensor:
    """Return the boxes of an object with torch's `_Checkpointable` protocol."""
    items = value.__create_write_items__(fqn, value)
    if not items:
        return LocalTensor(tuple(value.shape), value.dtype, False, True, True, [], [])
    sources, boxes = [], []
    for item in items:
        data = item.tensor_data
        if data is None or item.index.fqn != fqn:
            raise PlanError(
                f"tensor {fqn!r} of type {type(value).__name__} returned an item {item.index.fqn!r} that is "
                "not one of its shards; __create_write_items__ must return tensor items with the given name",
                fqn=fqn,
            )
        sources.append(value.__get_tensor_shard__(item.index))
        boxes.append(_whole(fqn, sources[-1], data.chunk.offsets, data.chunk.sizes))
    data = items[0].tensor_data
    facts = data.properties
    return LocalTensor(tuple(data.size), facts.dtype, facts.requires_grad, True, True, sources, boxes)


def plain_tensor(tensor: torch.Tensor) -> LocalTensor:
    """Return the layout of a tensor that every rank holds as a whole."""
    shape = tuple(tensor.shape)
    zeros = (0,) * len(shape)
    box = LocalBox(zeros, shape, zeros)
    return LocalTensor(shape, tensor.dtype, tensor.requires_grad, False, True, [tensor], [box])


def local_tensor(fqn: str, value: Any, cache: SpecCache) -> LocalTensor | None:
    """Return the local part of the tensor-like ``value``; None outside of a DTensor's mesh.

    Raises:
        PlanError: For a pending reduction, and a subclass with hidden memory.
    """
    kind = tensor_kind(type(value))
    if kind == DTENSOR:
        return _from_dtensor(fqn, value, cache)
    if kind == _SHARDED:
        return _from_sharded(fqn, value)
    if kind == _PROTOCOL:
        return _from_protocol(fqn, value)
    claim = claim_of(value)
    if claim is not None:
        return _from_claim(fqn, value, claim)
    if kind == PLAIN:
        return plain_tensor(value)
    if kind == _ASYNC:
        return plain_tensor(value.wait())
    raise PlanError(
        f"tensor {fqn!r} is a {type(value).__name__}, a subclass with inner tensors; store the inner tensors "
        "under their own names, or implement __create_write_items__, __create_chunk_list__ and "
        "__get_tensor_shard__",
        fqn=fqn,
    )


def flatten_sharded(flat: dict[str, Any]) -> dict[str, Any]:
    """Flatten nested ShardedTensors (FSDP1 over tensor parallelism) in a flat state dict, like torch."""
    has_any = _SHARDED in map(tensor_kind, set(map(type, flat.values())))
    return flatten_sharded_tensors(flat) if has_any else flat


@dataclass(eq=False)
class BoxLookup:
    """Lookup of plan indexes as views of local memory.

    Boxes are looked up in the present state dict, including replaced tensors.
    """

    _layouts: SpecCache = field(default_factory=dict)
    _known: dict[str, tuple[Any, LocalTensor | None]] = field(default_factory=dict)

    def find(
        self, state_dict: Mapping[str, Any], index: MetadataIndex, sizes: tuple[int, ...] | None = None
    ) -> Any:
        """Return the value or tensor view named by ``index``.

        ``sizes`` is the extent of the box; by default, the whole local box at the index's offset.

        Raises:
            PlanError: If this rank has no such name or box.
        """
        fqn = index.fqn
        if fqn not in state_dict:
            raise PlanError(f"Could not find FQN: {fqn!r} of the plan in the state dict", fqn=fqn)
        value = state_dict[fqn]
        if tensor_kind(type(value)) == OBJECT:
            if index.offset is not None:
                raise PlanError(
                    f"FQN: {fqn!r} is not a ShardedTensor, can't find by offset: '{index.offset}': it is a "
                    f"{type(value).__name__}",
                    fqn=fqn,
                )
            return value
        known = self._known.get(fqn)
        if known is None or known[0] is not value:
            known = self._known[fqn] = (value, local_tensor(fqn, value, self._layouts))
        view = _view_of_box(known[1], index.offset, sizes) if known[1] is not None else None
        if view is None:
            raise PlanError(
                f"Could not find shard at '{index.offset}' for FQN: {fqn!r}: this rank has no shard of sizes "
                f"{sizes} there",
                fqn=fqn,
            )
        return view


def _view_of_box(
    local: LocalTensor, offset: Sequence[int] | None, sizes: tuple[int, ...] | None
) -> torch.Tensor | None:
    is_only = offset is None and len(local.boxes) == 1
    for number, box in enumerate(local.boxes):
        begin = box.offsets if is_only else tuple(offset or ())
        extent = box.sizes if is_only or sizes is None else sizes
        if len(begin) != len(box.offsets):
            continue
        inner = [at - own for at, own in zip(begin, box.offsets, strict=True)]
        rows = zip(inner, extent, box.sizes, strict=True)
        if all(at >= 0 and at + size <= own_size for at, size, own_size in rows):
            source = local.sources[number if len(local.sources) > 1 else 0]
            return narrow(source, [*map(sum, zip(inner, box.local_offsets, strict=True))], extent)
    return None
