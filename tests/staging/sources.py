"""Tensors of every dtype and memory layout, with random bytes, for tests of staging."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

import dcp
from tests.support.values import raw

__all__ = ["TensorSpec", "bits", "collect", "make_tensors", "tensor_specs"]

_NAMES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "complex128", "complex64", "complex32"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "bits8", "bits16"),
)
DTYPES = tuple(name for name in _NAMES if hasattr(torch, name))
_MEMORY = ("contiguous", "transposed", "stepped", "offset", "expanded", "conjugated", "tied", "leaf")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to make; ``tied`` repeats the previous tensor."""

    dtype: str
    shape: tuple[int, ...]
    memory: str
    seed: int


def tensor_specs() -> st.SearchStrategy[list[TensorSpec]]:
    """Draw lists of specs, which include empty and 0-dimensional tensors."""
    spec = st.builds(
        TensorSpec,
        dtype=st.sampled_from(DTYPES),
        shape=st.lists(st.integers(0, 6) | st.just(33), max_size=3).map(tuple),
        memory=st.sampled_from(_MEMORY),
        seed=st.integers(0, 1 << 16),
    )
    return st.lists(spec, min_size=1, max_size=8)


def _filled(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    if (count := math.prod(shape)) == 0:
        return torch.empty(shape, dtype=dtype)
    most = 2 if dtype == torch.bool else 256
    data = np.random.default_rng(seed).integers(0, most, count * dtype.itemsize, np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


def _make(spec: TensorSpec, previous: torch.Tensor | None) -> torch.Tensor:
    dtype, shape, memory, seed = getattr(torch, spec.dtype), spec.shape, spec.memory, spec.seed
    if memory == "tied" and previous is not None:
        return previous
    if shape and memory == "transposed":
        return _filled(dtype, shape[::-1], seed).permute(*range(len(shape))[::-1])
    if shape and memory == "stepped":
        return _filled(dtype, (*shape[:-1], 2 * shape[-1]), seed)[..., ::2]
    if shape and memory == "offset":
        return _filled(dtype, (shape[0] + 1, *shape[1:]), seed)[1:]
    if shape and memory == "expanded":
        return _filled(dtype, (1, *shape[1:]), seed).expand(shape)
    filled = _filled(dtype, shape, seed)
    if memory == "conjugated" and dtype in (torch.complex64, torch.complex128):
        return filled.conj()
    return (
        torch.nn.Parameter(filled)
        if memory == "leaf" and dtype.is_floating_point and dtype.itemsize > 1
        else filled
    )


def make_tensors(specs: list[TensorSpec]) -> dict[str, torch.Tensor]:
    """Return the tensors as a flat state dict."""
    made: dict[str, torch.Tensor] = {}
    previous = None
    for number, spec in enumerate(specs):
        previous = made[f"layer.{number}"] = _make(spec, previous)
    return made


def bits(tensor: torch.Tensor) -> bytes:
    """Return the elements as bytes in C order, for any dtype and strides."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return raw(tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor)


def collect(state_dict: Mapping[str, Any]) -> Any:
    """Return the local plan that a save passes to a stager."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(dict(state_dict), None, True)
    return planner.create_local_columns(digests=False).encoded()
