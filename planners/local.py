"""The tensors of one rank as columns: which boxes of which global tensors lie where in local memory.

Shared by saving and loading. DTensors may give several boxes a local tensor (see `dcp.planners.placements`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

from dcp.planners.placements import Box, Split, boxes_of_runs, local_runs, local_shape
from dcp.storage.errors import PlanError
from dcp.storage.formats import dtypes
from dcp.storage.formats.index import Int64, starts

__all__ = [
    "DTYPE_CODES",
    "LocalTensor",
    "LocalTensors",
    "Piece",
    "SpecCache",
    "collect_tensors",
    "has_plain_memory",
    "has_sharded_tensor",
    "is_tensor_class",
    "is_tensor_like",
    "local_tensor",
]

DTYPE_CODES: Mapping[torch.dtype, int] = {
    getattr(torch, name): dtype.code for name, dtype in dtypes.BY_NAME.items() if hasattr(torch, name)
}
"""Stable code of `dcp.storage.formats.dtypes` by torch dtype."""

_COMPLEX = frozenset(dtype.code for name, dtype in dtypes.BY_NAME.items() if name.startswith("complex"))
_MAX_LISTED = 20
_OBJECT, _PLAIN, _DTENSOR, _SHARDED, _PROTOCOL, _ASYNC, _WRAPPER = range(7)


class Piece(NamedTuple):
    """A box of a global tensor in the plain local tensor ``source``."""

    source: torch.Tensor
    box: Box


class LocalTensor(NamedTuple):
    """What a rank holds of one global tensor.

    ``sharded`` is False where every rank has the whole; ``replicated`` is True where other ranks may hold the
    same box.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    sharded: bool
    replicated: bool
    pieces: Sequence[Piece]


class _Layout(NamedTuple):
    local_shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    replicated: bool


