"""Transitions of the job ledger. Internal: leases and pauses of days are too long for a test to wait."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import insert, select

from dcp.server.catalog.events import emit
from dcp.server.catalog.runs import sync_roots
from dcp.server.core.feature import Feature
from dcp.server.core.jobs.kind import (
    PermanentJobError,
    TransientJobError,
    UnavailableJobError,
    is_environment,
    is_retryable,
)
from dcp.server.core.jobs.ledger import claims, failures, reading, transitions
from dcp.server.core.jobs.ledger.rows import Backoff, Held, JobSpec, StaleFenceError, TaskSpec
from dcp.server.core.jobs.schedules import PeriodicWork, ScheduleContext, Scheduler
from dcp.server.core.problems import ConflictError, NotFoundError, UnavailableError
from dcp.server.core.settings import RootSettings, Settings
from dcp.server.database.engine import Database
from dcp.server.database.tables import schedules
from dcp.server.features import schedules as schedules_of
from dcp.server.features.quotas import QuotaAllowances
from dcp.server.records.declaring import moment
from dcp.server.records.jobs import JobFailure
from dcp.storage.errors import CheckpointConflictError, CorruptCheckpointError, StorageError, StorageFullError
from tests.support.catalog_rows import add_checkpoint
from tests.support.job_workers import job_settings, until
from tests.support.ledger_model import run_any_order

NOW: Final = 1000.0
HOUR: Final = 3600.0
BROKEN: Final = JobFailure(type="StorageError", detail="away")
FULL: Final = JobFailure(type="StorageFullError", detail="root x is full", is_environment=True)


class Steps:
    """Functions of the ledger, each call in a transaction of its own."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def __getattr__(self, name: str) -> Callable[..., Any]:
        modules = (claims, failures, reading, transitions)
        act: Any = next(getattr(module, name) for module in modules if hasattr(module, name))

        def call(*given: Any, **options: Any) -> Any:
            return self.database.transact(lambda connection: act(connection, *given, **options))

        return call

    def add(self, now: float = NOW, **changes: Any) -> int:
        """Submit a new job."""
        spec = JobSpec(**{"kind": "verify", "params": {}, "created_by": "test"} | changes)
        return int(self.submit(spec, now))

    def take(self, now: float = NOW) -> Any:
        """Claim the next work, or return None."""
        return self.claim("worker", now, 10.0)

    def taken(self, phase: str | None = None, now: float = NOW) -> Any:
        """Claim the next work, and check its phase."""
        made = self.take(now)
        assert made is not None and phase in (None, made.phase)
        return made

    def plan(self, made: Any, count: int, now: float = NOW) -> None:
        """Complete a plan with this number of tasks."""
        specs = [TaskSpec(payload={"n": n}, weight_bytes=1) for n in range(count)]
        self.complete_plan(made.held, {"plan": 1}, specs, now)

    def planned(self, count: int, **changes: Any) -> int:
        """Submit a job, and plan this number of tasks."""
        job_id, made = self.add(**changes), self.taken("plan")
        assert made.job.id == job_id
        self.plan(made, count)
        return job_id

    def finish(self, made: Any, now: float = NOW, tasks: int = 0) -> None:
        """Complete work of any phase."""
        if made.phase == "plan":
            self.plan(made, tasks, now)
        elif made.phase == "discard":
            self.complete_discard(made.held, now)
        else:
            getattr(self, f"complete_{made.phase}")(made.held, {}, now)


@pytest.fixture
def steps(database: Database) -> Steps:
    """Return the ledger of each database in turn."""
    return Steps(database)


def test_work_completes_once_in_any_order(database: Database) -> None:
    """Claimed work is completed exactly once, in any order of actions of workers and users."""
    run_any_order(database, 120, 50)


# -- scheduling ----------------------------------------------------------------------------------------------


def test_failed_tasks_wait_for_their_backoff(steps: Steps) -> None:
    """A failed task waits for its backoff while other tasks run; a job with a later start waits too."""
    job_id = steps.planned(2)
    first = steps.taken("task")
    steps.fail(first.held, BROKEN, NOW, Backoff(10.0, 10.0))
    assert steps.taken("task").task.number == 1
    assert steps.take() is None
    later = steps.add(not_before_seconds=NOW + 100.0)
    assert steps.take(NOW + 9.0) is None
    again = steps.taken("task", NOW + 20.0)
    assert (again.job.id, again.task.number, again.task.attempt) == (job_id, 0, 1)
    assert again.fence > first.fence and steps.taken("plan", NOW + 101.0).job.id == later


