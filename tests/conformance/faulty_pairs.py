"""Minimal saves and loads with publicly reported faults, with torch's real parallelism."""

from __future__ import annotations

import os
import signal
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

__all__ = [
    "load_full",
    "load_fused",
    "load_weights_alone",
    "save_and_die",
    "save_by_blocks",
    "save_full_in_order_of_the_mesh",
    "save_later_without_a_copy",
    "save_weights_alone",
]

State = dict[str, Any]


def _module(state: State) -> nn.Module:
    module = state["model"].module
    assert isinstance(module, nn.Module)
    return module


def _write(checkpoint_id: str, values: Any) -> None:
    """Write the values of rank 0 for all ranks."""
    if dist.get_rank() == 0:
        torch.save(values, f"{checkpoint_id}.pt")
    dist.barrier()


def _read(checkpoint_id: str) -> Any:
    return torch.load(f"{checkpoint_id}.pt", weights_only=True)


# -- pytorch/pytorch#129206: shards of FSDP2 over tensor parallelism are joined in the order of the mesh -----


def save_full_in_order_of_the_mesh(state: State, *, checkpoint_id: str) -> None:
    """Join shards as if the first mesh dimension had sharded first."""
    full = {}
    for name, tensor in _module(state).state_dict().items():
        if isinstance(tensor, DTensor):
            plain = [Shard(p.dim) if hasattr(p, "dim") else p for p in tensor.placements]
            tensor = DTensor.from_local(tensor.to_local(), tensor.device_mesh, plain).full_tensor()
        full[name] = tensor
    _write(checkpoint_id, full)


def load_full(state: State, *, checkpoint_id: str) -> None:
    """Load correctly."""
    found = _read(checkpoint_id)
    for name, tensor in _module(state).state_dict().items():
        if isinstance(tensor, DTensor):
            tensor.copy_(distribute_tensor(found[name], tensor.device_mesh, tensor.placements))
        else:
            tensor.copy_(found[name])


# -- NVIDIA/Megatron-LM#4841: fused weights are joined by rank, and split again by rows ----------------------


def save_by_blocks(state: State, *, checkpoint_id: str) -> None:
    """Concatenate the ranks' parts: gate and up projections of each rank in turn."""
    weight = _module(state).get_parameter("gate_up").detach()
    parts = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, weight.contiguous())
    _write(checkpoint_id, torch.cat(parts))


def load_fused(state: State, *, checkpoint_id: str) -> None:
    """Copy this rank's rows of the saved tensor."""
    weight = _module(state).get_parameter("gate_up").detach()
    weight.copy_(_read(checkpoint_id).chunk(dist.get_world_size())[dist.get_rank()])


# -- others --------------------------------------------------------------------------------------------------


def save_weights_alone(state: State, *, checkpoint_id: str) -> None:
    """Save weights, and the optimizer under a name that the load does not use."""
    optimizer = state["optimizer"].optimizer.state_dict()
    _write(checkpoint_id, {"model": _module(state).state_dict(), "optimizer_states": optimizer})


def load_weights_alone(state: State, *, checkpoint_id: str) -> None:
    """Load the optimizer under another name, and skip it if missing."""
    found = _read(checkpoint_id)
    _module(state).load_state_dict(found["model"])
    if "optimizer" in found:
        state["optimizer"].optimizer.load_state_dict(found["optimizer"])


class _Later(Future[None]):
    """Future that writes only when its result is requested."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self._write = write

    def result(self, timeout: float | None = None) -> None:
        """Write the current values of the tensors."""
        self._write()


def save_later_without_a_copy(state: State, *, checkpoint_id: str) -> Future[None]:
    """Save later from the tensors themselves, without a copy."""
    values = {"model": _module(state).state_dict(), "optimizer_states": {}}
    return _Later(lambda: _write(checkpoint_id, values))


def save_and_die(state: State, *, checkpoint_id: str) -> None:
    """Kill rank 1 while the others wait for it."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
