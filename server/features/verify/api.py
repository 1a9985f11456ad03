"""``/checkpoints/{id}/verifications``: whether its bytes are those that were committed."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Response

from dcp.server.catalog.contents.verifications import list_verifications as find_verifications
from dcp.server.catalog.details import get_checkpoint
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.http.dependencies import Author, Caller, Db, ServiceDep, requires
from dcp.server.core.http.idempotent_transaction import IdempotentDep
from dcp.server.core.http.routers import api_router
from dcp.server.core.jobs.answers import JobAnswer
from dcp.server.core.jobs.submitting import submit_kind
from dcp.server.features.verify.answers import VerificationAnswer, VerificationList
from dcp.server.features.verify.job import VerifyParams

__all__ = ["router"]

router = api_router("/checkpoints/{checkpoint_id}", tags=["data"])


@router.get("/verifications", dependencies=[requires("read")], responses=problems(404))
def list_verifications(
    checkpoint_id: IdPath,
    database: Db,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
) -> VerificationList:
    """The last verifications, newest first."""
    with database.read() as connection:
        row = get_checkpoint(connection, checkpoint_id, caller.roots)
        found = find_verifications(connection, checkpoint_id, caller.roots, limit=limit)
    return VerificationList(items=[VerificationAnswer.of(one, is_current=one.is_of(row)) for one in found])


@router.post(
    "/verifications", status_code=202, dependencies=[requires("write")], responses=problems(404, 409, 410)
)
def verify_checkpoint(
    checkpoint_id: IdPath,
    service: ServiceDep,
    author: Author,
    transact: IdempotentDep,
    response: Response,
) -> JobAnswer:
    """Have every byte read and compared, by a job."""
    return submit_kind(
        "verify", VerifyParams(checkpoint_id=checkpoint_id), service, author, transact, response
    )
