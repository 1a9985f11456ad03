"""Plain tensors of a model and its optimizer on this rank, with the elements of the whole that they hold.

They are taken from parameters, buffers and the optimizer's own state, not from state dicts, and places follow
from the meaning of placements: the code under test must not judge itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dcp.storage.errors import OptionError
from dcp.storage.torch_compat import FlatSlice, StridedShard, flat_slices

__all__ = ["LiveTensor", "PartOf", "StatePart", "Whole", "clean_name", "parameter_names", "tensors_of"]

StatePart = Literal["model", "optimizer"]

_WRAPPERS: Final = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Modules of torch.compile, of activation checkpointing and of FSDP1, which no state dict names."""


class Whole(NamedTuple):
    """The whole that a plain tensor is a part of: its ``name`` and ``shape``, and in ``places``, which has
    the part's shape, the row-major place there of each of the part's elements."""

    name: str
    shape: tuple[int, ...]
    places: torch.Tensor


PartOf: TypeAlias = Callable[[str, torch.Tensor, int, int], Whole | None]
"""``part_of(name, tensor, rank, world)``; None for what is whole."""


@dataclass(frozen=True, eq=False)
class LiveTensor:
    """A plain tensor that this rank has: all of ``name``, or the elements ``index`` of it, which has
    ``shape``. ``fqn`` is the parameter's or buffer's that it belongs to.

    ``is_alone``: nothing says that it is a part of a whole: other ranks may have the same, or another.
    """

    part: StatePart
    name: str
    fqn: str
    local: torch.Tensor
    shape: tuple[int, ...]
    index: npt.NDArray[np.int64]
    is_alone: bool


def clean_name(name: str, model: nn.Module) -> str:
    """Remove the parts of a parameter's name that wrappers add."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if isinstance(model, DistributedDataParallel | DataParallel) and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    """Give the first name of each parameter."""
    found: dict[torch.Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, clean_name(name, model))
    return found


def tensors_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, part_of: PartOf, rank: int, world: int
) -> list[LiveTensor]:
    """List all tensors that a checkpoint has to have: parameters, persistent buffers, optimizer state.

    Raises OptionError for a tensor whose elements of the whole are not known.
    """
    names = parameter_names(model)
    flat = _flat_parts(model)
    found = [
        live for parameter, name in names.items() for live in _of_parameter("model", name, parameter, flat)
    ]
    saved = {clean_name(name, model) for name in model.state_dict()}
    for name, buffer in model.named_buffers():
        cleaned = clean_name(name, model)
        if cleaned in saved:
            found += _parts("model", cleaned, cleaned, buffer)
    for parameter, values in optimizer.state.items() if optimizer is not None else ():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and parameter in names:
                found += _of_state(f".{key}", names[parameter], parameter, value, flat)
    return _as_parts(found, part_of, rank, world)


_FlatParts: TypeAlias = Mapping[torch.Tensor, list[FlatSlice]]
"""Parts by parameter that is flat, or a view of one; their ``offset`` is that in the parameter."""


def _flat_parts(model: nn.Module) -> _FlatParts:
    """List the parts of the flat parameters that FSDP1 makes; none where it wraps no module.

    Raises OptionError where a parameter is flat and divided by tensor parallelism besides: then the flat one
    does not say which elements it has.
    """
    if not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return {}
    slices = flat_slices(model)
    if slices is None:
        raise OptionError(
            f"torch {torch.__version__} does not say what is in the flat parameters of "
            "FullyShardedDataParallel: use fully_shard (FSDP2), or another version of torch"
        )
    names = {module: clean_name(name, model) for name, module in model.named_modules()}
    found: dict[torch.Tensor, list[FlatSlice]] = {}
    for one in slices:
        name = ".".join(filter(None, (names[one.module], one.name)))
        if not one.is_whole:
            raise OptionError(
                f"{name}: FullyShardedDataParallel over tensor parallelism does not say which elements a "
                "rank has: use fully_shard (FSDP2) over it"
            )
        if one.parameter is None:
            found.setdefault(one.flat, []).append(one._replace(name=name))
        else:
            found.setdefault(one.parameter, []).append(one._replace(name=name, offset=0))
    return found


def _of_parameter(
    part: StatePart, name: str, parameter: torch.Tensor, flat: _FlatParts
) -> Iterator[LiveTensor]:
    if parameter not in flat:
        yield from _parts(part, name, name, parameter)
    for one in flat.get(parameter, ()):
        in_memory = torch.empty(int(np.prod(one.shape)), dtype=torch.int64)
        in_memory.as_strided(one.shape, one.strides).copy_(torch.arange(len(in_memory)).view(one.shape))
        index = in_memory[one.begin : one.begin + one.length].numpy()
        local = parameter.detach().view(-1)[one.offset : one.offset + one.length]
        yield LiveTensor(part, one.name, one.name, local, one.shape, index, is_alone=False)


def _of_state(
    suffix: str, name: str, parameter: torch.Tensor, value: torch.Tensor, flat: _FlatParts
) -> Iterator[LiveTensor]:
    """Give state of an optimizer, such as ".exp_avg"; a flat parameter's belongs to all of its parts."""
    inside = flat.get(parameter, [])
    if inside and value.shape == parameter.shape:
        for live in _of_parameter("optimizer", name, value, {value: inside}):
            yield replace(live, name=live.name + suffix)
    else:
        name = inside[0].name if inside else name
        yield from _parts("optimizer", name + suffix, name, value)


