"""Jobs that read a whole checkpoint: ``verify`` compares all bytes with checksums, ``digest`` computes
digests of the tensors, to find checkpoints with the same weights."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Final

from sqlalchemy import Connection, insert, select

from dcp.server.catalog import audit
from dcp.server.catalog.details import bump, get_checkpoint, lock_checkpoint
from dcp.server.catalog.events import checkpoint_event, emit_all
from dcp.server.catalog.inputs import clean_json
from dcp.server.catalog.runs import touch_run
from dcp.server.core.feature import Feature
from dcp.server.core.jobs.kind import JobContext, ReportProgress
from dcp.server.core.jobs.ledger.rows import Json
from dcp.server.core.jobs.subjects import (
    CheckpointParams,
    SimpleKind,
    Subject,
    open_place,
    read_tensors,
    storage_errors,
    unchanged,
)
from dcp.server.database.mapping import record_of_row
from dcp.server.database.tables import verifications
from dcp.server.records.administration import Scope
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.declaring import Shown, moment
from dcp.server.records.jobs import Job

_MAX_FINDINGS: Final = 200
_MAX_MESSAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class Verification:
    """Verification; ``is_current``: the content has not changed since."""

    id: int
    outcome: Annotated[str, Shown("good or damaged.")]
    mode: Annotated[str, Shown("full: all bytes were read.")]
    is_current: Annotated[bool, Shown("The content has not changed since.")]
    findings: Annotated[Any, Shown("Findings with file, position and tensor; notes last.")]
    checked_bytes: Annotated[int, Shown("Bytes read.")]
    seconds: float
    created_at: datetime
    job_id: int | None


class VerifyKind(SimpleKind[CheckpointParams]):
    """Verification of a checkpoint."""

    name: ClassVar[str] = "verify"
    about: ClassVar[str] = "Read every byte of a checkpoint and compare with the checksums."
    button: ClassVar[str] = "Verify: read every byte"
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
            "findings": [
                asdict(one) | {"message": root.hide(one.message)[:_MAX_MESSAGE]}
                for one in shown[:_MAX_FINDINGS]
            ],
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
        """Record the verdict. For unchanged content, update the checkpoint and emit "checkpoint.verified" or
        "checkpoint.damaged"."""
        now, outcome, findings = time.time(), result["outcome"], clean_json(result["findings"])
        row, is_same = _read_checkpoint(connection, result)
        kept = {name: result[name] for name in ("fingerprint", "outcome", "checked_bytes", "seconds")}
        kept |= {"checkpoint_id": row["id"], "findings": findings, "job_id": job.id, "created_seconds": now}
        connection.execute(insert(verifications).values(mode="full", **kept))
        if is_same:
            problem = None if outcome == "good" else next((one["message"] for one in findings), outcome)
            found = {"verification": outcome, "verified_seconds": now, "problem": problem}
            digest = result.get("content_digest") or row["content_digest"]
            bump(connection, row["id"], now, **found, content_digest=digest)
            touch_run(connection, row["run_id"], now)
            kind = "checkpoint.verified" if outcome == "good" else "checkpoint.damaged"
            emit_all(connection, [checkpoint_event(kind, row, mode="full", problem=problem)], now=now)
        detail = {"outcome": outcome, "job": job.id, "findings": result["finding_count"]}
        target = f"checkpoint:{row['id']}"
        audit.record(connection, job.created_by, "checkpoint.verify", target, detail, now=now)


class DigestKind(SimpleKind[CheckpointParams]):
    """Digests of a checkpoint: from the manifest, and by reading the remaining tensors."""

    name: ClassVar[str] = "digest"
    about: ClassVar[str] = (
        "Compute digests of the tensors of a checkpoint, to find checkpoints with equal tensors."
    )
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

        with read_tensors(context, *subjects) as [(reader, fingerprint)]:
            found = digests(reader, progress=lambda done, total: report_progress(done))
        return {
            "content_digest": found.digest,
            "tensors": len(found.tensors),
            "bytes_read": found.bytes_read,
            "fingerprint": fingerprint,
            "subject": asdict(subjects[0]),
        }

    def record(self, connection: Connection, job: Job, result: Json) -> None:
        """Store the digest of all tensors for unchanged content."""
        now, digest = time.time(), result["content_digest"]
        row, is_same = _read_checkpoint(connection, result)
        if is_same:
            bump(connection, row["id"], now, content_digest=digest)
            touch_run(connection, row["run_id"], now)
            target, detail = f"checkpoint:{row['id']}", {"job": job.id, "content_digest": digest}
            audit.record(connection, job.created_by, "checkpoint.digest", target, detail, now=now)


def _read_checkpoint(connection: Connection, result: Json) -> tuple[Mapping[Any, Any], bool]:
    """Lock the row of the job's checkpoint, and check for unchanged content."""
    subject = Subject(**result["subject"])
    row = lock_checkpoint(connection, subject.id)
    # A missing fingerprint in the catalog says nothing, for example after a registration.
    is_same = subject.is_same(row) and row["fingerprint"] in (None, result["fingerprint"])
    return row, row["state"] == "committed" and is_same


def outcomes_of_jobs(connection: Connection, jobs: Collection[int]) -> dict[int, str]:
    """Return the outcomes of jobs by number; jobs without a verification are left out."""
    query = select(verifications.c.job_id, verifications.c.outcome).where(verifications.c.job_id.in_(jobs))
    return {row.job_id: row.outcome for row in connection.execute(query)} if jobs else {}


def newest_verifications(
    connection: Connection,
    checkpoint_id: int,
    visible: frozenset[str] | None = None,
    *,
    limit: int = 20,
) -> list[Verification]:
    """Return the last verifications, newest first. Raises MissingError for an invisible checkpoint."""
    checkpoint = get_checkpoint(connection, checkpoint_id, visible)
    query = (
        select(verifications)
        .where(verifications.c.checkpoint_id == checkpoint_id)
        .order_by(verifications.c.id.desc())
        .limit(limit)
    )
    return [_verification(row, checkpoint) for row in connection.execute(query)]


def _verification(row: Any, checkpoint: CheckpointDetail) -> Verification:
    created_at = moment(row.created_seconds)
    # The checkpoint's verdict applies to its content. Fingerprints alone are not enough: a verification of
    # content without a known fingerprint, or a changed fingerprint of the same content, would contradict the
    # verdict.
    is_verdict = checkpoint.verification != "unverified" and checkpoint.verified_at == created_at
    is_same = row.fingerprint is not None and row.fingerprint == checkpoint.fingerprint
    return record_of_row(Verification, row, created_at=created_at, is_current=is_verdict or is_same)


feature: Final = Feature("verify", __name__, kinds=[VerifyKind(), DigestKind()], web=["verdicts"])
