"""Metrics of the database: samples of catalog, jobs and scans at one moment.

The cost of each statement is bounded: sums over runs, index ranges, the newest rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric
from sqlalchemy import Connection, Select, func, select, text

from dcp.server.database.tables import (
    checkpoints,
    consumers,
    events,
    jobs,
    roots,
    runs,
    schedules,
    tasks,
    verifications,
)

WINDOW_SECONDS: Final = 3600.0
"""The time window of "recent" samples."""

REGULAR_SCHEDULE: Final = "clean-up"
"""A schedule that runs regularly, even without work."""

_NEWEST_VERIFICATIONS: Final = 10_000
_RARE_STATES: Final = ("incomplete", "unreadable", "vanished", "deleted")
_UNFINISHED: Final = ("queued", "planning", "running", "publishing")

Rows = Iterable[tuple[tuple[str, ...], float]]


def read_state(connection: Connection, now: float) -> list[Metric]:
    """Return all samples at ``now`` (seconds since the epoch)."""
    return [
        *_catalog(connection),
        *_roots(connection),
        *_jobs(connection, now),
        *_verification(connection, now),
        *_schedules(connection, now),
        gauge("dcp_database_bytes", "Size of the database", [], [((), _database_bytes(connection))]),
    ]


def gauge(name: str, help_text: str, labels: list[str], rows: Rows) -> Metric:
    """Return a metric with its samples: label values, and the number."""
    family = GaugeMetricFamily(name, help_text, labels=labels)
    for values, value in rows:
        family.add_metric(list(values), float(value))
    return family


def counts(
    connection: Connection, names: Iterable[str], statement: Select[str, int]
) -> list[tuple[tuple[str, ...], float]]:
    """Run a query that counts by name; absent ``names`` become 0, so their series continue."""
    counts = dict.fromkeys(names, 0) | {
        str(name): int(count) for name, count in connection.execute(statement)
    }
    return [((name,), float(count)) for name, count in counts.items()]


def _catalog(connection: Connection) -> Iterator[Metric]:
    committed = connection.execute(select(func.coalesce(func.sum(runs.c.checkpoint_count), 0))).scalar_one()
    rare = (
        select(checkpoints.c.state, func.count())
        .where(checkpoints.c.state.in_(_RARE_STATES))
        .group_by(checkpoints.c.state)
    )
    rows = [(("committed",), committed), *counts(connection, _RARE_STATES, rare)]
    yield gauge("dcp_catalog_checkpoints", "Checkpoints by state, without purged ones", ["state"], rows)
    yield gauge(
        "dcp_catalog_runs",
        "Runs in the catalog",
        [],
        [((), connection.execute(select(func.count(runs.c.id))).scalar_one())],
    )


def _roots(connection: Connection) -> Iterator[Metric]:
    found = connection.execute(
        select(
            roots.c.name,
            func.coalesce(func.sum(runs.c.checkpoint_count), 0),
            func.coalesce(func.sum(runs.c.bytes), 0),
            func.coalesce(func.max(runs.c.latest_seconds), 0),
            roots.c.scanned_seconds,
            roots.c.scan_error.is_not(None),
        )
        .select_from(roots.outerjoin(runs, runs.c.root_id == roots.c.id))
        .where(roots.c.is_configured)
        .group_by(roots.c.id)
    ).all()
    columns = (
        ("dcp_root_checkpoints", "Committed checkpoints in a root"),
        ("dcp_root_bytes", "Bytes of the committed checkpoints in a root"),
        (
            "dcp_root_newest_timestamp_seconds",
            "Commit time of the newest checkpoint in a root; 0 without any",
        ),
        ("dcp_root_scanned_timestamp_seconds", "End of the last complete scan of a root; 0 without any"),
        ("dcp_root_scan_failed", "1 if the last scan of a root failed"),
    )
    for number, (name, help_text) in enumerate(columns, start=1):
        rows = [((row[0],), float(row[number] or 0)) for row in found]
        yield gauge(name, help_text, ["root"], rows)


def _jobs(connection: Connection, now: float) -> Iterator[Metric]:
    unfinished = connection.execute(
        select(jobs.c.kind, jobs.c.state, func.count())
        .where(jobs.c.state.in_(_UNFINISHED))
        .group_by(jobs.c.kind, jobs.c.state)
    )
    rows = [((kind, state), count) for kind, state, count in unfinished]
    yield gauge("dcp_jobs", "Unfinished jobs, by kind and state", ["kind", "state"], rows)
    ended = connection.execute(
        select(
            jobs.c.kind,
            jobs.c.state,
            func.count(),
            func.sum(jobs.c.finished_seconds - func.coalesce(jobs.c.started_seconds, jobs.c.created_seconds)),
        )
        .where(jobs.c.finished_seconds > now - WINDOW_SECONDS)
        .group_by(jobs.c.kind, jobs.c.state)
    ).all()
    rows = [((kind, state), count) for kind, state, count, _ in ended]
    yield gauge(
        "dcp_jobs_recent", "Jobs that ended in the last hour, by kind and state", ["kind", "state"], rows
    )
    rows = [((kind, state), seconds or 0) for kind, state, _, seconds in ended]
    yield gauge(
        "dcp_jobs_recent_seconds",
        "Total duration of the jobs that ended in the last hour",
        ["kind", "state"],
        rows,
    )
    # Excludes jobs that wait for their next attempt.
    oldest = connection.execute(
        select(func.min(jobs.c.created_seconds)).where(
            jobs.c.state == "queued", jobs.c.not_before_seconds <= now
        )
    ).scalar()
    yield age("dcp_jobs_oldest_queued_seconds", "Age of the oldest queued job", oldest, now)
    active = ("queued", "running")
    states = select(tasks.c.state, func.count()).where(tasks.c.state.in_(active)).group_by(tasks.c.state)
    yield gauge(
        "dcp_tasks", "Tasks of jobs that are queued or running", ["state"], counts(connection, active, states)
    )


def _verification(connection: Connection, now: float) -> Iterator[Metric]:
    newest = (
        select(verifications.c.outcome, verifications.c.created_seconds)
        .order_by(verifications.c.id.desc())
        .limit(_NEWEST_VERIFICATIONS)
        .subquery()
    )
    recent = (
        select(newest.c.outcome, func.count())
        .where(newest.c.created_seconds > now - WINDOW_SECONDS)
        .group_by(newest.c.outcome)
    )
    rows = counts(connection, ("good", "damaged"), recent)
    yield gauge("dcp_verifications_recent", "Verifications of the last hour, by outcome", ["outcome"], rows)


def _schedules(connection: Connection, now: float) -> Iterator[Metric]:
    newest = connection.execute(select(func.coalesce(func.max(events.c.id), 0))).scalar_one()
    rows = [
        ((name,), max(newest - event_id, 0))
        for name, event_id in connection.execute(select(consumers.c.name, consumers.c.event_id))
    ]
    help_text = "Events that a consumer, such as webhooks, has not processed yet"
    yield gauge("dcp_events_behind", help_text, ["consumer"], rows)
    # Other schedules can be idle and would appear late.
    due = connection.execute(
        select(schedules.c.due_seconds).where(schedules.c.name == REGULAR_SCHEDULE)
    ).scalar()
    help_text = "Delay of the clean-up that runs every ten minutes; grows while no worker runs"
    yield age("dcp_worker_late_seconds", help_text, due, now)


def age(name: str, help_text: str, since: float | None, now: float) -> Metric:
    """Return a metric of the seconds since a moment; 0 without one."""
    return gauge(name, help_text, [], [((), max(now - since, 0.0) if since is not None else 0.0)])


def _database_bytes(connection: Connection) -> int:
    if connection.dialect.name == "postgresql":
        return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
    pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    return int(pages) * int(connection.exec_driver_sql("PRAGMA page_size").scalar_one())
