"""Verifications of a checkpoint, and checkpoints with the same weights: lists, and their jobs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query
from sqlalchemy import Connection, func, select

from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.jobs.subjects import CheckpointParams
from dcp.server.database.tables import checkpoints
from dcp.server.features.lineage import same_tensors
from dcp.server.features.verify import (
    DigestKind,
    Verification,
    VerifyKind,
    feature,
    newest_verifications,
)
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.jobs import Job
from dcp.server.records.lists import Items


@feature.get("/checkpoints/{checkpoint_id}/verifications", tag="data")
def list_verifications(
    checkpoint_id: IdPath,
    ask: Ask,
    limit: Annotated[int, Query(ge=1, le=100, description="Maximum verifications.")] = 20,
) -> Items[Verification]:
    """Return the last verifications, newest first."""
    found = ask.find(newest_verifications, checkpoint_id, ask.visible, limit=limit)
    return Items(tuple(found))


@feature.post(
    "/checkpoints/{checkpoint_id}/verifications",
    tag="data",
    scope="write",
    status=202,
    errors=(404, 409, 410),
)
def verify_checkpoint(checkpoint_id: IdPath, ask: Ask) -> Job:
    """Read and compare every byte, by a job."""
    return ask.submit(VerifyKind, CheckpointParams(checkpoint_id=checkpoint_id))


@feature.panel("checkpoint", "panel.html", order=50)
def verifications_panel(ask: Ask, found: CheckpointDetail) -> dict[str, Any]:
    """List the last verifications, and the findings."""
    return {}


@feature.post(
    "/checkpoints/{checkpoint_id}/digests", tag="data", scope="write", status=202, errors=(404, 409, 410)
)
def compute_digests(checkpoint_id: IdPath, ask: Ask) -> Job:
    """Submit a job that computes the digests of the tensors, to find checkpoints with equal tensors."""
    return ask.submit(DigestKind, CheckpointParams(checkpoint_id=checkpoint_id))


@feature.form("/checkpoints/{checkpoint_id}/digests", scope="write")
def digests_form(checkpoint_id: IdPath, ask: Ask) -> str:
    """Compute them, and return to the page of the checkpoint."""
    compute_digests(checkpoint_id, ask)
    return f"/checkpoints/{checkpoint_id}#same-weights"


@feature.panel("checkpoint", "same_weights.html", order=41)
def same_weights(ask: Ask, found: CheckpointDetail) -> dict[str, Any] | None:
    """Offer the job if digests are missing; otherwise list checkpoints with the same tensors."""
    if found.state != "committed" or not found.tensor_count:
        return None
    job = ask.last_job(DigestKind, CheckpointParams(checkpoint_id=found.id))
    if found.content_digest is None:
        return {"is_known": False, "job": job, "others": []}
    others = ask.find(same_tensors, found, ask.visible)
    unknown = ask.find(_without_digest, found.run_id)
    return {"is_known": True, "job": None, "others": others, "unknown": unknown}


def _without_digest(connection: Connection, run_id: int) -> int:
    """Count the run's committed checkpoints without a digest, up to a thousand."""
    column = checkpoints.c
    some = (
        select(column.id)
        .where(column.run_id == run_id, column.state == "committed", column.content_digest.is_(None))
        .limit(1000)
    )
    return int(connection.execute(select(func.count()).select_from(some.subquery())).scalar_one())
