"""Runs by the API, and the page of a run: steps over time, a metric, checkpoints."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Query as InQuery
from pydantic import Field

from dcp.server.catalog import runs
from dcp.server.catalog.filters import (
    CheckpointFilter,
    RootName,
    Sort,
    SortText,
    check_filter,
    check_root,
    notes_of,
)
from dcp.server.catalog.inputs import Name, Paged, Query, Step, Text
from dcp.server.catalog.labels import list_aliases
from dcp.server.catalog.runs import RunFilter, RunSort
from dcp.server.catalog.timeline import RunTimeline, Series, metric_series, run_timeline
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.logs import redact
from dcp.server.core.pages.drawing import polyline, timeline
from dcp.server.features.checkpoints import ListView, find_page, listed, loss_of
from dcp.server.features.runs import feature
from dcp.server.features.runs.live import activity_of
from dcp.server.records.checkpoints import Checkpoint, Run
from dcp.server.records.lists import NotedPage

_BINS: Final = 200
"""Maximum number of bars that can be distinguished."""

_Pattern = Annotated[Text, Field(min_length=1, max_length=256)]


class RunQuery(Paged):
    """Runs of a root with a key that contains a text or matches a glob."""

    root: Annotated[RootName | None, Field(description="Name of a root.")] = None
    contains: Annotated[_Pattern | None, Field(description="Part of the key.")] = None
    glob: Annotated[_Pattern | None, Field(description="Glob for the key; * matches any characters.")] = None
    sort: Annotated[
        RunSort,
        Field(description="latest: time of the newest checkpoint. A minus means descending."),
    ] = "-latest"


@feature.get("/runs", tag="runs", errors=())
def list_runs(query: Annotated[RunQuery, InQuery()], ask: Ask) -> NotedPage[Run]:
    """List runs, newest checkpoint first."""
    wanted = RunFilter(root=query.root, contains=query.contains, glob=query.glob)
    with ask.reading() as connection:
        check_root(connection, query.root, ask.visible)
        page = runs.list_runs(connection, wanted, query.sort, query.cursor, query.limit, ask.visible)
        notes = notes_of(connection, query.root, ask.visible)
    return NotedPage(page.items, page.next_cursor, tuple(redact(notes)))


@feature.get("/runs/{run_id}", tag="runs")
def get_run(run_id: IdPath, ask: Ask) -> Run:
    """Return a run."""
    return ask.find(runs.get_run, run_id, ask.visible)


@feature.get("/runs/{run_id}/series", tag="runs")
def get_run_series(
    run_id: IdPath,
    ask: Ask,
    metric: Annotated[
        str,
        InQuery(min_length=1, max_length=128, description="Name of the metric.", examples=["loss"]),
    ],
    points: Annotated[int, InQuery(ge=1, le=1000, description="Maximum points.")] = 200,
) -> Series:
    """Return a metric over the steps of a run; of more checkpoints than points, each point is of several."""
    with ask.reading() as connection:
        found = metric_series(connection, run_id, metric, ask.visible, points=points)
        if not found.points:
            check_filter(connection, CheckpointFilter(), Sort("metric", metric=metric), ask.visible)
    return found


class TimelineQuery(Query):
    """Steps of a run, in how many bins, with which metrics."""

    metric: Annotated[tuple[Name, ...], Field(max_length=8, description="Names of metrics to include.")] = ()
    points: Annotated[int, Field(ge=1, le=1000, description="Maximum bins.")] = 300
    min_step: Annotated[Step | None, Field(description="Lowest step, inclusive.")] = None
    max_step: Annotated[Step | None, Field(description="Highest step, inclusive.")] = None


@feature.get("/runs/{run_id}/timeline", tag="runs")
def get_run_timeline(run_id: IdPath, query: Annotated[TimelineQuery, InQuery()], ask: Ask) -> RunTimeline:
    """Return a run's checkpoints of all states over its steps, grouped into bins: bytes, seconds of saving,
    metrics, states, aliases."""
    return ask.find(
        run_timeline,
        run_id,
        ask.visible,
        names=query.metric,
        points=query.points,
        min_step=query.min_step,
        max_step=query.max_step,
    )


class RunView(ListView):
    """Query of a run's page: filters of its checkpoints."""

    sort: SortText = "-step"


@feature.page("/runs/{run_id}", "run.html", panels="run")
def run_page(run_id: IdPath, view: Annotated[RunView, InQuery()], ask: Ask) -> dict[str, Any]:
    """Show the run over its steps, a metric, and its checkpoints."""
    run = get_run(run_id, ask)
    steps = get_run_timeline(run_id, TimelineQuery(points=_BINS), ask)
    metric = view.metric or loss_of(steps.metric_names)
    series = None if metric is None else get_run_series(run_id, ask, metric, _BINS)
    return {
        "found": run,
        "activity": ask.find(activity_of, run_id, ask.now),
        "aliases": ask.find(list_aliases, run_id, ask.visible),
        "steps": steps,
        "metric_names": steps.metric_names,
        "timeline": timeline(steps.bins),
        "metric": metric,
        "series": series,
        "ends": _ends(run_id, metric, ask) if series and series.points and metric else [],
        "line": polyline([point.mean for point in series.points], 600, 120) if series else "",
        **listed(view, ask, run_id=run_id),
    }


def _ends(run_id: int, metric: str, ask: Ask) -> list[Checkpoint]:
    """Return the committed checkpoints with the minimum and maximum; the better value depends on the
    metric."""
    wanted = CheckpointFilter(run_id=run_id)
    pages = [find_page(wanted, f"{sign}metric:{metric}", ask, limit=1) for sign in ("", "-")]
    found = [one for page in pages for one in page.items]
    return found if all(metric in one.metrics for one in found) else []
