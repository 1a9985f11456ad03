"""`dcp.save`: from a state dict on every rank to one committed checkpoint.

The steps are those of `docs/architecture.md`: local plan, global plan, write, commit. With our own planner
and storage they run on columns; a planner or storage that overrides a step gets torch's objects for all of
them, by torch's protocol (`dcp.object_steps`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
)
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.checkpoint.utils import _api_bc_check
from typing_extensions import deprecated

from dcp import object_steps
from dcp.collectives import DEFAULT_TIMEOUT_SECONDS, Ranks
from dcp.columnar_save import ColumnarSave
from dcp.local_state import LocalState, PlanOptions
from dcp.planners import save_planner
from dcp.planners.save_planner import DefaultSavePlanner
from dcp.progress import ProgressCallback
from dcp.stateful_values import is_stateful
from dcp.storage import writer as columnar
from dcp.storage.errors import CheckpointError
from dcp.storage.writer import FileSystemWriter
from dcp.storages import choose_writer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import SavePlanner

__all__ = ["AsyncCheckpointerType", "AsyncSaveResponse", "async_save", "save", "save_state_dict"]


@_api_bc_check  # type: ignore[untyped-decorator]  # torch does not annotate it
def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    user_metadata: Mapping[str, Any] | None = None,
    progress: bool | ProgressCallback | None = None,
) -> Metadata:
    """Save a sharded state dict as one checkpoint; every rank of the process group calls it alike.

    The parameters up to ``use_collectives`` are torch's, with torch's meaning. ``state_dict`` holds tensors
    of any kind (plain, DTensor, ShardedTensor), other values, nested dicts and lists of them, and
    `Stateful` objects, whose ``state_dict()`` is saved. Plain tensors and values count as replicated: they
    must be equal on all ranks (compared by digest), one rank stores them; mark what differs by rank with
    `PerRank`.

    Without a process group (or with ``no_dist``) this process saves alone. ``use_collectives=False`` lets
    each rank save its own part without the others (``__{rank}.manifest.msgpack``). ``timeout_seconds``
    bounds every wait for other ranks. ``user_metadata`` is plain data kept in the manifest. ``progress``
    draws a bar (True) or is called with `dcp.progress.Progress`.

    When it returns the checkpoint is committed and, unless the writer was told otherwise, durable. When it
    raises, on any rank, it raises on all: a `RankFailedError` that is also of the cause's class; what was
    under the id before is untouched.

    Returns torch's `Metadata` of the checkpoint, built when it is looked at.
    """
    alone = no_dist or not (dist.is_available() and dist.is_initialized())
    return _save(
        lambda: _stateful_to_plain(state_dict),
        choose_writer(storage_writer, checkpoint_id),
        Ranks(process_group, use_dist=not alone, timeout_seconds=timeout_seconds, operation="save"),
        planner,
        use_collectives=use_collectives,
        user_metadata=user_metadata,
        progress=progress,
    )


@deprecated("`save_state_dict` is deprecated; use `save` instead.", category=FutureWarning)
def save_state_dict(
    state_dict: dict[str, Any],
    storage_writer: StorageWriter,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """`save` as it was called before torch 2.2; `Stateful` values are saved as they are."""
    storage_writer.reset()
    alone = no_dist or not (dist.is_available() and dist.is_initialized())
    ranks = Ranks(process_group, use_dist=not alone, coordinator=coordinator_rank, operation="save")
    return _save(lambda: state_dict, storage_writer, ranks, planner)


def _stateful_to_plain(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.state_dict() if is_stateful(value) else value for key, value in state_dict.items()}


def _save(
    state: Callable[[], dict[str, Any]],
    writer: StorageWriter,
    ranks: Ranks,
    planner: SavePlanner | None,
    *,
    use_collectives: bool = True,
    user_metadata: Mapping[str, Any] | None = None,
    progress: bool | ProgressCallback | None = None,
) -> Metadata:
    """Save what ``state`` gives, which is asked in the first step so that its failure reaches all ranks."""
    planner = planner if planner is not None else DefaultSavePlanner()
    if isinstance(planner, DefaultSavePlanner):
        planner.rank = ranks.rank
    if isinstance(writer, FileSystemWriter):
        writer.user = dict(user_metadata or {})
        writer.provenance = _provenance(ranks)
    elif user_metadata:
        raise CheckpointError(
            f"user_metadata needs a storage of ours; {type(writer).__name__} has no place for it"
        )
    if (
        isinstance(writer, FileSystemWriter)
        and columnar.uses_columns(writer)
        and isinstance(planner, DefaultSavePlanner)
        and save_planner.uses_columns(planner)
    ):
        local = partial(_collect, state, writer, ranks, planner, use_collectives)
        options = PlanOptions.of(planner)
        return ColumnarSave(
            local, writer, ranks, options, use_collectives=use_collectives, progress=progress
        ).run()
    return object_steps.save(state, writer, ranks, planner, use_collectives=use_collectives)


def _collect(
    state: Callable[[], dict[str, Any]],
    writer: FileSystemWriter,
    ranks: Ranks,
    planner: DefaultSavePlanner,
    use_collectives: bool,
) -> LocalState:
    planner.set_up_planner(
        state_dict=state(), storage_meta=writer.storage_meta(), is_coordinator=ranks.is_coordinator
    )
    return LocalState.collect(planner, digests=use_collectives and ranks.world_size > 1)


def _provenance(ranks: Ranks) -> dict[str, Any]:
    from dcp.version import __version__

    return {
        "world_size": ranks.world_size,
        "torch_version": str(torch.__version__),
        "dcphub_version": __version__,
    }
