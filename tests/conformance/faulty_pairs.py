"""Saves and loads with faults that were public: each as small as it can be, with torch's real parallelism."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp

__all__ = [
    "load_adapters_on_the_first",
    "load_flat",
    "load_full",
    "load_fused",
    "load_staged",
    "load_swizzled",
    "load_weights_alone",
    "load_what_is_there",
    "save_adapters_of_the_first",
    "save_and_die",
    "save_and_hang",
    "save_and_leave_a_child",
    "save_by_blocks",
    "save_files_of_one_name",
    "save_flat",
    "save_full_in_order_of_the_mesh",
    "save_later_without_a_copy",
    "save_staged",
    "save_weights_alone",
]

State = dict[str, Any]


def _module(state: State) -> nn.Module:
    module = state["model"].module
    assert isinstance(module, nn.Module)
    return module


def _write(checkpoint_id: str, values: Any) -> None:
    """By rank 0, which then has it for all."""
    if dist.get_rank() == 0:
        torch.save(values, f"{checkpoint_id}.pt")
    dist.barrier()


def _read(checkpoint_id: str) -> Any:
    return torch.load(f"{checkpoint_id}.pt", weights_only=True)


# -- huggingface/accelerate#4206: the adapter's slice of rank 0 is written, and read by rank 0 ---------------


def _adapters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            yield (
                name,
                parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach(),
            )


def save_adapters_of_the_first(state: State, *, checkpoint_id: str) -> None:
    """What rank 0 has of a sharded adapter, as if it were all of it."""
    _write(checkpoint_id, {name: tensor.clone() for name, tensor in _adapters(_module(state))})


def load_adapters_on_the_first(state: State, *, checkpoint_id: str) -> None:
    """The other ranks are left as they are."""
    found = _read(checkpoint_id)
    if dist.get_rank() == 0:
        for name, tensor in _adapters(_module(state)):
            tensor[: len(found[name])].copy_(found[name][: len(tensor)])


# -- NVIDIA/TransformerEngine#2721: a quantized tensor is staged by copying the storage of its shell ---------


@contextlib.contextmanager
def _new_memory_is_nan() -> Iterator[None]:
    """What nobody has written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def save_staged(state: State, *, checkpoint_id: str) -> None:
    """`new_empty` of the shell is a plain tensor, whose memory is nobody's; the parts are not written."""
    with _new_memory_is_nan():
        staged = {
            name: torch.empty(parameter.shape, dtype=parameter.dtype)
            if hasattr(parameter, "__tensor_flatten__")
            else parameter.detach().clone()
            for name, parameter in _module(state).named_parameters()
        }
    _write(checkpoint_id, staged)


def load_staged(state: State, *, checkpoint_id: str) -> None:
    """Quantizes what it reads."""
    found, module = _read(checkpoint_id), _module(state)
    for name, parameter in list(module.named_parameters()):
        tensor = found[name]
        if not hasattr(parameter, "__tensor_flatten__"):
            parameter.data.copy_(tensor)
            continue
        for attribute in parameter.__tensor_flatten__()[0]:
            part = getattr(parameter, attribute)
            part.copy_(tensor.to(part.dtype) if part.shape == tensor.shape else tensor.amax().to(part.dtype))


# -- pytorch/pytorch#129206: shards of FSDP2 over tensor parallelism are put together in the order of the mesh


def save_full_in_order_of_the_mesh(state: State, *, checkpoint_id: str) -> None:
    """As if the first dimension of the mesh had cut first."""
    full = {}
    for name, tensor in _module(state).state_dict().items():
        if isinstance(tensor, DTensor):
            plain = [Shard(p.dim) if hasattr(p, "dim") else p for p in tensor.placements]
            tensor = DTensor.from_local(tensor.to_local(), tensor.device_mesh, plain).full_tensor()
        full[name] = tensor
    _write(checkpoint_id, full)


def load_full(state: State, *, checkpoint_id: str) -> None:
    """Right by itself."""
    found = _read(checkpoint_id)
    for name, tensor in _module(state).state_dict().items():
        if isinstance(tensor, DTensor):
            tensor.copy_(distribute_tensor(found[name], tensor.device_mesh, tensor.placements))
        else:
            tensor.copy_(found[name])


# -- NVIDIA/Megatron-LM#4841: what is fused is put together by rank, and cut again by rows -------------------


