"""Work of a worker: update metrics of changed runs.

A changed ``updated_seconds`` marks a changed run. Each run is read in a snapshot and written in a short
transaction; slow runs are read less often.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, delete, or_, select

from dcp.server.core.jobs.schedules import ScheduleContext
from dcp.server.database.engine import insert_or_update
from dcp.server.database.tables import checkpoints, runs
from dcp.server.features.run_metrics import feature, run_metadata, run_metrics, run_summaries
from dcp.server.features.run_metrics.folding import BY_RUN, flattened, metrics_of_run, number_of

_SECONDS: Final = 1.0
_ALL_SECONDS: Final = 600.0
_RECENT_SECONDS: Final = 900.0
"""Recent changes are checked often; clocks of processes differ by less than this."""
_REST: Final = 20.0
"""A run rests for this multiple of its reading time."""
_RUNS: Final = 100
"""Runs written in one transaction."""
_MOST_SECONDS: Final = 60.0


def _is_old(now: float) -> ColumnElement[bool]:
    seen = run_summaries.c
    changed = or_(seen.run_id.is_(None), seen.seen_seconds != runs.c.updated_seconds)
    return changed & or_(seen.due_seconds.is_(None), seen.due_seconds <= now)


def _old_runs(connection: Connection, now: float, since: float | None, limit: int) -> Sequence[Any]:
    query = (
        select(runs.c.id, runs.c.updated_seconds)
        .outerjoin_from(runs, run_summaries, run_summaries.c.run_id == runs.c.id)
        .where(_is_old(now))
        .limit(limit)
    )
    if since is not None:
        query = query.where(runs.c.updated_seconds >= since)
    return connection.execute(query).all()


def _are_recent(connection: Connection, context: ScheduleContext) -> bool:
    return bool(_old_runs(connection, context.now, context.now - _RECENT_SECONDS, 1))


@feature.schedule("run-metrics", _SECONDS, is_needed=_are_recent)
def sum_recent(context: ScheduleContext) -> None:
    """Update runs with a recent change."""
    _sum_up(context, context.now - _RECENT_SECONDS)


@feature.schedule("run-metrics-all", _ALL_SECONDS)
def sum_all(context: ScheduleContext) -> None:
    """Update all changed runs, regardless of clocks."""
    _sum_up(context, None)


def _sum_up(context: ScheduleContext, since: float | None) -> None:
    until = time.monotonic() + _MOST_SECONDS
    while not context.stop.is_set() and time.monotonic() < until:
        found = []
        with context.database.read() as connection:
            old = _old_runs(connection, context.now, since, _RUNS)
        for row in old:
            if context.stop.is_set():
                return
            begun = time.monotonic()
            with context.database.read() as connection:
                found.append(_summary(connection, row.id))
            found[-1]["due_seconds"] = context.now + _REST * (time.monotonic() - begun)
        context.database.transact(lambda connection, found=found: _write(connection, found))  # type: ignore[misc]
        if len(old) < _RUNS:
            return


def _summary(connection: Connection, run_id: int) -> dict[str, Any]:
    """Return the rows of a run from one snapshot."""
    seen = connection.execute(select(runs.c.updated_seconds).where(runs.c.id == run_id)).scalar_one()
    of_run = (checkpoints.c.run_id == run_id, checkpoints.c.state == "committed")
    newest = (
        select(checkpoints.c.user_metadata)
        .where(*of_run)
        .with_hint(checkpoints, BY_RUN, "sqlite")
        .order_by(checkpoints.c.step_order.desc(), checkpoints.c.id.desc())
        .limit(1)
    )
    members = flattened(connection.execute(newest).scalar())
    return {
        "run_id": run_id,
        "seen_seconds": seen,
        "metrics": metrics_of_run(connection, run_id),
        "metadata": [
            {"run_id": run_id, "name": name, "value": text, "number": number_of(text)}
            for name, text in members.items()
        ],
    }


def _write(connection: Connection, found: Sequence[dict[str, Any]]) -> None:
    """Replace the rows of runs."""
    numbers = [one["run_id"] for one in found]
    if not numbers:
        return
    for table, name in ((run_metrics, "metrics"), (run_metadata, "metadata")):
        rows = [row for one in found for row in one[name]]
        kept = {(row["run_id"], row["name"]) for row in rows}
        known = connection.execute(select(table.c.run_id, table.c.name).where(table.c.run_id.in_(numbers)))
        for run_id, gone in [tuple(row) for row in known if tuple(row) not in kept]:
            connection.execute(delete(table).where(table.c.run_id == run_id, table.c.name == gone))
        insert_or_update(connection, table, rows)
    columns = ("run_id", "seen_seconds", "due_seconds")
    insert_or_update(connection, run_summaries, [{name: one[name] for name in columns} for one in found])
