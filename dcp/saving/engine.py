"""A save by our own planner and storage: plans, writes and commits on columns.

`dcp.save` runs it on the state itself, the background writers on staged copies.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import astuple

from torch.distributed.checkpoint.metadata import Metadata

from dcp.planners.cache.plan_cache import PlanCache
from dcp.planners.columns import WriteColumns
from dcp.planners.save.digest import ReplicaCheck
from dcp.planners.save.global_plan import GlobalSavePlan, plan_save
from dcp.planners.wire.codec import (
    SectionCache,
    decode_save_columns,
    decode_write_columns,
    encode_save_columns,
    encode_write_columns,
)
from dcp.progress import ProgressCallback, reporting
from dcp.ranks.collectives import Ranks
from dcp.ranks.handshake import begin, check_same_target
from dcp.ranks.options import of_save
from dcp.saving.rank_state import PlanOptions, RankState, encoded_object
from dcp.storage.engine.reading.assemble import assemble_index
from dcp.storage.engine.write import WriteOutcome
from dcp.storage.errors import CheckpointError
from dcp.storage.formats.index import CheckpointIndex, itemsizes
from dcp.storage.formats.open import open_index
from dcp.storage.geometry.ragged import row_products
from dcp.storage.torch_metadata import LazyMetadata
from dcp.storage.writer import FileSystemWriter, WriteRequest

__all__ = ["ColumnarSave", "cache_of"]

_SAVE_ID_BYTES = 8
_LENGTH_BYTES = 8

_caches: dict[int, tuple[weakref.ref[object], PlanCache]] = {}
"""By identity: equal writers are not one, and a user's may not be hashable. Entries go with their owners."""


def cache_of(owner: object) -> PlanCache:
    """The plan cache of a writer or planner that is used again; it lives as long as its owner, and is no one
    else's."""
    number = id(owner)
    if number not in _caches:
        _caches[number] = (weakref.ref(owner, lambda _: _caches.pop(number, None)), PlanCache())
    return _caches[number][1]