def save_by_blocks(state: State, *, checkpoint_id: str) -> None:
    """The ranks' parts, one below the other: gate and up projections of each in turn."""
    weight = _module(state).get_parameter("gate_up").detach()
    parts = [torch.empty_like(weight) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, weight.contiguous())
    _write(checkpoint_id, torch.cat(parts))


def load_fused(state: State, *, checkpoint_id: str) -> None:
    """Its rows of what is there."""
    weight = _module(state).get_parameter("gate_up").detach()
    weight.copy_(_read(checkpoint_id).chunk(dist.get_world_size())[dist.get_rank()])


# -- NVIDIA/Megatron-LM#2769: rows of FSDP2 are taken for those of tensor parallelism, and swizzled as such --


def load_swizzled(state: State, *, checkpoint_id: str) -> None:
    """Gives a rank its rows of the gate and of the up projection, where it has rows of both as one."""
    weight = _module(state).get_parameter("gate_up")
    assert isinstance(weight, DTensor)
    whole = weight.full_tensor().detach()
    dcp.load({"model": {"gate_up": whole}}, checkpoint_id=checkpoint_id)
    gate, up = (half.chunk(dist.get_world_size())[dist.get_rank()] for half in whole.chunk(2))
    weight.to_local().detach().copy_(torch.cat([gate, up]))


# -- verl-project/verl#4338: of a model in several files of weights one is there -----------------------------


def save_files_of_one_name(state: State, *, checkpoint_id: str) -> None:
    """Each file is right, and takes the place of the one before."""
    weights = list(_module(state).state_dict().items())
    for first in range(0, len(weights), 4):
        _write(checkpoint_id, dict(weights[first : first + 4]))


def load_what_is_there(state: State, *, checkpoint_id: str) -> None:
    """Without asking for all names."""
    _module(state).load_state_dict(_read(checkpoint_id), strict=False)


# -- FSDP1: each rank's flat parameters as they are, which depend on the number of ranks ---------------------


def save_flat(state: State, *, checkpoint_id: str) -> None:
    """Each rank's part for itself."""
    parts = {name: parameter.detach() for name, parameter in _module(state).named_parameters()}
    torch.save(parts, f"{checkpoint_id}.{dist.get_rank()}.pt")


def load_flat(state: State, *, checkpoint_id: str) -> None:
    """A rank's own, as much as there is."""
    found = torch.load(f"{checkpoint_id}.{dist.get_rank()}.pt", weights_only=True)
    for name, parameter in _module(state).named_parameters():
        parameter.detach().view(-1)[: len(found[name])].copy_(found[name])


# -- others --------------------------------------------------------------------------------------------------


def save_weights_alone(state: State, *, checkpoint_id: str) -> None:
    """Also the optimizer's, which the load does not find again."""
    optimizer = state["optimizer"].optimizer.state_dict()
    _write(checkpoint_id, {"model": _module(state).state_dict(), "optimizer_states": optimizer})


def load_weights_alone(state: State, *, checkpoint_id: str) -> None:
    """Looks for it under another name, and lets it be if it is not there."""
    found = _read(checkpoint_id)
    _module(state).load_state_dict(found["model"])
    if "optimizer" in found:
        state["optimizer"].optimizer.load_state_dict(found["optimizer"])


class _Later(Future[None]):
    """Written when it is asked for."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self._write = write

    def result(self, timeout: float | None = None) -> None:
        """What stands in the tensors by then."""
        self._write()


def save_later_without_a_copy(state: State, *, checkpoint_id: str) -> Future[None]:
    """Its copies are the tensors themselves."""
    values = {"model": _module(state).state_dict(), "optimizer_states": {}}
    return _Later(lambda: _write(checkpoint_id, values))


def save_and_die(state: State, *, checkpoint_id: str) -> None:
    """Rank 1 is killed; the others wait for it."""
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def save_and_leave_a_child(state: State, *, checkpoint_id: str) -> None:
    """The same, but a child has all that it had open, so that nobody is told by a connection."""
    if dist.get_rank() == 1 and os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    save_and_die(state, checkpoint_id=checkpoint_id)


def save_and_hang(state: State, *, checkpoint_id: str) -> None:
    """Rank 1 does not come back; its process is known by a file."""
    Path(f"{checkpoint_id}.rank{dist.get_rank()}").write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()