def test_priorities_and_age(steps: Steps) -> None:
    """Higher priority comes first, then age; a begun job comes before a queued job."""
    low, old, young = steps.add(priority=-3), steps.add(), steps.add()
    high = steps.add(priority=9)
    order = []
    while (made := steps.take()) is not None:
        order.append((made.job.id, made.phase))
        steps.finish(made, tasks=1)
    phases = ("plan", "task", "publish")
    assert order == [(job_id, phase) for job_id in (high, old, young, low) for phase in phases]


def test_keys_and_roots_take_turns(steps: Steps) -> None:
    """Each key has a fair share of each root: keys with less running work come first."""
    roots = {"main": "/main", "other": "/other"}
    steps.database.transact(lambda connection: sync_roots(connection, roots, now=NOW))
    many = [steps.add(created_by="key:many", root="main") for _ in range(6)]
    assert steps.taken().job.id == many[0]
    few = [steps.add(created_by="key:few", root="main") for _ in range(2)]
    other = steps.add(created_by="key:many", root="other")
    urgent = steps.add(created_by="key:many", root="main", priority=1)
    assert [steps.taken().job.id for _ in range(9)] == [urgent, few[0], other, few[1], *many[1:]]


def test_keys_take_turns_at_a_single_slot(steps: Steps) -> None:
    """With a single slot, keys take turns job by job."""
    many = [steps.add(created_by="key:many") for _ in range(4)]
    few = [steps.add(created_by="key:few") for _ in range(2)]
    order = []
    for _ in range(6):
        made = steps.taken("plan")
        order.append(made.job.id)
        steps.finish(made)
        steps.finish(steps.taken("publish"))
    assert order == [many[0], few[0], many[1], few[1], *many[2:]]


@pytest.mark.parametrize("kind", ["account", "key", "root"])
def test_limits_of_running_jobs_queue_the_next(steps: Steps, kind: str) -> None:
    """A limit of running jobs of an account, key or root queues its next jobs and lets other jobs pass."""
    quotas = {"quotas": {kind: {"jobs_running": 1}}}
    limits = claims.ClaimLimits(allowances=QuotaAllowances(Settings(features=quotas)))
    own: dict[str, Any] = {
        "account": {"owner": "key#1"},
        "key": {"owner": "key#1", "key_id": 1},
        "root": {"root": "main"},
    }
    one: Any = {"owner": "account#7", **own[kind]}
    steps.database.transact(lambda connection: sync_roots(connection, {"main": "/main"}, now=NOW))
    first, held = steps.add(**one), steps.add(**one)
    other = steps.add(owner="key#2", key_id=2)
    scan = steps.add(root="main")

    def taken() -> int | None:
        made = steps.claim("w", NOW, HOUR, limits)
        return None if made is None else made.job.id

    assert [taken() for _ in range(4)] == [first, other, scan, None]
    steps.complete_plan(Held(first, None, 1), {}, [TaskSpec(payload={})] * 2, NOW)
    assert [taken() for _ in range(3)] == [first, first, None]  # two tasks of one job
    assert steps.get_job(held).state == "queued"


def test_begun_conversions_reserve_their_bytes(steps: Steps) -> None:
    """A begun conversion reserves the bytes of its checkpoint: the next one without room beside it waits."""
    source = add_checkpoint(steps.database, "run/a", bytes=50)
    quotas = {"quotas": {"root": {"bytes_kept": 145}}}
    allowances = QuotaAllowances(Settings(features=quotas))
    limits = claims.ClaimLimits(allowances=allowances, writers=frozenset({"convert"}))
    convert: Any = {"kind": "convert", "owner": "key#1", "root": "main", "checkpoint_id": source}
    first, held = steps.add(**convert), steps.add(**convert)
    verify = steps.add(root="main")

    def taken() -> int | None:
        made = steps.claim("w", NOW, HOUR, limits)
        return None if made is None else made.job.id

    assert [taken() for _ in range(3)] == [first, verify, None]
    steps.complete_plan(Held(first, None, 1), {}, [], NOW)
    assert [taken(), taken()] == [first, None]
    steps.complete_publish(Held(first, None, 2), {}, NOW)
    assert taken() == held


# -- visibility ----------------------------------------------------------------------------------------------


