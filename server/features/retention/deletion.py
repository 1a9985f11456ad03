"""Deletion with grace: checkpoints marked as deleted can be restored until their bytes are purged."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field
from sqlalchemy import Connection, select

from dcp.server.catalog.checkpoints import set_state
from dcp.server.catalog.details import get_checkpoint, lock_checkpoint
from dcp.server.catalog.errors import CatalogError, StateError
from dcp.server.catalog.labels import Change
from dcp.server.core.jobs.kind import CheckpointId, JobContext, JobPlan, Kind, Parameters, ReportProgress
from dcp.server.core.jobs.ledger.rows import JobSpec, Json, lock_job, unfinished_job
from dcp.server.core.jobs.ledger.transitions import request_cancel
from dcp.server.core.jobs.subjects import roots_of_committed
from dcp.server.core.problems import ConflictError, ForbiddenError
from dcp.server.core.security.principal import Principal
from dcp.server.core.settings import Settings
from dcp.server.database.tables import aliases
from dcp.server.features.retention.policies import writable_roots
from dcp.server.records.administration import Scope
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.jobs import Job

__all__ = ["DeleteKind", "DeleteParams", "alias_of", "delete_softly", "purge_dedup_key", "restore"]


def purge_dedup_key(checkpoint_id: int) -> str:
    """Key of the job that purges a checkpoint, of which there is one at a time."""
    return f"purge:{checkpoint_id}"


def delete_softly(
    connection: Connection, checkpoint_id: int, grace_seconds: float, change: Change
) -> CheckpointDetail:
    """Mark it as deleted; its bytes stay for ``grace_seconds``. Deleting it again changes nothing.

    Raises MissingError, ChangedError, and StateError if it is pinned, an alias names it, or it is purged.
    """
    row = lock_checkpoint(connection, checkpoint_id, change.visible, change.expected_version)
    if row["state"] == "deleted":
        return get_checkpoint(connection, checkpoint_id)
    alias = alias_of(connection, checkpoint_id)
    if alias is not None:
        raise StateError(
            f"checkpoint {checkpoint_id} is {alias!r} of its run: move or remove that alias first",
            state=row["state"],
        )
    now = change.at_seconds
    return set_state(
        connection,
        checkpoint_id,
        "deleted",
        actor=change.actor,
        now=now,
        purge_after_seconds=now + grace_seconds,
    )


def alias_of(connection: Connection, checkpoint_id: int) -> str | None:
    """Return the first of the aliases that name a checkpoint, which keep it whole."""
    query = select(aliases.c.name).where(aliases.c.checkpoint_id == checkpoint_id).order_by(aliases.c.name)
    return connection.execute(query).scalars().first()


def restore(connection: Connection, checkpoint_id: int, change: Change) -> CheckpointDetail:
    """Undo a deletion whose purge has not begun. The next scan looks at its bytes.

    Raises MissingError, ChangedError, and StateError if it is not deleted, or is being purged.
    """
    row = lock_checkpoint(connection, checkpoint_id, change.visible, change.expected_version)
    if row["state"] != "deleted":
        raise StateError(f"checkpoint {checkpoint_id} is {row['state']}, not deleted", state=row["state"])
    job_id = unfinished_job(connection, purge_dedup_key(checkpoint_id))
    if job_id is not None:
        job = lock_job(connection, job_id)
        if job.state == "queued" and job.attempt == 0:
            request_cancel(connection, job_id, change.at_seconds, change.actor)
        elif not job.is_final:
            raise StateError(f"checkpoint {checkpoint_id} is being purged by job {job_id}", state="deleted")
    return set_state(connection, checkpoint_id, "committed", actor=change.actor, now=change.at_seconds)


class DeleteParams(Parameters):
    """Committed checkpoints of one root, and for how long they can be restored; None: as is configured."""

    checkpoint_ids: Annotated[tuple[CheckpointId, ...], Field(min_length=1, max_length=1000, strict=False)]
    grace_seconds: Annotated[float, Field(ge=0, le=10 * 366 * 86_400.0)] | None = None


class DeleteKind(Kind[DeleteParams]):
    """Deletion of several checkpoints, in the transaction that completes the job: there are no tasks."""

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
        if root not in writable_roots(settings):
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

    def record(self, connection: Connection, job: Job, result: Json) -> None:
        """As `Kind.record`. Checkpoints that are pinned or gone by now stay as they are."""
        params = DeleteParams.model_validate(job.params)
        change = Change(actor=job.created_by, now=time.time())
        for number in result["checkpoint_ids"]:
            try:
                delete_softly(connection, number, params.grace_seconds or 0.0, change)
            except CatalogError:
                continue
