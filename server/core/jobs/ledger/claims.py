"""Claims: the next phase or task is leased to one worker, within limits.

A claim has a lease and a fence. During the lease no other worker takes the work. The fence increases with
each claim, and only the latest claim may complete the work: a worker that wakes up after an hour changes
nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, and_, func, not_, or_, select, text, true, update

from dcp.server.core.allowances import SERVICE, Allowances, LimitSubject, bytes_kept, refusal, subjects_of
from dcp.server.core.jobs.ledger.rows import (
    Claim,
    Held,
    Phase,
    by_priority,
    emit,
    lock_job,
    task_of_row,
)
from dcp.server.database.engine import lock_names
from dcp.server.database.tables import checkpoints, jobs, roots, tasks
from dcp.server.records.jobs import Job

_WAIT_SECONDS: Final = 60
_AT_WORK: Final = ("planning", "running", "publishing")
_FOUND: Final[Sequence[ColumnElement[Any]]] = (jobs.c.id, jobs.c.priority, jobs.c.owner, jobs.c.root_id)
_CLAIMS_LOCK: Final = 7_218_330_041
"""PostgreSQL advisory lock of claims: claims are short and take turns."""


@dataclass(frozen=True, slots=True)
class ClaimLimits:
    """Limits of a claim.

    ``by_kind``: maximum running phases and tasks per kind over all workers. ``only``: kinds known to the
    worker; None is all. ``allowances``: limits of accounts, keys and roots for running jobs, and for bytes of
    jobs of ``writers``, the kinds that make checkpoints.
    """

    by_kind: Mapping[str, int] = field(default_factory=dict)
    only: frozenset[str] | None = None
    allowances: Allowances | None = None
    writers: frozenset[str] = frozenset()


NO_LIMITS: Final = ClaimLimits()
_Share = tuple[str, int | None]
"""The account of a job with the number of its root: the unit of fair sharing."""


@dataclass(frozen=True, slots=True)
class AtWork:
    """A job with a leased phase or task."""

    job_id: int
    owner: str
    key_id: int | None
    root_id: int | None


@dataclass(frozen=True, slots=True)
class _Claimable:
    phase: Phase
    job_id: int
    priority: int
    share: _Share
    task_id: int | None = None


def has_work(connection: Connection, now: float, limits: ClaimLimits = NO_LIMITS) -> bool:
    """Return True if `claim` would find work; reads without a lock, so idle workers block no one."""
    return _next(connection, now, limits) is not None


def claim(
    connection: Connection, owner: str, now: float, lease_seconds: float, limits: ClaimLimits = NO_LIMITS
) -> Claim | None:
    """Claim the next work for ``owner`` until the lease ends; None without work.

    Clean-up comes first, then the priority. Within a priority, the account and root with the least running
    work come first, then begun jobs, then the turn.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _CLAIMS_LOCK})
    candidate = _next(connection, now, limits)
    if candidate is None:
        return None
    job = lock_job(connection, candidate.job_id)
    again = _next(connection, now, limits, only_job=job.id)
    if again is None:  # cancelled or changed concurrently: the next call finds other work
        return None
    lease = {"lease_owner": owner, "lease_until_seconds": now + lease_seconds}
    if again.phase == "task":
        return _claim_task(connection, job, again, lease)
    return _claim_phase(connection, job, again.phase, lease, now)


def _claim_task(connection: Connection, job: Job, candidate: _Claimable, lease: Mapping[str, Any]) -> Claim:
    row = connection.execute(
        update(tasks)
        .where(tasks.c.id == candidate.task_id)
        .values(state="running", fence=tasks.c.fence + 1, done_bytes=0, **lease)
        .returning(tasks)
    ).one()
    return Claim(phase="task", job=job, task=task_of_row(row), fence=row.fence)


def _claim_phase(
    connection: Connection, job: Job, phase: Phase, lease: Mapping[str, Any], now: float
) -> Claim:
    values: dict[str, Any] = {"fence": jobs.c.fence + 1, **lease}
    if phase == "plan":
        values |= {"state": "planning"}
        if job.started_at is None:
            values["started_seconds"] = now
        emit(connection, job.id, "state", now, state="planning")
    fence = connection.execute(
        update(jobs).where(jobs.c.id == job.id).values(**values).returning(jobs.c.fence)
    ).scalar_one()
    return Claim(phase=phase, job=lock_job(connection, job.id), task=None, fence=fence)


# -- candidates ----------------------------------------------------------------------------------------------


