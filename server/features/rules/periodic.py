"""What workers call periodically: rules for what has happened, and jobs that are due by the clock.

Each function may be called by several processes at a time, and again after a crash: what it decides is
written in one transaction with what it decided on.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import Connection, Select, exists, func, select, update

from dcp.server.catalog.events import events_after, last_event_id, move_on, position
from dcp.server.core.jobs.ledger.transitions import submit_or_join
from dcp.server.core.jobs.subjects import find_subject
from dcp.server.core.security.principal import SYSTEM
from dcp.server.core.settings import Settings
from dcp.server.database.engine import Database
from dcp.server.database.sql import insert_missing
from dcp.server.database.tables import checkpoints, consumers, jobs, roots, schedules
from dcp.server.features.retention.job import retention_spec
from dcp.server.features.retention.policies import list_policies
from dcp.server.features.retention.purge import PurgeKind, PurgeParams
from dcp.server.features.rules.matching import EVENTS, act_on
from dcp.server.features.rules.rules import list_rules

__all__ = ["consume_events", "has_events", "is_anything_due", "submit_due"]

CONSUMER: Final = "automation"
_BATCH: Final = 100
_MAX_BATCHES: Final = 20
_MAX_PURGES: Final = 200
_RETRY_SECONDS: Final = 3600.0
"""A purge that has failed is tried again after this."""


def has_events(connection: Connection, now: float) -> bool:
    """Whether `consume_events` has anything to do."""
    return last_event_id(connection) > position(connection, CONSUMER)


def consume_events(database: Database, settings: Settings, now: float) -> int:
    """Apply the rules to what has happened since the last time. Returns how many jobs that made."""
    count = 0
    for _ in range(_MAX_BATCHES):
        made, is_done = database.transact(lambda connection: _consume(connection, settings, now))
        count += made
        if is_done:
            break
    return count


def _consume(connection: Connection, settings: Settings, now: float) -> tuple[int, bool]:
    insert_missing(connection, consumers, [{"name": CONSUMER, "event_id": 0}])
    # One process at a time, so that no event is dealt with twice.
    connection.execute(select(consumers.c.event_id).where(consumers.c.name == CONSUMER).with_for_update())
    begin, rules = position(connection, CONSUMER), list_rules(connection, is_enabled=True)
    if not rules:
        last = last_event_id(connection)
        if last > begin:
            move_on(connection, CONSUMER, last)
        return 0, True
    found = events_after(connection, begin, _BATCH)
    count = 0
    for event in found:
        if event.kind in EVENTS:
            count += act_on(connection, event, rules, settings, now)
    if found:
        move_on(connection, CONSUMER, found[-1].id)
    return count, len(found) < _BATCH


def is_anything_due(connection: Connection, now: float, settings: Settings) -> bool:
    """Whether `submit_due` has anything to do."""
    writable = _writable(settings)
    if connection.execute(_due_purges(writable, now).limit(1)).first() is not None:
        return True
    policies = list_policies(connection, is_enabled=True)
    names = [f"retention:{policy.id}" for policy in policies if policy.root in writable]
    query = select(func.count()).where(schedules.c.name.in_(names), schedules.c.due_seconds > now)
    return bool(names) and connection.execute(query).scalar_one() < len(names)


def submit_due(database: Database, settings: Settings, now: float) -> int:
    """Submit jobs for what is due: retention policies, and purges. Returns how many are new."""
    return database.transact(
        lambda connection: (
            _submit_retention(connection, settings, now) + _submit_purges(connection, settings, now)
        )
    )


def _writable(settings: Settings) -> frozenset[str]:
    return frozenset(name for name, root in settings.roots.items() if not root.readonly)


def _is_due(connection: Connection, name: str, interval_seconds: float, now: float) -> bool:
    """Whether ``name`` is due. If so the caller alone is told, and it is due again after the interval."""
    insert_missing(connection, schedules, [{"name": name, "due_seconds": now}])
    statement = (
        update(schedules)
        .where(schedules.c.name == name, schedules.c.due_seconds <= now)
        .values(due_seconds=now + interval_seconds)
    )
    return connection.execute(statement).rowcount == 1


def _submit_retention(connection: Connection, settings: Settings, now: float) -> int:
    count = 0
    writable = _writable(settings)
    for policy in list_policies(connection, is_enabled=True):
        if policy.root not in writable:
            continue
        if _is_due(connection, f"retention:{policy.id}", policy.interval_seconds, now):
            count += submit_or_join(connection, retention_spec(policy, created_by=SYSTEM.name), now)[1]
    return count


def _due_purges(writable: frozenset[str], now: float) -> Select[Any]:
    """Deleted checkpoints whose grace is over, in ``writable`` roots alone: many in others may wait for
    ever, and must not stand before these. One whose purge has failed lately is left alone for a while."""
    lately = exists().where(
        jobs.c.checkpoint_id == checkpoints.c.id,
        jobs.c.kind == PurgeKind.name,
        jobs.c.state != "cancelled",
        jobs.c.finished_seconds.is_(None) | (jobs.c.finished_seconds > now - _RETRY_SECONDS),
    )
    return (
        select(checkpoints.c.id)
        .join(roots, roots.c.id == checkpoints.c.root_id)
        .where(
            checkpoints.c.state == "deleted",
            checkpoints.c.purge_after_seconds <= now,
            roots.c.name.in_(sorted(writable)),
            ~lately,
        )
        .order_by(checkpoints.c.id)
        .limit(_MAX_PURGES)
    )


def _submit_purges(connection: Connection, settings: Settings, now: float) -> int:
    count = 0
    for number in connection.execute(_due_purges(_writable(settings), now)).scalars().all():
        subject = find_subject(connection, number, state="deleted")
        spec = PurgeKind().spec(subject, PurgeParams(checkpoint_id=number), SYSTEM)
        count += submit_or_join(connection, spec, now)[1]
    return count
