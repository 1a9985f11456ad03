"""Contents of a checkpoint as plain lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import dcp


class Unpicklable:
    """A value that fails in the write step, after the data files are begun."""

    def __reduce__(self) -> Any:
        raise RuntimeError("bad \udcff name")


def values(path: Path, **wanted: torch.Tensor) -> dict[str, list[float]]:
    """Load tensors of a checkpoint as lists."""
    dcp.load(wanted, checkpoint_id=path)
    return {name: tensor.tolist() for name, tensor in wanted.items()}
