"""A metric over the steps of a run, in as many points as somebody can look at: the database adds them up."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from dcp.server.catalog.runs import get_run
from dcp.server.catalog.values import NONFINITE
from dcp.server.database.tables import checkpoints, metrics
from dcp.server.records.declaring import moment
from dcp.server.records.labels import Series, SeriesPoint

__all__ = ["metric_series"]


def metric_series(
    connection: Connection, run_id: int, metric: str, visible: frozenset[str] | None = None, *, points: int
) -> Series:
    """``metric`` of the committed checkpoints of a run that have a step: by step, in at most ``points`` of
    about as many checkpoints each. `MissingError` for a run that may not be seen."""
    get_run(connection, run_id, visible)
    order = (checkpoints.c.step_order, checkpoints.c.id)
    rows = (
        select(
            checkpoints.c.id,
            checkpoints.c.step,
            checkpoints.c.committed_seconds,
            metrics.c.value,
            func.ntile(points).over(order_by=order).label("bucket"),
        )
        .join(metrics, metrics.c.checkpoint_id == checkpoints.c.id)
        .where(
            checkpoints.c.run_id == run_id,
            checkpoints.c.state == "committed",
            checkpoints.c.step.is_not(None),
            metrics.c.name == metric,
        )
        .subquery()
    )
    query = (
        select(
            func.max(rows.c.id).label("checkpoint_id"),
            func.min(rows.c.step).label("first_step"),
            func.max(rows.c.step).label("last_step"),
            func.max(rows.c.committed_seconds).label("last_at"),
            func.count().label("count"),
            func.min(rows.c.value).label("min"),
            func.max(rows.c.value).label("max"),
            func.avg(rows.c.value).label("mean"),
        )
        .group_by(rows.c.bucket)
        .order_by(rows.c.bucket)
    )
    found = tuple(
        SeriesPoint(**{**row, "last_at": moment(row["last_at"])})
        for row in connection.execute(query).mappings()
    )
    noted = checkpoints.c.user_metadata[("metrics", metric)].as_string()
    odd = connection.execute(
        select(func.count(), func.min(checkpoints.c.step), func.max(checkpoints.c.step)).where(
            checkpoints.c.run_id == run_id,
            checkpoints.c.state == "committed",
            checkpoints.c.step.is_not(None),
            noted.in_(NONFINITE),
        )
    ).one()
    count = sum(point.count for point in found)
    return Series(
        run_id, metric, count, found, odd[0], first_nonfinite_step=odd[1], last_nonfinite_step=odd[2]
    )
