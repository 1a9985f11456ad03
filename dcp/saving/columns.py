"""Saves on columns: our planner and our storage, with no objects by tensor; see `docs/design/saving.md`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from dcp.planners.columns import SaveColumns, decode_save_columns, encode_rows, encode_save_columns
from dcp.planners.digest import ReplicaCheck
from dcp.planners.rank_state import RankState
from dcp.planners.save.global_plan import GlobalSavePlan, plan_save
from dcp.planners.save.planner import DefaultSavePlanner, PlanOptions
from dcp.progress import reporting
from dcp.ranks.collectives import Codec
from dcp.saving.feature import Features, SaveFeature
from dcp.saving.options import compared_options
from dcp.saving.save import Save, SavingRank
from dcp.storage.engine.write import WriteColumns, WriteOutcome, assemble_index
from dcp.storage.errors import PlanError, StorageError
from dcp.storage.formats.opening import open_index
from dcp.storage.packing import pack, unpack
from dcp.storage.threads import unwanted_once
from dcp.storage.torch_storage.metadata import LazyMetadata
from dcp.storage.torch_storage.writer import FileSystemWriter

__all__ = ["ColumnSave", "RankPlan"]


class RankPlan(NamedTuple):
    """The rows that one rank has to write, and the id of the save."""

    save_id: str
    writes: WriteColumns

    def encode(self) -> bytes:
        """Pack it for the way from the coordinator."""
        return pack((self.save_id, encode_rows(self.writes)))

    @classmethod
    def decode(cls, data: bytes) -> RankPlan:
        """Unpack what `encode` packed."""
        save_id, writes = unpack(data)
        return cls(save_id, WriteColumns(*unpack(writes)))


_PLANS: Final = Codec(RankPlan.encode, RankPlan.decode)


@dataclass(kw_only=True, eq=False)
class ColumnSave(Save):
    """A save by our own planner and storage: no plan object per tensor is made on any rank.

    The planner does not travel: what it decides on is in ``plan_options``. Digests that a rank's part lacks
    are made where they are needed. All of ``times`` end up in the manifest, by rank: ``plan`` is all until
    this rank knows what to write, ``local_plan``, ``digests`` (the wait for the others' and the answer) and
    ``global_plan`` (on the coordinator) are parts of it.
    """

    storage: FileSystemWriter
    planner: DefaultSavePlanner
    plan_options: PlanOptions
    kinds: Sequence[type[SaveFeature]] = ()

    on_columns: ClassVar = True
    outcomes: ClassVar = Codec(WriteOutcome.encode, WriteOutcome.decode)

    features: Features = field(init=False)
    local: RankState | None = field(init=False)
    planned: GlobalSavePlan | None = field(init=False)
    check: ReplicaCheck = field(init=False)
    parts: Codec = field(init=False)

    def __post_init__(self) -> None:
        self.features = Features(self.kinds, self.options, self.storage)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("planner", "features")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, planner=DefaultSavePlanner())  # which makes no plan there
        self.__post_init__()

    def held(self, state: dict[str, Any], at: SavingRank) -> RankState:
        """Return the columns, tensors and values of ``state``."""
        planner = self.planner
        planner.rank = at.rank
        planner.set_up_planner(
            state_dict=state, storage_meta=self.storage.storage_meta(), is_coordinator=at.is_coordinator
        )
        return self.features.held(planner.create_local_columns(digests=False), at)

    # -- begin -----------------------------------------------------------------------------------------------

    def agreed(self) -> dict[str, Any]:
        """Return the options of the save, its storage, its planner and its features."""
        return self.features.agreed(compared_options(self.options, self.storage, self.plan_options))

    # -- plan ------------------------------------------------------------------------------------------------

    def plan(self) -> Callable[[], RankPlan]:
        """Plan with the other ranks."""
        self.start()
        return self.steps.reduce_scatter(
            "plan", self.local_plan, self.global_plan, sent=self.parts, reply=_PLANS
        )

    def start(self) -> None:
        """Forget the attempt before. A rank that plans alone has no replicas to compare."""
        self.local, self.planned = None, None
        # names and paths are the same on most ranks, and then decoded once
        self.parts = Codec(encode_save_columns, partial(decode_save_columns, cache={}))
        is_alone = not self.together or self.ranks.world_size == 1
        self.check = "off" if is_alone else self.plan_options.replica_check

    def local_state(self) -> RankState:
        """Set the storage up, and ask once for what this rank has."""
        if self.local is None:
            storage, ranks = self.storage, self.ranks
            storage.set_up_storage_writer(
                ranks.is_coordinator, rank=ranks.rank, use_collectives=self.together
            )
            if ranks.is_coordinator or not self.together:
                storage.prepare()
            self.local = self.given()
            self.times.update(self.seconds)  # staging may have ended only now
            self.size_bytes = self.local.memory.size_bytes
        return self.local

    def local_plan(self) -> SaveColumns:
        """Return what this rank could write."""
        begun = time.perf_counter()
        self.local = self.local_state().with_digests(self.check)
        self.times["local_plan"] = self.times.get("local_plan", 0.0) + time.perf_counter() - begun
        return self.local.columns

    def global_plan(self, parts: list[SaveColumns], *, with_sets: bool = False) -> list[RankPlan]:
        """Plan for all ranks, on the coordinator."""
        begun = time.perf_counter()
        try:
            self.planned = plan_save(
                parts,
                dedup_to_lowest_rank=self.plan_options.dedup_to_lowest_rank,
                split_bytes=self.plan_options.split_bytes,
                check_replicas=self.check != "off",
                with_sets=with_sets,
            )
        except PlanError as error:
            self.features.explain(error, parts)
            raise
        self.times["global_plan"] = time.perf_counter() - begun
        return [RankPlan(self.storage.save_id, writes) for writes in self.planned.writes]

    # -- write -----------------------------------------------------------------------------------------------

    def write(self, plan: RankPlan) -> WriteOutcome:
        """Write the rows of ``plan``, seen by the features' observers."""
        local, storage, ranks, columns = self.local_state(), self.storage, self.ranks, plan.writes
        storage.save_id = plan.save_id
        begun = time.perf_counter()
        memory, objects = local.memory, local.encoded_objects(columns.objects)
        groups, observers = self.features.groups(local), self.features.observers(local, columns)
        total = int(columns.payload_bytes(memory.dtype_codes)[columns.own_rows].sum())
        with reporting(self.options.progress, "write", total, show=ranks.is_coordinator) as on_bytes:
            watched = ranks.watching(on_bytes) if ranks.abort is not None else on_bytes
            try:
                with unwanted_once(ranks.abort):
                    outcome = storage.write_columns(
                        columns, memory, objects, watched, groups, [*observers.values()]
                    )
            except StorageError:
                ranks.check_called_off()  # then that is what has ended the request
                raise
        self.times["write"] = time.perf_counter() - begun
        found = self.features.found_by(observers)
        return replace(outcome, found=found, seconds=self.times, traffic=storage.traffic)

    # -- commit ----------------------------------------------------------------------------------------------

    def commit(self, outcomes: list[WriteOutcome]) -> bytes:
        """Publish the index of what all have written, on the coordinator."""
        plan, begun = self.planned, time.perf_counter()
        if plan is None:
            raise PlanError("the save was not planned")
        index = assemble_index(plan.index, plan.writes, outcomes)
        index = self.features.manifest(index, plan.writes, outcomes)
        provenance = self.provenance()
        provenance["rank_seconds"] = [outcome.seconds for outcome in outcomes]
        traffic = [outcome.traffic for outcome in outcomes]
        if any(traffic):
            provenance["rank_traffic"] = traffic
        provenance["assemble_seconds"] = time.perf_counter() - begun
        self.storage.publish(index, user=self.options.user_metadata, provenance=provenance)
        return b""

    def metadata(self, answer: bytes) -> Metadata:
        """Return torch's metadata, made of the index when it is looked at."""
        index, store = self.storage.index, self.storage.store
        rank = None if self.together else self.ranks.rank
        return LazyMetadata.of(
            lambda: index if index is not None else open_index(store, rank=rank), self.storage.storage_meta()
        )
