"""Digests of tensors, computed by a job, by which checkpoints with the same weights are found."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import ClassVar, Final

from sqlalchemy import Connection

from dcp.server.catalog import audit
from dcp.server.catalog.details import bump, lock_checkpoint
from dcp.server.catalog.runs import touch_run
from dcp.server.core.feature import Feature
from dcp.server.core.jobs.kind import JobContext, ReportProgress
from dcp.server.core.jobs.ledger.rows import Json
from dcp.server.core.jobs.subjects import (
    CheckpointParams,
    SimpleKind,
    Subject,
    read_tensors,
)
from dcp.server.records.administration import Scope
from dcp.server.records.jobs import Job


class DigestKind(SimpleKind[CheckpointParams]):
    """The digests of one checkpoint: those of its manifest, and of the other tensors by reading them."""

    name: ClassVar[str] = "digest"
    about: ClassVar[str] = "Compute digests of the tensors of a checkpoint, to find others with the same."
    scope: ClassVar[Scope] = "write"
    params = CheckpointParams
    preload: ClassVar[tuple[str, ...]] = ("dcp.inspection.values.digests",)

    def run(
        self,
        context: JobContext,
        params: CheckpointParams,
        subjects: Sequence[Subject],
        report_progress: ReportProgress,
    ) -> Json:
        """As `SimpleKind.run`."""
        from dcp.inspection.values.digests import digests

        (subject,) = subjects
        with read_tensors(context, subject) as (reader, fingerprint):
            found = digests(reader, progress=lambda done, total: report_progress(done))
        return {
            "content_digest": found.digest,
            "tensors": len(found.tensors),
            "bytes_read": found.bytes_read,
            "fingerprint": fingerprint,
            "subject": asdict(subject),
        }

    def record(self, connection: Connection, job: Job, result: Json) -> None:
        """Keep the digest of all tensors, if the checkpoint's content is still the one that was read."""
        now, subject = time.time(), Subject(**result["subject"])
        row = lock_checkpoint(connection, subject.id)
        is_same = row["state"] == "committed" and subject.is_same(row)
        if not is_same or row["fingerprint"] not in (None, result["fingerprint"]):
            return
        bump(connection, subject.id, now, content_digest=result["content_digest"])
        touch_run(connection, row["run_id"], now)
        detail = {"job": job.id, "content_digest": result["content_digest"]}
        target = f"checkpoint:{subject.id}"
        audit.record(connection, job.created_by, "checkpoint.digest", target, detail, now=now)


feature: Final = Feature("digests", __name__, kinds=[DigestKind()], web=["same_weights"])