def test_jobs_are_visible_to_keys_for_all_roots(steps: Steps) -> None:
    """A job, also as the last of a result key, is visible to keys for all roots of its checkpoints."""
    here, there = add_checkpoint(steps.database, "run/a"), add_checkpoint(steps.database, "b", root="other")
    named: dict[str, Any] = {"kind": "third-party", "root": "main", "result_key": "both"}
    one = steps.add(**named, checkpoint_id=here)
    steps.finish(steps.taken("plan"))
    steps.finish(steps.taken("publish"))
    both = steps.add(**named, subjects=[here, there])
    rootless = steps.add(subjects=[here])
    main, all_roots = frozenset({"main"}), frozenset({"main", "other"})
    for visible, seen in ((main, [one]), (all_roots, [both, one]), (None, [rootless, both, one])):
        assert [job.id for job in steps.list_jobs(visible=visible).items] == seen
        assert {event.job_id for event in steps.all_events_after(0, visible)} == {*seen}
    assert steps.last_job("both", main).id == one and steps.last_job("both", all_roots).id == both
    assert steps.last_job("both", succeeded=True).id == one


# -- concurrency ---------------------------------------------------------------------------------------------


def together(count: int, act: Callable[[], None]) -> None:
    """Run a function in several threads at the same moment."""
    barrier = threading.Barrier(count)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            barrier.wait(60)
            act()
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert not failures, failures


@pytest.mark.each_database
def test_concurrent_equal_submissions_share_a_job(steps: Steps) -> None:
    """Concurrent submissions with the same key share one job; a single caller learns that the job is new."""
    spec = JobSpec(kind="verify", params={}, created_by="test", dedup_key="one")
    found: list[tuple[int, bool]] = []
    together(6, lambda: found.append(steps.submit_or_join(spec, NOW)))
    assert len({job_id for job_id, _ in found}) == 1
    assert sorted(is_new for _, is_new in found) == [False] * 5 + [True]
    with pytest.raises(ValueError, match="100 characters"):
        steps.add(dedup_key="x" * 101)


@pytest.mark.each_database
def test_concurrent_claims_give_each_task_one_owner(steps: Steps) -> None:
    """Each task has a single owner; the last completion, of any thread, advances the job."""
    count = 12
    job_id = steps.planned(count)
    done: list[int] = []

    def work() -> None:
        while len(done) < count:
            made = steps.take()
            if made is not None and made.phase == "task":
                done.append(made.task.number)
                steps.finish(made)

    together(4, work)
    assert sorted(done) == list(range(count))
    assert steps.get_job(job_id).state == "publishing"


# -- leases, fences and ends ---------------------------------------------------------------------------------


def test_a_lost_publisher_does_not_end_the_job(steps: Steps) -> None:
    """Only a reported failure of publish ends the job: a lost publisher may have published."""
    job_id, now = steps.planned(0, max_attempts=2), NOW
    for _ in range(5):
        steps.taken("publish", now)
        now += 1000.0
        assert steps.expire_leases(now) == 1
        now += 1000.0
    steps.fail(steps.taken("publish", now).held, BROKEN, now)
    job = steps.get_job(job_id)
    assert job.is_ending and job.error.type == "StorageError"


def test_a_task_of_a_dead_worker_is_taken_over(steps: Steps) -> None:
    """Another worker takes a task over when its lease ends; results of the first worker are refused."""
    job_id, first = steps.planned(1), steps.taken("task")
    assert [steps.expire_leases(NOW + seconds) for seconds in (5.0, 60.0)] == [0, 1]
    again = steps.taken("task", NOW + 600.0)
    assert (again.job.id, again.task.number) == (job_id, 0) and again.fence > first.fence
    with pytest.raises(StaleFenceError):
        steps.finish(first)


def test_nothing_is_discarded_while_a_task_runs(steps: Steps) -> None:
    """A cancelled job starts no task, and discards after its running tasks, which could still write."""
    job_id = steps.planned(3)
    first, second = steps.taken("task"), steps.taken("task")
    steps.request_cancel(job_id, NOW, "test")
    assert steps.take() is None
    assert steps.stopped([first.held, second.held]) == {first.held, second.held}
    steps.release(first.held, NOW)
    assert steps.take() is None
    steps.finish(second)  # this task ended before its worker stopped it
    steps.taken("discard")


def test_claims_of_an_earlier_plan_are_refused(steps: Steps) -> None:
    """Claims of an earlier plan are refused, also where the database reuses the ids of deleted rows."""
    job_id = steps.planned(2)
    old = [steps.taken("task"), steps.taken("task")]
    steps.request_cancel(job_id, NOW, "test")
    for made in old:
        steps.release(made.held, NOW)
    steps.finish(steps.taken("discard"))
    steps.retry(job_id, NOW, "test")
    steps.plan(steps.taken("plan"), 2)
    new = [steps.taken("task"), steps.taken("task")]
    for made in old:
        for reached in (made.held, *(Held(job_id, one.held.task_id, made.fence) for one in new)):
            with pytest.raises(StaleFenceError):
                steps.complete_task(reached, {}, NOW)
    for made in new:
        steps.finish(made)
    assert steps.get_job(job_id).state == "publishing"