def _as_parts(found: Sequence[LiveTensor], part_of: PartOf, rank: int, world: int) -> list[LiveTensor]:
    """Apply ``part_of`` to parameters, and to state of their shape."""
    wholes = {
        live.fqn: part_of(live.fqn, live.local, rank, world)
        for live in found
        if live.part == "model" and live.is_alone and live.name == live.fqn
    }
    made = []
    for live in found:
        whole = wholes.get(live.fqn)
        if whole is not None:
            live = replace(live, name=whole.name + live.name.removeprefix(live.fqn), fqn=whole.name)
            if live.local.shape == whole.places.shape:
                index = whole.places.reshape(-1).numpy()
                live = replace(live, shape=tuple(whole.shape), index=index, is_alone=False)
        made.append(live)
    return made


def _parts(part: StatePart, name: str, fqn: str, tensor: torch.Tensor) -> Iterator[LiveTensor]:
    """Give the plain tensors that ``tensor`` is made of."""
    if isinstance(tensor, DTensor):
        yield from _shard(part, name, fqn, tensor)
    elif hasattr(tensor, "__tensor_flatten__"):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from _parts(part, f"{name}.{attribute}", fqn, getattr(tensor, attribute))
    else:
        index = np.arange(tensor.numel(), dtype=np.int64)
        yield LiveTensor(part, name, fqn, tensor.detach(), tuple(tensor.shape), index, is_alone=True)


def _shard(part: StatePart, name: str, fqn: str, tensor: DTensor) -> Iterator[LiveTensor]:
    local = tensor.to_local().detach()
    is_pending = any(placement.is_partial() for placement in tensor.placements)
    if is_pending or hasattr(local, "__tensor_flatten__"):
        # its elements of the whole are not known, so that it is this rank's own
        for live in _parts(part, name, fqn, local):
            yield LiveTensor(part, live.name, fqn, live.local, live.shape, live.index, is_alone=True)
        return
    index = _places(tensor)
    if index.shape != tuple(local.shape):
        raise OptionError(
            f"{name} has {tuple(local.shape)} on this rank, where {tensor.placements} of "
            f"{tuple(tensor.shape)} are {tuple(index.shape)}: a shard whose elements are not known"
        )
    yield LiveTensor(part, name, fqn, local, tuple(tensor.shape), index.reshape(-1), is_alone=False)


def _places(tensor: DTensor) -> npt.NDArray[np.int64]:
    """Give the row-major places in the whole tensor of this rank's elements, as its placements mean them."""
    index = torch.arange(tensor.numel()).view(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    shards = [
        (isinstance(placement, StridedShard), axis, int(placement.dim))
        for axis, placement in enumerate(tensor.placements)
        if hasattr(placement, "dim")
    ]
    # a strided shard was cut after those on its right, as FSDP cuts what tensor parallelism left
    for _, axis, dim in sorted(shards, key=lambda shard: (shard[0], -shard[1] if shard[0] else shard[1])):
        size = index.shape[dim]
        step = -(-size // tensor.device_mesh.size(axis))
        begin = size if coordinate is None else min(coordinate[axis] * step, size)
        index = index.narrow(dim, begin, min(step, size - begin))
    if coordinate is None and not shards:
        index = index[:0]
    return index.numpy()
