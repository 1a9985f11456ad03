"""Local tensors: the boxes that a rank holds of a tensor of any kind, in plain local tensors.

DTensors may give several boxes a local tensor (see `dcp.planners.layout.placements`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from dcp.planners.layout.checkpointable import claimed_boxes, has_claim
from dcp.planners.layout.placements import LocalBox, Split, boxes_of_runs, local_runs, local_shape
from dcp.storage.errors import PlanError
from dcp.storage.torch_compat import (
    AsyncCollectiveTensor,
    ShardedTensor,
    StridedShard,
    flatten_sharded_tensors,
    local_part,
    shard_order,
    spec_of,
)

__all__ = [
    "DTENSOR",
    "KINDS",
    "OBJECT",
    "PLAIN",
    "WRAPPER",
    "LocalPiece",
    "LocalTensor",
    "SpecCache",
    "TensorLayout",
    "flatten_sharded",
    "is_tensor_like",
    "layout_of",
    "local_tensor",
]

OBJECT, PLAIN, DTENSOR, _SHARDED, _PROTOCOL, _ASYNC, WRAPPER = range(7)
"""Kinds of values: what is no tensor, tensors that are their memory, and composite tensors."""


class LocalPiece(NamedTuple):
    """A box of a global tensor in the plain local tensor ``source``."""

    source: torch.Tensor
    box: LocalBox


class LocalTensor(NamedTuple):
    """A rank's part of one global tensor.

    ``sharded`` is False where every rank has the whole; ``replicated`` is True where other ranks may hold the
    same box.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    sharded: bool
    replicated: bool
    pieces: Sequence[LocalPiece]


class TensorLayout(NamedTuple):
    """A rank's part of each DTensor of one shape, mesh and placements."""

    local_shape: tuple[int, ...]
    boxes: tuple[LocalBox, ...]
    replicated: bool


SpecCache = dict[Any, TensorLayout | None]
"""Layouts by (mesh, placements, shape) for the length of one call; None for a rank outside of the mesh."""


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


class _TensorKinds(dict[type, int]):
    def __missing__(self, cls: type) -> int:
        kind = self[cls] = _kind_of(cls)
        return kind


KINDS: Final = _TensorKinds()
"""Kind by class, found once a class."""


def is_tensor_like(value: object) -> bool:
    """Test whether ``value`` is stored as a tensor: tensors of all kinds, and what implements torch's
    protocol for them."""
    return KINDS[type(value)] != OBJECT


def _ordered_mesh_dims(spec: Any, ndim: int) -> list[int]:
    """Return mesh dimensions in the order in which their shardings are applied; left to right unless the spec
    says else."""
    listed = [mesh_dim for entry in shard_order(spec) for mesh_dim in entry.mesh_dims]
    return listed + [mesh_dim for mesh_dim in range(ndim) if mesh_dim not in listed]


def _layout(fqn: str, spec: Any, shape: tuple[int, ...]) -> TensorLayout | None:
    mesh, placements = spec.mesh, spec.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    splits, replicated = [], False
    for mesh_dim in _ordered_mesh_dims(spec, len(placements)):
        placement, parts = placements[mesh_dim], mesh.size(mesh_dim)
        if placement.is_shard() or isinstance(placement, StridedShard):
            factor = int(placement.split_factor) if isinstance(placement, StridedShard) else 1
            splits.append(Split(placement.dim, parts, coordinate[mesh_dim], factor))
        elif isinstance(placement, Replicate):
            replicated |= parts > 1
        else:
            what = "a pending reduction (Partial)" if isinstance(placement, Partial) else repr(placement)
            raise PlanError(
                f"tensor {fqn!r} has {what}; redistribute it to Shard or Replicate first", fqn=fqn
            )
    if not math.prod(shape):
        # an empty tensor still has a shape to keep: one empty chunk, from whoever comes first
        return TensorLayout(shape, (LocalBox((0,) * len(shape), shape, (0,) * len(shape)),), True)
    runs = local_runs(shape, splits)
    return TensorLayout(local_shape(runs), boxes_of_runs(runs), replicated)


def layout_of(fqn: str, spec: Any, shape: tuple[int, ...], cache: SpecCache) -> TensorLayout | None:
    """Return the layout of the DTensor ``fqn``; None for a rank outside of its mesh. PlanError for a pending
    reduction."""
    placements = spec.placements
    order = getattr(spec, "shard_order", None) if len(placements) > 1 else None
    key = (id(spec.mesh), placements, shape, order)
    try:
        return cache[key]
    except KeyError:
        layout = cache[key] = _layout(fqn, spec, shape)
        return layout