def _next(
    connection: Connection, now: float, limits: ClaimLimits, *, only_job: int | None = None
) -> _Claimable | None:
    known: ColumnElement[bool] = true()
    if limits.only is not None:
        known = jobs.c.kind.in_(sorted(limits.only))
    if only_job is not None:
        known = and_(known, jobs.c.id == only_job)
    if (ending := _ending(connection, now, known)) is not None:
        return ending
    allowed = and_(known, _allowed(connection, limits))
    if not (found := _found(connection, now, allowed)):
        return None
    at_work = jobs_at_work(connection)
    if limits.allowances is not None and at_work:
        beside = _may_run(connection, at_work, limits.allowances)
        if beside is not None:
            allowed = and_(allowed, beside)
            found = _found(connection, now, allowed)
    if limits.allowances is not None and any(one.phase == "plan" for one in found):
        with_room = _may_write(connection, limits.writers, limits.allowances)
        if with_room is not None:
            allowed = and_(allowed, with_room)
            found = _found(connection, now, allowed)
    if len(found) < 2 and not (only_job is None and any(one.phase == "plan" for one in found)):
        best = found[0] if found else None
    else:
        shares = Counter((one.owner, one.root_id) for one in at_work)
        best = _fairest(connection, found, now, allowed, shares)
    return _with_task(connection, best, now) if best is not None and best.phase == "task" else best


def _found(connection: Connection, now: float, allowed: ColumnElement[bool]) -> list[_Claimable]:
    return [
        *_phase(connection, "publish", "publishing", now, allowed),
        *_tasks(connection, now, allowed),
        *_phase(connection, "plan", "queued", now, allowed),
    ]


def _fairest(
    connection: Connection,
    found: list[_Claimable],
    now: float,
    allowed: ColumnElement[bool],
    at_work: Counter[_Share],
) -> _Claimable:
    """Return the first job of the shares with the least running work."""
    best = min(found, key=lambda one: (-one.priority, at_work[one.share]))
    while any(one.phase == "plan" for one in found) and (count := at_work[best.share]):
        busy = [_is_of(share) for share, many in at_work.items() if many >= count]
        behind = _phase(connection, "plan", "queued", now, and_(allowed, not_(or_(*busy))))
        if not behind or behind[0].priority < best.priority:
            break
        (best,) = behind
    return best


def _is_of(share: _Share) -> ColumnElement[bool]:
    owner, root_id = share
    return and_(jobs.c.owner == owner, jobs.c.root_id.is_not_distinct_from(root_id))


def _ending(connection: Connection, now: float, known: ColumnElement[bool]) -> _Claimable | None:
    """Return an abandoned job without running work."""
    running = select(tasks.c.id).where(tasks.c.job_id == jobs.c.id, tasks.c.state == "running")
    for state in ("running", "publishing"):
        query = by_priority(
            select(*_FOUND).where(
                jobs.c.state == state,
                jobs.c.is_ending,
                jobs.c.lease_owner.is_(None),
                jobs.c.not_before_seconds <= now,
                ~running.exists(),
                known,
            )
        )
        if (row := connection.execute(query.limit(1)).one_or_none()) is not None:
            return _claimable("discard", row)
    return None


def _phase(
    connection: Connection, phase: Phase, state: str, now: float, allowed: ColumnElement[bool]
) -> list[_Claimable]:
    conditions = (
        jobs.c.state == state,
        jobs.c.lease_owner.is_(None),
        ~jobs.c.is_ending,
        jobs.c.not_before_seconds <= now,
        allowed,
    )
    # Two steps, each along an index: no index has priority descending with turn ascending.
    first = by_priority(select(jobs.c.priority).where(*conditions))
    priority = connection.execute(first.limit(1)).scalar_one_or_none()
    if priority is None:
        return []
    query = select(*_FOUND).where(*conditions, jobs.c.priority == priority).order_by(jobs.c.turn, jobs.c.id)
    return [_claimable(phase, row) for row in connection.execute(query.limit(1))]


def _tasks(connection: Connection, now: float, allowed: ColumnElement[bool]) -> list[_Claimable]:
    """Return the jobs with a waiting task of the highest priority, by turn, without the task."""
    query = (
        select(*_FOUND)
        .where(
            jobs.c.state == "running",
            ~jobs.c.is_ending,
            jobs.c.not_before_seconds <= now,
            select(tasks.c.id).where(*_is_due(jobs.c.id, now)).exists(),
            allowed,
        )
        .order_by(jobs.c.priority.desc(), jobs.c.turn, jobs.c.id)
    )
    found = [_claimable("task", row) for row in connection.execute(query)]
    return [one for one in found if one.priority == found[0].priority]


