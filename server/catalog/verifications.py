"""Findings about the bytes of checkpoints: verifications, and statistics of their values."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, insert, select, update

from dcp.server.catalog.details import get_checkpoint, lock_checkpoint
from dcp.server.catalog.events import checkpoint_event, emit_all
from dcp.server.catalog.values import clean_json, clean_text
from dcp.server.database.documents import find_item, read_items, write_document
from dcp.server.database.records import record_of_row
from dcp.server.database.sql import insert_or_update
from dcp.server.database.tables import checkpoints, statistics, verifications
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.contents import Verification
from dcp.server.records.declaring import moment

__all__ = [
    "StatisticsRow",
    "add_verification",
    "get_statistics",
    "list_verifications",
    "outcomes_of_jobs",
    "set_statistics",
    "statistics_of_tensor",
    "statistics_tensors",
]

Outcome = Literal["good", "damaged"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatisticsRow:
    """Statistics of a checkpoint's values; of content that has been replaced since if ``is_stale``.

    ``result`` is what is of all of its ``tensor_count`` tensors together.
    """

    checkpoint_id: int
    fingerprint: str
    result: Any
    tensor_count: int
    created_seconds: float
    job_id: int | None
    is_stale: bool


def add_verification(
    connection: Connection,
    checkpoint_id: int,
    *,
    fingerprint: str | None,
    mode: str,
    outcome: Outcome,
    findings: Any,
    checked_bytes: int,
    seconds: float,
    is_same: bool = True,
    content_digest: str | None = None,
    job_id: int | None = None,
    now: float,
) -> bool:
    """Write what a verification found; whether it is of what is there now.

    Only then it changes the checkpoint, and emits "checkpoint.verified" or "checkpoint.damaged". ``is_same``:
    no other sign says that it has been replaced. The fingerprint is no sign where the catalog has none
    yet, as of a checkpoint that its trainer has registered just now. ``content_digest`` is of all tensors,
    where the checkpoint itself did not tell one.
    """
    row = lock_checkpoint(connection, checkpoint_id)
    connection.execute(
        insert(verifications).values(
            checkpoint_id=checkpoint_id,
            fingerprint=fingerprint,
            mode=mode,
            outcome=outcome,
            findings=clean_json(findings),
            checked_bytes=checked_bytes,
            seconds=seconds,
            created_seconds=now,
            job_id=job_id,
        )
    )
    if not is_same or row["fingerprint"] not in (None, fingerprint):
        return False
    problem = None if outcome == "good" else _first(findings)
    _change(connection, row, outcome, mode, problem, content_digest or row["content_digest"], now)
    return True


def outcomes_of_jobs(connection: Connection, jobs: Collection[int]) -> dict[int, str]:
    """The outcomes of jobs by number; jobs that verified nothing are left out."""
    query = select(verifications.c.job_id, verifications.c.outcome).where(verifications.c.job_id.in_(jobs))
    return {row.job_id: row.outcome for row in connection.execute(query)} if jobs else {}


def _change(
    connection: Connection,
    row: Mapping[Any, Any],
    outcome: Outcome,
    mode: str,
    problem: str | None,
    content_digest: str | None,
    now: float,
) -> None:
    """Set the verdict of the checkpoint ``row``, and emit its event."""
    connection.execute(
        update(checkpoints)
        .where(checkpoints.c.id == row["id"])
        .values(
            verification=outcome,
            verified_seconds=now,
            problem=problem,
            content_digest=content_digest,
            version=checkpoints.c.version + 1,
            updated_seconds=now,
        )
    )
    kind = "checkpoint.verified" if outcome == "good" else "checkpoint.damaged"
    emit_all(connection, [checkpoint_event(kind, row, mode=mode, problem=problem)], now=now)


def list_verifications(
    connection: Connection,
    checkpoint_id: int,
    visible: frozenset[str] | None = None,
    *,
    limit: int = 20,
) -> list[Verification]:
    """The last verifications, newest first; `MissingError` for a checkpoint that may not be seen."""
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
    # The verdict that the checkpoint has stands for its content; by fingerprints alone, one that was not
    # known yet, or that changed without the content, would speak against the verdict beside it.
    is_verdict = checkpoint.verification != "unverified" and checkpoint.verified_at == created_at
    is_same = row.fingerprint is not None and row.fingerprint == checkpoint.fingerprint
    return record_of_row(Verification, row, created_at=created_at, is_current=is_verdict or is_same)


def set_statistics(
    connection: Connection,
    checkpoint_id: int,
    *,
    fingerprint: str,
    result: Any,
    job_id: int | None = None,
    document_id: int | None = None,
) -> None:
    """Keep statistics, in place of earlier ones. ``result`` is JSON, with the list ``tensors``, which the
    document has already if it is given."""
    tensors = result.get("tensors", [])
    kept = {name: value for name, value in result.items() if name != "tensors"}
    row = {
        "checkpoint_id": checkpoint_id,
        "fingerprint": fingerprint,
        "result": kept | {"tensor_count": len(tensors)},
        "created_seconds": time.time(),
        "job_id": job_id,
        "document_id": write_document(connection, {"tensors": tensors})
        if document_id is None
        else document_id,
    }
    insert_or_update(connection, statistics, [row])


def get_statistics(
    connection: Connection, checkpoint_id: int, visible: frozenset[str] | None = None
) -> StatisticsRow | None:
    """The stored statistics, None without any; `MissingError` for a checkpoint that may not be seen."""
    detail = get_checkpoint(connection, checkpoint_id, visible)
    row = connection.execute(select(statistics).where(statistics.c.checkpoint_id == checkpoint_id)).first()
    if row is None:
        return None
    is_stale = row.fingerprint != detail.fingerprint
    if detail.fingerprint is None:  # not known yet
        is_stale = moment(row.created_seconds) < detail.committed_at
    kept = {name: value for name, value in row.result.items() if name != "tensor_count"}
    return StatisticsRow(
        checkpoint_id=checkpoint_id,
        fingerprint=row.fingerprint,
        result=kept,
        tensor_count=row.result["tensor_count"],
        created_seconds=row.created_seconds,
        job_id=row.job_id,
        is_stale=is_stale,
    )


def statistics_tensors(connection: Connection, checkpoint_id: int, begin: int, end: int) -> list[Any]:
    """The statistics of the tensors ``begin`` to ``end`` of a checkpoint that may be seen."""
    query = select(statistics.c.document_id).where(statistics.c.checkpoint_id == checkpoint_id)
    return read_items(connection, connection.execute(query).scalar_one(), "tensors", begin, end)


def statistics_of_tensor(connection: Connection, checkpoint_id: int, fqn: str) -> Any | None:
    """The statistics of one tensor of a checkpoint that may be seen; None if there are none of it."""
    query = select(statistics.c.document_id).where(statistics.c.checkpoint_id == checkpoint_id)
    number = connection.execute(query).scalar()
    if number is None:
        return None
    return find_item(connection, number, "tensors", "fqn", fqn)


def _first(findings: Any) -> str:
    first = findings[0] if isinstance(findings, list) and findings else findings
    if isinstance(first, Mapping) and "message" in first:
        first = first["message"]
    return clean_text(str(first))[:4000]
