"""``/runs``: folders that hold checkpoints."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from dcp.server.catalog import runs
from dcp.server.catalog.filter_checks import check_filter, check_root, notes_of
from dcp.server.catalog.filters import CheckpointFilter, Sort
from dcp.server.catalog.timeline import metric_series, run_timeline
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.http.dependencies import Caller, Db, requires
from dcp.server.core.http.routers import api_router
from dcp.server.core.security.redaction import redact
from dcp.server.features.checkpoints.queries import RunQuery, TensorBytesQuery, TimelineQuery
from dcp.server.features.retention.planning import tensor_bytes
from dcp.server.features.runs.answers import (
    RunAnswer,
    RunList,
    SeriesAnswer,
    TensorBytesAnswer,
    TimelineAnswer,
)
from dcp.steps import OPTIMIZER

__all__ = ["router"]

router = api_router("/runs", tags=["runs"])


@router.get("", dependencies=[requires("read")])
def list_runs(query: Annotated[RunQuery, Query()], database: Db, caller: Caller) -> RunList:
    """Runs, the one with the newest checkpoint first."""
    with database.read() as connection:
        check_root(connection, query.root, caller.roots)
        page = runs.list_runs(connection, query.wanted, query.sort, query.cursor, query.limit, caller.roots)
        notes = notes_of(connection, query.root, caller.roots)
    items = [RunAnswer.of(run) for run in page.runs]
    return RunList(items=items, next_cursor=page.next_cursor, notes=redact(notes))


@router.get("/{run_id}", dependencies=[requires("read")], responses=problems(404))
def get_run(run_id: IdPath, database: Db, caller: Caller) -> RunAnswer:
    """One run."""
    with database.read() as connection:
        return RunAnswer.of(runs.get_run(connection, run_id, caller.roots))


@router.get("/{run_id}/series", dependencies=[requires("read")], responses=problems(404))
def get_run_series(
    run_id: IdPath,
    database: Db,
    caller: Caller,
    metric: Annotated[str, Query(min_length=1, max_length=128, examples=["loss"])],
    points: Annotated[int, Query(ge=1, le=1000, description="As many at most.")] = 200,
) -> SeriesAnswer:
    """A metric over the steps of a run; of more checkpoints than points, each point is of several."""
    with database.read() as connection:
        found = metric_series(connection, run_id, metric, caller.roots, points=points)
        if not found.points:
            check_filter(connection, CheckpointFilter(), Sort("metric", metric=metric), caller.roots)
    return SeriesAnswer.of(found)


@router.get("/{run_id}/timeline", dependencies=[requires("read")], responses=problems(404))
def get_run_timeline(
    run_id: IdPath, query: Annotated[TimelineQuery, Query()], database: Db, caller: Caller
) -> TimelineAnswer:
    """Its checkpoints over the steps, in whatever states, neighbours added up: bytes, seconds of saving,
    metrics, states, aliases."""
    with database.read() as connection:
        found = run_timeline(
            connection,
            run_id,
            caller.roots,
            names=query.metric,
            points=query.points,
            min_step=query.min_step,
            max_step=query.max_step,
        )
    return TimelineAnswer.of(found)


@router.get("/{run_id}/tensor-bytes", dependencies=[requires("read")], responses=problems(404))
def get_run_tensor_bytes(
    run_id: IdPath, query: Annotated[TensorBytesQuery, Query()], database: Db, caller: Caller
) -> TensorBytesAnswer:
    """What the tensors of some names take in its checkpoints: those of optimizers if nothing else is said."""
    with database.read() as connection:
        found = tensor_bytes(
            connection,
            run_id,
            caller.roots,
            only=query.only or OPTIMIZER,
            below_step=query.below_step,
        )
    return TensorBytesAnswer.of(found)
