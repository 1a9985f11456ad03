"""A script that trains with FSDP2 and keeps one file of the whole model and one of the optimizer.

After PyTorch's example of FSDP2: rank 0 writes a file, reads it again, and sends the others their shards.
The optimizer, which has not stepped yet, gets its state by a private name of the state dict helpers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Job:
    """A small model, sharded; AdamW."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self) -> None:
        """Learn something."""
        self.model(torch.ones(2, 8)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self) -> dict[str, Any]:
        """Model and optimizer as one rank alone has them; empty on the other ranks."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return {
            "model": get_model_state_dict(self.model, options=options),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options),
        }

    def take(self, state: dict[str, Any]) -> None:
        """From rank 0 to all."""
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.model, state.get("model", {}), options=options)
        _init_optim_state(self.optimizer)
        set_optimizer_state_dict(self.model, self.optimizer, state.get("optimizer", {}), options=options)


def main(folder: Path) -> dict[str, Any]:
    """Train, save, load into another job; what that has, whole, on rank 0."""
    first, second = Job(seed=0), Job(seed=1)
    first.step()
    state = first.whole()
    if dist.get_rank() == 0:
        torch.save(state, folder / "state.pt")
    dist.barrier()
    second.take(torch.load(folder / "state.pt", weights_only=True) if dist.get_rank() == 0 else {})
    first.step()
    second.step()
    return second.whole()
