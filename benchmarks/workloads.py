"""Workloads: tensors and the state of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from benchmarks.patterns import fill, is_intact

__all__ = ["STATE_BYTES", "TITLES", "State", "TensorSpec", "build_state", "total_bytes"]

TITLES = {
    "W1": "1 GiB, 291 bf16 tensors as a Llama has them",
    "W1-opt": "1.5 GiB: 291 smaller bf16 parameters, their Adam moments in fp32, scalar steps",
    "W2": "20,000 tensors of 16 KiB",
    "W3": "four tensors of 512 MiB",
    "W4": "1 GiB, 64 fp32 tensors of 16 MiB",
}
STATE_BYTES = {"W1": 1 << 30, "W1-opt": 3 << 29, "W2": 20_000 << 14, "W3": 2 << 30, "W4": 1 << 30}
"""Approximate bytes of a state at scale 1, for the check of free space."""

_LAYERS = 32
_VOCABULARY = 32_000
_ROWS_MULTIPLE = 8
"""A multiple of every number of ranks, so that all shards of a tensor are equal."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: its path in the nested state dict and its global shape. Shape () is a step."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class State:
    """State of one rank: the nested state dict to save or fill, and the rank's contiguous tensors in it.

    ``locals`` are (local tensor, seed, offsets in the global tensor) of all but the scalars.
    """

    state_dict: dict[str, Any]
    locals: list[tuple[torch.Tensor, int, tuple[int, ...]]] = field(default_factory=list)
    scalars: list[torch.Tensor] = field(default_factory=list)
    by_fqn: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of this rank."""
        return sum(tensor.nbytes for tensor in self.by_fqn.values())

    def wipe(self) -> None:
        """Zero all tensors, so that `is_intact` can check a load."""
        for tensor in self.by_fqn.values():
            tensor.zero_()

    def is_intact(self) -> bool:
        """Return True if every byte equals the byte of the built state."""
        steps = all(scalar.item() == 1000.0 for scalar in self.scalars)
        return steps and all(is_intact(tensor, seed, offsets) for tensor, seed, offsets in self.locals)


def _llama(hidden: int, middle: int, scale: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    def rows(count: int) -> int:
        return max(_ROWS_MULTIPLE, int(count * scale) // _ROWS_MULTIPLE * _ROWS_MULTIPLE)

    yield "model.embed_tokens.weight", (rows(_VOCABULARY), hidden)
    for layer in range(_LAYERS):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            yield f"model.layers.{layer}.self_attn.{name}.weight", (rows(hidden), hidden)
        for name in ("gate_proj", "up_proj"):
            yield f"model.layers.{layer}.mlp.{name}.weight", (rows(middle), hidden)
        yield f"model.layers.{layer}.mlp.down_proj.weight", (rows(hidden), middle)
        yield f"model.layers.{layer}.input_layernorm.weight", (hidden,)
        yield f"model.layers.{layer}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (rows(_VOCABULARY), hidden)


def tensor_specs(workload: str, scale: float) -> list[TensorSpec]:
    """Return the tensors of a workload; ``scale`` shortens the first dimension, or for W2 the list."""
    bf16, fp32 = torch.bfloat16, torch.float32
    if workload == "W1":
        return [TensorSpec(("model", fqn), shape, bf16) for fqn, shape in _llama(1024, 3424, scale)]
    if workload == "W1-opt":
        specs = []
        for fqn, shape in _llama(512, 1920, scale):
            specs.append(TensorSpec(("model", fqn), shape, bf16))
            specs += [
                TensorSpec(("optimizer", "state", fqn, moment), shape, fp32)
                for moment in ("exp_avg", "exp_avg_sq")
            ]
            specs.append(TensorSpec(("optimizer", "state", fqn, "step"), (), fp32))
        return specs
    if workload == "W2":
        count = max(16, int(20_000 * scale))
        return [TensorSpec(("model", f"block.{i}.weight"), (64, 128), bf16) for i in range(count)]
    if workload == "W4":
        rows = max(_ROWS_MULTIPLE, int(4096 * scale) // _ROWS_MULTIPLE * _ROWS_MULTIPLE)
        return [TensorSpec(("model", f"layer.{i}.weight"), (rows, 1024), fp32) for i in range(64)]
    rows = max(_ROWS_MULTIPLE, int(65_536 * scale) // _ROWS_MULTIPLE * _ROWS_MULTIPLE)
    return [TensorSpec(("model", f"table.{i}.weight"), (rows, 4096), bf16) for i in range(4)]


def total_bytes(specs: Sequence[TensorSpec]) -> int:
    """Return the bytes of all tensors, each once."""
    return sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in specs)


def build_state(workload: str, scale: float, *, rank: int, world_size: int, dim: int = 0) -> State:
    """Build and fill this rank's state; on several ranks DTensors sharded on ``dim``.

    One-dimensional tensors are sharded on dimension 0. Steps are plain tensors, equal on all ranks.
    """
    mesh = _mesh(world_size) if world_size > 1 else None
    state = State({})
    for number, spec in enumerate(tensor_specs(workload, scale)):
        shape, offsets = list(spec.shape), [0] * len(spec.shape)
        if not shape:
            local = torch.full((), 1000.0, dtype=spec.dtype)
            state.scalars.append(local)
            value = local
        else:
            along = dim if len(shape) > 1 else 0
            shape[along] //= world_size
            offsets[along] = shape[along] * rank
            local = torch.empty(shape, dtype=spec.dtype)
            fill(local, number, tuple(offsets))
            state.locals.append((local, number, tuple(offsets)))
            value = _sharded(local, spec, along, mesh) if mesh is not None else local
        state.by_fqn[".".join(spec.path)] = local
        _place(state.state_dict, spec.path, value)
    if "optimizer" in state.state_dict:
        names = list(state.state_dict["optimizer"]["state"])
        group = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "params": names}
        state.state_dict["optimizer"]["param_groups"] = [group]
    return state


def _mesh(world_size: int) -> Any:
    return torch.distributed.device_mesh.init_device_mesh("cpu", (world_size,))


def _sharded(local: torch.Tensor, spec: TensorSpec, along: int, mesh: Any) -> torch.Tensor:
    shape = torch.Size(spec.shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(along)], run_check=False, shape=shape, stride=stride)


def _place(state_dict: dict[str, Any], path: tuple[str, ...], value: torch.Tensor) -> None:
    for part in path[:-1]:
        state_dict = state_dict.setdefault(part, {})
    state_dict[path[-1]] = value
