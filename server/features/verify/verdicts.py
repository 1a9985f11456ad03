"""Verifications of a checkpoint: listed, and started by the API."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query

from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.jobs.subjects import CheckpointParams
from dcp.server.features.verify import Verification, VerifyKind, feature, newest_verifications
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.jobs import Job
from dcp.server.records.lists import Items


@feature.get("/checkpoints/{checkpoint_id}/verifications", tag="data")
def list_verifications(
    checkpoint_id: IdPath, ask: Ask, limit: Annotated[int, Query(ge=1, le=100)] = 20
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
