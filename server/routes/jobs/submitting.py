"""Jobs that have a route of their own beside ``/jobs``."""

from __future__ import annotations

from fastapi import Response
from pydantic import BaseModel
from sqlalchemy import Connection

from dcp.server.catalog import audit
from dcp.server.http.context import Service
from dcp.server.http.dependencies import Writer
from dcp.server.http.idempotent_transaction import IdempotentTransaction
from dcp.server.jobs import ledger
from dcp.server.jobs.kinds import KINDS
from dcp.server.schemas.jobs import JobAnswer

__all__ = ["submit_kind"]


def submit_kind(
    kind: str,
    params: BaseModel,
    service: Service,
    author: Writer,
    transact: IdempotentTransaction,
    response: Response,
) -> JobAnswer:
    """The job of this kind, new or unfinished; ``response`` says where it is.

    Raises what the kind refuses: what the key may not see is not found.
    """

    def submit(connection: Connection) -> JobAnswer:
        spec = KINDS[kind].specify(connection, params, author.principal, service.settings)
        job_id, is_new = ledger.submit_or_join(connection, spec, author.now_seconds)
        if is_new:
            audit.record(
                connection,
                author.principal.name,
                "job.submit",
                f"job:{job_id}",
                {"kind": spec.kind, "params": dict(spec.params)},
                now=author.now_seconds,
                request_id=author.request_id,
                address=author.address,
            )
        response.headers["Location"] = f"/api/v1/jobs/{job_id}"
        return JobAnswer.of(ledger.get_job(connection, job_id))

    return transact(submit)