_AnyBox = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""A `Box`, or its three fields where making one would be felt."""

SpecCache = dict[Any, _Layout | None]
"""Layouts by (mesh, placements, shape) for the length of one call; None for a rank outside of the mesh."""


def _kind_of(cls: type) -> int:
    if issubclass(cls, DTensor):
        return _DTENSOR
    if hasattr(cls, "__create_write_items__") and hasattr(cls, "__get_tensor_shard__"):
        return _PROTOCOL
    if issubclass(cls, ShardedTensor):
        return _SHARDED
    if issubclass(cls, AsyncCollectiveTensor):
        return _ASYNC
    if not issubclass(cls, torch.Tensor):
        return _OBJECT
    return _WRAPPER if hasattr(cls, "__tensor_flatten__") else _PLAIN


class _Kinds(dict[type, int]):
    def __missing__(self, cls: type) -> int:
        kind = self[cls] = _kind_of(cls)
        return kind


_KINDS = _Kinds()


def is_tensor_like(value: object) -> bool:
    """True for what is stored as a tensor: tensors of all kinds, and what implements torch's protocol for
    them."""
    return _KINDS[type(value)] != _OBJECT


def is_tensor_class(cls: type) -> bool:
    """`is_tensor_like` of what is of this very class."""
    return _KINDS[cls] != _OBJECT


def has_plain_memory(tensors: Iterable[object], locals_: Iterable[torch.Tensor]) -> bool:
    """True where all are plain tensors, or DTensors over plain ``locals_``: facts of these, and no code of a
    class, say what is stored."""
    kinds = {_KINDS[cls] for cls in set(map(type, tensors))}
    return kinds <= {_PLAIN, _DTENSOR} and {_KINDS[cls] for cls in set(map(type, locals_))} <= {_PLAIN}


def has_sharded_tensor(values: Iterable[object]) -> bool:
    """True where a `ShardedTensor` (FSDP1) is among ``values``."""
    return any(_KINDS[cls] == _SHARDED for cls in set(map(type, values)))


def _ordered_mesh_dims(spec: Any, ndim: int) -> list[int]:
    """Mesh dimensions in the order in which their shardings are applied; left to right unless the spec says
    else."""
    order = getattr(spec, "shard_order", None)
    if not order or getattr(spec, "use_strided_shard_as_shard_order", True):
        return list(range(ndim))
    listed = [mesh_dim for entry in order for mesh_dim in entry.mesh_dims]
    return listed + [mesh_dim for mesh_dim in range(ndim) if mesh_dim not in listed]


def _layout(fqn: str, spec: Any, shape: tuple[int, ...]) -> _Layout | None:
    mesh, placements = spec.mesh, spec.placements
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    splits, replicated = [], False
    for mesh_dim in _ordered_mesh_dims(spec, len(placements)):
        placement, parts = placements[mesh_dim], mesh.size(mesh_dim)
        if placement.is_shard() or isinstance(placement, _StridedShard):
            factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
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
        return _Layout(shape, (Box((0,) * len(shape), shape, (0,) * len(shape)),), True)
    runs = local_runs(shape, splits)
    return _Layout(local_shape(runs), boxes_of_runs(runs), replicated)


def _spec_layout(fqn: str, spec: Any, shape: tuple[int, ...], cache: SpecCache) -> _Layout | None:
    placements = spec.placements
    order = getattr(spec, "shard_order", None) if len(placements) > 1 else None
    key = (id(spec.mesh), placements, shape, order)
    try:
        return cache[key]
    except KeyError:
        layout = cache[key] = _layout(fqn, spec, shape)
        return layout


def _from_dtensor(fqn: str, tensor: DTensor, cache: SpecCache) -> LocalTensor | None:
    # what to_local() gives without autograd, and without its making of a new Parameter a call
    local = tensor._local_tensor
    kind = _KINDS[type(local)]
    if kind == _PROTOCOL:
        return _from_protocol(fqn, tensor)
    shape = tuple(tensor.shape)
    layout = _spec_layout(fqn, tensor._spec, shape, cache)
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
    pieces = [Piece(local, box) for box in layout.boxes]
    return LocalTensor(shape, local.dtype, tensor.requires_grad, True, layout.replicated, pieces)


def _whole(fqn: str, source: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Piece:
    if tuple(source.shape) != tuple(sizes):
        raise PlanError(
            f"tensor {fqn!r}: a shard of shape {tuple(source.shape)} claims the box of sizes {tuple(sizes)}",
            fqn=fqn,
        )
    return Piece(source, Box(tuple(offsets), tuple(sizes), (0,) * len(sizes)))


def _from_sharded(fqn: str, tensor: ShardedTensor) -> LocalTensor:
    shape = tuple(tensor.metadata().size)
    pieces = []
    for shard in tensor.local_shards():
        if isinstance(shard.tensor, ShardedTensor):
            raise PlanError(
                f"tensor {fqn!r} nests sharded tensors; plan with flatten_sharded_tensors=True", fqn=fqn
            )
        pieces.append(_whole(fqn, shard.tensor, shard.metadata.shard_offsets, shard.metadata.shard_sizes))
    properties = tensor.metadata().tensor_properties
    return LocalTensor(shape, properties.dtype, properties.requires_grad, True, False, pieces)


def _from_protocol(fqn: str, value: Any) -> LocalTensor:
    """Boxes of an object that implements torch's `_Checkpointable`."""
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
        shape, tensor.dtype, tensor.requires_grad, False, True, [Piece(tensor, Box(zeros, shape, zeros))]
    )


def local_tensor(fqn: str, value: Any, cache: SpecCache) -> LocalTensor | None:
    """What this rank holds of the tensor-like ``value``; None where it is outside of a DTensor's mesh.

    Raises PlanError for a pending reduction, and for a subclass that hides its memory.
    """
    kind = _KINDS[type(value)]
    if kind == _PLAIN:
        return _from_plain(value)
    if kind == _DTENSOR:
        return _from_dtensor(fqn, value, cache)
    if kind == _SHARDED:
        return _from_sharded(fqn, value)
    if kind == _ASYNC:
        return _from_plain(value.wait())
    if kind == _PROTOCOL:
        return _from_protocol(fqn, value)
    raise PlanError(
        f"tensor {fqn!r} is a {type(value).__name__}, a subclass made of inner tensors; store those "
        "under names of their own, or implement __create_write_items__, __create_chunk_list__ and "
        "__get_tensor_shard__",
        fqn=fqn,
    )


@dataclass(frozen=True, eq=False)
class LocalTensors:
    """All tensors of one rank, columns as in `dcp.planners.columns.SaveColumns`.

    ``item_sources`` indexes ``sources`` (plain local tensors; they may require grad, so copy under no_grad).
    ``item_replicated`` is 1 where another rank may hold the same box. ``pointers`` is the address of each
    source. ``objects`` are the values that are no tensors.
    """

    fqns: tuple[str, ...]
    dtype_codes: npt.NDArray[np.uint8]
    requires_grad: npt.NDArray[np.uint8]
    shape_start: Int64
    shape_values: Int64
    item_tensors: Int64
    item_offsets: Int64
    item_sizes: Int64
    item_local_offsets: Int64
    item_sources: Int64
    item_sharded: npt.NDArray[np.uint8]
    item_replicated: npt.NDArray[np.uint8]
    sources: list[torch.Tensor]
    pointers: Int64
    objects: dict[str, Any]
    stride_orders: dict[int, tuple[int, ...]]

    @cached_property
    def box_start(self) -> Int64:
        """Positions of the items' boxes."""
        return starts(np.diff(self.shape_start)[self.item_tensors])


