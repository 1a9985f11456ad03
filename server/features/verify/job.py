"""Verification (kind ``verify``): every byte of a checkpoint is compared with its checksums."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy import Connection

from dcp.server.catalog import audit
from dcp.server.catalog.details import lock_checkpoint
from dcp.server.catalog.verifications import add_verification
from dcp.server.core.jobs.kind import JobContext, ReportProgress
from dcp.server.core.jobs.ledger.rows import Json
from dcp.server.core.jobs.subjects import (
    CheckpointParams,
    SimpleKind,
    Subject,
    open_place,
    storage_errors,
    unchanged,
)
from dcp.server.core.roots import StorageRoot
from dcp.server.core.security.principal import Scope
from dcp.server.records.jobs import Job

if TYPE_CHECKING:
    from dcp.inspection.verification import Finding

__all__ = ["VerifyKind"]

_MAX_FINDINGS: Final = 200
_MAX_MESSAGE: Final = 1000


class VerifyKind(SimpleKind[CheckpointParams]):
    """The verification of one checkpoint."""

    name: ClassVar[str] = "verify"
    about: ClassVar[str] = "Read every byte of a checkpoint and compare it with its checksums."
    scope: ClassVar[Scope] = "write"
    params = CheckpointParams
    preload: ClassVar[tuple[str, ...]] = ("dcp.inspection.verification",)

    def run(
        self,
        context: JobContext,
        params: CheckpointParams,
        subjects: Sequence[Subject],
        report_progress: ReportProgress,
    ) -> Json:
        """As `SimpleKind.run`; reads with several threads."""
        from dcp.inspection.verification import verify_place

        (subject,) = subjects
        root, place = open_place(context, subject)
        begun = time.monotonic()
        with storage_errors(root), unchanged(place) as fingerprint:
            report = verify_place(place, progress=lambda done, total: report_progress(done), with_digest=True)
        shown = sorted(report.findings, key=lambda found: found.is_note)
        return {
            "outcome": "good" if report.ok else "damaged",
            "findings": [_shown(found, root) for found in shown[:_MAX_FINDINGS]],
            "finding_count": len(shown),
            "files": report.files,
            "tensors": report.tensors,
            "blocks": report.blocks,
            "checked_bytes": report.bytes,
            "unchecked_bytes": report.unchecked_bytes,
            "content_digest": report.digest,
            "seconds": round(time.monotonic() - begun, 3),
            "fingerprint": fingerprint,
            "subject": asdict(subject),
        }

    def record(self, connection: Connection, job: Job, result: Json) -> None:
        """Record the verdict; it counts for the checkpoint only if its content is still the verified one."""
        now, subject = time.time(), Subject(**result["subject"])
        row = lock_checkpoint(connection, subject.id)
        add_verification(
            connection,
            subject.id,
            fingerprint=result["fingerprint"],
            is_same=row["state"] == "committed" and subject.is_same(row),
            mode="full",
            outcome=result["outcome"],
            findings=result["findings"],
            checked_bytes=result["checked_bytes"],
            content_digest=result.get("content_digest"),
            seconds=result["seconds"],
            job_id=job.id,
            now=now,
        )
        detail = {"outcome": result["outcome"], "job": job.id, "findings": result["finding_count"]}
        audit.record(
            connection, job.created_by, "checkpoint.verify", f"checkpoint:{subject.id}", detail, now=now
        )


def _shown(found: Finding, root: StorageRoot) -> dict[str, Any]:
    return {
        "kind": found.kind,
        "message": root.hide(found.message)[:_MAX_MESSAGE],
        "file": found.file,
        "fqn": found.fqn,
        "offset": found.offset,
        "length": found.length,
    }
