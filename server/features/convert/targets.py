"""Targets of conversions in the catalog: refused where one is known, recorded with their sources."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Connection, select, update

from dcp.server.catalog import audit
from dcp.server.catalog.checkpoints import upsert_checkpoint
from dcp.server.catalog.events import emit
from dcp.server.catalog.facts import CheckpointFacts
from dcp.server.catalog.lineage import LineageKind, add_lineage
from dcp.server.catalog.roots import root_id
from dcp.server.catalog.source_facts import facts_of_source
from dcp.server.core.jobs.ledger.rows import Json
from dcp.server.core.jobs.ledger.transitions import submit_behind
from dcp.server.core.problems import ConflictError
from dcp.server.core.roots import StorageRoot
from dcp.server.database.tables import checkpoints, roots
from dcp.server.features.scan.job import scan_spec
from dcp.server.records.jobs import Job

__all__ = ["facts_document", "record_target", "refuse_known"]

_FACTS: Final = (
    "format",
    "committed_seconds",
    "step",
    "save_id",
    "fingerprint",
    "bytes",
    "file_count",
    "observed_seconds",
)
_LIVING: Final = ("committed", "unreadable", "incomplete", "deleted")


def refuse_known(connection: Connection, root: str, key: str) -> None:
    """Raise ConflictError if the catalog has a checkpoint there, or one around the target."""
    parts = key.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    query = (
        select(checkpoints.c.key, checkpoints.c.state)
        .join(roots, roots.c.id == checkpoints.c.root_id)
        .where(roots.c.name == root, checkpoints.c.key.in_(above), checkpoints.c.state.in_(_LIVING))
    )
    found = connection.execute(query).first()
    if found is not None:
        raise ConflictError(f"{root}:{found.key} is a checkpoint already ({found.state})", key=found.key)


def facts_document(root: StorageRoot, key: str) -> dict[str, Any]:
    """The facts of a target as JSON; its structure is left to a scan."""
    facts = facts_of_source(root.name, key, root.source(key), observed_seconds=time.time())
    return {name: getattr(facts, name) for name in _FACTS}


def record_target(
    connection: Connection,
    job: Job,
    source_ids: Sequence[int],
    lineage: LineageKind,
    done: str,
    tags: Iterable[str],
    result: Json,
) -> None:
    """Register the target, record its sources and, as ``done``, the author of the job, emit
    "checkpoint.converted", and submit a scan that reads its structure. Without a step of its own it has that
    of the first of ``source_ids``."""
    now, root, key = time.time(), result["root"], result["key"]
    query = select(checkpoints.c.id, checkpoints.c.step).where(checkpoints.c.id.in_(source_ids))
    steps = {row.id: row.step for row in connection.execute(query)}
    facts = CheckpointFacts(root=root, key=key, tags=frozenset(tags), **result["target"])
    if facts.step is None:
        facts = replace(facts, step=steps.get(source_ids[0]))
    target = upsert_checkpoint(connection, facts, now=now, actor=job.created_by).id
    # without a fingerprint the scan opens it, and finds the structure
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
    # not a scan that runs already: it may have listed the folder before the target was there
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