@dataclass(eq=False)
class _Builder:
    loading: bool = False
    fqns: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    requires_grad: list[bool] = field(default_factory=list)
    ndims: list[int] = field(default_factory=list)
    shapes: list[int] = field(default_factory=list)
    item_tensors: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    local_offsets: list[int] = field(default_factory=list)
    item_sources: list[int] = field(default_factory=list)
    sharded: list[bool] = field(default_factory=list)
    replicated: list[bool] = field(default_factory=list)
    sources: list[torch.Tensor] = field(default_factory=list)
    pointers: list[int] = field(default_factory=list)
    objects: dict[str, Any] = field(default_factory=dict)
    stride_orders: dict[int, tuple[int, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add_plain(self, fqn: str, tensor: torch.Tensor) -> None:
        shape = tensor.shape
        zeros = (0,) * len(shape)
        self.add_one(fqn, tensor, tensor.requires_grad, shape, (zeros, shape, zeros))
        self.sharded.append(False)
        self.replicated.append(True)

    def add_dtensor(self, fqn: str, tensor: DTensor, cache: SpecCache) -> None:
        source, spec = tensor._local_tensor, tensor._spec
        if _KINDS[type(source)] == _PLAIN:
            shape = tensor.shape
            layout = _spec_layout(fqn, spec, shape, cache)
            if layout is None:
                return
            if len(layout.boxes) == 1 and source.shape == layout.local_shape:
                self.add_one(fqn, source, tensor.requires_grad, shape, layout.boxes[0])
                self.sharded.append(True)
                self.replicated.append(layout.replicated)
                return
        self.add(fqn, _from_dtensor(fqn, tensor, cache))

    def add_one(
        self, fqn: str, source: torch.Tensor, requires_grad: bool, shape: tuple[int, ...], box: _AnyBox
    ) -> None:
        """The hot path, a plain local tensor of one box: nothing here that 20,000 tensors would notice."""
        code = DTYPE_CODES.get(source.dtype, 0)
        if source.is_neg() or (code in _COMPLEX and source.is_conj()):
            source = self.resolved(source)
        pointer = source.data_ptr()
        row = len(self.fqns)
        if not (code and pointer):
            self.problems.extend(_unsupported(fqn, source, code, pointer))
        if not source.is_contiguous():
            self.note_strides(row, source)
        self.fqns.append(fqn)
        self.codes.append(code)
        self.requires_grad.append(requires_grad)
        self.ndims.append(len(shape))
        self.shapes.extend(shape)
        self.item_tensors.append(row)
        self.offsets.extend(box[0])
        self.sizes.extend(box[1])
        self.local_offsets.extend(box[2])
        self.item_sources.append(len(self.sources))
        self.sources.append(source)
        self.pointers.append(pointer)

    def add(self, fqn: str, local: LocalTensor | None) -> None:
        if local is None:
            return
        row = len(self.fqns)
        code = DTYPE_CODES.get(local.dtype, 0)
        if not code and not local.pieces:
            self.problems.append(f"{fqn!r}: dtype {local.dtype} cannot be stored")
        self.fqns.append(fqn)
        self.codes.append(code)
        self.requires_grad.append(local.requires_grad)
        self.ndims.append(len(local.shape))
        self.shapes.extend(local.shape)
        previous = None
        for source, box in local.pieces:
            if source is not previous:
                self.add_source(fqn, row, source, local.dtype)
                previous = source
            self.item_tensors.append(row)
            self.offsets.extend(box.offsets)
            self.sizes.extend(box.sizes)
            self.local_offsets.extend(box.local_offsets)
            self.item_sources.append(len(self.sources) - 1)
            self.sharded.append(local.sharded)
            self.replicated.append(local.replicated)

    def add_source(self, fqn: str, row: int, source: torch.Tensor, dtype: torch.dtype) -> None:
        if _KINDS[type(source)] != _PLAIN:
            self.problems.append(f"{fqn!r}: its local part is a {type(source).__name__}, not a plain tensor")
            self.sources.append(source)
            self.pointers.append(0)
            return
        if source.dtype != dtype:
            self.problems.append(f"{fqn!r}: its local part is {source.dtype}, the tensor {dtype}")
        if source.is_neg() or source.is_conj():
            source = self.resolved(source)
        code, pointer = DTYPE_CODES.get(source.dtype, 0), source.data_ptr()
        if not (code and pointer):
            self.problems.extend(_unsupported(fqn, source, code, pointer))
        if not source.is_contiguous():
            self.note_strides(row, source)
        self.sources.append(source)
        self.pointers.append(pointer)

    def resolved(self, view: torch.Tensor) -> torch.Tensor:
        """A lazily conjugated or negated view by value; to load into, the view itself, which copies heed."""
        return view if self.loading else view.detach().resolve_conj().resolve_neg()

    def note_strides(self, row: int, tensor: torch.Tensor) -> None:
        """Remember the order of dimensions in memory where a tensor is dense but not C-ordered."""
        strides = tensor.stride()
        order = tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))
        if order != tuple(range(tensor.ndim)) and tensor.permute(order).is_contiguous():
            self.stride_orders[row] = order

    def finish(self, purpose: Literal["save", "load"]) -> LocalTensors:
        if self.problems:
            shown = self.problems[:_MAX_LISTED]
            more = len(self.problems) - len(shown)
            raise PlanError(
                f"tensors that cannot be {'saved' if purpose == 'save' else 'loaded into'}: "
                + "; ".join(shown)
                + (f"; and {more} more" if more else ""),
                problems=shown,
            )
        return LocalTensors(
            fqns=tuple(self.fqns),
            dtype_codes=np.array(self.codes, np.uint8),
            requires_grad=np.array(self.requires_grad, np.uint8),
            shape_start=starts(self.ndims),
            shape_values=np.array(self.shapes, np.int64),
            item_tensors=np.array(self.item_tensors, np.int64),
            item_offsets=np.array(self.offsets, np.int64),
            item_sizes=np.array(self.sizes, np.int64),
            item_local_offsets=np.array(self.local_offsets, np.int64),
            item_sources=np.array(self.item_sources, np.int64),
            item_sharded=np.array(self.sharded, np.uint8),
            item_replicated=np.array(self.replicated, np.uint8),
            sources=self.sources,
            pointers=np.array(self.pointers, np.int64),
            objects=self.objects,
            stride_orders=self.stride_orders,
        )


