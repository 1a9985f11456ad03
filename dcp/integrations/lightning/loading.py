"""Which checkpoint a run goes on from, where the one that was asked for is damaged or was never committed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import lightning
from lightning.pytorch.utilities import rank_zero_warn

from dcp.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, UnsafeObjectError
from dcp.integrations.lightning.names import LAST, SHARDS, VERSION
from dcp.integrations.trainer_state import committed_beside, on_first_rank
from dcp.ranks.failures import causes_of

__all__ = ["is_of_lightning", "newest_good"]

_Path = str | os.PathLike[str]


class _NothingYet(dict[str, Any]):
    """Where a run was killed in its very first save: the Trainer restores nothing from a checkpoint that is
    false, and begins."""

    def __bool__(self) -> bool:
        return False


def is_of_lightning(path: _Path) -> bool:
    """Whether Lightning itself has saved it: a file, or a folder with its own metadata."""
    return os.path.isfile(path) or os.path.isfile(os.path.join(path, SHARDS))  # noqa: PTH113, PTH118 - or a URL


def newest_good(
    path: _Path, load: Callable[[_Path], dict[str, Any]], storage_options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What ``load`` gives for ``path``; of a "last" one that is damaged or was never committed, for the
    newest good one beside it. All ranks call it alike, and ``load`` raises the same on all of them.

    Raises CheckpointNotFoundError, CorruptCheckpointError and UnsafeObjectError as `dcp.read` does.
    """
    try:
        return load(path)
    except UnsafeObjectError as error:
        error.add_note("Of the Trainer: fit(..., weights_only=False); or add_safe_globals() beforehand.")
        raise
    except (CheckpointNotFoundError, CorruptCheckpointError) as error:
        if not os.path.basename(path).startswith(LAST) or _is_absent(error):  # noqa: PTH119 - or a URL
            raise
        refused = error
    for other in on_first_rank(lambda: committed_beside(path, storage_options)):
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
