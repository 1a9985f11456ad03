"""Deletion with grace: checkpoints marked as deleted can be restored until their bytes are purged."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated, Any, ClassVar

from pydantic import Field
from sqlalchemy import Connection, select, update

from dcp.manager.retention import part_named
from dcp.server.catalog import audit
from dcp.server.catalog.changes import set_state
from dcp.server.catalog.details import get_checkpoint, lock_checkpoint
from dcp.server.catalog.errors import CatalogError, StateError
from dcp.server.catalog.labels import Change
from dcp.server.core import allowances
from dcp.server.core.jobs.kind import (
    CheckpointId,
    Globs,
    JobContext,
    JobPlan,
    Kind,
    Parameters,
    PermanentJobError,
    ReportProgress,
)
from dcp.server.core.jobs.ledger.rows import JobSpec, Json, lock_job, unfinished_job
from dcp.server.core.jobs.ledger.transitions import request_cancel, submit_behind
from dcp.server.core.jobs.subjects import (
    SimpleKind,
    Subject,
    find_subject,
    fingerprint_at,
    open_database,
    open_place,
    roots_of_committed,
    storage_errors,
)
from dcp.server.core.problems import ConflictError, ForbiddenError
from dcp.server.core.security.principal import Principal
from dcp.server.core.settings import Settings
from dcp.server.database.tables import aliases, checkpoints, jobs, roots
from dcp.server.features.scan import ScanKind
from dcp.server.records.administration import Scope
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.jobs import FINAL_STATES, Job
from dcp.storage.stores.base import Store


def purge_dedup_key(checkpoint_id: int) -> str:
    """Return the key of a purge job; a checkpoint has at most one purge."""
    return f"purge:{checkpoint_id}"


def delete_softly(
    connection: Connection, checkpoint_id: int, grace_seconds: float, change: Change
) -> CheckpointDetail:
    """Mark the checkpoint as deleted; the bytes stay for ``grace_seconds``. A repetition changes nothing.

    Raises MissingError, ChangedError, and StateError for a pinned, aliased, or purged checkpoint.
    """
    row = lock_checkpoint(connection, checkpoint_id, change.visible, change.expected_version)
    if row["state"] == "deleted":
        return get_checkpoint(connection, checkpoint_id)
    alias = alias_of(connection, checkpoint_id)
    if alias is not None:
        raise StateError(
            f"checkpoint {checkpoint_id} has the alias {alias!r}: move or remove the alias first",
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
    """Return the first alias of a checkpoint; aliases protect checkpoints."""
    query = select(aliases.c.name).where(aliases.c.checkpoint_id == checkpoint_id).order_by(aliases.c.name)
    return connection.execute(query).scalars().first()


def kept_by(connection: Connection, checkpoint_id: int) -> list[allowances.LimitSubject]:
    """Return the root that stores a checkpoint, and the account that registered the checkpoint, if any."""
    query = select(roots.c.name, checkpoints.c.owner).join_from(checkpoints, roots)
    row = connection.execute(query.where(checkpoints.c.id == checkpoint_id)).one_or_none()
    if row is None:
        return []
    found = [allowances.LimitSubject("root", row.name)]
    return found if row.owner is None else [*found, allowances.LimitSubject("account", row.owner)]


def restore(connection: Connection, checkpoint_id: int, change: Change) -> CheckpointDetail:
    """Undo a deletion before its purge. The next scan examines the bytes.

    Raises MissingError, ChangedError, and StateError unless the checkpoint is deleted and its purge has not
    begun.
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
    """Committed checkpoints of one root, and their grace period; None: the configured period."""

    checkpoint_ids: Annotated[
        tuple[CheckpointId, ...], Field(min_length=1, max_length=1000, strict=False)
    ] = Field(description="Committed checkpoints of one root.")
    grace_seconds: Annotated[float, Field(ge=0, le=10 * 366 * 86_400.0)] | None = Field(
        default=None, description="Time in which the checkpoints can be restored; null: as configured."
    )