class ColumnarSave:
    """One save on columns: no plan object per tensor is made on any rank.

    ``local`` gives this rank's part, in the first step, so that its failure reaches all ranks; digests that
    it lacks are made where they are needed. ``cache``, on all ranks or on none, lets the plan of the save
    before serve again. ``seconds`` are phases that came before; all of them end up in the manifest, by rank:
    ``plan`` is all until this rank knows what to write, ``local_plan``, ``digests`` (the wait for the others'
    and the answer) and ``global_plan`` (on the coordinator) are parts of it.
    """

    def __init__(
        self,
        local: Callable[[], RankState],
        writer: FileSystemWriter,
        ranks: Ranks,
        options: PlanOptions,
        *,
        use_collectives: bool = True,
        progress: bool | ProgressCallback | None = None,
        seconds: Mapping[str, float] | None = None,
        cache: PlanCache | None = None,
    ) -> None:
        self._collect = local
        self._writer = writer
        self._ranks = ranks
        self._options = options
        self._together = use_collectives
        self._progress = progress
        self._cache = cache
        self.seconds: dict[str, float] = dict(seconds or {})
        self.plan_reused = False
        self._offered = 0.0
        self._scattered = False
        self._local: RankState | None = None
        self._plan: GlobalSavePlan | None = None

    def run(self) -> Metadata:
        """Plan, write, commit."""
        try:
            self._begin()
            if self._together:
                self._run_together()
            else:
                self._run_alone()
        except BaseException:
            if self._cache is not None:
                self._cache.drop()
            raise
        if self._cache is not None:
            self._cache.commit()
        return self._metadata()

    def _begin(self) -> None:
        manner = [] if self._together else ["without collectives"]
        if self._cache is not None:
            manner.append("with a plan cache")
        options = of_save(self._writer, self._options)
        places = begin(self._ranks, lambda: self._writer.store.url, manner=manner, options=options)
        if self._together:
            check_same_target(self._ranks, places, lambda: self._writer.store)
        self._scattered = len(set(places)) > 1

    def _run_together(self) -> None:
        writer, ranks, begun = self._writer, self._ranks, time.perf_counter()
        known = None if self._cache is None else self._known_plan(self._cache)
        reply = b""
        if known is None:
            reply = ranks.reduce_scatter("plan", self._local_plan, self._global_plan)
        self.seconds["plan"] = time.perf_counter() - begun

        def write() -> bytes:
            return self._write(self._received(reply) if known is None else known).encode()

        try:
            ranks.reduce_broadcast("write", write, self._commit)
        except BaseException as error:  # an interrupt, too, must not leave files behind
            # By the coordinator alone: by now every rank has reported to it, or was given up. Of what is
            # elsewhere it knows nothing.
            if ranks.is_coordinator or self._scattered:
                writer.discard()
            if ranks.is_coordinator and writer.index is not None and isinstance(error, CheckpointError):
                error.committed = True
                error.add_note("The checkpoint is committed: only the answer did not reach every rank.")
            raise

    def _run_alone(self) -> None:
        """Each rank by itself, then a barrier: no plan is exchanged, no rank sees another's failure."""

        def everything() -> bytes:
            columns = None
            if (cache := self._cache) is not None:
                columns = self._answered(cache, self._compare(cache, [self._offer(cache)]))
            if columns is None:
                columns = self._received(self._global_plan([self._local_plan()])[0])
            try:
                self._commit([self._write(columns).encode()])
            except BaseException:
                self._writer.discard()
                raise
            return b""

        self._ranks.all_gather("save", everything)

    def _metadata(self) -> Metadata:
        writer = self._writer
        index = writer.index
        store = writer.store
        meta = writer.storage_meta()
        if index is not None:
            return LazyMetadata.of(lambda: index, meta)
        rank = None if self._together else self._ranks.rank
        return LazyMetadata.of(lambda: open_index(store, rank=rank), meta)

    # -- the plan of the save before -------------------------------------------------------------------------

    def _known_plan(self, cache: PlanCache) -> WriteColumns | None:
        """This rank's part of the cached plan where all ranks have it and their parts are unchanged.

        Every rank of a save with caches takes this step: one that has no plan any more says so in it.
        """
        answer = self._ranks.reduce_broadcast(
            "digests",
            lambda: self._offer(cache),
            lambda offers: self._compare(cache, offers),
            short=True,
        )
        self.seconds["digests"] = time.perf_counter() - self._offered
        return self._answered(cache, answer)

    def _offer(self, cache: PlanCache) -> bytes:
        begun = time.perf_counter()
        local, ranks, check = self._local_state(), self._ranks, self._check
        offer = cache.offer(
            local,
            local.digested_objects(check).digests,
            check=check,
            options=[*astuple(self._options), self._together, ranks.rank, ranks.world_size],
        )
        self._offered = time.perf_counter()
        self.seconds["local_plan"] = self._offered - begun
        return offer

    def _compare(self, cache: PlanCache, offers: list[bytes]) -> bytes:
        """The id of the save if the cached plan serves, else nothing."""
        begun = time.perf_counter()
        if not cache.hit(offers):
            return b""
        self._plan = cache.plan
        self.seconds["global_plan"] = time.perf_counter() - begun
        return self._writer.save_id.encode("ascii")

    def _answered(self, cache: PlanCache, answer: bytes) -> WriteColumns | None:
        if not answer:
            return None
        self._writer.save_id = answer.decode("ascii")
        self.plan_reused = True
        return cache.writes

    # -- the steps -------------------------------------------------------------------------------------------

    @property
    def _is_exchanged(self) -> bool:
        return self._together and self._ranks.world_size > 1

    @property
    def _check(self) -> ReplicaCheck:
        """How replicas are compared: a rank that plans alone has none."""
        return self._options.replica_check if self._is_exchanged else "off"

    def _local_state(self) -> RankState:
        if self._local is None:
            writer, ranks = self._writer, self._ranks
            writer.set_up_storage_writer(
                ranks.is_coordinator, rank=ranks.rank, use_collectives=self._together
            )
            if ranks.is_coordinator or not self._together:
                writer.prepare()
            self._local = self._collect()
        return self._local

    def _local_plan(self) -> bytes:
        begun = time.perf_counter()
        local = self._local_state()
        local = self._local = local.with_digests(self._check)
        encoded = encode_save_columns(local.columns) if self._is_exchanged else b""
        self.seconds["local_plan"] = self.seconds.get("local_plan", 0.0) + time.perf_counter() - begun
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
        save_id = self._writer.save_id
        extras = [b""] * len(parts) if self._cache is None else self._cache.planned(self._plan)
        replies = [
            save_id.encode("ascii")
            + len(extra).to_bytes(_LENGTH_BYTES, "little")
            + extra
            + encode_write_columns(writes)
            for extra, writes in zip(extras, self._plan.writes, strict=True)
        ]
        self.seconds["global_plan"] = time.perf_counter() - begun
        return replies

    def _received(self, reply: bytes) -> WriteColumns:
        """What this rank has to write, from the coordinator's `_global_plan`."""
        begin = _SAVE_ID_BYTES + _LENGTH_BYTES
        end = begin + int.from_bytes(reply[_SAVE_ID_BYTES:begin], "little")
        self._writer.save_id = reply[:_SAVE_ID_BYTES].decode("ascii")
        columns = decode_write_columns(reply[end:])
        if self._cache is not None and self._local is not None:
            self._cache.receive(self._local, columns, reply[begin:end], check=self._check)
        return columns

    def _write(self, columns: WriteColumns) -> WriteOutcome:
        begun = time.perf_counter()
        request = self._request(columns)
        total = int(request.payload_bytes[request.own_rows].sum())
        with reporting(self._progress, "write", total, show=self._ranks.is_coordinator) as on_bytes:
            outcome = self._writer.write_request(request, on_bytes)
        self.seconds["write"] = time.perf_counter() - begun
        outcome.seconds = dict(self.seconds)
        outcome.traffic = self._writer.traffic
        return outcome

    def _request(self, columns: WriteColumns) -> WriteRequest:
        if self._local is None:
            raise CheckpointError("the save was not planned")
        local = self._local.columns
        codes = local.dtype_codes[local.item_tensors[columns.items]]
        cache: dict[bytes, bytes] = {}
        fqns, values = local.objects.fqns, self._local.objects
        # Two lists, because the interpreter's cyclic collection would look at each of very many pairs.
        blobs: list[bytes] = []
        plains: list[bytes | None] = []
        for row in columns.objects.tolist():
            blob, plain = encoded_object(fqns[row], values[row], cache)
            blobs.append(blob)
            plains.append(plain)
        sources = self._local.sources
        return WriteRequest(
            sources=[sources[number] for number in local.item_sources[columns.items].tolist()],
            dtype_codes=codes,
            box_start=columns.box_start,
            sizes=columns.sizes,
            local_offsets=columns.local_offsets,
            payload_bytes=row_products(columns.sizes, columns.box_start) * itemsizes(codes),
            shares=columns.shares,
            blobs=blobs,
            values=plains,
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
        if any(outcome.traffic for outcome in outcomes):
            self._writer.provenance["rank_traffic"] = [outcome.traffic for outcome in outcomes]
        self._writer.provenance["assemble_seconds"] = time.perf_counter() - begun
        self._writer.publish(index)
        return b""