# -- unavailable storage and full disks ----------------------------------------------------------------------


@pytest.mark.parametrize("hours", [2, 25])
def test_jobs_wait_for_a_full_disk(hours: int, steps: Steps) -> None:
    """A job on a full disk waits with growing pauses and keeps its attempts, but fails after a day."""
    job_id, now, pauses = steps.planned(1), NOW, list[float]()
    backoff = Backoff() if hours == 2 else Backoff(60.0, HOUR)
    while now < NOW + hours * HOUR:
        steps.fail(steps.taken("task", now).held, FULL, now, backoff)
        job = steps.get_job(job_id)
        if job.is_ending:
            break
        assert job.waiting.detail == FULL.detail and job.waiting.is_environment
        assert (job.waiting.since, job.waiting.count) == (moment(NOW), len(pauses) + 1)
        pauses.append(job.waiting.next_attempt_at.timestamp() - now + 0.001)
        assert steps.take(now + pauses[-1] - 0.1) is None
        now += pauses[-1]
    steps.finish(steps.taken("task" if hours == 2 else "discard", now), now)
    job = steps.get_job(job_id)
    if hours == 2:
        assert pauses[0] <= 3.0 and 300.0 <= max(pauses) <= 450.0 and job.waiting is None
    else:
        assert 24 * HOUR <= now - NOW < 28 * HOUR
        assert (job.state, job.waiting, job.error.detail) == ("failed", None, FULL.detail)
        assert steps.retry(job_id, now, "me").state == "queued"


def test_all_tasks_of_a_job_wait_together(steps: Steps) -> None:
    """One failure pauses all tasks of the job; running tasks do not prolong the pause, other jobs run."""
    job_id = steps.planned(4)
    for made in (steps.taken("task"), steps.taken("task")):
        steps.fail(made.held, FULL, NOW, Backoff(60.0, HOUR))
    job = steps.get_job(job_id)
    assert job.waiting.count == 1
    assert job.not_before == job.waiting.next_attempt_at <= moment(NOW + 90.0)
    other = steps.planned(1)
    assert steps.taken("task").job.id == other and steps.take() is None
    assert steps.taken("task", NOW + 91.0).job.id == job_id


def test_a_manual_retry_ends_the_pause(steps: Steps) -> None:
    """A manual retry ends the pause at once, also after a temporary error; so does cancelling."""
    job_id = steps.planned(2)
    with pytest.raises(ConflictError, match="waiting jobs"):
        steps.retry(job_id, NOW, "me")
    for error in (FULL, BROKEN):
        made = steps.taken("task")
        steps.fail(made.held, error, NOW, Backoff(60.0, HOUR))
        assert steps.get_job(job_id).waiting.next_attempt_at > moment(NOW)
        job = steps.retry(job_id, NOW, "me")
        assert (job.state, job.waiting.next_attempt_at) == ("running", moment(NOW))
        again = steps.taken("task")
        assert again.held.task_id == made.held.task_id
        steps.release(again.held, NOW)
    steps.fail(steps.taken("task").held, FULL, NOW, Backoff(HOUR, HOUR))
    steps.request_cancel(job_id, NOW, "me")
    steps.finish(steps.taken("discard"))
    assert steps.get_job(job_id).state == "cancelled"


# -- large plans ---------------------------------------------------------------------------------------------

SPECS: Final = [TaskSpec(payload={"n": n}, weight_bytes=1) for n in range(5)]


def test_incomplete_plans_are_not_shown(steps: Steps) -> None:
    """Tasks of an incomplete plan are not shown, and those of a killed planner are dropped."""
    job_id, first = steps.add(), steps.taken("plan")
    steps.add_tasks(first.held, SPECS[:3], 0)
    assert (
        steps.list_tasks(job_id).items == () and steps.progress_of([job_id]) == {} and not steps.has_work(NOW)
    )
    assert steps.expire_leases(NOW + 60) == 1
    second = steps.taken("plan", NOW + 600)
    with pytest.raises(StaleFenceError):
        steps.add_tasks(first.held, SPECS[3:], 3)
    for begin in (0, 2, 2):  # twice, as after a lost confirmation
        steps.add_tasks(second.held, SPECS[begin : begin + 2], begin)
    steps.complete_plan(second.held, {}, SPECS[4:], NOW + 600, after=4)
    assert [task.number for task in steps.list_tasks(job_id).items] == [0, 1, 2, 3, 4]
    assert steps.progress_of([job_id])[job_id].total_tasks == 5


