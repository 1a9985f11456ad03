"""``/checkpoints``: registration by trainers, and all that is known of one."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Header, Query, Request, Response
from sqlalchemy import Connection

from dcp.server.catalog import listing
from dcp.server.catalog.details import get_checkpoint as find_checkpoint
from dcp.server.catalog.filter_checks import check_filter, notes_of
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.http.dependencies import Caller, Db, ServiceDep, requires
from dcp.server.core.http.idempotent_transaction import IdempotentDep
from dcp.server.core.http.routers import api_router
from dcp.server.core.security.redaction import redact
from dcp.server.features.checkpoints.answers import (
    CheckpointAnswer,
    CheckpointDetailAnswer,
    CheckpointList,
    RegisteredAnswer,
)
from dcp.server.features.checkpoints.queries import CheckpointQuery
from dcp.server.features.scan.registering import Registration, observe

__all__ = ["router"]

router = api_router("/checkpoints", tags=["checkpoints"])

_REGISTERED: dict[int | str, dict[str, Any]] = {
    200: {"model": RegisteredAnswer, "description": "It was known."},
    201: {"model": RegisteredAnswer, "description": "It was not known."},
}
_NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "It has this ETag."}}


@router.get("", dependencies=[requires("read")])
def list_checkpoints(
    query: Annotated[CheckpointQuery, Query()], database: Db, caller: Caller
) -> CheckpointList:
    """Checkpoints, the newest first; deleted and unreadable ones only if `state` asks for them.

    A root, run or metric that there is not is an error, which names those that are like it.
    """
    with database.read() as connection:
        check_filter(connection, query.wanted, query.order, caller.roots)
        page = listing.list_checkpoints(
            connection, query.wanted, query.order, query.cursor, query.limit, caller.roots
        )
        notes = notes_of(connection, query.root, caller.roots)
    items = [CheckpointAnswer.of(found) for found in page.checkpoints]
    return CheckpointList(items=items, next_cursor=page.next_cursor, notes=redact(notes))


@router.post("", dependencies=[requires("write")], responses=_REGISTERED | problems(404, 409, 410))
def register_checkpoint(
    body: Registration,
    service: ServiceDep,
    caller: Caller,
    transact: IdempotentDep,
    request: Request,
    response: Response,
) -> RegisteredAnswer:
    """Look at a checkpoint now, instead of at the next scan. Saying it twice changes nothing."""
    write = observe(
        service.database,
        service.roots,
        body,
        actor=caller.name,
        visible=caller.roots,
        clock=service.clock,
    )

    def act(connection: Connection) -> RegisteredAnswer:
        found = write(connection)
        response.status_code = 201 if found.is_new else 200
        if found.id is not None:
            response.headers["Location"] = f"{request.url.path}/{found.id}"
        return RegisteredAnswer.of(found)

    return transact(act)


@router.get(
    "/{checkpoint_id}",
    response_model=CheckpointDetailAnswer,
    dependencies=[requires("read")],
    responses=_NOT_MODIFIED | problems(404),
)
def get_checkpoint(
    checkpoint_id: IdPath,
    database: Db,
    caller: Caller,
    response: Response,
    if_none_match: Annotated[str | None, Header(max_length=1024)] = None,
) -> Any:
    """All that is known of a checkpoint."""
    with database.read() as connection:
        detail = find_checkpoint(connection, checkpoint_id, caller.roots)
    headers = {"ETag": detail.etag, "Cache-Control": "private, no-cache"}
    if if_none_match is not None and (if_none_match.strip() == "*" or detail.etag in if_none_match):
        return Response(status_code=304, headers=headers)
    response.headers.update(headers)
    return CheckpointDetailAnswer.of(detail)
