"""Deterministic contents for state dicts of any kind, and their comparison byte by byte.

`fill` writes into every tensor of a state dict the part of a full tensor that only its name, shape and dtype
determine. So any rank of any world knows what must be loaded without another checkpoint to compare with. The
slicing here is written from what a placement means, not with the code of the planners, nor with torch's.
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
    """The full contents that stand for ``name``: pseudo-random bytes (0 and 1 for bool)."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    count = int(np.prod(shape, dtype=np.int64))
    if dtype == torch.bool:
        return torch.from_numpy(generator.integers(0, 2, count, dtype=np.uint8)).view(dtype).reshape(shape)
    size = count * torch.empty(0, dtype=dtype).element_size()
    if size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(generator.integers(0, 256, size, dtype=np.uint8)).view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    """The elements of a plain tensor as C-ordered bytes."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, leaf) of nested mappings, lists and tuples."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from leaves(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        for position, entry in enumerate(value):
            yield from leaves(entry, f"{name}.{position}" if name else str(position))
    else:
        yield name, value


def _chunk(length: int, parts: int, part: int) -> tuple[int, int]:
    """(begin, end) of one part, by the rule of `torch.chunk`: equal parts, the last smaller or empty."""
    step = -(-length // parts)
    return min(part * step, length), min((part + 1) * step, length)


def _rows(size: int, dim: int, tensor: DTensor) -> tuple[int, int]:
    """(begin, end) of what this rank holds of one tensor dimension."""
    coordinate, placements = tensor.device_mesh.get_coordinate(), tensor.placements
    if coordinate is None:
        return 0, 0
    sharding = [axis for axis, placement in enumerate(placements) if getattr(placement, "dim", None) == dim]
    # a strided shard is one that was cut after those on its right, as FSDP cuts what tensor parallelism left
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
    """The plain tensors that hold this rank's part of ``value``."""
    if isinstance(value, ShardedTensor):
        return [shard.tensor.detach() for shard in value.local_shards()]
    if isinstance(value, DTensor):
        if any(placement.is_partial() for placement in value.placements):
            raise ValueError(f"no deterministic contents for {value.placements}")
        return [value.to_local().detach()]
    return [value.detach()]


def fill(state: Any) -> Any:
    """Give every tensor of ``state`` the contents its name stands for; returns ``state``."""
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
    """Overwrite every local tensor of ``state`` with zeros, which `fill` never gives a tensor of some
    size."""
    for _, value in leaves(state):
        if isinstance(value, torch.Tensor):
            for part in local_parts(value):
                if part.numel():
                    zeros = torch.from_numpy(np.zeros(part.nbytes, np.uint8))
                    put(part, zeros.view(part.dtype).view(part.shape))
    return state


def differences(state: Any) -> list[str]:
    """The names of tensors in ``state`` that do not hold what `fill` would have given them."""
    different = []
    for name, value in leaves(state):
        if not isinstance(value, torch.Tensor):
            continue
        pairs = list(zip(local_parts(value), expected_parts(name, value), strict=True))
        if any(raw(part) != raw(wanted) for part, wanted in pairs):
            different.append(name)
    return different
