"""State dicts that conversions must preserve, saved by one process or by four ranks; commands."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp
from tests.support.command import run as command
from tests.support.harmless_values import same
from tests.support.values import full_tensor

__all__ = [
    "FUSED",
    "NAMES",
    "assert_same",
    "command",
    "flip",
    "folder_of",
    "many_kinds",
    "names_in",
    "save_sharded",
    "sharded_tensors",
    "state_to_fuse",
    "training_state",
    "write_adapter",
]

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "rows": ((70, 33), torch.float32),
    "columns": ((48, 130), torch.bfloat16),
    "deep": ((9, 14, 22), torch.float16),
    "copy": ((11, 5), torch.int64),
    "both": ((64, 96), torch.float64),
    "wide": ((3, 400_000), torch.float32),
}


def many_kinds() -> dict[str, torch.Tensor]:
    """Return a tensor of each kind: all dtypes, 0-d, empty, odd sizes, tied."""
    names = (
        "float32 float64 float16 bfloat16 uint8 int8 int16 int32 int64 bool complex64 uint16 uint32 uint64"
    )
    names += " float8_e4m3fn float8_e5m2"
    state = {f"kind.{name}": full_tensor(name, (13, 7), getattr(torch, name)) for name in names.split()}
    state["scalar"] = torch.tensor(2.5)
    state["empty"] = torch.zeros(0, 5)
    state["none_wide"] = torch.zeros(4, 0, 2, dtype=torch.int8)
    state["large"] = full_tensor("large", (800, 1201), torch.float32)
    state["tied"] = state["large"]
    return state


def training_state() -> dict[str, Any]:
    """Return a model and its optimizer after a step: int keys, lists of groups, OrderedDict, plain values."""
    model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.LayerNorm(20), torch.nn.Linear(20, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 12)).sum().backward()
    optimizer.step()
    return {
        "model": OrderedDict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "kinds": many_kinds(),
        "epoch": 7,
        "name": "run-ü",
        "history": [0.5, 0.25, None, True, "x", b"\x00\xff", 2**70, 1 + 2j],
    }


def sharded_tensors() -> dict[str, torch.Tensor]:
    """Return the full tensors saved by `save_sharded`."""
    return {name: full_tensor(name, shape, dtype) for name, (shape, dtype) in SHAPES.items()}


def save_sharded(rank: int, world_size: int, path: str, how: str = "dcp") -> None:
    """Save `sharded_tensors` with four ranks, sharded on dimension 0, 1, 2, both, and replicated; ``how`` is
    "dcp" or "stock"."""
    mesh = init_device_mesh("cpu", (world_size,))
    grid = init_device_mesh("cpu", (2, 2))
    full = sharded_tensors()
    placements = {
        "rows": Shard(0),
        "columns": Shard(1),
        "deep": Shard(2),
        "copy": Replicate(),
        "wide": Shard(1),
    }
    state: dict[str, Any] = {
        name: distribute_tensor(full[name], mesh, [place]) for name, place in placements.items()
    }
    state["both"] = distribute_tensor(full["both"], grid, [Shard(0), Shard(1)])
    state["step"] = 12
    if how == "dcp":
        dcp.save(state, checkpoint_id=path)
    else:
        torch.distributed.checkpoint.save(state, checkpoint_id=path)


def assert_same(got: Any, expected: Any) -> None:
    """Check that containers, keys, values and tensors are equal, bit for bit."""
    assert same(got, expected), (got, expected)


def folder_of(path: Path) -> list[str]:
    """Return the names in the folder of ``path``."""
    return sorted(entry.name for entry in path.parent.iterdir())


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(entry.name for entry in folder.iterdir())


def flip(checkpoint: Path, at: int | None = None) -> Path:
    """Flip one bit of the largest data file of a folder, at ``at`` or in the middle; return the file."""
    file = max(checkpoint.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    file.write_bytes(data)
    return file


def write_adapter(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Write an adapter in the layout of peft."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


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
"""A weight map with weights fused by heads, transposed and padded, stacked, and renamed."""


def state_to_fuse(number: int) -> dict[str, torch.Tensor]:
    """Return the state for `FUSED` of source ``number``."""
    torch.manual_seed(number)
    shapes = {"q": (10, 7), "k": (8, 7), "layers.0.w": (31,), "layers.1.w": (3, 5)}
    kind = [torch.float32, torch.bfloat16, torch.float16][number % 3]
    state = {name: torch.randn(shape).to(kind) for name, shape in shapes.items()}
    return state | {"steps": torch.arange(3) + number}
