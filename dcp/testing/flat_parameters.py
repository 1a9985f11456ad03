"""Which elements of its parameters a rank has under FSDP1, which puts several into one flat parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from dcp.storage.errors import OptionError
from dcp.storage.torch_compat import FlatSlice, flat_slices

__all__ = ["FlatParts", "NamedSlice", "flat_parts"]


class NamedSlice(NamedTuple):
    """Elements of a tensor from ``offset`` on are those at ``places`` of the parameter ``name`` with
    ``shape``."""

    name: str
    shape: tuple[int, ...]
    places: npt.NDArray[np.int64]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Those elements of the flat parameter, its view or state of that size."""
        return tensor.detach().view(-1)[self.offset : self.offset + len(self.places)]


FlatParts: TypeAlias = Mapping[torch.Tensor, list[NamedSlice]]
"""Of each parameter that is flat, or a view of one, what is in it."""


def flat_parts(model: nn.Module, names: Mapping[nn.Module, str]) -> FlatParts:
    """Which parts are in the flat parameters that FSDP1 makes in ``model``, whose modules have ``names``;
    empty where it wraps none.

    Raises OptionError where a parameter is flat and divided by tensor parallelism besides: of that the flat
    one does not say which elements it has.
    """
    if not any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return {}
    slices = flat_slices(model)
    if slices is None:
        raise OptionError(
            f"torch {torch.__version__} does not say what is in the flat parameters of "
            "FullyShardedDataParallel: use fully_shard (FSDP2), or another version of torch"
        )
    found: dict[torch.Tensor, list[NamedSlice]] = {}
    for one in slices:
        name = ".".join(filter(None, (names[one.module], one.name)))
        if not one.is_whole:
            raise OptionError(
                f"{name}: FullyShardedDataParallel over tensor parallelism does not say which elements a "
                "rank has: use fully_shard (FSDP2) over it"
            )
        has_view = one.parameter is not None
        holder = one.flat if one.parameter is None else one.parameter
        found.setdefault(holder, []).append(
            NamedSlice(name, one.shape, _places(one), 0 if has_view else one.offset)
        )
    return found


def _places(one: FlatSlice) -> npt.NDArray[np.int64]:
    """Row-major places of what lies in memory from its ``begin`` on."""
    in_memory = torch.empty(int(np.prod(one.shape)), dtype=torch.int64)
    in_memory.as_strided(one.shape, one.strides).copy_(torch.arange(len(in_memory)).view(one.shape))
    return in_memory[one.begin : one.begin + one.length].numpy()
