"""Comparison of runs: one chart of a metric, metadata, and facts; as JSON and as a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Query as InQuery
from pydantic import Field
from sqlalchemy import Connection

from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.filters import CheckpointFilter, Sort
from dcp.server.catalog.inputs import MAX_ID, Name, Query
from dcp.server.catalog.listing import list_checkpoints
from dcp.server.catalog.runs import get_run
from dcp.server.catalog.timeline import Series, metric_names, metric_series, save_seconds_of
from dcp.server.core.ask import Ask
from dcp.server.core.pages.formatting import bytes_text, count_text, large_text, seconds_text
from dcp.server.features.checkpoints import loss_of
from dcp.server.features.run_metrics import feature
from dcp.server.features.run_metrics.folding import flattened, metrics_of_run
from dcp.server.features.run_metrics.listing import MAX_RUNS, RunMetric, metric_of_row, without
from dcp.server.features.run_metrics.overlay import Axis, Scale, overlay
from dcp.server.records.checkpoints import CheckpointDetail, Run
from dcp.server.records.declaring import Shown

_POINTS: Final = 120
_RunId = Annotated[int, Field(ge=1, le=MAX_ID)]


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """Run of a comparison. ``metric`` and ``series`` are None without the metric."""

    run: Run
    newest_id: Annotated[int | None, Shown("Newest committed checkpoint, the source of the facts.")]
    metric: Annotated[RunMetric | None, Shown("null: the run has no such metric.")]
    series: Annotated[Series | None, Shown("null: the run has no such metric.")]


@dataclass(frozen=True, slots=True)
class ComparedFact:
    """A fact or a member of the metadata, with the value of each run; None where a run has none."""

    name: str
    is_metadata: Annotated[bool, Shown("True: a member of the metadata. False: a fact of the catalog.")]
    values: Annotated[tuple[str | None, ...], Shown("By run, in their order; null: none.")]
    differs: Annotated[bool, Shown("The runs have different values.")]


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Runs side by side, in the requested order."""

    metric: Annotated[str | None, Shown("Requested metric, or a loss.")]
    metric_names: Annotated[tuple[str, ...], Shown("Facts of the newest checkpoints.")]
    runs: tuple[ComparedRun, ...]
    facts: tuple[ComparedFact, ...]


class ComparisonQuery(Query):
    """The runs, the metric, and as many points of each at most."""

    run: Annotated[
        tuple[_RunId, ...],
        Field(min_length=1, max_length=MAX_RUNS, description="The `id` of each run."),
    ]
    metric: Annotated[Name | None, Field(description="Name of a metric; default: a loss.")] = None
    points: Annotated[int, Field(ge=1, le=1000, description="Maximum points of each run.")] = 200


@feature.get("/runs/compare", tag="runs")
def compare_runs(query: Annotated[ComparisonQuery, InQuery()], ask: Ask) -> RunComparison:
    """Compare up to ten runs: a metric over steps, best checkpoints, and metadata and facts of the newest
    checkpoints with differences."""
    return _comparison(query.run, query.metric, query.points, ask)


def _comparison(numbers: Iterable[int], metric: str | None, points: int, ask: Ask) -> RunComparison:
    with ask.reading() as connection:
        found = [get_run(connection, number, ask.visible) for number in dict.fromkeys(numbers)]
        newest = [_newest(connection, run, ask.visible) for run in found]
        names = sorted({name for run in found for name in metric_names(connection, run.id)})
        metric = metric or loss_of(names)
        compared = tuple(
            ComparedRun(
                run,
                None if last is None else last.id,
                *_measured(connection, run, metric, points, ask.visible),
            )
            for run, last in zip(found, newest, strict=True)
        )
    return RunComparison(metric, tuple(names), compared, tuple(_facts(found, newest)))


def _newest(connection: Connection, run: Run, visible: frozenset[str] | None) -> CheckpointDetail | None:
    wanted, order = CheckpointFilter(run_id=run.id), Sort("step")
    page = list_checkpoints(connection, wanted, order, limit=1, visible=visible)
    return get_checkpoint(connection, page.items[0].id, visible) if page.items else None


