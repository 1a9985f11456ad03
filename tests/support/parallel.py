"""Small models under every kind of parallelism that works on CPU ranks, with an optimizer that has state.

Each recipe is a function ``(world_size) -> Training``: it builds the model, distributes it over the default
process group and takes real AdamW steps, so that the optimizer's state is what a trainer would save. The
gradients are set by hand: torch's tensor parallelism cannot run a forward pass on uneven shards, but it can
be checkpointed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DataParallel, DistributedDataParallel

__all__ = ["RECIPES", "Block", "Training", "adamw"]


class Block(nn.Module):
    """Two linear layers around a norm; ``hidden`` odd makes every sharding of it uneven."""

    def __init__(self, width: int = 10, hidden: int = 13) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.second = nn.Linear(hidden, width, bias=False)
        self.register_buffer("steps_seen", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """The block's output for a batch."""
        hidden: torch.Tensor = self.norm(self.first(batch))
        output: torch.Tensor = self.second(torch.relu(hidden))
        return output


@dataclass
class Training:
    """A model and the optimizer that trains it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """An AdamW that took two steps."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for number in (1, 2):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 0.25 * number)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _trained(model: nn.Module) -> Training:
    return Training(model, adamw(model))


def plain(world_size: int) -> Training:
    """The model as it is."""
    return _trained(Block())


def fsdp1(world_size: int) -> Training:
    """FullyShardedDataParallel, which on CPU wants its device named."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = FullyShardedDataParallel(Block(), device_id=torch.device("cpu"), use_orig_params=True)
    return _trained(model)


def fsdp2(world_size: int) -> Training:
    """`fully_shard` of layers and root."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = Block()
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _trained(model)


def ddp(world_size: int) -> Training:
    """DistributedDataParallel."""
    return _trained(DistributedDataParallel(Block()))


def data_parallel(world_size: int) -> Training:
    """DataParallel, whose names begin with ``module.``: torch's helpers take that off for
    DistributedDataParallel only."""
    return _trained(DataParallel(Block()))


def tensor_parallel(world_size: int) -> Training:
    """`parallelize_module`: columns of the first layer, rows of the second."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = Block()
    parallelize_module(model, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return _trained(model)


def fsdp2_tensor_parallel(world_size: int) -> Training:
    """`fully_shard` over tensor parallelism on a 2-D mesh: strided shards, and uneven ones."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    model = Block()
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(model.first, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return _trained(model)


def hybrid_sharded(world_size: int) -> Training:
    """HSDP: replicas of shards."""
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    model = Block()
    fully_shard(model, mesh=mesh)
    return _trained(model)


def fsdp1_hybrid(world_size: int) -> Training:
    """FullyShardedDataParallel's own hybrid sharding, on a 2-D mesh."""
    from torch.distributed.fsdp import ShardingStrategy

    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = FullyShardedDataParallel(
            Block(),
            device_id=torch.device("cpu"),
            device_mesh=mesh,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            use_orig_params=True,
        )
    return _trained(model)


def frozen(world_size: int) -> Training:
    """`fully_shard` with the first layer frozen."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = Block()
    model.first.requires_grad_(False)
    fully_shard(model, mesh=mesh)
    return _trained(model)


def pipeline(world_size: int) -> Training:
    """Pipeline stages: every rank has layers, and names, of its own."""
    stages = nn.ModuleDict({f"stage{dist.get_rank()}": Block(hidden=4 + dist.get_rank())})
    return _trained(stages)


RECIPES: dict[str, tuple[Callable[[int], Training], tuple[int, ...]]] = {
    "plain": (plain, (1, 2)),
    "fsdp1": (fsdp1, (1, 2, 3, 4)),
    "fsdp2": (fsdp2, (1, 2, 3, 4)),
    "ddp": (ddp, (2, 4)),
    "data_parallel": (data_parallel, (1, 2)),
    "tensor_parallel": (tensor_parallel, (2, 3, 4)),
    "fsdp2_tensor_parallel": (fsdp2_tensor_parallel, (2, 4)),
    "hybrid_sharded": (hybrid_sharded, (2, 4)),
    "fsdp1_hybrid": (fsdp1_hybrid, (4,)),
    "frozen": (frozen, (2, 4)),
    "pipeline": (pipeline, (2, 3)),
}
"""Recipes by name, each with the world sizes it is made for."""
