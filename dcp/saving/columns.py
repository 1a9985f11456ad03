"""Saves on columns: our planner and our storage, with no objects by tensor; see `docs/design/saving.md`."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata

from dcp.planners.columns import SaveColumns
from dcp.planners.digest import ReplicaCheck
from dcp.planners.load.selection import Selection
from dcp.planners.rank_state import RankState
from dcp.planners.save.global_plan import GlobalSavePlan, plan_save
from dcp.planners.save.options import PlanOptions
from dcp.planners.save.plan_cache import PlanCache
from dcp.planners.save.planner import DefaultSavePlanner
from dcp.planners.wire.codec import (
    SectionCache,
    decode_save_columns,
    decode_write_columns,
    encode_save_columns,
    encode_write_columns,
)
from dcp.progress import reporting
from dcp.ranks.collectives import Ranks
from dcp.ranks.options import of_save
from dcp.saving.engine import GivesPart, SaveAttempt, SaveEngine, SaveOrder
from dcp.saving.foreign_values import warn_of_foreign, warn_of_keys
from dcp.saving.mapped import mapped_state, missing_sources
from dcp.saving.options import SaveOptions
from dcp.saving.provenance import provenance_of
from dcp.storage.engine.assemble import assemble_index
from dcp.storage.engine.write_tables import WriteColumns, WriteOutcome
from dcp.storage.errors import CheckpointError, PlanError, StorageError
from dcp.storage.formats.index import Int64
from dcp.storage.formats.opening.folder import open_index
from dcp.storage.near_names import listed
from dcp.storage.threads import unwanted_once
from dcp.storage.torch_storage.metadata import LazyMetadata
from dcp.storage.torch_storage.writer import FileSystemWriter

__all__ = ["ColumnSave", "ColumnSaveEngine", "cache_of"]

_SAVE_ID_BYTES = 8
_LENGTH_BYTES = 8
_MAX_LISTED = 10

_caches: dict[int, tuple[weakref.ref[object], PlanCache]] = {}
"""By identity: equal writers are not one, and a user's may not be hashable. Entries go with their owners."""


def cache_of(owner: object) -> PlanCache:
    """The plan cache of a writer or planner that is used again; it lives as long as its owner, and is no one
    else's."""
    number = id(owner)
    if number not in _caches:
        _caches[number] = (weakref.ref(owner, lambda _: _caches.pop(number, None)), PlanCache())
    return _caches[number][1]


def _apart(local: RankState, parts: Sequence[Sequence[str]]) -> Int64 | None:
    """By local tensor the number of the part that it is of, from 1; 0 for those of none."""
    if not parts:
        return None
    columns = local.columns
    selections = [Selection.of(patterns, None) for patterns in parts]
    numbers = np.array(
        [
            next((at for at, one in enumerate(selections, 1) if one is not None and one.selects(name)), 0)
            for name in columns.fqns
        ],
        np.int64,
    )
    found = np.zeros(len(local.sources), np.int64)
    found[columns.item_sources] = numbers[columns.item_tensors]
    return found


class ColumnSaveEngine(SaveEngine):
    """Saves by our own ``planner`` and ``writer``. What the planner decides on is in ``plan``: it does not
    travel."""

    on_columns = True

    storage: FileSystemWriter

    def __init__(
        self,
        writer: FileSystemWriter,
        planner: DefaultSavePlanner | None,
        plan: PlanOptions,
        options: SaveOptions | None = None,
    ) -> None:
        super().__init__(writer, writer)
        self._planner = planner
        self._plan = plan
        self._options = options if options is not None else SaveOptions()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.storage, None, self._plan)

    def part(self, state: dict[str, Any], *, rank: int, world_size: int, is_coordinator: bool) -> RankState:
        """The columns, tensors and values of ``state``. The coordinator logs a warning of what only a trusted
        checkpoint gives back."""
        planner = self._planner
        if planner is None:
            raise CheckpointError("a writer process is given parts, and makes none")
        planner.begin_save(rank)
        planner.set_up_planner(
            state_dict=state, storage_meta=self.writer.storage_meta(), is_coordinator=is_coordinator
        )
        local = planner.create_local_columns(digests=False)
        if is_coordinator:
            warn_of_foreign(local.columns.objects.fqns, local.objects)
            warn_of_keys(planner.foreign_keys)
        options = self._options
        if options.map is None:
            return local
        is_part = world_size > 1 and options.use_collectives  # only then somebody looks for gaps
        return mapped_state(local, options.map, is_part=is_part, leads_back=options.map_leads_back)

    def attempt(
        self, order: SaveOrder, part: GivesPart, ranks: Ranks, cache: PlanCache | None = None
    ) -> ColumnSave:
        """One attempt on columns."""
        return ColumnSave(order, part, ranks, cache, self.storage, self._plan)