def _measured(
    connection: Connection, run: Run, metric: str | None, points: int, visible: frozenset[str] | None
) -> tuple[RunMetric | None, Series | None]:
    if metric is None:
        return None, None
    series = metric_series(connection, run.id, metric, visible, points=points)
    found = [metric_of_row(row) for row in metrics_of_run(connection, run.id, metric)]
    has_any = bool(series.points or series.nonfinite_count)
    return next(iter(found), None), series if has_any else None


# -- facts ---------------------------------------------------------------------------------------------------


def _facts(found: Sequence[Run], newest: Sequence[CheckpointDetail | None]) -> Iterable[ComparedFact]:
    own = [_own_facts(run, last) for run, last in zip(found, newest, strict=True)]
    for name in own[0]:
        yield _fact(name, False, [facts[name] for facts in own])
    members = [flattened(last.user_metadata) if last else {} for last in newest]
    for name in sorted({name for one in members for name in one}):
        yield _fact(name, True, [one.get(name) for one in members])


def _fact(name: str, is_metadata: bool, values: Sequence[str | None]) -> ComparedFact:
    return ComparedFact(name, is_metadata, tuple(values), len(set(values)) > 1)


def _own_facts(run: Run, last: CheckpointDetail | None) -> dict[str, str | None]:
    """Return facts of the run and its newest checkpoint, with the labels of their pages."""
    noted = last.provenance if last is not None and isinstance(last.provenance, Mapping) else {}
    seconds = save_seconds_of(noted.get("slowest_rank_seconds"))
    return {
        "Root": run.root,
        "Checkpoints": count_text(run.checkpoint_count),
        "Newest step": None if run.latest_step is None else count_text(run.latest_step),
        "Bytes of all": bytes_text(run.bytes),
        "Bytes of the newest": None if last is None else bytes_text(last.bytes),
        "Format": None if last is None else last.format,
        "Ranks": None if last is None or last.world_size is None else count_text(last.world_size),
        "Tensors": None if last is None or last.tensor_count is None else count_text(last.tensor_count),
        "Elements": None if last is None or last.element_count is None else large_text(last.element_count),
        "dtypes": None if last is None or last.dtypes is None else ", ".join(sorted(last.dtypes)),
        "Structure": None if last is None or not last.structure_digest else last.structure_digest[:12],
        "torch": _text(noted.get("torch_version")),
        "dcphub": _text(noted.get("dcphub_version")),
        "Save took": None if seconds is None else seconds_text(seconds),
        "Verification": None if last is None else last.verification,
    }


def _text(value: Any) -> str | None:
    return value[:64] if isinstance(value, str) else None


# -- the page ------------------------------------------------------------------------------------------------


class ComparisonView(Query):
    """The address of the page: the runs, the metric, and the axes of the chart."""

    run: Annotated[tuple[_RunId, ...], Field(max_length=MAX_RUNS)] = ()
    metric: Name | None = None
    scale: Scale = "linear"
    by: Axis = "step"
    facts: Annotated[str, Field(pattern="^(all|differences)$")] = "all"
    done: Annotated[str, Field(max_length=32)] | None = None


@feature.page("/runs/compare", "compare.html")
def compare_page(view: Annotated[ComparisonView, InQuery()], ask: Ask) -> dict[str, Any]:
    """Plot a metric of the selected runs in one chart, and show their facts side by side."""
    if not view.run:
        return {"twin": "/api/v1/runs/summaries", "view": view, "found": None}
    found = _comparison(view.run, view.metric, _POINTS, ask)
    asked: list[tuple[str, object]] = [("run", one.run.id) for one in found.runs]
    asked += [("metric", found.metric)] if found.metric else []
    last_parts = Counter(one.run.key.rpartition("/")[2] for one in found.runs)
    return {
        "twin": f"/api/v1/runs/compare?{urlencode(asked)}",
        "view": view,
        "found": found,
        "letters": "ABCDEFGHIJ",
        "short": [
            last if last and last_parts[last] == 1 else one.run.key or one.run.root
            for one in found.runs
            for last in [one.run.key.rpartition("/")[2]]
        ],
        "overlay": overlay([one.series for one in found.runs], view.by, view.scale),
        "without": partial(without, ask.request),
        "facts": [one for one in found.facts if view.facts == "all" or one.differs],
        "differing": sum(one.differs for one in found.facts),
    }
