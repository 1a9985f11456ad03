"""Saves on columns: our planner and our storage, with no objects by tensor; see `docs/design/saving.md`."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import astuple, replace
from typing import Any, NamedTuple

import numpy as np
from torch.distributed.checkpoint.metadata import Metadata

from dcp.planners.columns import SaveColumns
from dcp.planners.digest import ReplicaCheck
from dcp.planners.rank_state import RankState
from dcp.planners.save.global_plan import GlobalSavePlan, plan_save
from dcp.planners.save.plan_cache import PlanCache
from dcp.planners.save.planner import DefaultSavePlanner, PlanOptions
from dcp.planners.wire.codec import (
    SectionCache,
    decode_save_columns,
    decode_write_columns,
    encode_save_columns,
    encode_write_columns,
)
from dcp.progress import reporting
from dcp.ranks.collectives import Codec, Ranks
from dcp.saving.engine import GivesPart, SaveAttempt, SaveEngine, SaveOrder, provenance_of
from dcp.saving.feature import Features, SaveFeature
from dcp.saving.foreign_values import warn_of_foreign, warn_of_keys
from dcp.saving.options import SaveOptions, compared_options
from dcp.storage.engine.write_tables import WriteColumns, WriteOutcome, assemble_index
from dcp.storage.errors import CheckpointError, OptionError, PlanError, StorageError
from dcp.storage.formats.opening.folder import open_index
from dcp.storage.packing import pack, unpack
from dcp.storage.threads import unwanted_once
from dcp.storage.torch_storage.metadata import LazyMetadata
from dcp.storage.torch_storage.writer import FileSystemWriter

__all__ = ["ColumnSave", "ColumnSaveEngine", "cache_of"]

_caches: dict[int, tuple[weakref.ref[object], PlanCache]] = {}
"""By identity: equal writers are not one, and a user's may not be hashable. Entries go with their owners."""


def cache_of(owner: object) -> PlanCache:
    """The plan cache of a writer or planner that is used again; it lives as long as its owner, and is no one
    else's."""
    number = id(owner)
    if number not in _caches:
        _caches[number] = (weakref.ref(owner, lambda _: _caches.pop(number, None)), PlanCache())
    return _caches[number][1]


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
        features: Sequence[type[SaveFeature]] = (),
        options: SaveOptions | None = None,
    ) -> None:
        super().__init__(writer, writer)
        self._planner = planner
        self._plan = plan
        self._kinds = tuple(features)
        self._options = options if options is not None else SaveOptions()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.storage, None, self._plan, self._kinds)

    def features(self, options: SaveOptions) -> Features:
        """The features of one save with ``options``."""
        return Features(self._kinds, options, self.storage)

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
        is_part = world_size > 1 and self._options.use_collectives  # only then gaps are looked for
        return self.features(self._options).held(local, is_part=is_part)

    def attempt(
        self, order: SaveOrder, part: GivesPart, ranks: Ranks, cache: PlanCache | None = None
    ) -> ColumnSave:
        """One attempt on columns."""
        features = self.features(order.options)
        return ColumnSave(order, part, ranks, cache, self.storage, self._plan, features)


