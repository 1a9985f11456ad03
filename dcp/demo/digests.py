"""Fingerprints of full tensors, to compare them bit for bit across numbers of ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dcp.planners.flatten import flatten_state_dict

__all__ = ["digest_of", "digests_of_state"]


def digest_of(value: Any) -> str:
    """Compute SHA-256 of a tensor's dtype, shape and bytes, or of another value's type and repr."""
    if not isinstance(value, torch.Tensor):
        return hashlib.sha256(f"{type(value).__name__} {value!r}".encode()).hexdigest()
    full = value.detach().contiguous()
    digest = hashlib.sha256(f"{full.dtype} {tuple(full.shape)} ".encode())
    digest.update(full.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def digests_of_state(state_dict: dict[str, Any]) -> dict[str, str]:
    """Compute digests by the names of the entries in a checkpoint; those under `dcp.PerRank` of all ranks.

    Sharded tensors are gathered: all ranks have to call together.
    """
    rank = dist.get_rank()
    flat, _ = flatten_state_dict(state_dict, rank=rank)
    own: dict[str, str] = {}
    for name in sorted(flat):
        value = flat[name]
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if full is value or rank == 0:  # what was gathered is the same on all ranks
            own[name] = digest_of(full)
    found: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, own)
    return {name: digest for part in reversed(found) for name, digest in part.items()}
