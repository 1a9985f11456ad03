"""States in any format, and the sums that a merge promises of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

import dcp

__all__ = ["FUSED", "KINDS", "NAMES", "same", "state_to_fuse", "write"]

KINDS: Final = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
NAMES: Final = {"dcp": "out", "safetensors": "out.safetensors", "torch": "out.pt"}

FUSED: Final[dict[str, Any]] = {
    "rules": [
        {
            "from": {"q": "(two q) width", "k": "(two k) width"},
            "to": {"qk": "width (two (q + k) + pad)"},
            "padding": ["pad"],
        },
        {"from": "layers.{n}.w", "to": "blocks.{n}.weight"},
        {"from": "steps", "to": "count"},
    ],
    "sizes": {"two": 2, "pad": 5, "q": 5, "k": 4},
}
"""Fused by heads, transposed and padded; stacked; renamed."""


def state_to_fuse(number: int) -> dict[str, torch.Tensor]:
    """What `FUSED` is about, of the source of that number."""
    torch.manual_seed(number)
    shapes = {"q": (10, 7), "k": (8, 7), "layers.0.w": (31,), "layers.1.w": (3, 5)}
    kind = [torch.float32, torch.bfloat16, torch.float16][number % 3]
    state = {name: torch.randn(shape).to(kind) for name, shape in shapes.items()}
    return state | {"steps": torch.arange(3) + number}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other) if tensor.numel()]
    return not raw or torch.equal(*raw)


def write(state: dict[str, torch.Tensor], path: Path, draw: random.Random) -> Path:
    """In any format: one file, or a folder of one chunk a tensor or several."""
    way = draw.choice(["torch", "safetensors", "dcp", "split"])
    if way == "torch":
        torch.save(state, path.with_suffix(".pt"))
        return path.with_suffix(".pt")
    if way == "safetensors":
        plain = {name: tensor.contiguous() for name, tensor in state.items()}
        save_file(plain, path.with_suffix(".safetensors"))
        return path.with_suffix(".safetensors")
    if way == "dcp":
        dcp.save(state, checkpoint_id=path, no_dist=True)
        return path
    torch.save(state, path.with_suffix(".part.pt"))
    dcp.convert(path.with_suffix(".part.pt"), path, to="dcp", files=draw.randint(2, 4), chunks="split")
    return path
