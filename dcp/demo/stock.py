"""Load checkpoints with stock torch in a single process: print digests as JSON; the first checkpoint is
damaged.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader as stock
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

import dcp
from dcp.demo.train import digest_of
from dcp.storage.torch_compat import stock_fsspec_storages


def load_with_stock_torch(folder: str) -> dict[str, str]:
    """Return digests of all entries, loaded by stock torch into full tensors."""
    fsspec_reader, _ = stock_fsspec_storages()
    reader = fsspec_reader(folder) if "://" in folder else FileSystemReader(folder)
    state = _empty_state(reader.read_metadata())
    stock.load(state, storage_reader=reader, no_dist=True)
    return {name: digest_of(value) for name, value in state.items()}


def _empty_state(metadata: Metadata) -> dict[str, Any]:
    return {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }


def load_damaged(folder: str) -> tuple[dict[str, str] | str, str]:
    """Load a damaged checkpoint: return digests or an error of stock torch, and the message of `dcp.load`."""
    try:
        by_stock: dict[str, str] | str = load_with_stock_torch(folder)
    except (CheckpointException, RuntimeError, OSError) as error:
        by_stock = f"refuses it with {type(error).__name__}"
    try:
        dcp.load(
            _empty_state(dcp.FileSystemReader(folder).read_metadata()), checkpoint_id=folder, no_dist=True
        )
    except dcp.CheckpointError as error:
        return by_stock, f"{type(error).__name__}: {error}"
    return by_stock, "loaded it"


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # stock torch warns about loading in one process
    damaged, *whole = sys.argv[1:]
    by_stock, by_ours = load_damaged(damaged)
    digests = [load_with_stock_torch(folder) for folder in whole]
    print(json.dumps({"stock": digests, "damaged_by_stock": by_stock, "damaged_by_ours": by_ours}))
