"""The first page: runs, how each goes, and whether all is well."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Final
from urllib.parse import urlencode

from fastapi import Query, Request, Response

from dcp.server.core.http.dependencies import Caller, Db, PageParams, ServiceDep
from dcp.server.core.pages.drawing import polyline
from dcp.server.core.pages.formatting import metrics_of
from dcp.server.core.pages.queries import READ, BrowserRoute, pages_router, query_of
from dcp.server.core.pages.rendering import page
from dcp.server.features.checkpoints import api as checkpoints_api
from dcp.server.features.checkpoints.answers import CheckpointAnswer
from dcp.server.features.checkpoints.lists import loss_of
from dcp.server.features.checkpoints.queries import CheckpointQuery, RunQuery
from dcp.server.features.jobs import api as jobs_api
from dcp.server.features.roots import api as roots_api
from dcp.server.features.runs import api as runs_api
from dcp.server.features.runs.answers import RunAnswer

__all__ = ["router"]

router = pages_router()

_RUNS: Final = 20
_NEWEST: Final = 32
"""Checkpoints of a run that are looked at, so that this page costs the same however long runs are."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run with what its newest checkpoints tell. ``metric`` and ``sizes`` are lines, "" without any."""

    run: RunAnswer
    newest: CheckpointAnswer | None
    seen: int
    damaged: int
    good: int
    metric_name: str | None
    metric_last: float | None
    metric: str
    sizes: str


def overview_page(
    request: Request,
    database: Db,
    service: ServiceDep,
    caller: Caller,
    root: Annotated[str | None, Query(max_length=63)] = None,
    cursor: Annotated[str | None, Query(max_length=4096)] = None,
) -> Response:
    """Runs, the one with the newest checkpoint first, each with its last values; jobs and roots in a line."""
    query = query_of(RunQuery, root=root, cursor=cursor, limit=_RUNS)
    found = runs_api.list_runs(query, database, caller)
    roots = roots_api.list_all(service, caller).items
    active = ["queued", "planning", "running", "publishing"]
    jobs = jobs_api.list_jobs(database, caller, PageParams(5, None), active)  # type: ignore[arg-type]
    return page(
        request,
        "overview.html",
        twin=f"/api/v1/runs?{urlencode({'root': root})}" if root else "/api/v1/runs",
        rows=[_row(run, database, caller) for run in found.items],
        next_cursor=found.next_cursor,
        roots=roots,
        troubled=[one for one in roots if one.scan_error or one.lost],
        jobs=jobs.items,
        has_more_jobs=jobs.next_cursor is not None,
        root=root,
        is_first=cursor is None,
    )


router.add_api_route(
    "/", overview_page, dependencies=READ, route_class_override=BrowserRoute, response_class=Response
)


def _row(run: RunAnswer, database: Db, caller: Caller) -> RunRow:
    query = CheckpointQuery(run_id=run.id, sort="-step", limit=_NEWEST)
    newest = checkpoints_api.list_checkpoints(query, database, caller).items
    metric = loss_of({name for one in newest for name in metrics_of(one)})
    oldest_first = newest[::-1]
    values = [found[metric] for one in oldest_first if metric in (found := metrics_of(one))]
    return RunRow(
        run=run,
        newest=newest[0] if newest else None,
        seen=len(newest),
        damaged=sum(one.verification == "damaged" for one in newest),
        good=sum(one.verification == "good" for one in newest),
        metric_name=metric,
        metric_last=values[-1] if values else None,
        metric=polyline([value for value in values if math.isfinite(value)]),
        sizes=polyline([one.bytes for one in oldest_first]),
    )
