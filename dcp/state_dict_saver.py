"""`dcp.save`: from a state dict on every rank to one committed checkpoint.

The steps are those of `docs/design/saving.md`: local plan, global plan, write, commit. With our own planner
and storage they run on columns; a planner or storage that overrides a step gets torch's objects for all of
them, by torch's protocol (`dcp.engines`).
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
    """Save a sharded state dict as one checkpoint; every rank of the process group calls it alike.

    Plain tensors and values count as replicated: they must be equal on all ranks (compared by digest), one
    rank stores them; mark what differs by rank with `PerRank`.

    When it returns the checkpoint is committed and, unless the writer is set otherwise, durable. When it
    raises, on any rank, it raises on all; what was under the id before is untouched.

    The arguments up to ``use_collectives`` are torch's, with torch's meaning.

    Args:
        state_dict: Tensors of any kind (plain, DTensor, ShardedTensor), other values, nested dicts and lists
            of them, and `Stateful` objects, whose ``state_dict()`` is saved.
        checkpoint_id: A path or a URL, such as ``s3://bucket/run/step-100``. What is there is replaced, in
            one step.
        storage_writer: Writes the checkpoint, instead of dcp's. One that is used again remembers the plan: as
            long as no rank's structure changes, the next save exchanges digests instead of plans.
        planner: Plans the save, instead of `DefaultSavePlanner`; with ``enable_plan_caching`` it remembers
            the plan where no writer is given.
        process_group: The ranks that save together; the default group without it.
        no_dist: Save in this process alone.
        use_collectives: False lets each rank save its own part without the others
            (``__{rank}.manifest.msgpack``).
        map: From the model definition of ``state_dict`` to that of the checkpoint, as for `dcp.convert`. It
            is given the names and whole shapes of what a rank has, so all tensors that are made into one are
            on each rank, be it a shard of them; those that are stacked may be on some ranks each, where the
            map says how many there are. What is not below the key of a map that is ``below`` one is saved as
            it is. What is permuted within a box is copied for the save.
        apart: Parts, as "optimizer" or globs on names, that get files of their own: one more a rank and part.
            They are the same on all ranks. A part without tensors is a warning.
            `dcp prune` drops them by removing those files, and writes nothing anew.
        timeout_seconds: The longest wait for other ranks.
        user_metadata: Plain data that is kept in the manifest: the coordinator's; where another rank's differ
            a warning says so, once for each name.
        progress: True for a bar, or a function that gets `dcp.progress.Progress`.
        storage_options: Those of the file system of a URL, as all users of fsspec pass them
            (``endpoint_url``, ``key``, ``secret``, ``anon``, ...; the environment serves as well), and
            those in `dcp.storage.stores.objects.store`.

    Returns:
        torch's `Metadata` of the checkpoint, built when it is looked at.

    Raises:
        PlanError: The ranks' parts do not fit together, or the ranks called different operations.
        ReplicaMismatchError: Ranks have different data under one name.
        CheckpointConflictError: Another save to the id was faster, or ``overwrite=False`` found one there.
        StorageError: The storage failed; `StorageFullError` where it is full.
        CollectiveTimeoutError: Ranks did not answer in time.

        These and others of `dcp.errors` are raised on all ranks alike, by several ranks as a
        `RankFailedError` that is also of the cause's class.
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
    """Save behind the training loop: copy the state, return, and write the copy in the background.

    CPU tensors are copied as well: when this returns, or with ``overlap`` when ``staging_completion`` is
    done, everything may change again. Host buffers, writer and a gloo group of its own are kept for the next
    call with the same process group (whose backend may be any). At most two saves are under way; a third call
    waits. `CheckpointManager` has all that for itself. Interpreter exit waits for the commit.

    The arguments up to ``use_collectives`` are torch's, with torch's meaning.

    Args:
        state_dict: As for `save`.
        checkpoint_id: As for `save`.
        storage_writer: As for `save`.
        planner: As for `save`.
        process_group: As for `save`.
        async_checkpointer_type: THREAD writes in a thread of this process; PROCESS in a process of its own,
            which is started once, does not compete for the interpreter, and commits what was staged even if
            this process is killed.
        async_stager: Copies the state, instead of dcp's.
        no_dist: As for `save`.
        use_collectives: As for `save`.
        map: As for `save`; what is permuted is copied before this returns.
        apart: As for `save`.
        user_metadata: As for `save`.
        progress: As for `save`; called in the background.
        overlap: Copy behind the caller's back, too: nothing may change before ``staging_completion``.
        storage_options: As for `save`; the writer process gets them with the order to save.

    Returns:
        A `SaveFuture`: ``result()`` gives torch's `Metadata` once the checkpoint is committed, and raises
        what the save raised; ``staging_completion`` and ``upload_completion`` are as in torch's
        AsyncSaveResponse.

    Raises:
        CollectiveTimeoutError: Ranks did not come to make the saves' own group.
        CheckpointError: Saves before it have not ended in time.

        Errors in the background, a tensor that changed while it was copied among them (StagingError), are
        errors of the future, on all ranks alike.
    """
    from dcp.background.session import default_session  # only here: sessions drain at exit

    if async_stager is None and _stages_itself(storage_writer):
        async_stager = storage_writer  # as torch does for storages from before there were stagers
    session = default_session(process_group, no_dist=no_dist, kind=async_checkpointer_type)
    with session.raise_on_all_ranks():
        refuse_a_place("async_save", state_dict)
        check_flags(overlap=overlap)
        if storage_writer is not None:
            given, storage_writer = storage_writer, with_own_id(storage_writer)
            if storage_writer is given:
                session.wait()  # it cannot be pointed at another id while a save uses it
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
    """Save as `save` was called before torch 2.2; `Stateful` values are saved as they are."""
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
    # what may change while it is saved is copied; what is no mapping is refused where all ranks hear of it
    metadata = dict(user_metadata) if isinstance(user_metadata, Mapping) else user_metadata or {}
    return SaveOptions(
        apart=tuple(patterns),
        user_metadata=metadata,
        use_collectives=use_collectives,
        progress=progress,
        **others,
    )


def _stages_itself(writer: StorageWriter | None) -> TypeGuard[AsyncStager]:
    """Return whether ``writer`` has a way to stage: ours have torch's, which ours takes the place of."""
    if isinstance(writer, FileSystemWriter):
        return "stage" in vars(writer) or type(writer).stage is not FileSystemWriter.stage
    return isinstance(writer, AsyncStager)
