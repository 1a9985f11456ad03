"""Saves by torch's protocol: plans made of objects, for a planner or storage that overrides a step.

The sequence of calls is the one that torch documents for StorageWriter and SavePlanner. Plans and results
are objects of any class: they travel between the ranks of a job pickled, as torch sends them, and nothing of
that is ever stored.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from dcp.planners.save.planner import PlanOptions
from dcp.saving.engine import GivesPart, SaveAttempt, SaveEngine, SaveOrder, provenance_of
from dcp.saving.foreign_values import warn_of_foreign, warn_of_keys
from dcp.saving.options import compared_options
from dcp.storage.errors import CheckpointError
from dcp.storage.formats.opening.folder import open_index
from dcp.storage.torch_storage.metadata import LazyMetadata
from dcp.torch_protocol.calls import PICKLED, call_with_optional, one_each

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

    from dcp.planners.save.plan_cache import PlanCache
    from dcp.planners.save.planner import DefaultSavePlanner
    from dcp.ranks.collectives import Ranks
    from dcp.storage.torch_storage.writer import FileSystemWriter

__all__ = ["ProtocolSave", "ProtocolSaveEngine"]


class ProtocolSaveEngine(SaveEngine):
    """Saves by any ``planner`` and any ``writer``; ``ours`` and ``storage`` are the same where they are of
    this package, else None."""

    on_columns = False

    def __init__(
        self,
        writer: StorageWriter,
        planner: SavePlanner,
        ours: DefaultSavePlanner | None,
        storage: FileSystemWriter | None,
    ) -> None:
        super().__init__(writer, storage)
        self.planner = planner
        self.ours = ours

    def part(
        self, state: dict[str, Any], *, rank: int, world_size: int, is_coordinator: bool
    ) -> dict[str, Any]:
        """The state dict itself: what is in it, the planner finds out."""
        return state

    def attempt(
        self, order: SaveOrder, part: GivesPart, ranks: Ranks, cache: PlanCache | None = None
    ) -> ProtocolSave:
        """One attempt; no plan is kept for the next."""
        return ProtocolSave(self, order, part, ranks)


class ProtocolSave(SaveAttempt):
    """One attempt by torch's protocol; its metadata are those that the planner made."""

    codecs = (PICKLED, PICKLED, PICKLED)

    def __init__(self, engine: ProtocolSaveEngine, order: SaveOrder, part: GivesPart, ranks: Ranks) -> None:
        super().__init__(order, part, ranks)
        self._writer, self._planner, self._ours = engine.writer, engine.planner, engine.ours
        self._made: Metadata | None = None

    def _manner(self) -> list[str]:
        return ["by torch's protocol"]

    def _compared(self) -> dict[str, Any]:
        plan = PlanOptions.of(self._ours) if self._ours is not None else None
        return compared_options(self._options, self._storage, plan)

    def _local_plan(self) -> SavePlan:
        writer, planner, ours, ranks = self._writer, self._planner, self._ours, self._ranks
        state = self._part()
        if ours is not None:
            ours.begin_save(ranks.rank)
        call_with_optional(
            planner.set_up_planner,
            (state,),
            {"storage_meta": writer.storage_meta(), "is_coordinator": ranks.is_coordinator},
        )
        call_with_optional(
            writer.set_up_storage_writer,
            (ranks.is_coordinator,),
            {"rank": ranks.rank, "use_collectives": self._together},
        )
        if self._storage is not None:
            provenance = provenance_of(ranks, self._options)
            self._storage.describe(self._options.user_metadata, provenance)
        plan = planner.create_local_plan()
        if ranks.is_coordinator:
            _warn_of_foreign(plan, planner.state_dict if hasattr(planner, "state_dict") else state)
            warn_of_keys(ours.foreign_keys if ours is not None else {})
        return writer.prepare_local_plan(plan)

    def _global_plan(self, parts: list[SavePlan]) -> Sequence[SavePlan]:
        plans, self._made = self._planner.create_global_plan(parts)
        return one_each(self._writer.prepare_global_plan(plans), len(parts))

    def _write(self, plan: SavePlan) -> list[WriteResult]:
        future = self._writer.write_data(self._planner.finish_plan(plan), self._planner)
        future.wait()
        return list(future.value())

    def _commit(self, parts: list[list[WriteResult]]) -> bytes:
        made = self._made
        if made is None:
            raise CheckpointError("the save was not planned")
        self._writer.finish(metadata=made, results=parts)
        # What our writer published can be read again; a foreign storage need not be readable at all.
        return b"" if self._storage is not None else pickle.dumps(made)

    def _metadata(self) -> Metadata:
        if self._made is not None:
            return self._made
        if self._storage is not None:
            store = self._storage.store
            return LazyMetadata.of(lambda: open_index(store), self._storage.storage_meta())
        metadata: Metadata = pickle.loads(self._answer)
        return metadata


def _warn_of_foreign(plan: SavePlan, values: Mapping[str, Any]) -> None:
    """As a save on columns does, by what the planner was given; what it makes of that is its own."""
    names = (item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO)
    named = {name: values[name] for name in names if name in values}
    warn_of_foreign([*named], [*named.values()])