def _with_task(connection: Connection, found: _Claimable, now: float) -> _Claimable:
    query = select(tasks.c.id).where(*_is_due(found.job_id, now)).order_by(tasks.c.number).limit(1)
    return replace(found, task_id=connection.execute(query).scalar_one())


def _is_due(job_id: ColumnElement[int] | int, now: float) -> tuple[ColumnElement[bool], ...]:
    return tasks.c.job_id == job_id, tasks.c.state == "queued", tasks.c.not_before_seconds <= now


def _claimable(phase: Phase, row: Row[Any]) -> _Claimable:
    return _Claimable(phase, row.id, row.priority, (row.owner, row.root_id))


def jobs_at_work(connection: Connection) -> list[AtWork]:
    """Return the job of each leased phase and task."""
    # Read in index order: otherwise SQLite reads all jobs.
    share = select(jobs.c.id, jobs.c.owner, jobs.c.key_id, jobs.c.root_id)
    leased = [share.where(jobs.c.state == state, jobs.c.lease_owner.is_not(None)) for state in _AT_WORK]
    of_tasks = share.select_from(tasks).join(jobs, tasks.c.job_id == jobs.c.id)
    queries = (*map(by_priority, leased), of_tasks.where(tasks.c.state == "running"))
    return [AtWork(*row) for query in queries for row in connection.execute(query)]


def _allowed(connection: Connection, limits: ClaimLimits) -> ColumnElement[bool]:
    if not limits.by_kind:
        return true()
    full = [kind for kind, most in limits.by_kind.items() if _running(connection, kind) >= most]
    return jobs.c.kind.not_in(full) if full else true()


def _running(connection: Connection, kind: str) -> int:
    """Count leased phases and tasks of a kind."""
    of_jobs = select(func.count()).where(jobs.c.kind == kind, jobs.c.lease_owner.is_not(None))
    of_tasks = (
        select(func.count())
        .select_from(tasks)
        .join(jobs, tasks.c.job_id == jobs.c.id)
        .where(tasks.c.state == "running", jobs.c.kind == kind)
    )
    return connection.execute(of_jobs).scalar_one() + connection.execute(of_tasks).scalar_one()


# -- limits of accounts, keys and roots ----------------------------------------------------------------------


def check_queue(connection: Connection, allowances: Allowances, job_id: int) -> None:
    """Refuse a job queued in this transaction above a limit of its account, key or root.

    Raises TooManyRequestsError, after which the transaction must roll back. Concurrent submissions for the
    same subjects wait, so the limit holds for all of them.
    """
    query = select(jobs.c.owner, jobs.c.key_id, roots.c.name).outerjoin_from(jobs, roots)
    owner, key_id, root = connection.execute(query.where(jobs.c.id == job_id)).one()
    if owner.startswith(SERVICE):
        return
    limited = {
        subject: allowance.jobs_queued
        for subject, allowance in allowances.of(subjects_of(owner, key_id, root), connection).items()
        if allowance.jobs_queued is not None
    }
    lock_names(connection, [f"jobs_queued {subject.text}" for subject in limited])
    for subject, most in sorted(limited.items()):
        count = _count_queued(connection, subject, most + 1)
        if count > most:
            raise refusal(subject, "jobs_queued", most, count - 1, wait_seconds=_WAIT_SECONDS)


def _jobs_of(subject: LimitSubject) -> ColumnElement[bool]:
    if subject.kind == "account":
        return jobs.c.owner == subject.name
    if subject.kind == "key":
        return and_(jobs.c.key_id.is_not(None), jobs.c.key_id == int(subject.name))
    number = select(roots.c.id).where(roots.c.name == subject.name).scalar_subquery()
    is_of_root = and_(jobs.c.root_id.is_not(None), jobs.c.root_id == number)
    return and_(is_of_root, not_(jobs.c.owner.startswith(SERVICE)))


def _count_queued(connection: Connection, subject: LimitSubject, most: int) -> int:
    queued = select(jobs.c.id).where(_jobs_of(subject), jobs.c.state == "queued").limit(most)
    return connection.execute(select(func.count()).select_from(queued.subquery())).scalar_one()


