"""Contents of a checkpoint as plain lists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import dcp


class Unpicklable:
    """Fails in the write step, when the data files are begun."""

    def __reduce__(self) -> Any:
        raise RuntimeError("bad \udcff name")


def values(path: Path, **wanted: torch.Tensor) -> dict[str, list[float]]:
    """The tensors of a checkpoint as lists."""
    dcp.load(wanted, checkpoint_id=path)
    return {name: tensor.tolist() for name, tensor in wanted.items()}
