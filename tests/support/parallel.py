"""Small models under every kind of parallelism available on CPU ranks, with an optimizer that has state.

Each recipe is a function ``(world_size) -> Training``: it builds the model, distributes it over the default
process group, and takes real AdamW steps, so that the optimizer has the state of a real training. Gradients
are set by hand: torch's tensor parallelism can checkpoint uneven shards, but cannot run their forward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DataParallel, DistributedDataParallel

__all__ = ["RECIPES", "Block", "Training", "adamw", "pipeline"]


class Block(nn.Module):
    """Two linear layers around a norm; an odd ``hidden`` makes every sharding uneven."""

    def __init__(self, width: int = 10, hidden: int = 13) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.second = nn.Linear(hidden, width, bias=False)
        self.register_buffer("steps_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the block's output for a batch."""
        hidden: torch.Tensor = self.norm(self.first(batch))
        output: torch.Tensor = self.second(torch.relu(hidden))
        return output


@dataclass
class Training:
    """A model and the optimizer that trains it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return an AdamW after two steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for number in (1, 2):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 0.25 * number)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _mesh(*sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def _fsdp1(**options: Any) -> nn.Module:
    with warnings.catch_warnings():  # torch warns on CPU unless the device is named
        warnings.simplefilter("ignore", FutureWarning)
        device = torch.device("cpu")
        return FullyShardedDataParallel(Block(), device_id=device, use_orig_params=True, **options)


def _fsdp2(mesh: DeviceMesh, model: nn.Module | None = None, *layers: str) -> nn.Module:
    model = model or Block()
    for layer in layers:
        fully_shard(model.get_submodule(layer), mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(Block(), mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


def _fsdp2_tensor_parallel(world_size: int) -> nn.Module:
    mesh = _mesh(2, world_size // 2, names=("dp", "tp"))  # strided shards, and uneven ones
    return _fsdp2(mesh["dp"], _tensor_parallel(mesh["tp"]), "first")


def _hybrid(world_size: int) -> DeviceMesh:
    return _mesh(2, world_size // 2, names=("replicate", "shard"))


def _fsdp1_hybrid(world_size: int) -> nn.Module:
    strategy = ShardingStrategy.HYBRID_SHARD
    return _fsdp1(device_mesh=_hybrid(world_size), sharding_strategy=strategy)


def _frozen(world_size: int) -> nn.Module:
    model = Block()
    model.first.requires_grad_(False)
    return _fsdp2(_mesh(world_size), model)


def _stages(world_size: int) -> nn.Module:
    return nn.ModuleDict({f"stage{dist.get_rank()}": Block(hidden=4 + dist.get_rank())})


def pipeline(world_size: int) -> Training:
    """Build pipeline stages: every rank has layers and names of its own."""
    return _trained(_stages, world_size)


def _trained(build: Callable[[int], nn.Module], world_size: int) -> Training:
    model = build(world_size)
    return Training(model, adamw(model))


_MODELS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "plain": (lambda _: Block(), (1, 2)),
    "fsdp1": (lambda _: _fsdp1(), (1, 2, 3, 4)),
    "fsdp2": (lambda world: _fsdp2(_mesh(world), None, "first"), (1, 2, 3, 4)),
    "ddp": (lambda _: DistributedDataParallel(Block()), (2, 4)),
    # The names begin with "module."; torch's helpers remove this prefix for DistributedDataParallel only.
    "data_parallel": (lambda _: DataParallel(Block()), (1, 2)),
    "tensor_parallel": (lambda world: _tensor_parallel(_mesh(world)), (2, 3, 4)),
    "fsdp2_tensor_parallel": (_fsdp2_tensor_parallel, (2, 4)),
    "hybrid_sharded": (lambda world: _fsdp2(_hybrid(world)), (2, 4)),
    "fsdp1_hybrid": (_fsdp1_hybrid, (4,)),
    "frozen": (_frozen, (2, 4)),
    "pipeline": (_stages, (2, 3)),
}
RECIPES: dict[str, tuple[Callable[[int], Training], tuple[int, ...]]] = {
    name: (partial(_trained, build), worlds) for name, (build, worlds) in _MODELS.items()
}
"""Recipes by name, each with its world sizes."""