def _may_run(
    connection: Connection, at_work: Iterable[AtWork], allowances: Allowances
) -> ColumnElement[bool] | None:
    """Return the jobs that may be claimed besides those ``at_work``; None for all.

    Excludes jobs of accounts, keys and roots at their limit of running jobs.
    """
    counted: defaultdict[LimitSubject, set[int]] = defaultdict(set)
    limited = {one.job_id: one for one in at_work if not one.owner.startswith(SERVICE)}
    numbers = sorted({one.root_id for one in limited.values() if one.root_id is not None})
    if not limited:
        return None
    query = select(roots.c.id, roots.c.name).where(roots.c.id.in_(numbers))
    names = {row.id: row.name for row in connection.execute(query)} if numbers else {}
    for one in limited.values():
        root = None if one.root_id is None else names[one.root_id]
        for subject in subjects_of(one.owner, one.key_id, root):
            counted[subject].add(one.job_id)
    full = [
        _jobs_of(subject)
        for subject, allowance in sorted(allowances.of(counted, connection).items(), key=lambda one: one[0])
        if allowance.jobs_running is not None and len(counted[subject]) >= allowance.jobs_running
    ]
    return or_(jobs.c.id.in_(sorted(limited)), not_(or_(*full))) if full else None


def _may_write(
    connection: Connection, writers: frozenset[str], allowances: Allowances
) -> ColumnElement[bool] | None:
    """Return the jobs that may be claimed beside begun jobs of ``writers``; None for all.

    Until its end, a begun job reserves the bytes of its checkpoint in the limits of its account and root. A
    job without enough room beside it waits. Claims take turns, so two jobs cannot begin in the same room.
    """
    of_job = select(checkpoints.c.bytes).where(checkpoints.c.id == jobs.c.checkpoint_id).scalar_subquery()
    size = func.coalesce(of_job, 0)
    query = select(jobs.c.owner, jobs.c.key_id, roots.c.name, size).outerjoin_from(jobs, roots)
    query = query.where(jobs.c.state.in_(_AT_WORK), jobs.c.kind.in_(sorted(writers)))
    reserved: Counter[LimitSubject] = Counter()
    for owner, key_id, root, size_bytes in connection.execute(query):
        reserved.update(dict.fromkeys(subjects_of(owner, key_id, root), size_bytes))
    full = []
    for subject, allowance in allowances.of(reserved, connection).items():
        if allowance.bytes_kept is not None:
            left = allowance.bytes_kept - bytes_kept(connection, subject) - reserved[subject]
            full.append(and_(_jobs_of(subject), size > left))
    is_begin = and_(jobs.c.state == "queued", jobs.c.kind.in_(sorted(writers)))
    return not_(and_(is_begin, or_(*full))) if full else None


# -- renewal ------------------------------------------------------------------------------------------------


def renew(
    connection: Connection,
    owner: str,
    held: Mapping[Held, int | None],
    now: float,
    lease_seconds: float,
) -> frozenset[Held]:
    """Renew leases with the progress in bytes where known; return the lost claims."""
    lost = set()
    for one in sorted(held, key=lambda one: (one.job_id, one.task_id or 0)):
        values: dict[str, Any] = {"lease_until_seconds": now + lease_seconds}
        if one.task_id is None:
            statement = update(jobs).where(jobs.c.id == one.job_id, jobs.c.fence == one.fence)
            statement = statement.where(jobs.c.lease_owner == owner)
        else:
            if (done_bytes := held[one]) is not None:
                values["done_bytes"] = done_bytes
            statement = update(tasks).where(tasks.c.id == one.task_id, tasks.c.fence == one.fence)
            statement = statement.where(
                tasks.c.job_id == one.job_id, tasks.c.state == "running", tasks.c.lease_owner == owner
            )
        if connection.execute(statement.values(**values)).rowcount != 1:
            lost.add(one)
    return frozenset(lost)


def stopped(connection: Connection, held: Iterable[Held]) -> frozenset[Held]:
    """Return the claims to abandon: lost leases, and cancelled or failed jobs."""
    wanted = list(held)
    if not wanted:
        return frozenset()
    job_ids = {one.job_id for one in wanted}
    goes_on: set[Held] = set()
    query = select(jobs.c.id, jobs.c.fence).where(
        jobs.c.id.in_(job_ids),
        jobs.c.lease_owner.is_not(None),
        or_(jobs.c.state != "planning", ~jobs.c.is_ending),  # their clean-up continues
    )
    goes_on.update(Held(row.id, None, row.fence) for row in connection.execute(query))
    task_ids = {one.task_id for one in wanted if one.task_id is not None}
    if task_ids:
        of_tasks = (
            select(tasks.c.job_id, tasks.c.id, tasks.c.fence)
            .join(jobs, tasks.c.job_id == jobs.c.id)
            .where(tasks.c.id.in_(task_ids), tasks.c.state == "running", ~jobs.c.is_ending)
        )
        goes_on.update(Held(row.job_id, row.id, row.fence) for row in connection.execute(of_tasks))
    return frozenset(one for one in wanted if one not in goes_on)
