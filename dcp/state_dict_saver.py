"""`dcp.save`: from a state dict on every rank to one committed checkpoint.

The steps are those of `docs/architecture.md`: local plan, global plan, write, commit. With our own planner
and storage they run on columns; a planner or storage that overrides a step gets torch's objects for all of
them, by torch's protocol (`dcp.object_steps`).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping, Sequence
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
from dcp.objects import encode_object
from dcp.planners import save_planner
from dcp.planners.codec import (
    SectionCache,
    decode_save_columns,
    decode_write_columns,
    encode_save_columns,
    encode_write_columns,
)
from dcp.planners.columns import SaveColumns, WriteColumns
from dcp.planners.global_plan import GlobalSavePlan, plan_save
from dcp.planners.save_planner import DefaultSavePlanner
from dcp.progress import ProgressCallback, reporting
from dcp.stateful_values import is_stateful
from dcp.storage import writer as columnar
from dcp.storage.engine.assemble import assemble_index
from dcp.storage.engine.write import WriteOutcome
from dcp.storage.errors import CheckpointError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.open import open_index
from dcp.storage.torch_metadata import LazyMetadata
from dcp.storage.writer import FileSystemWriter, WriteRequest
from dcp.storages import choose_writer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.planner import SavePlanner

__all__ = ["AsyncCheckpointerType", "AsyncSaveResponse", "async_save", "save", "save_state_dict"]

_SAVE_ID_BYTES = 8


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
        return _ColumnarSave(state, writer, ranks, planner, use_collectives, progress).run()
    return object_steps.save(state, writer, ranks, planner, use_collectives=use_collectives)


def _provenance(ranks: Ranks) -> dict[str, Any]:
    from dcp.version import __version__

    return {
        "world_size": ranks.world_size,
        "torch_version": str(torch.__version__),
        "dcphub_version": __version__,
    }


class _ColumnarSave:
    """One save on columns: no plan object per tensor is made on any rank."""

    def __init__(
        self,
        state: Callable[[], dict[str, Any]],
        writer: FileSystemWriter,
        ranks: Ranks,
        planner: DefaultSavePlanner,
        use_collectives: bool,
        progress: bool | ProgressCallback | None,
    ) -> None:
        self._state = state
        self._writer = writer
        self._ranks = ranks
        self._planner = planner
        self._together = use_collectives
        self._progress = progress
        self._seconds: dict[str, float] = {}
        self._local: SaveColumns | None = None
        self._sources: Sequence[torch.Tensor] = ()
        self._objects: Sequence[Any] = ()
        self._plan: GlobalSavePlan | None = None

    def run(self) -> Metadata:
        """Plan, write, commit."""
        if not self._together:
            return self._run_alone()
        writer, ranks = self._writer, self._ranks
        reply = ranks.reduce_scatter("plan", self._local_plan, self._global_plan)
        writer.save_id = reply[:_SAVE_ID_BYTES].decode("ascii")
        columns = decode_write_columns(reply[_SAVE_ID_BYTES:])
        try:
            ranks.reduce_broadcast("write", lambda: self._write(columns).encode(), self._commit)
        except BaseException as error:  # an interrupt, too, must not leave files behind
            # By the coordinator alone: by now every rank has reported to it, or was given up.
            if ranks.is_coordinator:
                writer.discard()
                if writer.index is not None and isinstance(error, CheckpointError):
                    error.facts["committed"] = True
                    error.add_note("The checkpoint is committed: only the answer did not reach every rank.")
            raise
        return self._metadata()

    def _run_alone(self) -> Metadata:
        """Each rank by itself, then a barrier: no plan is exchanged, no rank sees another's failure."""

        def everything() -> bytes:
            parts = [self._local_plan()]
            try:
                reply = self._global_plan(parts)[0]
                outcome = self._write(decode_write_columns(reply[_SAVE_ID_BYTES:]))
                self._commit([outcome.encode()])
            except BaseException:
                self._writer.discard()
                raise
            return b""

        self._ranks.all_gather("save", everything)
        return self._metadata()

    def _metadata(self) -> Metadata:
        writer = self._writer
        index = writer.index
        store = writer.store
        meta = writer.storage_meta()
        if index is not None:
            return LazyMetadata.of(lambda: index, meta)
        rank = None if self._together else self._ranks.rank
        return LazyMetadata.of(lambda: open_index(store, rank=rank), meta)

    # -- the steps -------------------------------------------------------------------------------------------

    def _local_plan(self) -> bytes:
        begun = time.perf_counter()
        writer, ranks = self._writer, self._ranks
        writer.set_up_storage_writer(ranks.is_coordinator, rank=ranks.rank, use_collectives=self._together)
        if ranks.is_coordinator or not self._together:
            writer.prepare()
        self._planner.set_up_planner(
            state_dict=self._state(),
            storage_meta=writer.storage_meta(),
            is_coordinator=ranks.is_coordinator,
        )
        self._local, self._sources, self._objects = self._planner.create_local_columns(
            digests=self._together and ranks.world_size > 1
        )
        alone = not self._together or ranks.world_size == 1
        encoded = b"" if alone else encode_save_columns(self._local)
        self._seconds["local_plan"] = time.perf_counter() - begun
        return encoded

    def _global_plan(self, parts: list[bytes]) -> list[bytes]:
        begun = time.perf_counter()
        sections: SectionCache = {}  # names and paths are the same on most ranks, and then decoded once
        if len(parts) == 1 and self._local is not None:
            columns = [self._local]
        else:
            columns = [decode_save_columns(part, sections) for part in parts]
        self._plan = plan_save(
            columns,
            dedup_to_lowest_rank=self._planner.dedup_save_to_lowest_rank,
            split_bytes=self._planner.split_bytes,
            check_replicas=self._planner.replica_check != "off",
        )
        save_id = self._writer.save_id.encode("ascii")
        replies = [save_id + encode_write_columns(writes) for writes in self._plan.writes]
        self._seconds["global_plan"] = time.perf_counter() - begun
        return replies

    def _write(self, columns: WriteColumns) -> WriteOutcome:
        begun = time.perf_counter()
        request = self._request(columns)
        total = sum(source.nbytes for source in request.sources)
        with reporting(self._progress, "write", total, show=self._ranks.is_coordinator) as on_bytes:
            outcome = self._writer.write_request(request, on_bytes)
        self._seconds["write"] = time.perf_counter() - begun
        outcome.seconds = dict(self._seconds)
        return outcome

    def _request(self, columns: WriteColumns) -> WriteRequest:
        local = self._local
        if local is None:
            raise CheckpointError("the save was not planned")
        codes = local.dtype_codes[local.item_tensors[columns.items]].tolist()
        starts = columns.box_start.tolist()
        sizes, offsets = columns.sizes.tolist(), columns.local_offsets.tolist()
        bounds = list(itertools.pairwise(starts))
        cache: dict[bytes, bytes] = {}
        objects = [encode_object(self._objects[row], cache) for row in columns.objects.tolist()]
        sources = self._sources
        return WriteRequest(
            sources=[sources[number] for number in local.item_sources[columns.items].tolist()],
            dtype_codes=codes,
            sizes=[tuple(sizes[begin:end]) for begin, end in bounds],
            local_offsets=[tuple(offsets[begin:end]) for begin, end in bounds],
            shares=columns.shares.tolist(),
            blobs=[blob for blob, _ in objects],
            values=[plain for _, plain in objects],
        )

    def _commit(self, parts: list[bytes]) -> bytes:
        if self._plan is None:
            raise CheckpointError("the save was not planned")
        begun = time.perf_counter()
        outcomes = [WriteOutcome.decode(part) for part in parts]
        chunks = [columns.chunks for columns in self._plan.writes]
        objects = [columns.object_rows for columns in self._plan.writes]
        index: CheckpointIndex = assemble_index(self._plan.index, chunks, objects, outcomes)
        self._writer.provenance["rank_seconds"] = [outcome.seconds for outcome in outcomes]
        self._writer.provenance["assemble_seconds"] = time.perf_counter() - begun
        self._writer.publish(index)
        return b""
