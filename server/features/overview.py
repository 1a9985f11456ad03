"""The first page: runs with their last values, and the state of jobs and roots."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Query

from dcp.server.catalog.filters import CheckpointFilter
from dcp.server.core.ask import Ask
from dcp.server.core.feature import Feature
from dcp.server.core.pages.drawing import polyline
from dcp.server.core.pages.formatting import metrics_of
from dcp.server.core.pages.requests import query_of
from dcp.server.features.checkpoints import find_page, loss_of
from dcp.server.features.jobs.job_routes import active_jobs
from dcp.server.features.roots import roots_of
from dcp.server.features.runs.run_pages import RunQuery, list_runs
from dcp.server.records.checkpoints import Checkpoint, Run

feature: Final = Feature("overview", __name__)

_RUNS: Final = 20
_JOBS: Final = 5
_NEWEST: Final = 32
"""Checkpoints read per run; bounds the cost of this page."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """Run with values of its newest checkpoints. ``metric`` and ``sizes`` are lines, "" without values."""

    run: Run
    newest: Checkpoint | None
    seen: int
    damaged: int
    good: int
    metric_name: str | None
    metric_last: float | None
    metric: str
    sizes: str


@feature.page("/", "overview.html", only_browsers=True)
def overview_page(
    ask: Ask,
    root: Annotated[str | None, Query(max_length=63)] = None,
    cursor: Annotated[str | None, Query(max_length=4096)] = None,
) -> dict[str, Any]:
    """Show runs, newest checkpoint first, with a line for jobs and roots."""
    found = list_runs(query_of(RunQuery, root=root, cursor=cursor, limit=_RUNS), ask)
    roots = list(roots_of(ask))
    jobs = active_jobs(ask, _JOBS + 1)
    return {
        "twin": f"/api/v1/runs?{urlencode({'root': root})}" if root else "/api/v1/runs",
        "rows": [_row(run, ask) for run in found.items],
        "next_cursor": found.next_cursor,
        "roots": roots,
        "troubled": [one for one in roots if one.scan_error or one.lost],
        "jobs": jobs[:_JOBS],
        "has_more_jobs": len(jobs) > _JOBS,
        "root": root,
        "is_first": cursor is None,
    }


def _row(run: Run, ask: Ask) -> RunRow:
    newest = find_page(CheckpointFilter(run_id=run.id), "-step", ask, limit=_NEWEST).items
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
