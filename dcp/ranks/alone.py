"""The choice between an operation of all ranks and one of this process alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from dcp.calls.plain_errors import warn_caller
from dcp.storage.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["works_alone"]


def works_alone(process_group: ProcessGroup | None, *, no_dist: bool, operation: str) -> bool:
    """Return whether an ``operation`` is this process's alone: asked for, or without torch.distributed.

    Raises CheckpointError where each rank would save alone to one id: for a process group that was destroyed,
    and for a save by one of several processes (``WORLD_SIZE``) without a group. A load by such a one warns; a
    read gives each of them the same.
    """
    if no_dist:
        return True
    if dist.is_available() and dist.is_initialized():
        return False
    if process_group is not None:
        raise CheckpointError(
            "a process group was given, but torch.distributed is not initialised any more: save before "
            "destroy_process_group(), or pass no_dist=True to work on one rank"
        )
    count = os.environ.get("WORLD_SIZE", "")
    if count.isdecimal() and int(count) > 1 and operation != "read":
        _tell_of_no_group(int(count), operation)
    return True


def _tell_of_no_group(processes: int, operation: str) -> None:
    facts = f"this is one of {processes} processes (WORLD_SIZE), and torch.distributed is not initialised"
    if operation == "load":
        text = f"{facts}: it loads alone, as rank 0; call init_process_group() first, or say no_dist=True"
        warn_caller(text)
        return
    raise CheckpointError(
        f"{facts}: each would {operation} alone, to one place, and replace what the others have written. "
        "Call init_process_group() first; or pass no_dist=True where this process alone is meant to",
    )
