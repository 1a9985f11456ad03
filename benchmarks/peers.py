"""Other packages that save and load the same state in the same rounds, if they are installed.

Each package is used in its fastest way, and its load ends in the tensors that existed before. None of them
calls fsync; the benchmark does for durable saves.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.sides import Side

__all__ = [
    "PEERS",
    "PEER_WORKLOADS",
    "TORCH_CHECKPOINTING",
    "not_installed",
    "peer_sides",
    "torch_checkpointing_manager",
]

PEER_WORKLOADS = ("W1", "W2")
"""Workloads of tensors only, of one process: all of these packages can save them."""
TORCH_CHECKPOINTING = "torch-checkpointing"
_PACKAGES = {TORCH_CHECKPOINTING: "torch_checkpointing", "safetensors": "safetensors", "torch.save": "torch"}
PEERS = tuple(_PACKAGES)


def _is_installed(peer: str) -> bool:
    return find_spec(_PACKAGES[peer]) is not None


def not_installed(workloads: Sequence[str]) -> list[str]:
    """Return the packages that these workloads skip because they are not installed."""
    compared = {workload.removeprefix("async-") for workload in workloads} & {*PEER_WORKLOADS, "async"}
    return [peer for peer in PEERS if compared and not _is_installed(peer)]


def peer_sides(workload: str, ranks: int) -> list[Side]:
    """Return the installed packages that can run this workload; none for several ranks."""
    if workload not in PEER_WORKLOADS or ranks > 1:
        return []
    sides = (
        Side(TORCH_CHECKPOINTING, _save_torch_checkpointing, _load_torch_checkpointing),
        Side("safetensors", _save_safetensors, _load_safetensors),
        Side("torch.save", _save_torch, _load_torch),
    )
    return [side for side in sides if _is_installed(side.name)]


def torch_checkpointing_manager(*, durable: bool, asynchronous: bool = False) -> Any:
    """Return a `CheckpointManager` of torch-checkpointing; the caller must close it."""
    config = import_module("torch_checkpointing").CheckpointManager.Config
    chosen = config.with_async_save() if asynchronous else config.with_sync_save()
    storages = import_module("torch_checkpointing.storage.filesystem")
    # The default writes unaligned buffers with O_DIRECT, which local file systems refuse.
    chosen.storage_config = storages.LocalFileSystemStorageConfig(use_direct_io=False)
    if durable:
        chosen.pre_finalize_callback, chosen.finalize_callback = _fsync_written, _fsync_renamed
    return chosen.build()


def _fsync_written(args: Any) -> None:
    """Sync the files before the folder is renamed. The writer process imports this function by name."""
    _fsync_folder(Path(args.path))


def _fsync_renamed(args: Any) -> None:
    _fsync(Path(args.path).parent)


def _fsync_folder(folder: Path) -> None:
    for path in folder.iterdir():
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _save_torch_checkpointing(state_dict: dict[str, Any], folder: Path, durable: bool) -> None:
    manager = torch_checkpointing_manager(durable=durable)
    try:
        manager.save(str(folder), state_dict)
    finally:
        manager.close()


def _load_torch_checkpointing(state_dict: dict[str, Any], folder: Path) -> None:
    manager = torch_checkpointing_manager(durable=False)
    try:
        manager.load(str(folder), into=state_dict, strict=True)
    finally:
        manager.close()


def _save_safetensors(state_dict: dict[str, Any], folder: Path, durable: bool) -> None:
    folder.mkdir()
    import_module("safetensors.torch").save_file(state_dict["model"], folder / "model.safetensors")
    _finish(folder, durable)


def _load_safetensors(state_dict: dict[str, Any], folder: Path) -> None:
    _copy(import_module("safetensors.torch").load_file(folder / "model.safetensors"), state_dict["model"])


def _save_torch(state_dict: dict[str, Any], folder: Path, durable: bool) -> None:
    folder.mkdir()
    torch.save(state_dict, folder / "model.pt")
    _finish(folder, durable)


def _load_torch(state_dict: dict[str, Any], folder: Path) -> None:
    _copy(torch.load(folder / "model.pt", mmap=True)["model"], state_dict["model"])


def _finish(folder: Path, durable: bool) -> None:
    if durable:
        _fsync_folder(folder)
        _fsync(folder.parent)


def _copy(loaded: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
    for name, tensor in into.items():
        tensor.copy_(loaded[name])
