"""Fingerprints of full tensors: what is compared, bit for bit, across numbers of ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dcp.planners.flatten import flatten_state_dict

__all__ = ["digest_of", "digests_of_state"]


def digest_of(value: Any) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes, or of another value's type and repr.

    A sharded tensor is gathered: all ranks have to call together.
    """
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(f"{type(value).__name__} {value!r}".encode()).hexdigest()
    full = value.full_tensor() if isinstance(value, DTensor) else value
    full = full.detach().contiguous()
    digest = hashlib.sha256(f"{full.dtype} {tuple(full.shape)} ".encode())
    digest.update(full.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digests_of_state(state_dict: dict[str, Any]) -> dict[str, str]:
    """Digests by the names that a checkpoint gives to the entries; those under `dcp.PerRank` of all ranks."""
    flat, _ = flatten_state_dict(state_dict, rank=dist.get_rank())
    found: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, {name: digest_of(flat[name]) for name in sorted(flat)})
    return {name: digest for part in reversed(found) for name, digest in part.items()}
