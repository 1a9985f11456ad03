"""A metric over the steps of a run, in as many points as somebody can look at: the database adds them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from dcp.server.catalog.runs import get_run
from dcp.server.database.tables import checkpoints, metrics

__all__ = ["Point", "Series", "metric_series"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Neighbouring checkpoints, ``count`` of them; ``checkpoint_id`` is of one of them."""

    checkpoint_id: int
    first_step: int
    last_step: int
    last_seconds: float
    count: int
    minimum: float
    maximum: float
    mean: float


@dataclass(frozen=True, slots=True)
class Series:
    """``count`` is of all checkpoints with the metric."""

    run_id: int
    metric: str
    count: int
    points: Sequence[Point]


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
            func.max(rows.c.committed_seconds).label("last_seconds"),
            func.count().label("count"),
            func.min(rows.c.value).label("minimum"),
            func.max(rows.c.value).label("maximum"),
            func.avg(rows.c.value).label("mean"),
        )
        .group_by(rows.c.bucket)
        .order_by(rows.c.bucket)
    )
    found = [Point(**row) for row in connection.execute(query).mappings()]
    return Series(run_id, metric, sum(point.count for point in found), found)
