"""Read one checkpoint with nothing but `torch.distributed.checkpoint`, in one process; print digests as JSON."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed.checkpoint as stock
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp.demo.digests import digest_of

__all__ = ["main"]


def load_with_stock_torch(folder: str) -> dict[str, str]:
    """Digests of all entries, as stock torch loads them into full tensors."""
    metadata = stock.FileSystemReader(folder).read_metadata()
    state: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        is_tensor = isinstance(entry, TensorStorageMetadata)
        state[name] = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None
    stock.load(state, checkpoint_id=folder, no_dist=True)
    return {name: digest_of(value) for name, value in state.items()}


def main() -> None:
    """Digests of the checkpoints named on the command line, in order."""
    warnings.simplefilter("ignore")  # stock torch says that one process loads
    print(json.dumps([load_with_stock_torch(folder) for folder in sys.argv[1:]]))


if __name__ == "__main__":
    main()