def _from_dtensor(fqn: str, tensor: DTensor, cache: SpecCache) -> LocalTensor | None:
    local = local_part(tensor)
    kind = KINDS[type(local)]
    if kind == _PROTOCOL:
        return _from_protocol(fqn, tensor)
    shape = tuple(tensor.shape)
    layout = layout_of(fqn, spec_of(tensor), shape, cache)
    if layout is None:
        return None
    if kind == _ASYNC:
        local = local.wait()  # type: ignore[attr-defined]
    if not math.prod(shape):
        local = local.new_empty(shape)
    elif local.shape != layout.local_shape:
        raise PlanError(
            f"tensor {fqn!r}: this rank's shard has shape {tuple(local.shape)}, but placements "
            f"{tensor.placements} of shape {shape} give {layout.local_shape}; shard it as torch does",
            fqn=fqn,
        )
    pieces = [LocalPiece(local, box) for box in layout.boxes]
    return LocalTensor(shape, local.dtype, tensor.requires_grad, True, layout.replicated, pieces)


def _whole(fqn: str, source: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> LocalPiece:
    if tuple(source.shape) != tuple(sizes):
        raise PlanError(
            f"tensor {fqn!r}: a shard of shape {tuple(source.shape)} claims the box of sizes {tuple(sizes)}",
            fqn=fqn,
        )
    return LocalPiece(source, LocalBox(tuple(offsets), tuple(sizes), (0,) * len(sizes)))


def _from_sharded(fqn: str, tensor: ShardedTensor) -> LocalTensor:
    shape = tuple(tensor.metadata().size)
    pieces = []
    for shard in tensor.local_shards():
        if isinstance(shard.tensor, ShardedTensor):
            raise PlanError(
                f"tensor {fqn!r} nests sharded tensors; it needs flatten_sharded_tensors=True",
                fqn=fqn,
            )
        pieces.append(_whole(fqn, shard.tensor, shard.metadata.shard_offsets, shard.metadata.shard_sizes))
    properties = tensor.metadata().tensor_properties
    return LocalTensor(shape, properties.dtype, properties.requires_grad, True, False, pieces)


def _from_protocol(fqn: str, value: Any) -> LocalTensor:
    """Ask an object that implements torch's `_Checkpointable` for its boxes."""
    items = value.__create_write_items__(fqn, value)
    if not items:
        return LocalTensor(tuple(value.shape), value.dtype, False, True, True, [])
    pieces = []
    for item in items:
        data = item.tensor_data
        if data is None or item.index.fqn != fqn:
            raise PlanError(
                f"tensor {fqn!r} of type {type(value).__name__} describes an item {item.index.fqn!r} "
                "that is no box of it; __create_write_items__ must give tensor items under the given name",
                fqn=fqn,
            )
        source = value.__get_tensor_shard__(item.index)
        pieces.append(_whole(fqn, source, data.chunk.offsets, data.chunk.sizes))
    data = items[0].tensor_data
    return LocalTensor(
        tuple(data.size), data.properties.dtype, data.properties.requires_grad, True, True, pieces
    )


def _from_plain(tensor: torch.Tensor) -> LocalTensor:
    shape = tuple(tensor.shape)
    zeros = (0,) * len(shape)
    return LocalTensor(
        shape,
        tensor.dtype,
        tensor.requires_grad,
        False,
        True,
        [LocalPiece(tensor, LocalBox(zeros, shape, zeros))],
    )


def _from_checkpointable(fqn: str, tensor: torch.Tensor) -> LocalTensor:
    shape, boxes = claimed_boxes(fqn, tensor)
    pieces = [LocalPiece(tensor, box) for box in boxes]
    return LocalTensor(shape, tensor.dtype, tensor.requires_grad, True, True, pieces)


def local_tensor(fqn: str, value: Any, cache: SpecCache) -> LocalTensor | None:
    """Return what this rank holds of the tensor-like ``value``; None where it is outside of a DTensor's mesh.

    Raises PlanError for a pending reduction, and for a subclass that hides its memory.
    """
    kind = KINDS[type(value)]
    if kind == DTENSOR:
        return _from_dtensor(fqn, value, cache)
    if kind == _SHARDED:
        return _from_sharded(fqn, value)
    if kind == _PROTOCOL:
        return _from_protocol(fqn, value)
    if has_claim(value):
        return _from_checkpointable(fqn, value)
    if kind == PLAIN:
        return _from_plain(value)
    if kind == _ASYNC:
        return _from_plain(value.wait())
    raise PlanError(
        f"tensor {fqn!r} is a {type(value).__name__}, a subclass made of inner tensors; store those "
        "under names of their own, or implement __create_write_items__, __create_chunk_list__ and "
        "__get_tensor_shard__",
        fqn=fqn,
    )


def flatten_sharded(flat: dict[str, Any]) -> dict[str, Any]:
    """Make nested ShardedTensors (FSDP1 over tensor parallelism) of a flat state dict flat, as torch does."""
    has_any = _SHARDED in map(KINDS.__getitem__, set(map(type, flat.values())))
    return flatten_sharded_tensors(flat) if has_any else flat