# -- errors --------------------------------------------------------------------------------------------------


def test_errors_are_waited_for_retried_or_final() -> None:
    """A lack of space or permission and outages are waited for; errors of data and of the job are final."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
    passing: list[Exception] = [OSError(code, os.strerror(code)) for code in codes]
    passing += [StorageFullError("full"), StorageError("503"), ConnectionError(), TimeoutError()]
    passing += [UnavailableError("the folder of root x is not there"), UnavailableJobError("the database")]
    assert all(map(is_environment, passing)), [error for error in passing if not is_environment(error)]
    again = (TransientJobError(), StorageError(), ConnectionError(), TimeoutError(), UnavailableError("x"))
    never = [PermanentJobError(), CorruptCheckpointError(), CheckpointConflictError(), NotFoundError("x")]
    never += [ValueError(), KeyError()]
    lasting = [*never, IsADirectoryError(errno.EISDIR, ""), FileNotFoundError(errno.ENOENT, ""), again[0]]
    assert not any(map(is_environment, lasting)), [error for error in lasting if is_environment(error)]
    assert all(map(is_retryable, again)) and not any(map(is_retryable, never))


# -- periodic work -------------------------------------------------------------------------------------------


def test_periodic_work_runs_in_one_process_at_a_time(database: Database, tmp_path: Path) -> None:
    """Periodic work runs in one process at a time, also after failures; expired leases are taken over."""
    now, done, release = [NOW], [], threading.Event()

    def act(context: ScheduleContext) -> None:
        done.append(context)
        assert release.wait(60)
        raise ValueError("of a test")

    def owner() -> str | None:
        query = select(schedules.c.lease_owner).where(schedules.c.name == "s")
        with database.read() as connection:
            return connection.execute(query).scalar_one_or_none()

    settings = job_settings(database, tmp_path, lease_seconds=30.0)
    with database.write() as connection:
        dead = {"name": "s", "due_seconds": 0.0, "lease_owner": "dead", "lease_until_seconds": NOW + 20}
        connection.execute(insert(schedules).values(**dead))
    one, two = (
        Scheduler(settings, database, [PeriodicWork("s", 10.0, act)], name, lambda: now[0]) for name in "ab"
    )
    one.tick()
    assert (done, owner()) == ([], "dead")
    for seconds in (30.0, 25.0, 25.0):  # the expired lease is taken over, then renewed
        now[0] += seconds
        one.tick()
        until(lambda: len(done) == 1, "its turn")
        two.tick()
    release.set()
    until(lambda: owner() is None, "its end")
    for seconds, count in ((9.0, 1), (2.0, 2), (11.0, 3), (11.0, 3), (10.0, 4)):  # slower after failures
        now[0] += seconds
        two.tick()
        until(lambda count=count: len(done) == count and owner() is None, "its end")  # type: ignore[misc]
    one.close()
    two.close()


def test_roots_are_scanned_at_their_interval(database: Database, tmp_path: Path) -> None:
    """Each root has one scan at a time; a root with an interval of 0 is scanned on demand only."""
    places = {
        name: RootSettings(url=str(tmp_path / name), scan_seconds=seconds)
        for name, seconds in (("main", 5.0), ("still", 0.0))
    }
    settings = job_settings(database, tmp_path, roots=places)
    scans = [one for one in schedules_of(settings) if one.name.startswith("scan:")]
    assert [(one.name, one.interval_seconds) for one in scans] == [("scan:main", 5.0)]
    for _ in range(2):
        scans[0].act(ScheduleContext(settings, database, NOW, threading.Event()))
    found = Steps(database).list_jobs().items
    assert [(job.kind, job.root, job.created_by) for job in found] == [("scan", "main", "system")]


def test_a_consumer_of_a_feature_gets_each_event_once(database: Database, tmp_path: Path) -> None:
    """A consumer gets each event of its kinds once and in order, in any number of processes."""
    feature, seen = Feature("notes", __name__), []
    feature.consumer("notes", kinds=["one"])(lambda connection, found, context: seen.extend(found))
    with database.write() as connection:
        for number in range(450):
            emit(connection, "one" if number % 2 else "two", now=NOW)
    settings = job_settings(database, tmp_path)
    context = ScheduleContext(settings, database, NOW, threading.Event())
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda work: work.act(context), feature.periodic_work(settings) * 3))
    assert [one.id % 2 for one in seen] == [0] * 225 and seen == sorted(seen, key=lambda one: one.id)