class DeleteKind(Kind[DeleteParams]):
    """Deletion of several checkpoints in the transaction that completes the job, without tasks."""

    name: ClassVar[str] = "delete"
    about: ClassVar[str] = "Delete checkpoints; they can be restored until their grace is over."
    scope: ClassVar[Scope] = "delete"
    params = DeleteParams

    @classmethod
    def dedup_key(cls, params: DeleteParams) -> str:
        """As `Kind.dedup_key`; the grace period does not matter."""
        numbers = ",".join(map(str, sorted(set(params.checkpoint_ids))))
        return f"delete:{hashlib.sha256(numbers.encode()).hexdigest()[:40]}"

    def specify(
        self, connection: Connection, params: DeleteParams, caller: Principal, settings: Settings
    ) -> JobSpec:
        """As `Kind.specify`."""
        wanted = sorted(set(params.checkpoint_ids))
        names = roots_of_committed(connection, wanted, caller.roots)
        if len(names) > 1:
            raise ConflictError(
                f"the checkpoints are in {len(names)} roots; submit one deletion job for each root"
            )
        root = names.pop()
        if root not in settings.writable_roots:
            raise ForbiddenError(f"root {root} is read-only")
        grace = settings.delete_grace_seconds if params.grace_seconds is None else params.grace_seconds
        return self.new_job(params.model_copy(update={"grace_seconds": grace}), caller.name, root=root)

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
        """As `Kind.record`. Pinned or missing checkpoints do not change."""
        params = DeleteParams.model_validate(job.params)
        change = Change(actor=job.created_by, now=time.time())
        for number in result["checkpoint_ids"]:
            try:
                delete_softly(connection, number, params.grace_seconds or 0.0, change)
            except CatalogError:
                continue


# -- the job ``prune`` ---------------------------------------------------------------------------------------


class PruneParams(Parameters):
    """Checkpoint, and parts to drop: "optimizer", or globs of names. ``rewrite`` also rewrites files with
    other data, to free all bytes of the parts."""

    checkpoint_id: CheckpointId
    parts: Globs = Field(default=("optimizer",), description="Globs of names to drop, or optimizer.")
    rewrite: Annotated[bool, Field(description="Rewrite files that also contain other data.")] = True


