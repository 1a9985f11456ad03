"""A save by our own planner and storage: plans, writes and commits on columns.

`dcp.save` runs it on the state itself, the background writers on staged copies.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping

from torch.distributed.checkpoint.metadata import Metadata

from dcp.collectives import Ranks
from dcp.local_state import LocalState, PlanOptions, encoded_object
from dcp.planners.codec import (
    SectionCache,
    decode_save_columns,
    decode_write_columns,
    encode_save_columns,
    encode_write_columns,
)
from dcp.planners.columns import WriteColumns
from dcp.planners.global_plan import GlobalSavePlan, plan_save
from dcp.progress import ProgressCallback, reporting
from dcp.storage.engine.assemble import assemble_index
from dcp.storage.engine.write import WriteOutcome
from dcp.storage.errors import CheckpointError
from dcp.storage.formats.index import CheckpointIndex
from dcp.storage.formats.open import open_index
from dcp.storage.torch_metadata import LazyMetadata
from dcp.storage.writer import FileSystemWriter, WriteRequest

__all__ = ["ColumnarSave"]

_SAVE_ID_BYTES = 8


class ColumnarSave:
    """One save on columns: no plan object per tensor is made on any rank.

    ``local`` gives this rank's part, in the first step, so that its failure reaches all ranks. ``seconds``
    are phases that came before; all of them end up in the manifest, by rank.
    """

    def __init__(
        self,
        local: Callable[[], LocalState],
        writer: FileSystemWriter,
        ranks: Ranks,
        options: PlanOptions,
        *,
        use_collectives: bool = True,
        progress: bool | ProgressCallback | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        self._collect = local
        self._writer = writer
        self._ranks = ranks
        self._options = options
        self._together = use_collectives
        self._progress = progress
        self.seconds: dict[str, float] = dict(seconds or {})
        self._local: LocalState | None = None
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
        self._local = self._collect()
        alone = not self._together or ranks.world_size == 1
        encoded = b"" if alone else encode_save_columns(self._local.columns)
        self.seconds["local_plan"] = time.perf_counter() - begun
        return encoded

    def _global_plan(self, parts: list[bytes]) -> list[bytes]:
        begun = time.perf_counter()
        sections: SectionCache = {}  # names and paths are the same on most ranks, and then decoded once
        if len(parts) == 1 and self._local is not None:
            columns = [self._local.columns]
        else:
            columns = [decode_save_columns(part, sections) for part in parts]
        self._plan = plan_save(
            columns,
            dedup_to_lowest_rank=self._options.dedup_to_lowest_rank,
            split_bytes=self._options.split_bytes,
            check_replicas=self._options.replica_check != "off",
        )
        save_id = self._writer.save_id.encode("ascii")
        replies = [save_id + encode_write_columns(writes) for writes in self._plan.writes]
        self.seconds["global_plan"] = time.perf_counter() - begun
        return replies

    def _write(self, columns: WriteColumns) -> WriteOutcome:
        begun = time.perf_counter()
        request = self._request(columns)
        total = sum(source.nbytes for source in request.sources)
        with reporting(self._progress, "write", total, show=self._ranks.is_coordinator) as on_bytes:
            outcome = self._writer.write_request(request, on_bytes)
        self.seconds["write"] = time.perf_counter() - begun
        outcome.seconds = dict(self.seconds)
        return outcome

    def _request(self, columns: WriteColumns) -> WriteRequest:
        if self._local is None:
            raise CheckpointError("the save was not planned")
        local = self._local.columns
        codes = local.dtype_codes[local.item_tensors[columns.items]].tolist()
        starts = columns.box_start.tolist()
        sizes, offsets = columns.sizes.tolist(), columns.local_offsets.tolist()
        bounds = list(itertools.pairwise(starts))
        cache: dict[bytes, bytes] = {}
        values = self._local.objects
        objects = [encoded_object(values[row], cache) for row in columns.objects.tolist()]
        sources = self._local.sources
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