class ColumnSave(SaveAttempt):
    """One attempt on columns: no plan object per tensor is made on any rank.

    Digests that a rank's part lacks are made where they are needed. All of ``seconds`` end up in the
    manifest, by rank: ``plan`` is all until this rank knows what to write, ``local_plan``, ``digests`` (the
    wait for the others' and the answer) and ``global_plan`` (on the coordinator) are parts of it.
    """

    def __init__(
        self,
        order: SaveOrder,
        part: GivesPart,
        ranks: Ranks,
        cache: PlanCache | None,
        writer: FileSystemWriter,
        plan: PlanOptions,
    ) -> None:
        super().__init__(order, part, ranks)
        self._writer = writer
        self._plan_options = plan
        self._cache = cache
        self._offered = 0.0
        self._local: RankState | None = None
        self._plan: GlobalSavePlan | None = None
        self._known: WriteColumns | None = None

    def run(self) -> Metadata:
        """Plan, write, commit; a plan that did not end in a commit does not serve again."""
        try:
            metadata = super().run()
        except BaseException:
            if self._cache is not None:
                self._cache.drop()
            raise
        if self._cache is not None:
            self._cache.commit()
        return metadata

    def _place(self) -> str:
        return self._writer.store.url

    def _manner(self) -> list[str]:
        return [] if self._cache is None else ["with a plan cache"]

    def _compared(self) -> dict[str, Any]:
        return of_save(self._options, self._writer, self._plan_options)

    def _metadata(self) -> Metadata:
        writer = self._writer
        index, store = writer.index, writer.store
        meta = writer.storage_meta()
        if index is not None:
            return LazyMetadata.of(lambda: index, meta)
        rank = None if self._together else self._ranks.rank
        return LazyMetadata.of(lambda: open_index(store, rank=rank), meta)

    # -- the plan of the save before -------------------------------------------------------------------------

    def _plan_together(self) -> bytes:
        if self._cache is not None:
            self._known = self._known_plan(self._cache)
        return b"" if self._known is not None else super()._plan_together()

    def _plan_by_itself(self) -> bytes:
        if (cache := self._cache) is not None:
            self._known = self._answered(cache, self._compare(cache, [self._offer(cache)]))
        return b"" if self._known is not None else super()._plan_by_itself()

    def _known_plan(self, cache: PlanCache) -> WriteColumns | None:
        """This rank's part of the cached plan where all ranks have it and their parts are unchanged.

        Every rank of a save with caches takes this step: one that has no plan any more says so in it.
        """
        answer = self._ranks.reduce_broadcast(
            "digests",
            lambda: self._offer(cache),
            lambda offers: self._compare(cache, offers),
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
            options=[*astuple(self._plan_options), self._together, ranks.rank, ranks.world_size],
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
        return cache.writes

    # -- the steps -------------------------------------------------------------------------------------------

    @property
    def _is_exchanged(self) -> bool:
        return self._together and self._ranks.world_size > 1

    @property
    def _check(self) -> ReplicaCheck:
        """How replicas are compared: a rank that plans alone has none."""
        return self._plan_options.replica_check if self._is_exchanged else "off"

    def _local_state(self) -> RankState:
        if self._local is None:
            writer, ranks = self._writer, self._ranks
            writer.set_up_storage_writer(
                ranks.is_coordinator, rank=ranks.rank, use_collectives=self._together
            )
            if ranks.is_coordinator or not self._together:
                writer.prepare()
            self._local = self._part()
            self.size_bytes = self._local.memory.size_bytes
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
        with self._missing_told(columns):
            self._plan = plan_save(
                columns,
                dedup_to_lowest_rank=self._plan_options.dedup_to_lowest_rank,
                split_bytes=self._plan_options.split_bytes,
                check_replicas=self._check != "off",
                with_sets=self._cache is not None,
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

    @contextmanager
    def _missing_told(self, columns: Sequence[SaveColumns]) -> Iterator[None]:
        """What a plan lacks, by the names of the state dict that was saved through a map."""
        try:
            yield
        except PlanError as error:
            weights = self._options.map
            missing = [] if weights is None else missing_sources(columns, weights)
            if not missing:
                raise
            raise PlanError(
                f"no rank has (all of) {listed(missing, most=_MAX_LISTED)}: {error}",
                fqns=missing[:_MAX_LISTED],
            ) from error

    def _received(self, reply: bytes) -> WriteColumns:
        """What this rank has to write, from the coordinator's `_global_plan`."""
        begin = _SAVE_ID_BYTES + _LENGTH_BYTES
        end = begin + int.from_bytes(reply[_SAVE_ID_BYTES:begin], "little")
        self._writer.save_id = reply[:_SAVE_ID_BYTES].decode("ascii")
        columns = decode_write_columns(reply[end:])
        if self._cache is not None and self._local is not None:
            self._cache.receive(self._local, columns, reply[begin:end], check=self._check)
        return columns

    def _write(self, plan: bytes) -> bytes:
        columns = self._received(plan) if self._known is None else self._known
        begun = time.perf_counter()
        if self._local is None:
            raise CheckpointError("the save was not planned")
        memory, objects = self._local.memory, self._local.encoded_objects(columns.objects)
        places = self._local.places(columns) if self._writer.digests else None
        total = int(columns.payload_bytes(memory.dtype_codes)[columns.own_rows].sum())
        with reporting(self._options.progress, "write", total, show=self._ranks.is_coordinator) as on_bytes:
            watched = self._ranks.watching(on_bytes)
            try:
                with unwanted_once(self._ranks.abort):
                    apart = _apart(self._local, self._options.apart)
                    outcome = self._writer.write_columns(columns, memory, objects, watched, apart, places)
            except StorageError:
                self._ranks.check_called_off()  # then that is what has ended the request
                raise
        self.seconds["write"] = time.perf_counter() - begun
        return replace(outcome, seconds=dict(self.seconds), traffic=self._writer.traffic).encode()

    def _commit(self, parts: list[bytes]) -> bytes:
        if self._plan is None:
            raise CheckpointError("the save was not planned")
        begun = time.perf_counter()
        outcomes = [WriteOutcome.decode(part) for part in parts]
        index = assemble_index(self._plan.index, self._plan.writes, outcomes)
        provenance = provenance_of(self._ranks, self._options)
        provenance["rank_seconds"] = [outcome.seconds for outcome in outcomes]
        if any(outcome.traffic for outcome in outcomes):
            provenance["rank_traffic"] = [outcome.traffic for outcome in outcomes]
        provenance["assemble_seconds"] = time.perf_counter() - begun
        self._writer.publish(index, user=self._options.user_metadata, provenance=provenance)
        return b""
