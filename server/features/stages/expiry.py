"""Expiry of old requests for promotions."""

from __future__ import annotations

from functools import partial
from typing import Final

from sqlalchemy import Connection, insert, select, update

from dcp.server.catalog import audit
from dcp.server.core.jobs.schedules import ScheduleContext
from dcp.server.database.tables import roots, runs
from dcp.server.features.stages import feature
from dcp.server.features.stages.stage_settings import StagesSettings
from dcp.server.features.stages.stage_tables import stage_entries, stage_requests

_SYSTEM: Final = "system"
_AT_ONCE: Final = 100


def _oldest(context: ScheduleContext) -> float | None:
    options: StagesSettings = feature.options(context.settings)
    return options.expired_before(context.now)


def _is_needed(connection: Connection, context: ScheduleContext) -> bool:
    return (before := _oldest(context)) is not None and bool(_expired(connection, before, 1))


def _expired(connection: Connection, before: float, limit: int) -> list[int]:
    query = select(stage_requests.c.id).where(
        stage_requests.c.state == "requested", stage_requests.c.created_seconds < before
    )
    return list(connection.execute(query.order_by(stage_requests.c.id).limit(limit)).scalars())


@feature.schedule("stage-requests", 600.0, is_needed=_is_needed)
def expire_requests(context: ScheduleContext) -> None:
    """Close requests older than configured."""
    if (before := _oldest(context)) is not None:
        context.repeat(partial(_expire_some, before=before, now=context.now))


def _expire_some(connection: Connection, before: float, now: float) -> bool:
    numbers = _expired(connection, before, _AT_ONCE)
    for number in numbers:
        closed = (
            update(stage_requests)
            .where(stage_requests.c.id == number, stage_requests.c.state == "requested")
            .values(state="expired", version=stage_requests.c.version + 1, updated_seconds=now)
        )
        if connection.execute(closed).rowcount:
            _note(connection, number, now)
    return len(numbers) == _AT_ONCE


def _note(connection: Connection, number: int, now: float) -> None:
    query = (
        select(stage_requests, roots.c.name.label("root"), runs.c.key.label("run"))
        .join_from(stage_requests, runs, runs.c.id == stage_requests.c.run_id)
        .join(roots, roots.c.id == runs.c.root_id)
        .where(stage_requests.c.id == number)
    )
    row = connection.execute(query).one()
    entry = {"run_id": row.run_id, "checkpoint_id": row.checkpoint_id, "request_id": number}
    entry |= {"stage": row.stage, "action": "expired", "by": _SYSTEM, "at_seconds": now}
    connection.execute(insert(stage_entries).values(entry))
    detail = {"root": row.root, "run": row.run, "checkpoint": row.checkpoint_id, "stage": row.stage}
    target = f"stage_request:{number}"
    audit.record(connection, _SYSTEM, "stage_request.expire", target, detail, now=now, root=row.root)