def _unsupported(fqn: str, tensor: torch.Tensor, code: int, pointer: int) -> list[str]:
    if not code:
        advice = "dequantize it" if tensor.is_quantized else "convert it to a supported dtype"
        return [f"{fqn!r}: dtype {tensor.dtype} cannot be stored; {advice} first"]
    if pointer or not tensor.numel():
        return []
    if tensor.is_meta:
        return [f"{fqn!r}: on the meta device, there are no values; materialise it with to_empty() first"]
    return [f"{fqn!r}: its memory was freed (resized storage); gather or reshard the parameters first"]


def _no_memory(fqn: str, value: Any, error: RuntimeError) -> str:
    if isinstance(value, torch.Tensor) and value.layout != torch.strided:
        return f"{fqn!r}: layout {value.layout} cannot be stored; call to_dense(), or store its parts"
    return f"{fqn!r}: a {type(value).__name__} without memory of its own ({str(error).splitlines()[0]})"


def collect_tensors(
    state_dict: Mapping[str, Any], *, purpose: Literal["save", "load"] = "save"
) -> LocalTensors:
    """Columns of a flat state dict, in its order.

    Raises PlanError naming every tensor that cannot be stored (sparse, quantized, meta, freed, unknown dtype)
    and what to do about it.
    """
    builder, kinds = _Builder(loading=purpose == "load"), _KINDS
    cache: SpecCache = {}
    for fqn, value in state_dict.items():
        kind = kinds[type(value)]
        if kind == _OBJECT:
            builder.objects[fqn] = value
            continue
        try:
            if kind == _PLAIN:
                builder.add_plain(fqn, value)
            elif kind == _DTENSOR:
                builder.add_dtensor(fqn, value, cache)
            else:
                builder.add(fqn, local_tensor(fqn, value, cache))
        except PlanError as error:
            builder.problems.append(str(error))
        except RuntimeError as error:
            # torch refuses the address of sparse, fake and functional tensors with a bare RuntimeError
            builder.problems.append(_no_memory(fqn, value, error))
    return builder.finish(purpose)
