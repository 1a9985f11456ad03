"""Deterministic contents for state dicts of any kind, and their comparison byte by byte.

`fill` writes into every tensor of a state dict its part of a full tensor. The full tensor depends only on
name, shape and dtype, so any rank of any world knows the expected values without a second checkpoint. Slices
are computed from the definition of placements, without the planners' code and without torch's.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

Parts = list[torch.Tensor]


def full_tensor(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the full contents for ``name``: pseudo-random bytes (0 and 1 for bool)."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == torch.bool:
        return torch.from_numpy(generator.integers(0, 2, count, dtype=np.uint8)).view(dtype).reshape(shape)
    size = count * torch.empty(0, dtype=dtype).element_size()
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(generator.integers(0, 256, size, dtype=np.uint8)).view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    """Return the elements of a plain tensor as C-ordered bytes."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, leaf) of nested mappings, lists and tuples."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from leaves(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for position, entry in enumerate(value):
            yield from leaves(entry, f"{name}.{position}" if name else str(position))
    else:
        yield name, value


def _chunk(length: int, parts: int, part: int) -> tuple[int, int]:
    """Return (begin, end) of a part, by the rule of `torch.chunk`: equal parts, the last smaller or empty."""
    step = -(-length // parts)
    return min(part * step, length), min((part + 1) * step, length)


def _rows(size: int, dim: int, tensor: DTensor) -> tuple[int, int]:
    """Return (begin, end) of this rank's part of a tensor dimension."""
    coordinate, placements = tensor.device_mesh.get_coordinate(), tensor.placements
    if coordinate is None:
        return 0, 0
    sharding = [axis for axis, placement in enumerate(placements) if getattr(placement, "dim", None) == dim]
    # a strided shard is cut after the placements on its right: FSDP cuts the shards of tensor parallelism
    strided = [axis for axis in sharding if isinstance(placements[axis], _StridedShard)]
    begin, end = 0, size
    for axis in [axis for axis in sharding if axis not in strided] + strided:
        first, last = _chunk(end - begin, tensor.device_mesh.size(axis), coordinate[axis])
        begin, end = begin + first, begin + last
    return begin, end


def expected_parts(name: str, value: torch.Tensor) -> Parts:
    """Return the expected local parts of ``value`` with the name ``name``."""
    full = full_tensor(name, tuple(value.shape), value.dtype)
    if isinstance(value, ShardedTensor):
        parts = []
        for shard in value.local_shards():
            part = full
            places = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
            for dim, (begin, size) in enumerate(places):
                part = part.narrow(dim, begin, size)
            parts.append(part)
        return parts
    if isinstance(value, DTensor):
        part = full
        for dim, size in enumerate(value.shape):
            begin, end = _rows(size, dim, value)
            part = part.narrow(dim, begin, end - begin)
        return [part]
    return [full]


def local_parts(value: torch.Tensor) -> Parts:
    """Return the plain tensors that hold this rank's part of ``value``."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor.detach() for shard in value.local_shards()]
    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            raise ValueError(f"no deterministic contents for {value.placements}")
        return [value.to_local().detach()]
    return [value.detach()]


def fill(state: Any) -> Any:
    """Give every tensor of ``state`` the contents for its name; return ``state``."""
    for name, value in leaves(state):
        if isinstance(value, torch.Tensor):
            for part, wanted in zip(local_parts(value), expected_parts(name, value), strict=True):
                put(part, wanted)
    return state


def put(part: torch.Tensor, wanted: torch.Tensor) -> None:
    """Copy ``wanted`` into ``part``; also for dtypes that torch cannot copy."""
    if part.is_contiguous() and not part.is_conj() and not part.is_neg():
        ctypes.memmove(part.data_ptr(), raw(wanted), part.nbytes)
    else:
        part.copy_(wanted)


def scrub(state: Any) -> Any:
    """Overwrite every local tensor of ``state`` with zeros, which `fill` never gives a tensor with
    elements."""
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor):
            for part in local_parts(value):
                if part.numel():
                    zeros = torch.from_numpy(np.zeros(part.nbytes, np.uint8))
                    put(part, zeros.view(part.dtype).view(part.shape))
    return state


def differences(state: Any) -> list[str]:
    """Return the names of tensors in ``state`` that differ from `fill`."""
    different = []
    for name, value in leaves(state):
        if not isinstance(value, torch.Tensor):
            continue
        pairs = list(zip(local_parts(value), expected_parts(name, value), strict=True))
        if any(raw(part) != raw(wanted) for part, wanted in pairs):
            different.append(name)
    return different
