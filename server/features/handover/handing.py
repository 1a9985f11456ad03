"""Job that hands a checkpoint over (kind ``handover``), and the table of finished handovers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any, ClassVar, Final

from sqlalchemy import (
    Boolean,
    Column,
    Connection,
    Float,
    ForeignKey,
    Row,
    String,
    Table,
    Text,
    UniqueConstraint,
    delete,
    insert,
    select,
)

from dcp.server.catalog import audit
from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.errors import StateError
from dcp.server.core.jobs.kind import JobContext, JobPlan, Kind, PermanentJobError, ReportProgress, TaskSpec
from dcp.server.core.jobs.ledger.rows import JobSpec, Json
from dcp.server.core.jobs.subjects import CheckpointParams, open_database
from dcp.server.core.problems import NotFoundError
from dcp.server.core.security.principal import Principal, Scope
from dcp.server.core.settings import Settings
from dcp.server.database.mapping import ID
from dcp.server.database.tables import jobs, metadata
from dcp.server.features.handover.destinations import (
    CheckpointFacts,
    HandedOver,
    HandoverSettings,
    Target,
    model_name,
    reference_of,
)
from dcp.server.records.jobs import FINAL_STATES, Job

_GONE: Final = ("deleted", "purged", "vanished")

handovers: Final = Table(
    "handovers",
    metadata,
    Column("id", ID, primary_key=True, autoincrement=True),
    Column("checkpoint_id", ID, ForeignKey("checkpoints.id"), nullable=False),
    Column("target", String(16), nullable=False),
    Column("identity", String(32), nullable=False),  # changes if the checkpoint is replaced
    Column("name", String(255), nullable=False),  # of the model or artifact
    Column("version", String(64)),
    Column("link", Text),
    Column("is_marked_deleted", Boolean, nullable=False),
    Column("handed_over_seconds", Float, nullable=False),
    Column("job_id", ID, nullable=False),
    UniqueConstraint("checkpoint_id", "target"),
)
"""The last handover of each checkpoint to each target."""


def options_of(settings: Settings) -> HandoverSettings:
    """Read the settings of handovers."""
    from dcp.server.features.handover import feature

    found: HandoverSettings = feature.options(settings)
    return found


def rows_of(connection: Connection, checkpoint_id: int) -> dict[str, Row[Any]]:
    """Return the last handovers of a checkpoint, by target."""
    query = select(handovers).where(handovers.c.checkpoint_id == checkpoint_id)
    return {row.target: row for row in connection.execute(query)}


def targets_of(connection: Connection, checkpoint_id: int) -> set[str]:
    """Return targets of finished and queued handovers of a checkpoint."""
    query = select(jobs.c.params["target"].as_string()).where(
        jobs.c.checkpoint_id == checkpoint_id,
        jobs.c.kind == HandoverKind.name,
        jobs.c.state.not_in(FINAL_STATES),
    )
    return {*rows_of(connection, checkpoint_id), *connection.execute(query).scalars()}


class HandoverParams(CheckpointParams):
    """Checkpoint, and the target of its reference."""

    target: Target


class HandoverKind(Kind[HandoverParams]):
    """Handover of a checkpoint to a target; for a deleted checkpoint, a mark at the target."""

    name: ClassVar[str] = "handover"
    about: ClassVar[str] = (
        "Register a checkpoint in MLflow or Weights & Biases by its URL; no bytes are copied."
    )
    scope: ClassVar[Scope] = "write"
    params = HandoverParams
    needs_database: ClassVar[bool] = True  # only workers need to reach targets, not a Dask cluster

    def specify(
        self, connection: Connection, params: HandoverParams, caller: Principal, settings: Settings
    ) -> JobSpec:
        """As `Kind.specify`. Accepts a deleted checkpoint after a finished or queued handover: the mark of
        the deletion is a separate job."""
        found = get_checkpoint(connection, params.checkpoint_id, caller.roots)
        if params.target not in options_of(settings).targets:
            raise NotFoundError(f"{params.target} is not configured; set features.handover.{params.target}")
        is_gone = found.state in _GONE
        if found.state != "committed" and not (is_gone and params.target in targets_of(connection, found.id)):
            raise StateError(f"checkpoint {found.id} is {found.state}, not committed", state=found.state)
        spec = self.new_job(params, caller.name, root=found.root, checkpoint_id=found.id)
        return replace(spec, dedup_key=f"{spec.dedup_key}:gone") if is_gone else spec

    def plan(self, context: JobContext, params: HandoverParams) -> JobPlan:
        """As `Kind.plan`."""
        return JobPlan(tasks=[TaskSpec(payload=params.model_dump(mode="json"))])

    def run_task(self, context: JobContext, payload: Json, report_progress: ReportProgress) -> Json:
        """As `Kind.run_task`. Repetitions create no duplicates. Uses the current facts, because jobs can wait
        for a day; a deletion in the meantime is marked."""
        options, target = options_of(context.settings), payload["target"]
        facts, before = _read(context, payload)
        done = _hand_over(context, options, facts, target, before)
        if done is not None and not done.is_marked_deleted:
            now, _ = _read(context, payload)
            if now.state in _GONE:
                before = done.name, facts.identity
                done = _hand_over(context, options, replace(facts, state=now.state), target, before) or done
        if done is None:
            return {"target": target, "handed_over": None}
        return {"target": target, "identity": facts.identity, "handed_over": asdict(done)}

    def publish(self, context: JobContext, plan_data: Json, results: Sequence[Json]) -> dict[str, Any]:
        """As `Kind.publish`."""
        return dict(results[0])

    def record(self, connection: Connection, job: Job, result: Json) -> None:
        """Store the result of the handover."""
        done, now = result["handed_over"], time.time()
        if done is None or job.checkpoint_id is None:
            return
        target = result["target"]
        same = (handovers.c.checkpoint_id == job.checkpoint_id, handovers.c.target == target)
        connection.execute(delete(handovers).where(*same))
        values = {"checkpoint_id": job.checkpoint_id, "target": target, "identity": result["identity"]}
        values |= {"job_id": job.id, "handed_over_seconds": now, **done}
        connection.execute(insert(handovers).values(**values))
        detail = {"target": target, "name": done["name"], "version": done["version"], "job": job.id}
        action = "checkpoint.mark_deleted" if done["is_marked_deleted"] else "checkpoint.hand_over"
        audit.record(connection, job.created_by, action, f"checkpoint:{job.checkpoint_id}", detail, now=now)


def _read(context: JobContext, payload: Json) -> tuple[CheckpointFacts, tuple[str, str] | None]:
    """Return the current facts, and the name and identity of an earlier handover."""
    number = payload["checkpoint_id"]
    with open_database(context) as database, database.read() as connection:
        found = get_checkpoint(connection, number)
        row = rows_of(connection, number).get(payload["target"])
    facts = {field.name: getattr(found, field.name) for field in fields(CheckpointFacts)}
    facts |= {"committed_at": found.committed_at.isoformat(), "metrics": dict(found.metrics)}
    return CheckpointFacts(**facts), None if row is None else (row.name, row.identity)


def _hand_over(
    context: JobContext,
    options: HandoverSettings,
    facts: CheckpointFacts,
    target: Target,
    before: tuple[str, str] | None,
) -> HandedOver | None:
    is_gone = facts.state in _GONE
    if not is_gone and facts.state != "committed":
        raise PermanentJobError(f"checkpoint {facts.id} is {facts.state}, not committed")
    if target == "mlflow" and options.mlflow is not None:
        from dcp.server.features.handover.mlflow_registry import MlflowRegistry

        with MlflowRegistry(options, options.mlflow) as registry:
            if is_gone:
                name = model_name(options.mlflow.name, facts)
                return registry.mark_deleted(*(before or (name, facts.identity)))
            if before is not None and before[1] != facts.identity:
                registry.mark_replaced(*before)
            return registry.hand_over(facts, reference_of(options, context.settings, facts.root, facts.key))
    if target == "wandb" and options.wandb is not None:
        if is_gone:
            return None
        from dcp.server.features.handover.wandb_artifacts import log_artifact

        reference = reference_of(options, context.settings, facts.root, facts.key)
        return log_artifact(options, options.wandb, facts, reference, context.work_folder)
    raise PermanentJobError(f"features.handover.{target} is no longer configured")
