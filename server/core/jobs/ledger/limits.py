"""Limits of jobs: refuse one more in the queue, and hold back those that may not run beside others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from sqlalchemy import ColumnElement, Connection, and_, func, not_, or_, select

from dcp.server.core.allowances import SERVICE, Allowances, Subject, refusal
from dcp.server.database.engine import lock_names
from dcp.server.database.tables import jobs, roots

_WAIT_SECONDS: Final = 60


@dataclass(frozen=True, slots=True)
class AtWork:
    """A job of which a phase or a task is leased."""

    job_id: int
    owner: str
    key_id: int | None
    root_id: int | None


def check_queue(connection: Connection, allowances: Allowances, job_id: int) -> None:
    """Refuse a job that was queued in this transaction, where an account, a key or its root has too many.

    Raises TooManyRequestsError, after which the transaction must not be committed. Others that queue a job of
    the same account, key or root wait for the end of this one, so that all of them together keep the limit.
    """
    query = select(jobs.c.owner, jobs.c.key_id, roots.c.name).outerjoin_from(jobs, roots)
    owner, key_id, root = connection.execute(query.where(jobs.c.id == job_id)).one()
    if owner.startswith(SERVICE):
        return
    limited = {
        subject: allowance.jobs_queued
        for subject, allowance in allowances.of(job_subjects(owner, key_id, root), connection).items()
        if allowance.jobs_queued is not None
    }
    lock_names(connection, [f"jobs_queued {subject.text}" for subject in limited])
    for subject, most in sorted(limited.items()):
        count = _count_queued(connection, subject, most + 1)
        if count > most:
            raise refusal(subject, "jobs_queued", most, count - 1, wait_seconds=_WAIT_SECONDS)


def job_subjects(owner: str, key_id: int | None, root: str | None) -> list[Subject]:
    """Return the account, key and root that a job counts for."""
    found = [Subject("account", owner)]
    if key_id is not None:
        found.append(Subject("key", str(key_id)))
    if root is not None:
        found.append(Subject("root", root))
    return found


def _jobs_of(subject: Subject) -> ColumnElement[bool]:
    if subject.kind == "account":
        return jobs.c.owner == subject.name
    if subject.kind == "key":
        return and_(jobs.c.key_id.is_not(None), jobs.c.key_id == int(subject.name))
    number = select(roots.c.id).where(roots.c.name == subject.name).scalar_subquery()
    is_of_root = and_(jobs.c.root_id.is_not(None), jobs.c.root_id == number)
    return and_(is_of_root, not_(jobs.c.owner.startswith(SERVICE)))


def _count_queued(connection: Connection, subject: Subject, most: int) -> int:
    queued = select(jobs.c.id).where(_jobs_of(subject), jobs.c.state == "queued").limit(most)
    return connection.execute(select(func.count()).select_from(queued.subquery())).scalar_one()


def may_run(
    connection: Connection, at_work: Iterable[AtWork], allowances: Allowances
) -> ColumnElement[bool] | None:
    """Return the jobs that may be claimed beside those ``at_work``: these themselves, and all others but
    those of an account, a key or a root that has as many at work as it may have. None: all may."""
    counted: defaultdict[Subject, set[int]] = defaultdict(set)
    limited = {one.job_id: one for one in at_work if not one.owner.startswith(SERVICE)}
    numbers = sorted({one.root_id for one in limited.values() if one.root_id is not None})
    if not limited:
        return None
    query = select(roots.c.id, roots.c.name).where(roots.c.id.in_(numbers))
    names = {row.id: row.name for row in connection.execute(query)} if numbers else {}
    for one in limited.values():
        root = None if one.root_id is None else names[one.root_id]
        for subject in job_subjects(one.owner, one.key_id, root):
            counted[subject].add(one.job_id)
    full = [
        _jobs_of(subject)
        for subject, allowance in sorted(allowances.of(counted, connection).items(), key=lambda one: one[0])
        if allowance.jobs_running is not None and len(counted[subject]) >= allowance.jobs_running
    ]
    return or_(jobs.c.id.in_(sorted(limited)), not_(or_(*full))) if full else None
