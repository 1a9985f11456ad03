"""A state dict taken apart into plain local tensors, and put together again around their copies."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcp.planners.layout.checkpointable import claim_of, with_claim
from dcp.planners.per_rank import PerRank
from dcp.staging.copies import resolved
from dcp.storage import torch_compat
from dcp.storage.errors import PlanError
from dcp.storage.torch_compat import AsyncCollectiveTensor, Shard, ShardedTensor

__all__ = ["StateTree"]

_Maker = Callable[[Sequence[torch.Tensor]], Any]
_Path = tuple[Any, ...]
_CPU = torch.device("cpu")
_PLAIN_VALUES = (int, float, complex, str, bytes, bool, type(None), torch.Size, torch.dtype, torch.device)


class StateTree:
    """The tensors of ``state_dict`` in ``sources``: plain, detached, strided; each object once.

    Other values are copied now, so that later changes do not reach them. ``type_check`` refuses values of
    other classes than torch's stagers expect, with PlanError.
    """

    def __init__(self, state_dict: Mapping[str, Any], *, type_check: bool = False) -> None:
        self.sources: list[torch.Tensor] = []
        self._paths: list[_Path] = []
        self._type_check = type_check
        # with the objects, so that the id of none becomes another's meanwhile
        self._seen: dict[int, tuple[_Maker, object]] = {}
        self._root = self._visit((), state_dict)
        self._seen.clear()

    def rebuilt(self, copies: Sequence[torch.Tensor]) -> dict[str, Any]:
        """The state dict again, with ``copies`` in the places of the sources: containers, DTensors and
        ShardedTensors are new ones of the same kinds."""
        state_dict: dict[str, Any] = self._root(copies)
        return state_dict

    def fqns(self, numbers: Sequence[int]) -> list[str]:
        """Names of these sources."""
        return list(dict.fromkeys(".".join(map(str, _flat(self._paths[number]))) for number in numbers))

    def _visit(self, path: _Path, value: Any) -> _Maker:
        if isinstance(value, _PLAIN_VALUES):
            return lambda copies: value
        seen = self._seen.get(id(value))
        if seen is None:
            seen = self._seen[id(value)] = (_once(self._maker(path, value)), value)
        return seen[0]

    def _maker(self, path: _Path, value: Any) -> _Maker:
        if isinstance(value, torch.Tensor):
            return self._tensor(path, value)
        if isinstance(value, Mapping):
            return self._mapping(path, value)
        if isinstance(value, list):
            return self._list(path, value)
        if isinstance(value, tuple):
            return self._tuple(path, value)
        if isinstance(value, PerRank):
            inner = self._visit((path, "value"), value.value)
            return lambda copies: PerRank(inner(copies))
        if self._type_check and not isinstance(value, io.BytesIO):
            raise PlanError(
                f"{'.'.join(map(str, _flat(path)))!r} is a {type(value).__name__}, and type_check allows "
                "tensors, numbers, strings, bytes, dicts, lists and tuples only"
            )
        kept = copy.deepcopy(value)
        return lambda copies: kept

    # -- containers ------------------------------------------------------------------------------------------

    def _mapping(self, path: _Path, value: Mapping[Any, Any]) -> _Maker:
        entries = [(key, self._visit((path, key), entry)) for key, entry in value.items()]
        if type(value) is dict or not isinstance(value, dict):
            return lambda copies: {key: make(copies) for key, make in entries}
        shell = copy.copy(value)

        def make_subclass(copies: Sequence[torch.Tensor]) -> Any:
            made = copy.copy(shell)  # a subclass may keep attributes, as state dicts of modules do
            for key, make in entries:
                made[key] = make(copies)
            return made

        return make_subclass

    def _list(self, path: _Path, value: list[Any]) -> _Maker:
        entries = [self._visit((path, number), entry) for number, entry in enumerate(value)]
        if type(value) is list:
            return lambda copies: [make(copies) for make in entries]
        shell = copy.copy(value)

        def make_subclass(copies: Sequence[torch.Tensor]) -> Any:
            made = copy.copy(shell)
            made[:] = [make(copies) for make in entries]
            return made

        return make_subclass

    def _tuple(self, path: _Path, value: tuple[Any, ...]) -> _Maker:
        entries = [self._visit((path, number), entry) for number, entry in enumerate(value)]
        if hasattr(value, "_fields"):
            return lambda copies: type(value)(*(make(copies) for make in entries))
        return lambda copies: tuple(make(copies) for make in entries)

    # -- tensors ---------------------------------------------------------------------------------------------

    def _tensor(self, path: _Path, value: torch.Tensor) -> _Maker:
        if isinstance(value, DTensor):
            spec, local = torch_compat.spec_of(value), self._tensor(path, torch_compat.local_part(value))
            return lambda copies: torch_compat.dtensor_with(spec, local(copies))
        if isinstance(value, ShardedTensor):
            return self._sharded(path, value)
        if isinstance(value, AsyncCollectiveTensor):
            return self._tensor(path, value.wait())
        if hasattr(value, "__tensor_flatten__"):
            return self._wrapper(path, value)
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            with torch.no_grad():
                kept = value.detach() if value.is_meta else value.detach().to(_CPU, copy=True)
            return lambda copies: kept
        number = len(self.sources)
        self.sources.append(resolved(value))
        self._paths.append(path)
        claim = claim_of(value)
        if claim is not None:
            return lambda copies: with_claim(copies[number].detach(), claim)
        return lambda copies: copies[number]

    def _wrapper(self, path: _Path, value: Any) -> _Maker:
        """A subclass that is made of other tensors, by torch's protocol for such."""
        names, context = value.__tensor_flatten__()
        inner = {name: self._tensor((path, name), getattr(value, name)) for name in names}
        cls, size, stride = type(value), value.size(), value.stride()
        return lambda copies: cls.__tensor_unflatten__(
            {name: make(copies) for name, make in inner.items()}, context, size, stride
        )

    def _sharded(self, path: _Path, value: ShardedTensor) -> _Maker:
        metadata = copy.deepcopy(value.metadata())
        for entry in metadata.shards_metadata:
            if entry.placement is not None:
                entry.placement = torch_compat.on_cpu(entry.placement)
        metadata.tensor_properties.requires_grad = False
        by_offsets = {tuple(entry.shard_offsets): entry for entry in metadata.shards_metadata}
        shards = [
            (by_offsets[tuple(shard.metadata.shard_offsets)], self._tensor((path, number), shard.tensor))
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


def _once(maker: _Maker) -> _Maker:
    """``maker`` that gives one object for one list of copies, so that what is shared stays shared."""
    made: list[Any] = []

    def make(copies: Sequence[torch.Tensor]) -> Any:
        if not made or made[0] is not copies:
            made[:] = [copies, maker(copies)]
        return made[1]

    return make


def _flat(path: _Path) -> list[Any]:
    keys: list[Any] = []
    while path:
        path, key = path
        keys.append(key)
    return keys[::-1]
