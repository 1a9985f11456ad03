"""Which checkpoint a run goes on from, where the one that was asked for is damaged or was never committed."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

from dcp.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, UnsafeObjectError
from dcp.inspection.checkpoints import list_checkpoints
from dcp.integrations.lightning.names import LAST, SHARDS, VERSION
from dcp.ranks.failures import causes_of

__all__ = ["gathered", "is_of_lightning", "newest_good"]

_Path = str | os.PathLike[str]


class _NothingYet(dict[str, Any]):
    """Where a run was killed in its very first save: the Trainer restores nothing from a checkpoint that is
    false, and begins."""

    def __bool__(self) -> bool:
        return False


def is_of_lightning(path: _Path) -> bool:
    """Whether Lightning itself has saved it: a file, or a folder with its own metadata."""
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, SHARDS))  # noqa: PTH113, PTH118 - or a URL


def gathered(own: Any) -> list[Any]:
    """What each rank has; one entry without a process group."""
    if not dist.is_initialized():
        return [own]
    packed = io.BytesIO()
    torch.save(own, packed)  # the collective's own pickle has no way for some tensors
    states: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(states, packed.getvalue())
    return [torch.load(io.BytesIO(state), weights_only=False) for state in states]


def newest_good(
    path: _Path, load: Callable[[_Path], dict[str, Any]], storage_options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What ``load`` gives for ``path``; of a "last" one that is damaged or was never committed, for the
    newest good one beside it. All ranks call it alike, and ``load`` raises the same on all of them.

    Raises CheckpointNotFoundError, CorruptCheckpointError and UnsafeObjectError as `dcp.read` does.
    """
    folder, name = os.path.split(os.fspath(path))
    try:
        return load(path)
    except UnsafeObjectError as error:
        error.add_note("Of the Trainer: fit(..., weights_only=False); or add_safe_globals() beforehand.")
        raise
    except (CheckpointNotFoundError, CorruptCheckpointError) as error:
        if not name.startswith(LAST) or _is_absent(error):
            raise
        refused = error
    for other in _beside(folder, name, storage_options):
        rank_zero_warn(f"{path} cannot be loaded ({causes_of(refused)[0]}): {other} is taken instead")
        try:
            return load(other)
        except CorruptCheckpointError as error:
            refused = error
    if isinstance(refused, CorruptCheckpointError):
        raise refused
    rank_zero_warn(f"the save to {path} was never committed, and nothing is beside it: training begins anew")
    return _NothingYet({VERSION: lightning.__version__})


def _is_absent(error: CheckpointError) -> bool:
    """Whether there is not even what a killed save has left."""
    return not any(getattr(cause, "data_files", 1) for cause in causes_of(error))


def _beside(folder: str, name: str, storage_options: Mapping[str, Any] | None) -> list[str]:
    """The other committed checkpoints of the folder, newest first; as rank 0 sees them."""
    found: list[str] = []
    if not dist.is_initialized() or dist.get_rank() == 0:
        listed = list_checkpoints(folder or ".", storage_options=storage_options)
        committed = [each for each in listed if each.state == "committed" and each.name != name]
        committed.sort(key=lambda each: each.committed_seconds or 0.0, reverse=True)
        found = [os.path.join(folder, each.name) for each in committed]  # noqa: PTH118
    chosen: list[str] = gathered(found)[0]
    return chosen
