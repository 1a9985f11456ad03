"""``/runs/{id}/drift``: how the tensors of a run change from step to step."""

from __future__ import annotations

from fastapi import Response

from dcp.server.catalog.runs import get_run
from dcp.server.http.dependencies import Author, Caller, Db, ServiceDep, requires
from dcp.server.http.idempotent_transaction import IdempotentDep
from dcp.server.http.routers import api_router
from dcp.server.jobs.kinds.drift import DriftParams
from dcp.server.jobs.ledger import latest_success
from dcp.server.problems import NotFoundError
from dcp.server.routes.jobs.submitting import submit_kind
from dcp.server.schemas.common import IdPath, problems
from dcp.server.schemas.contents.drawings import DriftAnswer
from dcp.server.schemas.jobs import JobAnswer

__all__ = ["router"]

router = api_router("/runs/{run_id}", tags=["runs"], dependencies=[requires("read")])


@router.get("/drift", responses=problems(404))
def get_run_drift(run_id: IdPath, database: Db, caller: Caller) -> DriftAnswer:
    """As a job has found it last; not found before the first one, and once that job is forgotten."""
    with database.read() as connection:
        get_run(connection, run_id, caller.roots)
        job = latest_success(connection, "drift", "run_id", run_id, caller.roots)
    if job is None or job.result is None:
        raise NotFoundError(f"no drift of run {run_id} is kept; POST here to compute it")
    return DriftAnswer.of(job.result, job_id=job.id, created_at=job.created_seconds)


@router.post("/drift", status_code=202, responses=problems(404, 409))
def compute_run_drift(
    run_id: IdPath, service: ServiceDep, author: Author, transact: IdempotentDep, response: Response
) -> JobAnswer:
    """Have it computed of up to 50 steps, by a job; `POST /jobs` with the kind `drift` chooses them."""
    return submit_kind("drift", DriftParams(run_id=run_id), service, author, transact, response)
