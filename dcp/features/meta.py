"""Tensors on the meta device: they are replaced by real ones before loading into them."""

from __future__ import annotations

from functools import partial
from itertools import compress
from operator import attrgetter, is_
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dcp.loading.feature import LoadFeature
from dcp.planners.flatten import FACTS
from dcp.planners.layout.local_tensor import claim_of, with_claim
from dcp.planners.per_rank import PerRank
from dcp.planners.rescale import Rescale
from dcp.storage.errors import PlanError
from dcp.storage.torch_compat import ShardedTensor

__all__ = ["MetaTensors"]


class MetaTensors(LoadFeature):
    """Gives memory to tensors that are to be loaded and have none."""

    name = "meta"

    def state(self) -> None:
        """Replace them in the state dict. Raises PlanError for a part of a composite tensor."""
        call = self.call
        chosen = call.selected(call.flat.values)
        if not _has_meta_tensor(list(chosen.values())):
            return
        names = []
        for fqn, value in list(chosen.items()):
            if self._may_be_kept(fqn):  # and must not become whatever is in new memory
                continue
            real = _materialise(value)
            if real is not value:
                self._check_place(fqn)
                call.put(fqn, real)
                names.append(fqn)
        self.new = names
        call.flat = call.flattened()

    def _may_be_kept(self, fqn: str) -> bool:
        """Return whether an entry is of a `PerRank` value that a load may leave as it is."""
        flat = self.call.flat
        own = flat.per_rank.get(flat.owners.get(fqn, ""))
        return own is not None and (
            own.rule == "keep" if isinstance(own, Rescale) else self.call.options.per_rank == "keep"
        )

    def _check_place(self, fqn: str) -> None:
        """Raise PlanError for a part of a tensor without memory, which cannot be replaced."""
        name = next((each for each in self.call.flat.facts if fqn.startswith(each.removesuffix(FACTS))), None)
        if name is not None:
            raise PlanError(
                f"tensor {name.removesuffix('.' + FACTS)!r} is a subclass made of inner tensors, on the meta "
                "device: give it memory before the load",
                fqn=fqn,
            )


def _has_meta_tensor(values: list[Any]) -> bool:
    """Return whether a tensor among ``values`` has no memory yet."""
    for cls in set(map(type, values)):
        if issubclass(cls, torch.Tensor):
            tensors = compress(values, map(partial(is_, cls), map(type, values)))
            if any(map(_is_meta if issubclass(cls, ShardedTensor) else attrgetter("is_meta"), tensors)):
                return True
    return False


def _is_meta(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, ShardedTensor):  # each look at an attribute of its own warns that it is deprecated
        return any(shard.tensor.is_meta for shard in tensor.local_shards())
    return tensor.is_meta


def _default_device() -> torch.device:
    """Return where the process group works: the accelerator, unless the ranks talk through gloo alone."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    together = dist.is_available() and dist.is_initialized()
    if accelerator is None or not together or dist.get_backend() == "gloo":
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _device_of_mesh(device_type: str) -> torch.device:
    if device_type == "cpu" or not torch.accelerator.is_available():
        return torch.device(device_type)
    return torch.device(device_type, torch.accelerator.current_device_index())


def _real_dtensor(tensor: DTensor) -> DTensor:
    device = _device_of_mesh(tensor.device_mesh.device_type)
    with torch.no_grad():
        local = torch.empty_like(tensor.to_local(), device=device)
    # shape and stride explicitly, because an uneven local shape does not tell them
    return DTensor.from_local(
        local,
        device_mesh=tensor.device_mesh,
        placements=tensor.placements,
        run_check=False,
        shape=tensor.size(),
        stride=tensor.stride(),
    )


def _materialise(value: Any) -> Any:
    """Return ``value`` with every meta tensor in it replaced by an uninitialised real one.

    Dicts, lists and `PerRank` are changed in place; tuples are replaced where something in them was.
    """
    if isinstance(value, torch.Tensor):
        if not value.is_meta:
            return value
        if isinstance(value, ShardedTensor):
            raise PlanError("a ShardedTensor on the meta device cannot be loaded into; materialise it first")
        return (
            _real_dtensor(value)
            if isinstance(value, DTensor)
            else with_claim(torch.empty_like(value, device=_default_device()), claim_of(value))
        )
    if isinstance(value, dict):
        for key, entry in value.items():
            value[key] = _materialise(entry)
    elif isinstance(value, list):
        value[:] = [_materialise(entry) for entry in value]
    elif isinstance(value, PerRank):
        value.value = _materialise(value.value)
    elif isinstance(value, tuple):
        entries = [_materialise(entry) for entry in value]
        if any(new is not old for new, old in zip(entries, value, strict=True)):
            return type(value)(*entries) if hasattr(value, "_fields") else tuple(entries)
    return value