class PruneKind(SimpleKind[PruneParams]):
    """Dropping, which may be repeated from any point on."""

    name: ClassVar[str] = "prune"
    about: ClassVar[str] = "Drop parts of a checkpoint, for example the optimizer."
    scope: ClassVar[Scope] = "delete"
    params = PruneParams
    preload: ClassVar[tuple[str, ...]] = ("dcp.manager.dropping",)
    needs_database: ClassVar[bool] = True  # checks pins and aliases again before bytes are removed

    @classmethod
    def dedup_key(cls, params: PruneParams) -> str:
        """As `Kind.dedup_key`: one per checkpoint at a time."""
        return f"prune:{params.checkpoint_id}"

    @classmethod
    def of_subject(cls, subject: Subject, params: PruneParams, created_by: str) -> JobSpec:
        """Make the job."""
        return cls.new_job(params, created_by, root=subject.root, checkpoint_id=subject.id)

    def specify(
        self, connection: Connection, params: PruneParams, caller: Principal, settings: Settings
    ) -> JobSpec:
        """As `Kind.specify`. Raises StateError for a protected checkpoint, or a checkpoint in use by another
        job."""
        lock_checkpoint(connection, params.checkpoint_id, caller.roots)  # serialized with promotions
        subject = find_subject(connection, params.checkpoint_id, caller.roots)
        if subject.root not in settings.writable_roots:
            raise ForbiddenError(f"root {subject.root} is read-only")
        _check_held(connection, subject.id)
        if in_use(connection, [subject.id]):
            raise StateError(
                f"a job is using checkpoint {subject.id}: wait for the job to end, and try again",
                state="committed",
            )
        return self.of_subject(subject, params, caller.name)

    def prepare(self, connection: Connection, params: PruneParams) -> Json:
        """As `Kind.prepare`."""
        with _lasting():
            _check_held(connection, params.checkpoint_id)
            return super().prepare(connection, params)

    def run(
        self,
        context: JobContext,
        params: PruneParams,
        subjects: Sequence[Subject],
        report_progress: ReportProgress,
    ) -> Json:
        """As `SimpleKind.run`."""
        from dcp.manager.dropping import drop_parts

        (subject,) = subjects
        root, place = open_place(context, subject)
        if root.readonly or place.file is not None:
            why = f"root {root.name} is read-only" if root.readonly else "it is a file, not a checkpoint"
            raise PermanentJobError(why)
        with _lasting(), open_database(context) as database, database.read() as connection:
            _check_held(connection, subject.id)
        with storage_errors(root):
            if not _is_meant(place.store, subject, fingerprint_at(place)):
                raise PermanentJobError("the checkpoint was replaced by another save")
            parts = [part_named(name) for name in params.parts]
            found = drop_parts(place.store, parts, time.time(), rewrite=params.rewrite)
        return {
            "outcome": found.outcome,
            "parts": [asdict(part) for part in found.parts],
            "files": len(found.files),
            "freed_bytes": found.freed_bytes,
            "shared_bytes": found.shared_bytes,
            "rewritten_bytes": found.rewritten_bytes,
            "subject": subject.to_json(),
        }

    def record(self, connection: Connection, job: Job, result: Json) -> None:
        """Record the freed bytes in the audit log, and submit a scan of the run."""
        subject, now = Subject(**result["subject"]), time.time()
        detail = {name: result[name] for name in ("outcome", "files", "freed_bytes", "rewritten_bytes")}
        detail |= {"parts": [part["name"] for part in result["parts"]], "job": job.id}
        about = f"checkpoint:{subject.id}"
        audit.record(connection, job.created_by, "checkpoint.prune", about, detail, now=now)
        # forces the scan to open the checkpoint even after quick changes
        changed = update(checkpoints).where(checkpoints.c.id == subject.id).values(fingerprint=None)
        if result["outcome"] == "dropped":
            connection.execute(changed)
        submit_behind(connection, ScanKind.of_folder(subject.root, subject.run), now)


def in_use(connection: Connection, checkpoint_ids: Sequence[int]) -> set[int]:
    """Return checkpoints in use by unfinished jobs, which can be reading them."""
    query = select(jobs.c.checkpoint_id).where(
        jobs.c.checkpoint_id.in_(checkpoint_ids), jobs.c.state.not_in(FINAL_STATES)
    )
    return {int(number) for number in connection.execute(query).scalars()}


def is_pruned_now(connection: Connection, checkpoint_id: int) -> bool:
    """Return True if an unfinished job drops parts of the checkpoint."""
    query = select(jobs.c.id).where(
        jobs.c.checkpoint_id == checkpoint_id,
        jobs.c.kind == PruneKind.name,
        jobs.c.state.not_in(FINAL_STATES),
    )
    return connection.execute(query).first() is not None


@contextmanager
def _lasting() -> Iterator[None]:
    """Turn a forbidden state into a permanent error: a retry would find the same state."""
    try:
        yield
    except StateError as error:
        raise PermanentJobError(str(error)) from error


def _check_held(connection: Connection, checkpoint_id: int) -> None:
    found = get_checkpoint(connection, checkpoint_id)
    alias = alias_of(connection, checkpoint_id)
    if found.is_pinned or alias is not None:
        why = "is pinned" if found.is_pinned else f"has the alias {alias!r}"
        raise StateError(
            f"checkpoint {checkpoint_id} {why}: parts of it cannot be dropped", state=found.state
        )


def _is_meant(store: Store, subject: Subject, fingerprint: str) -> bool:
    """Compare the checkpoint with the catalog's content."""
    from dcp.steps import read_commit

    if subject.save_id is None:
        return subject.fingerprint in (None, fingerprint)
    commit = read_commit(store)
    return commit is not None and commit.save_id == subject.save_id
