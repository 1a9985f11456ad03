"""A run: its steps over time, a metric, its checkpoints, and what retention would leave of it."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Query, Request, Response

from dcp.manager.retention import Retention
from dcp.server.core.answers import IdPath
from dcp.server.core.http.context import Service
from dcp.server.core.http.dependencies import Caller, Db, ServiceDep
from dcp.server.core.pages.drawing import polyline, timeline
from dcp.server.core.pages.queries import READ, pages_router
from dcp.server.core.pages.rendering import page
from dcp.server.features.checkpoint_page.actions import writable_roots
from dcp.server.features.checkpoints import api as checkpoints_api
from dcp.server.features.checkpoints.answers import CheckpointAnswer
from dcp.server.features.checkpoints.lists import listed, loss_of
from dcp.server.features.checkpoints.queries import CheckpointQuery, TensorBytesQuery, TimelineQuery
from dcp.server.features.labels import api as labels_api
from dcp.server.features.retention.planning import plan_run
from dcp.server.features.runs import api
from dcp.server.features.runs.answers import RunAnswer, TensorBytesAnswer
from dcp.server.features.runs.view import RunView
from dcp.server.records.administration import RetentionPreview
from dcp.storage.formats.registry import target_names

__all__ = ["router"]

router = pages_router()

_BINS: Final = 200
"""As many as bars can be told apart."""


@router.get("/runs/{run_id}", dependencies=READ)
def run_page(
    run_id: IdPath,
    view: Annotated[RunView, Query()],
    request: Request,
    database: Db,
    service: ServiceDep,
    caller: Caller,
) -> Response:
    """All about one run."""
    run = api.get_run(run_id, database, caller)
    steps = api.get_run_timeline(run_id, TimelineQuery(points=_BINS), database, caller)
    metric = view.metric or loss_of(steps.metric_names)
    series = None if metric is None else api.get_run_series(run_id, database, caller, metric, _BINS)
    return page(
        request,
        "run.html",
        twin=f"/api/v1/runs/{run_id}",
        run=run,
        aliases=labels_api.list_aliases(run_id, database, caller).items,
        steps=steps,
        metric_names=steps.metric_names,
        timeline=timeline(steps.bins),
        metric=metric,
        series=series,
        ends=_ends(run_id, metric, database, caller) if series and series.points else [],
        line=polyline([point.mean for point in series.points], 600, 120) if series else "",
        preview=_preview(run, view, service),
        tensor_bytes=_tensor_bytes(run, view, database, caller),
        may_convert=caller.may("convert"),
        writable=writable_roots(service, caller),
        targets=target_names(),
        **listed(view, database, caller, run_id=run_id),
    )


def _ends(run_id: int, metric: str | None, database: Db, caller: Caller) -> list[CheckpointAnswer]:
    """The committed checkpoints with the least and the greatest value: which of them is the good one depends
    on what is measured."""
    ways = [CheckpointQuery(run_id=run_id, sort=f"{sign}metric:{metric}", limit=1) for sign in ("", "-")]
    found = [one for query in ways for one in checkpoints_api.list_checkpoints(query, database, caller).items]
    return found if all(metric in one.metrics for one in found) else []


def _preview(run: RunAnswer, view: RunView, service: Service) -> RetentionPreview | None:
    keep = view.keep
    if keep is None:
        return None
    retention = Retention.from_dict(keep.document())
    with service.database.read() as connection:
        return plan_run(connection, run.id, run.key, retention, service.clock()).preview


def _tensor_bytes(run: RunAnswer, view: RunView, database: Db, caller: Caller) -> TensorBytesAnswer | None:
    if view.below_step is None:
        return None
    return api.get_run_tensor_bytes(run.id, TensorBytesQuery(below_step=view.below_step), database, caller)
