"""Jobs that have a route of their own beside ``/jobs``."""

from __future__ import annotations

from fastapi import Response
from pydantic import BaseModel
from sqlalchemy import Connection

from dcp.server.core.http.context import Service
from dcp.server.core.http.dependencies import Writer
from dcp.server.core.http.idempotent_transaction import IdempotentTransaction
from dcp.server.core.jobs.answers import JobAnswer
from dcp.server.core.jobs.ledger import reading, transitions
from dcp.server.core.jobs.ledger.states import JobSpec
from dcp.server.core.problems import TooManyRequestsError

__all__ = ["check_queue", "submit_kind", "submit_new"]

_RETRY_SECONDS = 60


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
        spec = service.kinds[kind].specify(connection, params, author.principal, service.settings)
        return submit_new(connection, spec, service, author, response)

    return transact(submit)


def submit_new(
    connection: Connection, spec: JobSpec, service: Service, author: Writer, response: Response
) -> JobAnswer:
    """The job of ``spec``, new or unfinished; ``response`` says where it is. Raises as `check_queue`."""
    job_id, is_new = transitions.submit_or_join(connection, spec, author.now_seconds)
    if is_new:
        check_queue(connection, author, service.settings.max_queued_jobs)
        detail = {"kind": spec.kind, "params": dict(spec.params)}
        author.change(None).record(connection, "job.submit", f"job:{job_id}", detail)
    response.headers["Location"] = f"/api/v1/jobs/{job_id}"
    return JobAnswer.of(reading.get_job(connection, job_id))


def check_queue(connection: Connection, author: Writer, most: int) -> None:
    """Raises TooManyRequestsError, after which the transaction is not to be committed, if more than ``most``
    jobs of the key are queued."""
    if author.principal.key_id is None:
        return
    if reading.count_queued(connection, author.principal.name, most + 1) > most:
        raise TooManyRequestsError(
            f"{most} jobs of this key are queued, and no more are taken before some of them have begun",
            headers={"Retry-After": str(_RETRY_SECONDS)},
        )
