"""Save by torch's protocol, for a planner or storage that overrides a step.

Calls follow torch's documentation of StorageWriter and SavePlanner. Plans and results are pickled between
ranks, as in torch, and never stored.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcp.engines.protocol_calls import PICKLED, call_with_optional, one_each
from dcp.planners.save.planner import DefaultSavePlanner
from dcp.saving.save import Save, SavingRank
from dcp.saving.trust_warnings import warn_of_foreign
from dcp.storage.errors import CheckpointError, PlanError
from dcp.storage.formats.opening import open_index
from dcp.storage.torch_storage.metadata import LazyMetadata


@dataclass(kw_only=True, eq=False)
class ProtocolSave(Save):
    """Save with any planner and storage; ``ours`` is dcp's planner or None. The planner makes the
    metadata.
    """

    planner: SavePlanner
    ours: DefaultSavePlanner | None

    on_columns: ClassVar = False
    manner: ClassVar = ("by torch's protocol",)
    outcomes: ClassVar = PICKLED

    _made: Metadata | None = field(init=False, default=None)

    def held(self, state: dict[str, Any], at: SavingRank) -> dict[str, Any]:
        """Return the state dict itself, for the planner."""
        return state

    def plan(self) -> Callable[[], SavePlan]:
        """Plan with the other ranks."""
        self._made = None
        return self.steps.reduce_scatter(
            "plan", self._local_plan, self._global_plan, sent=PICKLED, reply=PICKLED
        )

    def _local_plan(self) -> SavePlan:
        writer, planner, ours, ranks = self.writer, self.planner, self.ours, self.ranks
        state = self.given()
        self.times.update(self.seconds)  # staging may have ended only now
        if ours is not None:
            ours.rank = ranks.rank
        call_with_optional(
            planner.set_up_planner,
            (state,),
            {"storage_meta": writer.storage_meta(), "is_coordinator": ranks.is_coordinator},
        )
        call_with_optional(
            writer.set_up_storage_writer,
            (ranks.is_coordinator,),
            {"rank": ranks.rank, "use_collectives": self.together},
        )
        if self.storage is not None:
            self.storage.said = self.options.user_metadata, self.provenance()
        plan = planner.create_local_plan()
        if ranks.is_coordinator:  # the same warning as the feature ForeignValues of saves on columns
            values = planner.state_dict if hasattr(planner, "state_dict") else state
            names = (item.index.fqn for item in plan.items if item.type is WriteItemType.BYTE_IO)
            known = [name for name in names if name in values]
            keys = ours.foreign_keys if ours is not None else {}
            warn_of_foreign(known, [values[name] for name in known], keys)
        return writer.prepare_local_plan(plan)

    def _global_plan(self, parts: list[SavePlan]) -> Sequence[SavePlan]:
        plans, self._made = self.planner.create_global_plan(parts)
        return one_each(self.writer.prepare_global_plan(plans), len(parts))

    def write(self, plan: SavePlan) -> list[WriteResult]:
        """Write the data that the planner resolves."""
        future = self.writer.write_data(self.planner.finish_plan(plan), self.planner)
        future.wait()
        return list(future.value())

    def commit(self, outcomes: list[list[WriteResult]]) -> bytes:
        """Let the storage commit, on the coordinator."""
        if self._made is None:
            raise PlanError("the save was not planned")
        try:
            self.writer.finish(metadata=self._made, results=outcomes)
        except CheckpointError as error:  # raised by work of a storage after the publication
            if self.storage is not None and self.storage.index is not None:
                error.committed = True
            raise
        # dcp's checkpoint can be read again; a custom storage may not be readable.
        return b"" if self.storage is not None else pickle.dumps(self._made)

    def metadata(self, answer: bytes) -> Metadata:
        """Return the planner's metadata on the coordinator; elsewhere the published or announced one."""
        if self._made is not None:
            return self._made
        if self.storage is not None:
            store = self.storage.store
            return LazyMetadata.of(lambda: open_index(store), self.storage.storage_meta())
        found: Metadata = pickle.loads(answer)
        return found
