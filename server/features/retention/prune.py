"""The job ``prune``: drops parts of a checkpoint, such as its optimizer, by `dcp.manager.dropping`.

Refused for checkpoints that are pinned, that an alias names, or that another job uses.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, ClassVar

from pydantic import Field
from sqlalchemy import Connection, select, update

from dcp.manager.retention import part_named
from dcp.server.catalog import audit
from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.errors import StateError
from dcp.server.core.jobs.kind import (
    CheckpointId,
    Globs,
    JobContext,
    Parameters,
    PermanentJobError,
    ReportProgress,
)
from dcp.server.core.jobs.ledger.rows import JobSpec, Json
from dcp.server.core.jobs.ledger.transitions import submit_behind
from dcp.server.core.jobs.subjects import (
    SimpleKind,
    Subject,
    find_subject,
    fingerprint_at,
    open_place,
    storage_errors,
)
from dcp.server.core.problems import ForbiddenError
from dcp.server.core.security.principal import Principal
from dcp.server.core.settings import Settings
from dcp.server.database.tables import checkpoints, jobs
from dcp.server.features.retention.deletion import alias_of
from dcp.server.features.retention.policies import writable_roots
from dcp.server.features.scan.job import scan_spec
from dcp.server.records.administration import Scope
from dcp.server.records.jobs import FINAL_STATES, Job
from dcp.storage.stores.base import Store

__all__ = ["PruneKind", "PruneParams", "in_use", "prune_spec"]


class PruneParams(Parameters):
    """The checkpoint, and the parts to drop: "optimizer", or globs on names. With ``rewrite`` files that also
    hold other data are written anew, so that all bytes of the parts are freed."""

    checkpoint_id: CheckpointId
    parts: Globs = ("optimizer",)
    rewrite: Annotated[bool, Field(description="Write files anew that hold the parts and others.")] = True


def prune_spec(subject: Subject, params: PruneParams, created_by: str) -> JobSpec:
    """Make the job; a checkpoint has one at a time."""
    return JobSpec(
        kind="prune",
        params=params.model_dump(mode="json"),
        created_by=created_by,
        root=subject.root,
        checkpoint_id=subject.id,
        dedup_key=f"prune:{subject.id}",
    )


class PruneKind(SimpleKind[PruneParams]):
    """Dropping, which may be repeated from any point on."""

    name: ClassVar[str] = "prune"
    scope: ClassVar[Scope] = "delete"
    params = PruneParams
    preload: ClassVar[tuple[str, ...]] = ("dcp.manager.dropping",)

    def specify(
        self, connection: Connection, params: PruneParams, caller: Principal, settings: Settings
    ) -> JobSpec:
        """As `Kind.specify`. StateError for a checkpoint that is held, or that another job uses."""
        subject = find_subject(connection, params.checkpoint_id, caller.roots)
        if subject.root not in writable_roots(settings):
            raise ForbiddenError(f"root {subject.root} is read-only")
        _check_held(connection, subject.id)
        if in_use(connection, [subject.id]):
            raise StateError(
                f"a job is about checkpoint {subject.id} now, and may be reading it: wait for that one",
                state="committed",
            )
        return prune_spec(subject, params, caller.name)

    def prepare(self, connection: Connection, params: PruneParams) -> Json:
        """As `Kind.prepare`."""
        try:
            _check_held(connection, params.checkpoint_id)
            return super().prepare(connection, params)
        except StateError as error:
            raise PermanentJobError(str(error)) from error

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
            why = f"root {root.name} is read-only" if root.readonly else "it is a file, and no checkpoint"
            raise PermanentJobError(why)
        with storage_errors(root):
            if not _is_meant(place.store, subject, fingerprint_at(place)):
                raise PermanentJobError("something else was saved in its place")
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
        """Audit what was freed, and submit a scan of the run."""
        subject, now = Subject(**result["subject"]), time.time()
        detail = {name: result[name] for name in ("outcome", "files", "freed_bytes", "rewritten_bytes")}
        detail |= {"parts": [part["name"] for part in result["parts"]], "job": job.id}
        about = f"checkpoint:{subject.id}"
        audit.record(connection, job.created_by, "checkpoint.prune", about, detail, now=now)
        # So that the scan opens it, however quickly it was done.
        changed = update(checkpoints).where(checkpoints.c.id == subject.id).values(fingerprint=None)
        if result["outcome"] == "dropped":
            connection.execute(changed)
        submit_behind(connection, scan_spec(subject.root, subject.run, created_by="system"), now)


def in_use(connection: Connection, checkpoint_ids: Sequence[int]) -> set[int]:
    """Return the checkpoints that a job which has not ended uses: it may be reading them."""
    query = select(jobs.c.checkpoint_id).where(
        jobs.c.checkpoint_id.in_(checkpoint_ids), jobs.c.state.not_in(FINAL_STATES)
    )
    return {int(number) for number in connection.execute(query).scalars()}


def _check_held(connection: Connection, checkpoint_id: int) -> None:
    found = get_checkpoint(connection, checkpoint_id)
    alias = alias_of(connection, checkpoint_id)
    if found.is_pinned or alias is not None:
        why = "pinned" if found.is_pinned else f"{alias!r} of its run"
        raise StateError(f"checkpoint {checkpoint_id} is {why}: it stays whole", state=found.state)


def _is_meant(store: Store, subject: Subject, fingerprint: str) -> bool:
    """Compare the checkpoint with the one that the catalog knows."""
    from dcp.steps import read_commit

    if subject.save_id is None:
        return subject.fingerprint in (None, fingerprint)
    commit = read_commit(store)
    return commit is not None and commit.save_id == subject.save_id
