"""Verifications of a checkpoint: listed, and started by the API or its page."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Query

from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.jobs.subjects import CheckpointParams
from dcp.server.core.security.principal import Scope
from dcp.server.features.verify import Verification, VerifyKind, feature, newest_verifications
from dcp.server.records.checkpoints import CheckpointDetail
from dcp.server.records.jobs import Job
from dcp.server.records.lists import Items

_CHANGES: Final[tuple[Scope, ...]] = ("write", "convert", "delete")


@feature.get("/checkpoints/{checkpoint_id}/verifications", tag="data")
def list_verifications(
    checkpoint_id: IdPath, ask: Ask, limit: Annotated[int, Query(ge=1, le=100)] = 20
) -> Items[Verification]:
    """The last verifications, newest first."""
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


@feature.form("/checkpoints/{checkpoint_id}/verify", scope="write")
def verify_form(checkpoint_id: IdPath, ask: Ask) -> str:
    """Read and compare every byte, as a job."""
    return f"/jobs/{verify_checkpoint(checkpoint_id, ask).id}"


@feature.panel("checkpoint.actions", "action.html", order=10)
def verify_action(ask: Ask, found: CheckpointDetail) -> dict[str, Any] | None:
    """Show the findings, and the form that verifies the checkpoint."""
    return {} if any(ask.caller.may(scope) for scope in _CHANGES) else None


@feature.panel("checkpoint", "panel.html", order=50)
def verifications_panel(ask: Ask, found: CheckpointDetail) -> dict[str, Any]:
    """List the last verifications."""
    return {}
