"""Plain tensors of a model and an optimizer on this rank, with their elements of the whole tensors.

Tensors come from parameters, buffers and optimizer state, and positions from placements, without the state
dicts under test. Test values are finite hashes of position, tensor, rank and save, cut to the bits of the
dtype. With few bits, `gram_width` neighbours identify a position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dcp.storage.errors import OptionError
from dcp.storage.torch_compat import FlatSlice, StridedShard, flat_slices

Bits = npt.NDArray[Any]
"""Elements as unsigned integers of their size; a complex element is two integers."""

_FLOATS: Final = {
    torch.float64: (11, 52),
    torch.float32: (8, 23),
    torch.float16: (5, 10),
    torch.bfloat16: (8, 7),
    torch.float8_e4m3fn: (4, 3),
    torch.float8_e5m2: (5, 2),
    torch.complex128: (11, 52),
    torch.complex64: (8, 23),
    torch.complex32: (5, 10),
}
"""Number of exponent and fraction bits by dtype."""

_KNOWN_BITS: Final = 40
"""Number of bits with which values of a few million elements rarely repeat."""

_STEP, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Identity(NamedTuple):
    """Owner of test values: tensor ``name``, ``rank`` if one rank's own, and ``moment``."""

    name: str
    rank: int | None
    moment: str


def _hashes(of: Identity, index: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Compute SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    text = f"{of.moment}\0{'' if of.rank is None else of.rank}\0{of.name}".encode()
    seed = np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), "<u8")
    mixed = seed + index.astype(np.uint64) * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    return np.asarray(mixed ^ (mixed >> np.uint64(31)))


def _width(dtype: torch.dtype) -> int:
    """Return the bytes of one unsigned integer."""
    size = torch.empty(0, dtype=dtype).element_size()
    return size // 2 if dtype.is_complex else size


def bits_per_value(dtype: torch.dtype) -> int:
    """Count the free bits of a value."""
    if dtype in _FLOATS:
        return _FLOATS[dtype][1] + 3
    return 1 if dtype == torch.bool else 8 * _width(dtype) - 1


