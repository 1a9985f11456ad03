"""Save the state dicts of all ranks as one committed checkpoint (`dcp.save`, `dcp.async_save`).

A save makes local plans and a global plan, writes files and commits (`docs/design/saving.md`). dcp's planner
and storage work on columns. Planners and storages that override a step receive torch's plan objects
(`dcp.engines`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
)
from torch.distributed.checkpoint.storage import StorageWriter
from typing_extensions import deprecated

from dcp.background.writers import SaveFuture
from dcp.calls.arguments import (
    choose_writer,
    refuse_a_place,
    takes_storage_second,
    with_own_id,
)
from dcp.calls.plain_errors import plain_errors
from dcp.calls.torch_names import names_of
from dcp.engines.run import save_with
from dcp.planners.weight_maps.weight_map import WeightMap
from dcp.progress import ProgressCallback
from dcp.ranks.failures import DEFAULT_TIMEOUT_SECONDS
from dcp.saving.save import SaveOptions
from dcp.steps import patterns_of_part
from dcp.storage.errors import check_flags
from dcp.storage.torch_storage.writer import FileSystemWriter

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import SavePlanner

__all__ = [
    "AsyncCheckpointerType",
    "AsyncSaveResponse",
    "SaveFuture",
    "async_save",
    "save",
    "save_state_dict",
]

if not TYPE_CHECKING:
    __getattr__ = names_of("state_dict_saver")


@plain_errors
@takes_storage_second("storage_writer")
def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    map: WeightMap | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    apart: str | Sequence[str] = (),
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    user_metadata: Mapping[str, Any] | None = None,
    progress: bool | ProgressCallback | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Metadata:
    """Save a sharded state dict as one checkpoint. Call it on every rank of the process group.

    Plain tensors and values must be equal on all ranks; the save compares digests and one rank stores them.
    Wrap state that differs by rank in `PerRank`.

    When `save` returns, the checkpoint is committed and durable (see ``sync_files`` of `FileSystemWriter`).
    If a rank fails, all ranks raise, and an existing checkpoint under the id is unchanged.

    The arguments up to ``use_collectives`` are those of torch.

    Args:
        state_dict: Nested dicts and lists of tensors (plain, DTensor, ShardedTensor), values and `Stateful`
            objects, which provide ``state_dict()``.
        checkpoint_id: Path or URL, such as ``s3://bucket/run/step-100``. An existing checkpoint is replaced
            in one step.
        storage_writer: Writer to use instead of `FileSystemWriter`. A reused writer caches the plan: while
            the structure stays equal on all ranks, the next save exchanges digests only.
        planner: Planner to use instead of `DefaultSavePlanner`. With ``enable_plan_caching``, the planner
            caches the plan.
        process_group: Ranks that save together; the default group if None.
        no_dist: Save in this process alone.
        use_collectives: False saves each rank's part independently, as ``__{rank}.manifest.msgpack``.
        map: Map from the model definition of ``state_dict`` to that of the checkpoint, as for `dcp.convert`.
            All tensors that form one target tensor must be on the same rank, or be sharded alike. Stacked
            tensors may be on different ranks if the map gives their number. Permuted tensors are copied for
            the save.
        apart: Parts to store in files of their own: "optimizer", or shell patterns on names; equal on all
            ranks. `dcp prune` can delete these parts later without rewriting other files. A part without
            tensors causes a warning.
        timeout_seconds: Longest wait for other ranks, in seconds.
        user_metadata: Plain data for the manifest. The coordinator's data is stored; a different value on
            another rank causes a warning.
        progress: True for a bar, or a function that receives `dcp.progress.Progress`.
        storage_options: Options of the file system of a URL, as in fsspec (``endpoint_url``, ``key``,
            ``secret``, ``anon``), and those of `dcp.storage.stores.objects.store`.

    Returns:
        torch's `Metadata` of the checkpoint, built on access.

    Raises:
        PlanError: The ranks' parts do not fit together, or the ranks called different operations.
        ReplicaMismatchError: Ranks have different data under one name.
        CheckpointConflictError: Another save to the id committed first, or ``overwrite=False`` found a
            checkpoint.
        StorageError: The storage failed; `StorageFullError` if the storage is full.
        CollectiveTimeoutError: Other ranks did not answer in time.

    All ranks raise the same error. The error of several ranks is a `RankFailedError` and also has the
    class of the cause.

    Examples:
        ```python
        dcp.save({"model": model.state_dict(), "step": 100}, checkpoint_id="runs/first/step-00000100")
        ```
    """
    metadata, _ = save_with(
        state_dict,
        _options(apart, user_metadata, use_collectives, progress, timeout_seconds=timeout_seconds),
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        map=map,
        storage_options=storage_options,
    )
    return metadata


@plain_errors
def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: ProcessGroup | None = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
    map: WeightMap | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    apart: str | Sequence[str] = (),
    user_metadata: Mapping[str, Any] | None = None,
    progress: bool | ProgressCallback | None = None,
    overlap: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> SaveFuture:
    """Copy the state, return, and save the copy in the background.

    The state, CPU tensors included, may change after the return, or with ``overlap`` after
    ``staging_completion``. Host buffers, writer and a gloo group are kept for the next call with the same
    process group. At most two saves run at the same time; a third call waits. The interpreter waits for the
    commit before it exits. `CheckpointManager` uses the same machinery.

    The arguments up to ``use_collectives`` are those of torch.

    Args:
        state_dict: As for `save`.
        checkpoint_id: As for `save`.
        storage_writer: As for `save`.
        planner: As for `save`.
        process_group: As for `save`.
        async_checkpointer_type: THREAD writes in a thread. PROCESS writes in a separate process, started
            once, which commits a copied state even if this process is killed.
        async_stager: Stager to copy the state, instead of `DefaultStager`.
        no_dist: As for `save`.
        use_collectives: As for `save`.
        map: As for `save`. Permuted tensors are copied before the return.
        apart: As for `save`.
        user_metadata: As for `save`.
        progress: As for `save`; called in the background.
        overlap: True copies in the background too. The state must not change before ``staging_completion``.
        storage_options: As for `save`. The writer process receives the options with each save.

    Returns:
        A `SaveFuture`. ``result()`` waits for the commit and returns torch's `Metadata`, or raises the error
        of the save. ``staging_completion`` and ``upload_completion`` are those of torch's AsyncSaveResponse.

    Raises:
        CollectiveTimeoutError: Other ranks did not answer when the group was made.
        CheckpointError: Earlier saves did not finish in time.

    Errors in the background are raised by the future, on all ranks. A tensor that changed during the copy
    raises StagingError.

    Examples:
        ```python
        future = dcp.async_save({"model": model.state_dict()}, checkpoint_id="runs/first/step-00000100")
        train_step()
        future.result()  # committed
        ```
    """
    from dcp.background.session import default_session  # imported late: the import registers an exit handler

    if async_stager is None and _stages_itself(storage_writer):
        async_stager = storage_writer  # as torch does for storages that are stagers
    session = default_session(process_group, no_dist=no_dist, kind=async_checkpointer_type)
    with session.raise_on_all_ranks():
        refuse_a_place("async_save", state_dict)
        check_flags(overlap=overlap)
        if storage_writer is not None:
            given, storage_writer = storage_writer, with_own_id(storage_writer)
            if storage_writer is given:
                session.wait()  # its id cannot change while a save uses the writer
        writer = choose_writer(storage_writer, checkpoint_id, storage_options)
        weights = None if map is None else WeightMap.of(map)
    return session.save(
        state_dict,
        storage_writer=writer,
        planner=planner,
        options=_options(apart, user_metadata, use_collectives, progress, map=weights),
        overlap=overlap,
        stager=async_stager,
    )


@deprecated("`save_state_dict` is deprecated; use `save` instead.", category=FutureWarning)
@plain_errors
def save_state_dict(
    state_dict: dict[str, Any],
    storage_writer: StorageWriter,
    process_group: ProcessGroup | None = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """Save with the signature from before torch 2.2. `Stateful` values are saved as they are."""
    storage_writer.reset()
    metadata, _ = save_with(
        state_dict,
        SaveOptions(),
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        coordinator=coordinator_rank,
        has_stateful=False,
    )
    return metadata


def _options(
    apart: str | Sequence[str],
    user_metadata: Mapping[str, Any] | None,
    use_collectives: bool,
    progress: bool | ProgressCallback | None,
    **others: Any,
) -> SaveOptions:
    patterns = map(patterns_of_part, [apart] if isinstance(apart, str) else apart)
    # copied, because the caller may change the dict; other types are refused later, on all ranks
    metadata = dict(user_metadata) if isinstance(user_metadata, Mapping) else user_metadata or {}
    return SaveOptions(
        apart=tuple(patterns),
        user_metadata=metadata,
        use_collectives=use_collectives,
        progress=progress,
        **others,
    )


def _stages_itself(writer: StorageWriter | None) -> TypeGuard[AsyncStager]:
    """Return whether ``writer`` overrides staging; `FileSystemWriter` inherits torch's methods but uses dcp's
    stager.
    """
    if isinstance(writer, FileSystemWriter):
        return "stage" in vars(writer) or type(writer).stage is not FileSystemWriter.stage
    return isinstance(writer, AsyncStager)