class _RankPlan(NamedTuple):
    """What one rank has to write; ``extra`` is for its plan cache, None where that has the plan."""

    save_id: str
    writes: WriteColumns
    extra: bytes | None

    def encode(self) -> bytes:
        """Packed for the way from the coordinator."""
        return pack((self.save_id, encode_write_columns(self.writes), self.extra))

    @classmethod
    def decode(cls, data: bytes) -> _RankPlan:
        """The inverse of `encode`."""
        save_id, writes, extra = unpack(data)
        return cls(save_id, decode_write_columns(writes), extra)


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
        features: Features,
    ) -> None:
        super().__init__(order, part, ranks)
        self._writer = writer
        self._plan_options = plan
        self._cache = cache
        self._local: RankState | None = None
        self._plan: GlobalSavePlan | None = None
        self._features = features
        # How replicas are compared: a rank that plans alone has none.
        self._check: ReplicaCheck = plan.replica_check if self._together and ranks.world_size > 1 else "off"
        sections: SectionCache = {}  # names and paths are the same on most ranks, and then decoded once
        self.codecs = (
            Codec(encode_save_columns, lambda data: decode_save_columns(data, sections)),
            Codec(_RankPlan.encode, _RankPlan.decode),
            Codec(WriteOutcome.encode, WriteOutcome.decode),
        )

    def run(self) -> Metadata:
        """Plan, write, commit; a plan that did not end in a commit does not serve again."""
        cache = self._cache
        try:
            metadata = super().run()
        except BaseException:
            if cache is not None:
                cache.drop()
            raise
        if cache is not None:
            cache.commit()
        return metadata

    def _manner(self) -> list[str]:
        return [] if self._cache is None else ["with a plan cache"]

    def _compared(self) -> dict[str, Any]:
        options = compared_options(self._options, self._writer, self._plan_options)
        own = self._features.agreed()
        if taken := own.keys() & options.keys():
            raise OptionError(f"a feature has an option {min(taken)!r}, which every save has")
        return options | own

    def _metadata(self) -> Metadata:
        writer = self._writer
        index, store = writer.index, writer.store
        rank = None if self._together else self._ranks.rank
        return LazyMetadata.of(
            lambda: index if index is not None else open_index(store, rank=rank), writer.storage_meta()
        )

    # -- the plan of the save before -------------------------------------------------------------------------

    def _plan_again(self) -> _RankPlan | None:
        """This rank's part of the cached plan where all ranks have it and their parts are unchanged.

        Every rank of a save with caches takes this step: one that has no plan any more says so in it.
        """
        cache, ranks = self._cache, self._ranks
        if cache is None:
            return None

        def offer() -> bytes:
            begun, local = time.perf_counter(), self._local_state()
            digests = local.digested_objects(self._check).digests
            facts = [*astuple(self._plan_options), self._together, ranks.rank, ranks.world_size]
            offered = cache.offer(local, digests, check=self._check, options=facts)
            self.seconds["local_plan"] = time.perf_counter() - begun
            return offered

        def compare(offers: list[bytes]) -> bytes:
            """The id of the save if the cached plan serves, else nothing."""
            begun = time.perf_counter()
            if not cache.hit(offers):
                return b""
            self._plan = cache.plan
            self.seconds["global_plan"] = time.perf_counter() - begun
            return self._writer.save_id.encode("ascii")

        begun = time.perf_counter()
        if self._together:
            answer = ranks.reduce_broadcast("digests", offer, compare)
            self.seconds["digests"] = time.perf_counter() - begun - self.seconds["local_plan"]
        else:
            answer = compare([offer()])
        return _RankPlan(answer.decode("ascii"), cache.writes, None) if answer else None

    # -- the steps -------------------------------------------------------------------------------------------

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

    def _local_plan(self) -> SaveColumns:
        begun = time.perf_counter()
        self._local = self._local_state().with_digests(self._check)
        self.seconds["local_plan"] = self.seconds.get("local_plan", 0.0) + time.perf_counter() - begun
        return self._local.columns

    def _global_plan(self, parts: list[SaveColumns]) -> list[_RankPlan]:
        begun = time.perf_counter()
        try:
            plan = self._plan = plan_save(
                parts,
                dedup_to_lowest_rank=self._plan_options.dedup_to_lowest_rank,
                split_bytes=self._plan_options.split_bytes,
                check_replicas=self._check != "off",
                with_sets=self._cache is not None,
            )
        except PlanError as error:
            better = self._features.explained(error, parts)
            if better is error:
                raise
            raise better from error
        save_id = self._writer.save_id
        extras = [b""] * len(parts) if self._cache is None else self._cache.planned(plan)
        replies = [_RankPlan(save_id, *part) for part in zip(plan.writes, extras, strict=True)]
        self.seconds["global_plan"] = time.perf_counter() - begun
        return replies

    def _write(self, plan: _RankPlan) -> WriteOutcome:
        local, writer, ranks, columns = self._local, self._writer, self._ranks, plan.writes
        if local is None:
            raise CheckpointError("the save was not planned")
        writer.save_id = plan.save_id
        if self._cache is not None and plan.extra is not None:
            self._cache.receive(columns, plan.extra, check=self._check)
        begun = time.perf_counter()
        memory, objects = local.memory, local.encoded_objects(columns.objects)
        groups, observers = self._features.groups(local), self._features.observers(local, columns)
        total = int(columns.payload_bytes(memory.dtype_codes)[columns.own_rows].sum())
        with reporting(self._options.progress, "write", total, show=ranks.is_coordinator) as on_bytes:
            watched = ranks.watching(on_bytes)
            try:
                with unwanted_once(ranks.abort):
                    outcome = writer.write_columns(
                        columns, memory, objects, watched, groups, [*observers.values()]
                    )
            except StorageError:
                ranks.check_called_off()  # then that is what has ended the request
                raise
        self.seconds["write"] = time.perf_counter() - begun
        found = self._features.found_by(observers)
        return replace(outcome, found=found, seconds=dict(self.seconds), traffic=writer.traffic)

    def _commit(self, outcomes: list[WriteOutcome]) -> bytes:
        if self._plan is None:
            raise CheckpointError("the save was not planned")
        begun = time.perf_counter()
        index = assemble_index(self._plan.index, self._plan.writes, outcomes)
        provenance = provenance_of(self._ranks, self._options)
        rows = np.concatenate([writes.chunks for writes in self._plan.writes])
        index = self._features.manifest(index, rows, outcomes)
        provenance["rank_seconds"] = [outcome.seconds for outcome in outcomes]
        if any(outcome.traffic for outcome in outcomes):
            provenance["rank_traffic"] = [outcome.traffic for outcome in outcomes]
        provenance["assemble_seconds"] = time.perf_counter() - begun
        self._writer.publish(index, user=self._options.user_metadata, provenance=provenance)
        return b""
