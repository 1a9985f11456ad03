"""A conversion's target in the catalog: the row, where it came from, and who is told."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from sqlalchemy import Connection, select, update

from dcp.server.catalog import audit
from dcp.server.catalog.checkpoints import upsert_checkpoint
from dcp.server.catalog.events import emit
from dcp.server.catalog.facts import CheckpointFacts
from dcp.server.catalog.lineage import LineageKind, add_lineage
from dcp.server.catalog.roots import root_id
from dcp.server.core.jobs.ledger.states import JobRow, Json
from dcp.server.core.jobs.ledger.transitions import submit_behind
from dcp.server.database.tables import checkpoints
from dcp.server.features.scan.job import scan_spec

__all__ = ["record_target"]


def record_target(
    connection: Connection,
    job: JobRow,
    source_ids: Sequence[int],
    lineage: LineageKind,
    done: str,
    tags: Iterable[str],
    result: Json,
) -> None:
    """Register the target, note its origins and, as ``done``, who had it made, emit "checkpoint.converted",
    and have its structure read. Its step is that of the first of ``source_ids``, where it tells none itself.
    """
    now, root, key = time.time(), result["root"], result["key"]
    query = select(checkpoints.c.id, checkpoints.c.step).where(checkpoints.c.id.in_(source_ids))
    steps = {row.id: row.step for row in connection.execute(query)}
    facts = _facts(result, steps.get(source_ids[0]), tags)
    target = upsert_checkpoint(connection, facts, now=now, actor=job.created_by).id
    # So that the scan opens it, and finds the structure; that it is committed has been told by now.
    without_structure = (checkpoints.c.id == target) & checkpoints.c.structure_id.is_(None)
    connection.execute(update(checkpoints).where(without_structure).values(fingerprint=None))
    for source_id in steps:
        add_lineage(
            connection, target, source_id, kind=lineage, job_id=job.id, map=result.get("map"), now=now
        )
    several = {"sources": list(source_ids)} if len(source_ids) > 1 else {}
    detail = {"root": root, "key": key, "from": source_ids[0], **several, "job": job.id}
    if result.get("map"):
        detail["map"] = result["map"]
    audit.record(connection, job.created_by, done, f"checkpoint:{target}", detail, now=now)
    # not one that is at it already: it may have listed the folder before the target was there
    submit_behind(connection, scan_spec(root, facts.run_key, created_by="system"), now)
    emit(
        connection,
        "checkpoint.converted",
        root_id=root_id(connection, root),
        checkpoint_id=target,
        data={
            "root": root,
            "run": facts.run_key,
            "key": key,
            "step": facts.step,
            "format": facts.format,
            "source_id": source_ids[0],
            "job_id": job.id,
        },
        now=now,
    )


def _facts(result: Json, step: int | None, tags: Iterable[str]) -> CheckpointFacts:
    """The facts of the target; ``step`` is that of its source."""
    found = result["target"]
    return CheckpointFacts(
        root=result["root"],
        key=result["key"],
        format=found["format"],
        observed_seconds=found["observed_seconds"],
        committed_seconds=found["committed_seconds"],
        step=found["step"] if found["step"] is not None else step,
        save_id=found["save_id"],
        fingerprint=found["fingerprint"],
        bytes=found["bytes"],
        file_count=found["file_count"],
        tags=frozenset(tags),
    )
