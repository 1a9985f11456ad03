"""Models under each parallelism, with new optimizers, for the ranks of `dcp.testing.parallelism`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from dcp.testing.parallelism import Whole

__all__ = [
    "EXPERTS",
    "Built",
    "ddp",
    "expert_of_rank",
    "experts_by_number",
    "experts_renumbered",
    "fsdp1_flat",
    "fsdp2",
    "fsdp2_tensor_parallel",
    "fused_of_rank",
    "gate_up_by_hand",
    "pipeline",
    "tied",
]

Built = tuple[nn.Module, torch.optim.Optimizer | None]

EXPERTS = 6
_PLAN: dict[str, Any] = {"first": ColwiseParallel(), "second": RowwiseParallel()}


class Block(nn.Module):
    """Module with sizes uneven for some worlds, a buffer, and a bool tensor."""

    first: nn.Module

    def __init__(self, hidden: int = 12, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.first = nn.Linear(10, hidden)
        self.norm = nn.LayerNorm(hidden, dtype=dtype)
        self.second = nn.Linear(hidden, 10, bias=False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(70, dtype=torch.bool))


def _with_optimizer(model: nn.Module) -> Built:
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def ddp(rank: int, world: int) -> Built:
    """Return a DistributedDataParallel model; on one rank the plain model."""
    model = Block()
    return _with_optimizer(DistributedDataParallel(model) if world > 1 else model)


def fsdp2(rank: int, world: int) -> Built:
    """Return a model with `fully_shard` of a layer and the root."""
    mesh = init_device_mesh("cpu", (world,))
    model = Block()
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _with_optimizer(model)


def _fully_sharded(model: nn.Module, **options: Any) -> nn.Module:
    """Return an FSDP1 model; FSDP1 on CPU needs a device id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def fsdp1_flat(rank: int, world: int) -> Built:
    """Return an FSDP1 model with defaults: modules and optimizer have flat parameters."""
    model = Block(dtype=torch.float32)
    model.first = _fully_sharded(model.first)
    return _with_optimizer(_fully_sharded(model))


def fsdp2_tensor_parallel(rank: int, world: int) -> Built:
    """Return a model with `fully_shard` over tensor parallelism, which gives strided shards."""
    mesh = init_device_mesh("cpu", (max(1, world // 2), min(2, world)), mesh_dim_names=("dp", "tp"))
    model = Block()
    parallelize_module(model, mesh["tp"], _PLAN)
    fully_shard(model.first, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return _with_optimizer(model)


def pipeline(rank: int, world: int) -> Built:
    """Return this rank's stages of four, distributed in turn."""
    stages = {f"stage{n}": Block(hidden=4 + n) for n in range(4) if n % world == rank}
    return _with_optimizer(nn.ModuleDict(stages))


def _experts() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(5, 4) for _ in range(EXPERTS)]


def _router() -> nn.Linear:
    """Return a router with rank 0's weights on all ranks."""
    router = nn.Linear(5, EXPERTS)
    for parameter in router.parameters():
        dist.broadcast(parameter.data, 0)
    return router


def experts_by_number(rank: int, world: int) -> Built:
    """Return this rank's experts under their global numbers, and a router that all ranks have."""
    count = EXPERTS // world
    own = {str(n): expert for n, expert in enumerate(_experts()) if n // count == rank}
    return _with_optimizer(nn.ModuleDict({"experts": nn.ModuleDict(own), "router": _router()}))


def experts_renumbered(rank: int, world: int) -> Built:
    """Return this rank's experts, numbered from 0 on each rank, and a router."""
    count = EXPERTS // world
    own = nn.ModuleList(_experts()[rank * count : (rank + 1) * count])
    return nn.ModuleDict({"experts": own, "router": _router()}), None


def expert_of_rank(name: str, tensor: torch.Tensor, rank: int, world: int) -> Whole | None:
    """Return the global name of this rank's expert."""
    head, _, rest = name.partition("experts.")
    if not rest:
        return None
    number, _, which = rest.partition(".")
    number = str(int(number) + rank * EXPERTS // world)
    index = torch.arange(tensor.numel()).view(tensor.shape)
    return Whole(f"{head}experts.{number}.{which}", tuple(tensor.shape), index)


class Tied(nn.Module):
    """Module with one weight for embedding and output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight


def tied(rank: int, world: int) -> Built:
    """Return a replicated model with tied weights."""
    return _with_optimizer(Tied())


_FUSED = (24, 5)
"""Shape of gate and up projections, concatenated by rows."""


def gate_up_by_hand(rank: int, world: int) -> Built:
    """Return a model with manual tensor parallelism of plain tensors: each rank has its rows of the gate,
    followed by its rows of the up projection."""
    return nn.ParameterDict({"gate_up": torch.zeros(_FUSED[0] // world, _FUSED[1])}), None


def fused_of_rank(name: str, tensor: torch.Tensor, rank: int, world: int) -> Whole:
    """Return this rank's rows of both projections."""
    rows = torch.arange(_FUSED[0] * _FUSED[1]).view(2, world, -1, _FUSED[1])
    return Whole(name, _FUSED, rows[:, rank].reshape(tensor.shape))
