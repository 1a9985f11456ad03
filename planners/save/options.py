"""What of a save planner decides on the plan of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from dcp.planners.digest import ReplicaCheck
from dcp.planners.save.planner import DefaultSavePlanner

__all__ = ["PlanOptions"]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What of a `DefaultSavePlanner` decides on the global plan."""

    dedup_to_lowest_rank: bool = False
    split_bytes: int | None = None
    replica_check: ReplicaCheck = "full"

    @classmethod
    def of(cls, planner: DefaultSavePlanner) -> PlanOptions:
        """The options of ``planner``."""
        return cls(planner.dedup_save_to_lowest_rank, planner.split_bytes, planner.replica_check)
