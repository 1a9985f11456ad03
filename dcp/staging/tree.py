"""A state dict taken apart into plain local tensors, and put together again around their copies."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp.planners.layout.local_tensor import claim_of, with_claim
from dcp.planners.per_rank import PerRank
from dcp.storage import torch_compat
from dcp.storage.errors import PlanError
from dcp.storage.tensors import LocalMemory
from dcp.storage.torch_compat import AsyncCollectiveTensor, Shard, ShardedTensor

_Make = Callable[[Sequence[torch.Tensor]], Any]
_Path = tuple[Any, ...]
_CPU = torch.device("cpu")
_VALUES = (int, float, complex, str, bytes, type(None), io.BytesIO)
_PLAIN_VALUES = (*_VALUES, torch.Size, torch.dtype, torch.device)


class StateTree:
    """The tensors of ``state_dict`` in ``memory``: plain, detached, strided; each object once.

    ``type_check`` refuses values of other classes than torch's stagers expect, with PlanError.
    """

    def __init__(self, state_dict: dict[str, Any], *, type_check: bool = False) -> None:
        self._sources: list[torch.Tensor] = []
        self._paths: list[_Path] = []
        self._state_dict = state_dict
        self._type_check = type_check
        # by id, with the objects, so that no id becomes another's meanwhile
        self._tensors: dict[int, tuple[_Make, torch.Tensor]] = {}
        self._containers: dict[int, object] = {}
        self._mappings: list[Mapping[Any, Any]] = []  # but dicts: they become dicts, and need not be copyable
        self._visit((), state_dict)
        self.memory = LocalMemory.of(self._sources)

    def copied(self, memory: LocalMemory) -> dict[str, Any]:
        """Make a deep copy of the state dict with ``memory`` in the places of the sources: DTensors and
        ShardedTensors are new ones around them, and later changes of other values, attributes of containers
        among them, do not reach it."""
        made: dict[int, Any] = {key: make(memory.tensors) for key, (make, _) in self._tensors.items()}
        for mapping in reversed(self._mappings):  # inner ones first
            made[id(mapping)] = {key: copy.deepcopy(entry, made) for key, entry in mapping.items()}
        state_dict: dict[str, Any] = copy.deepcopy(self._state_dict, made)
        return state_dict

    def fqns(self, numbers: Sequence[int]) -> list[str]:
        """Return the names of these sources."""
        return [".".join(map(str, self._paths[number])) for number in numbers]

    def _visit(self, path: _Path, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = (self._tensor(path, value), value)
        elif isinstance(value, _PLAIN_VALUES) or id(value) in self._containers:
            return
        elif isinstance(value, (Mapping, list, tuple)):
            self._containers[id(value)] = value
            if isinstance(value, Mapping) and not isinstance(value, dict):
                self._mappings.append(value)
            for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
                self._visit((*path, key), entry)
        elif isinstance(value, PerRank):
            self._visit((*path, "value"), value.value)
        elif self._type_check:
            raise PlanError(
                f"{'.'.join(map(str, path))!r} is a {type(value).__name__}, and type_check allows "
                "tensors, numbers, strings, bytes, dicts, lists and tuples only"
            )

    def _tensor(self, path: _Path, value: torch.Tensor) -> _Make:
        if isinstance(value, DTensor):
            spec, local = torch_compat.spec_of(value), self._tensor(path, torch_compat.local_part(value))
            return lambda copies: torch_compat.dtensor_with(spec, local(copies))
        if isinstance(value, ShardedTensor):
            return self._sharded(path, value)
        if isinstance(value, AsyncCollectiveTensor):
            return self._tensor(path, value.wait())
        if hasattr(value, "__tensor_flatten__"):  # a subclass that is made of other tensors
            names, context = value.__tensor_flatten__()
            inner = {name: self._tensor((*path, name), getattr(value, name)) for name in names}
            cls: Any = type(value)
            size, stride = value.size(), value.stride()
            return lambda copies: cls.__tensor_unflatten__(
                {name: make(copies) for name, make in inner.items()}, context, size, stride
            )
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            with torch.no_grad():
                kept = value.detach() if value.is_meta else value.detach().to(_CPU, copy=True)
            return lambda copies: kept
        number, claim = len(self._sources), claim_of(value)
        self._sources.append(value.detach().resolve_conj().resolve_neg())
        self._paths.append(path)
        if claim is not None:
            return lambda copies: with_claim(copies[number].detach(), claim)
        return lambda copies: copies[number]

    def _sharded(self, path: _Path, value: ShardedTensor) -> _Make:
        metadata = copy.deepcopy(value.metadata())
        for entry in metadata.shards_metadata:
            if entry.placement is not None:
                entry.placement = torch_compat.on_cpu(entry.placement)
        metadata.tensor_properties.requires_grad = False
        by_offsets = {tuple(entry.shard_offsets): entry for entry in metadata.shards_metadata}
        shards = [
            (by_offsets[tuple(shard.metadata.shard_offsets)], self._tensor((*path, number), shard.tensor))
            for number, shard in enumerate(value.local_shards())
        ]
        group = torch_compat.group_of_sharded(value)

        def make(copies: Sequence[torch.Tensor]) -> ShardedTensor:
            local = [Shard(tensor(copies), entry) for entry, tensor in shards]
            own = copy.copy(metadata)
            own.tensor_properties = copy.copy(metadata.tensor_properties)
            own.tensor_properties.pin_memory = any(shard.tensor.is_pinned() for shard in local)
            return torch_compat.sharded_with(group, local, own)

        return make
