"""Deleting checkpoints with grace, and taking it back."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Query, Response
from sqlalchemy import Connection

from dcp.server.catalog.details import CheckpointDetail, get_checkpoint
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.http.context import Service
from dcp.server.core.http.dependencies import Author, IfMatch, ServiceDep, Writer, requires
from dcp.server.core.http.idempotent_transaction import IdempotentDep
from dcp.server.core.http.routers import api_router
from dcp.server.core.problems import ForbiddenError
from dcp.server.core.record_answers import answer_model
from dcp.server.features.retention import deletion

__all__ = ["router"]

CheckpointDetailAnswer: Any = answer_model(CheckpointDetail)
router = api_router("/checkpoints", tags=["deletion"])

_MAX_GRACE_SECONDS = 3660 * 86_400.0


@router.delete("/{checkpoint_id}", dependencies=[requires("delete")], responses=problems(404, 409, 412))
def delete_checkpoint(
    checkpoint_id: IdPath,
    service: ServiceDep,
    author: Author,
    if_match: IfMatch,
    response: Response,
    grace_seconds: Annotated[
        float | None,
        Query(ge=0, le=_MAX_GRACE_SECONDS, description="How long it can be restored; else as is configured."),
    ] = None,
) -> CheckpointDetailAnswer:
    """Delete it: its bytes stay until the grace is over, and until then it can be restored.

    Not if it is pinned, or an alias names it.
    """
    _check_root(service, author, checkpoint_id)
    grace = service.settings.delete_grace_seconds if grace_seconds is None else grace_seconds
    change = author.change(if_match.version(f"c{checkpoint_id}"))

    def act(connection: Connection) -> CheckpointDetail:
        found = deletion.delete_softly(connection, checkpoint_id, grace, change)
        change.record(
            connection, "checkpoint.delete", f"checkpoint:{checkpoint_id}", {"grace_seconds": grace}
        )
        return found

    found = service.database.transact(act)
    response.headers["ETag"] = found.etag
    return CheckpointDetailAnswer.of(found)


@router.post("/{checkpoint_id}/restore", dependencies=[requires("delete")], responses=problems(404, 409, 412))
def restore_checkpoint(
    checkpoint_id: IdPath,
    author: Author,
    transact: IdempotentDep,
    if_match: IfMatch,
    response: Response,
) -> CheckpointDetailAnswer:
    """Take a deletion back, unless its bytes are being purged already."""
    change = author.change(if_match.version(f"c{checkpoint_id}"))

    def act(connection: Connection) -> CheckpointDetailAnswer:
        found = deletion.restore(connection, checkpoint_id, change)
        change.record(connection, "checkpoint.restore", f"checkpoint:{checkpoint_id}", {})
        response.headers["ETag"] = found.etag
        return CheckpointDetailAnswer.of(found)

    return transact(act)


def _check_root(service: Service, author: Writer, checkpoint_id: int) -> None:
    with service.database.read() as connection:
        root = get_checkpoint(connection, checkpoint_id, author.principal.roots).root
    if root not in service.settings.roots or service.settings.roots[root].readonly:
        raise ForbiddenError(f"root {root} is read-only, or not configured any more")
