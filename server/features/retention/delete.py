"""``delete``: checkpoints are marked as deleted, all at once; their bytes stay until their grace is over."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from sqlalchemy import Connection

from dcp.server.catalog.errors import CatalogError
from dcp.server.catalog.labels import Change
from dcp.server.core.jobs.kind import JobContext, JobPlan, Kind, ReportProgress
from dcp.server.core.jobs.ledger.states import JobRow, JobSpec, Json
from dcp.server.core.jobs.parameters import CheckpointId, Parameters
from dcp.server.core.jobs.subjects import roots_of_committed
from dcp.server.core.problems import ConflictError, ForbiddenError
from dcp.server.core.security.principal import Principal, Scope
from dcp.server.core.settings import Settings
from dcp.server.features.retention.deletion import delete_softly

__all__ = ["DeleteKind", "DeleteParams"]


class DeleteParams(Parameters):
    """Committed checkpoints of one root, and how long they can be restored: None is as the service has it."""

    checkpoint_ids: Annotated[tuple[CheckpointId, ...], Field(min_length=1, max_length=1000, strict=False)]
    grace_seconds: Annotated[float, Field(ge=0, le=10 * 366 * 86_400.0)] | None = None


class DeleteKind(Kind[DeleteParams]):
    """No tasks: it is done in the transaction that completes the job."""

    name: ClassVar[str] = "delete"
    scope: ClassVar[Scope] = "delete"
    params = DeleteParams

    def specify(
        self, connection: Connection, params: DeleteParams, caller: Principal, settings: Settings
    ) -> JobSpec:
        """As `Kind.specify`."""
        wanted = sorted(set(params.checkpoint_ids))
        names = roots_of_committed(connection, wanted, caller.roots)
        if len(names) > 1:
            raise ConflictError(f"the checkpoints are of {len(names)} roots; delete those of each by a job")
        root = names.pop()
        if root not in settings.roots or settings.roots[root].readonly:
            raise ForbiddenError(f"root {root} is read-only")
        grace = settings.delete_grace_seconds if params.grace_seconds is None else params.grace_seconds
        numbers = ",".join(map(str, wanted))
        return JobSpec(
            kind=self.name,
            params=params.model_copy(update={"grace_seconds": grace}).model_dump(mode="json"),
            created_by=caller.name,
            root=root,
            dedup_key=f"delete:{hashlib.sha256(numbers.encode()).hexdigest()[:40]}",
        )

    def plan(self, context: JobContext, params: DeleteParams) -> JobPlan:
        """As `Kind.plan`."""
        return JobPlan(tasks=[], plan_data=params.model_dump(mode="json"))

    def run_task(self, context: JobContext, payload: Json, report_progress: ReportProgress) -> Json:
        """As `Kind.run_task`."""
        return {}

    def publish(self, context: JobContext, plan_data: Json, results: Sequence[Json]) -> dict[str, Any]:
        """As `Kind.publish`."""
        return {"checkpoint_ids": sorted(set(plan_data["checkpoint_ids"]))}

    def record(self, connection: Connection, job: JobRow, result: Json) -> None:
        """Those that are pinned or gone by now stay as they are; the audit log tells which were deleted."""
        params = DeleteParams.model_validate(job.params)
        change = Change(actor=job.created_by, now=time.time())
        for number in result["checkpoint_ids"]:
            try:
                delete_softly(connection, number, params.grace_seconds or 0.0, change)
            except CatalogError:
                continue
