"""``/checkpoints/{id}/statistics``: of the values of its tensors, as they were computed last."""

from __future__ import annotations

from fastapi import Response

from dcp.server.catalog.cursors import decode_cursor, encode_cursor, query_mark
from dcp.server.catalog.verifications import get_statistics as find_statistics
from dcp.server.catalog.verifications import statistics_tensors
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.http.dependencies import Author, Caller, Db, Page, ServiceDep, requires
from dcp.server.core.http.idempotent_transaction import IdempotentDep
from dcp.server.core.http.routers import api_router
from dcp.server.core.jobs.answers import JobAnswer
from dcp.server.core.jobs.submitting import submit_kind
from dcp.server.core.problems import NotFoundError
from dcp.server.features.statistics.answers import StatisticsAnswer
from dcp.server.features.statistics.job import StatsParams

__all__ = ["router"]

router = api_router("/checkpoints/{checkpoint_id}", tags=["data"], dependencies=[requires("read")])


@router.get("/statistics", responses=problems(404))
def get_statistics(checkpoint_id: IdPath, database: Db, caller: Caller, page: Page) -> StatisticsAnswer:
    """What is kept; not found before the first computation. A page is of tensors."""
    with database.read() as connection:
        found = find_statistics(connection, checkpoint_id, caller.roots)
        if found is None:
            raise NotFoundError(
                f"no statistics of checkpoint {checkpoint_id} are kept; POST here to compute them"
            )
        mark = query_mark("statistics", checkpoint_id, found.created_seconds)
        begin = max(0, decode_cursor(page.cursor, mark, int)[0]) if page.cursor is not None else 0
        end = begin + page.limit
        tensors = statistics_tensors(connection, checkpoint_id, begin, end)
    is_last = end >= found.tensor_count
    return StatisticsAnswer.of(
        found,
        total=found.result.get("total"),
        tensors=tensors,
        next_cursor=None if is_last else encode_cursor(mark, end),
    )


@router.post("/statistics", status_code=202, responses=problems(404, 409, 410))
def compute_statistics(
    checkpoint_id: IdPath,
    service: ServiceDep,
    author: Author,
    transact: IdempotentDep,
    response: Response,
) -> JobAnswer:
    """Have them computed of all tensors, by a job; they are kept with the checkpoint."""
    return submit_kind("stats", StatsParams(checkpoint_id=checkpoint_id), service, author, transact, response)