def gram_width(dtype: torch.dtype) -> int:
    """Count the neighbours that identify a position."""
    return -(-_KNOWN_BITS // bits_per_value(dtype))


def coded_bits(of: Identity, index: npt.NDArray[np.int64], dtype: torch.dtype) -> Bits:
    """Compute the values of the elements ``index`` (row-major places in the whole tensor), as bits."""
    if dtype.is_complex:
        index = np.stack([2 * index, 2 * index + 1], -1).reshape(-1)
    hashes = _hashes(of, index)
    if dtype in _FLOATS:
        exponent, fraction = _FLOATS[dtype]
        around_one = np.uint64((1 << (exponent - 1)) - 3) + (hashes >> np.uint64(62))
        sign = (hashes >> np.uint64(61) & np.uint64(1)) << np.uint64(exponent + fraction)
        found = sign | around_one << np.uint64(fraction) | hashes & np.uint64((1 << fraction) - 1)
    else:
        found = hashes & np.uint64((1 << bits_per_value(dtype)) - 1)
    narrow: Bits = found.astype(f"u{_width(dtype)}")
    return narrow


def number_of(of: Identity) -> float:
    """Compute a small positive unique value for a setting, such as a learning rate."""
    return float(_hashes(of, np.zeros(1, np.int64))[0] >> np.uint64(40)) / 2**30


def bits_of(tensor: torch.Tensor) -> Bits:
    """Return the elements of a plain tensor in C order, as bits."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    found: Bits = plain.view(torch.uint8).numpy().view(f"u{_width(plain.dtype)}")
    return found


def write_bits(tensor: torch.Tensor, bits: Bits) -> None:
    """Set the elements of a plain tensor."""
    if tensor.numel():
        made = torch.from_numpy(bits.view(np.uint8).copy()).view(tensor.dtype).reshape(tensor.shape)
        with torch.no_grad():
            tensor.detach().copy_(made)


StatePart = Literal["model", "optimizer"]

_WRAPPERS: Final = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Wrapper modules (torch.compile, activation checkpointing, FSDP1) that state dicts omit from names."""


class Whole(NamedTuple):
    """The whole tensor of a plain tensor: ``name``, ``shape`` and ``places``.

    ``places`` has the shape of the part and contains row-major positions in the whole tensor.
    """

    name: str
    shape: tuple[int, ...]
    places: torch.Tensor


PartOf: TypeAlias = Callable[[str, torch.Tensor, int, int], Whole | None]
"""``part_of(name, tensor, rank, world)``; returns None for a whole tensor."""


@dataclass(frozen=True, eq=False)
class LiveTensor:
    """A plain tensor of this rank: all of ``name``, or the elements ``index`` of a tensor of ``shape``.

    ``fqn`` is the parameter or buffer. ``is_alone``: no placement connects the tensor with other ranks.
    """

    part: StatePart
    name: str
    fqn: str
    local: torch.Tensor
    shape: tuple[int, ...]
    index: npt.NDArray[np.int64]
    is_alone: bool


def clean_name(name: str, model: nn.Module) -> str:
    """Remove wrapper prefixes from a parameter's name."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    if isinstance(model, DistributedDataParallel | DataParallel) and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def parameter_names(model: nn.Module) -> dict[torch.Tensor, str]:
    """Return the first name of each parameter."""
    found: dict[torch.Tensor, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, clean_name(name, model))
    return found


def tensors_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, part_of: PartOf, rank: int, world: int
) -> list[LiveTensor]:
    """List all tensors that a checkpoint must contain: parameters, persistent buffers, optimizer state.

    Raises OptionError for tensors with unknown positions.
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
"""Parts by flat parameter or view, with their ``offset`` in the parameter."""


def _flat_parts(model: nn.Module) -> _FlatParts:
    """List the parts of FSDP1's flat parameters; empty without FSDP1.

    Raises OptionError for flat parameters under tensor parallelism, whose elements are unknown.
    """
    if not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return {}
    slices = flat_slices(model)
    if slices is None:
        raise OptionError(
            f"cannot inspect the flat parameters of FullyShardedDataParallel in torch {torch.__version__}: "
            "use fully_shard (FSDP2), or another version of torch"
        )
    names = {module: clean_name(name, model) for name, module in model.named_modules()}
    found: dict[torch.Tensor, list[FlatSlice]] = {}
    for one in slices:
        name = ".".join(filter(None, (names[one.module], one.name)))
        if not one.is_whole:
            raise OptionError(
                f"{name}: FullyShardedDataParallel with tensor parallelism hides the elements of each rank: "
                "use fully_shard (FSDP2)"
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
    """Yield optimizer state such as ".exp_avg"; state of a flat parameter is divided into its parts."""
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
    """Return the plain tensors of ``tensor``."""
    local = tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
    if isinstance(tensor, DTensor) and not (
        any(placement.is_partial() for placement in tensor.placements) or hasattr(local, "__tensor_flatten__")
    ):
        yield _shard(part, name, fqn, tensor, local)
    elif hasattr(local, "__tensor_flatten__"):
        for attribute in local.__tensor_flatten__()[0]:
            yield from _parts(part, f"{name}.{attribute}", fqn, getattr(local, attribute))
    else:  # positions of pending partial values are unknown, so they count as this rank's own
        index = np.arange(local.numel(), dtype=np.int64)
        yield LiveTensor(part, name, fqn, local, tuple(local.shape), index, is_alone=True)


def _shard(part: StatePart, name: str, fqn: str, tensor: DTensor, local: torch.Tensor) -> LiveTensor:
    index = _places(tensor)
    if index.shape != tuple(local.shape):
        raise OptionError(
            f"{name} has shape {tuple(local.shape)} on this rank, but {tensor.placements} of "
            f"{tuple(tensor.shape)} has {tuple(index.shape)}: the elements of the shard are unknown"
        )
    return LiveTensor(part, name, fqn, local, tuple(tensor.shape), index.reshape(-1), is_alone=False)


def _places(tensor: DTensor) -> npt.NDArray[np.int64]:
    """Return row-major positions of this rank's elements in the whole tensor, from its placements."""
    index = torch.arange(tensor.numel()).view(tensor.shape)
    coordinate = tensor.device_mesh.get_coordinate()
    shards = [
        (isinstance(placement, StridedShard), axis, int(placement.dim))
        for axis, placement in enumerate(tensor.placements)
        if hasattr(placement, "dim")
    ]
    # a strided shard is split after the placements to its right, as FSDP splits shards of tensor parallelism
    for _, axis, dim in sorted(shards, key=lambda shard: (shard[0], -shard[1] if shard[0] else shard[1])):
        size = index.shape[dim]
        step = -(-size // tensor.device_mesh.size(axis))
        begin = size if coordinate is None else min(coordinate[axis] * step, size)
        index = index.narrow(dim, begin, min(step, size - begin))
    if coordinate is None and not shards:
        index = index[:0]
    return index.numpy()
