"""Steps of the ledger one by one. Internal: leases, turns and pauses of days, which no test can wait for."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import Connection, event, insert, select, text

from dcp.server.automation.schedules import built_in_schedules
from dcp.server.catalog.roots import sync_roots
from dcp.server.database.documents import prepare_document, write_document
from dcp.server.database.engine import Database
from dcp.server.database.tables import document_parts, jobs, schedules
from dcp.server.jobs import ledger
from dcp.server.jobs.executors.subprocess_main import error_of
from dcp.server.jobs.kind import (
    PermanentJobError,
    TransientJobError,
    UnavailableJobError,
    is_environment,
    is_retryable,
)
from dcp.server.jobs.ledger import Backoff, FailureFacts, Held, JobSpec, StaleFenceError, TaskSpec
from dcp.server.jobs.schedules import PeriodicWork, ScheduleContext, Scheduler
from dcp.server.problems import ConflictError, NotFoundError, ProblemError, UnavailableError
from dcp.server.roots import storage_problem
from dcp.server.settings import RootSettings
from dcp.storage.errors import CheckpointConflictError, CorruptCheckpointError, StorageError, StorageFullError
from tests.support.job_workers import job_settings, until
from tests.support.ledger_model import run_any_order

pytestmark = pytest.mark.each_database  # their SQL differs

NOW: Final = 1000.0
HOUR: Final = 3600.0
BROKEN: Final = FailureFacts(type="StorageError", detail="away")
FULL: Final = FailureFacts(type="StorageFullError", detail="root x is full", is_environment=True)


class Steps:
    """Calls of the ledger, each in a transaction of its own."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            return self.database.transact(
                lambda connection: getattr(ledger, name)(connection, *given, **options)
            )

        return call

    def add(self, now: float = NOW, **changes: Any) -> int:
        """A new job."""
        spec = JobSpec(**{"kind": "verify", "params": {}, "created_by": "test"} | changes)
        return int(self.submit(spec, now))

    def take(self, now: float = NOW) -> Any:
        """The next thing to do, if there is one."""
        return self.claim("worker", now, 10.0)

    def taken(self, phase: str | None = None, now: float = NOW) -> Any:
        """The next thing to do, which is this."""
        made = self.take(now)
        assert made is not None and phase in (None, made.phase)
        return made

    def plan(self, made: Any, count: int, now: float = NOW) -> None:
        """Complete a plan with so many tasks."""
        specs = [TaskSpec(payload={"n": n}, weight_bytes=1) for n in range(count)]
        self.complete_plan(made.held, {"plan": 1}, specs, now)

    def planned(self, count: int, **changes: Any) -> int:
        """A job, the next one, with so many tasks."""
        job_id, made = self.add(**changes), self.taken("plan")
        assert made.job.id == job_id
        self.plan(made, count)
        return job_id

    def finish(self, made: Any, now: float = NOW, tasks: int = 0) -> None:
        """Complete whatever it is."""
        if made.phase == "plan":
            self.plan(made, tasks, now)
        elif made.phase == "discard":
            self.complete_discard(made.held, now)
        else:
            getattr(self, f"complete_{made.phase}")(made.held, {}, now)


@pytest.fixture
def steps(database: Database) -> Steps:
    """On each database."""
    return Steps(database)


def test_every_order_of_steps(database: Database) -> None:
    """Completes what was claimed, and that only once, whatever workers and users do in whatever order."""
    run_any_order(database, 12, 40)


@pytest.mark.exhaustive
def test_many_more_orders_of_steps(database: Database) -> None:
    """Holds for long runs, too."""
    run_any_order(database, 120, 80)


# -- turns ---------------------------------------------------------------------------------------------------


def test_what_failed_waits_for_its_turn(steps: Steps) -> None:
    """Lets others go on before that; a job that is not to begin yet waits as well."""
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
    """Takes the highest first, the oldest of one, and what has begun before what has not."""
    low, old, young = steps.add(priority=-3), steps.add(), steps.add()
    high = steps.add(priority=9)
    order = []
    while (made := steps.take()) is not None:
        order.append((made.job.id, made.phase))
        steps.finish(made, tasks=1)
    phases = ("plan", "task", "publish")
    assert order == [(job_id, phase) for job_id in (high, old, young, low) for phase in phases]


def test_keys_and_roots_take_turns(steps: Steps) -> None:
    """Gives a key a share in each root; whoever has much at work comes after those who have less."""
    roots = {"main": "/main", "other": "/other"}
    steps.database.transact(lambda connection: sync_roots(connection, roots, now=NOW))
    many = [steps.add(created_by="key:many", root="main") for _ in range(6)]
    assert steps.taken().job.id == many[0]
    few = [steps.add(created_by="key:few", root="main") for _ in range(2)]
    other = steps.add(created_by="key:many", root="other")
    urgent = steps.add(created_by="key:many", root="main", priority=1)
    assert [steps.taken().job.id for _ in range(9)] == [urgent, few[0], other, few[1], *many[1:]]


def test_keys_take_turns_at_one_place(steps: Steps) -> None:
    """Does a job of each key in turn where each ends before the next begins."""
    many = [steps.add(created_by="key:many") for _ in range(4)]
    few = [steps.add(created_by="key:few") for _ in range(2)]
    order = []
    for _ in range(6):
        made = steps.taken("plan")
        order.append(made.job.id)
        steps.finish(made)
        steps.finish(steps.taken("publish"))
    assert order == [many[0], few[0], many[1], few[1], *many[2:]]


def test_a_job_of_many_tasks_leaves_a_share_to_others(steps: Steps) -> None:
    """Serves who has a place already after who has none."""
    large = steps.planned(9, created_by="key:many")
    second, small = steps.add(created_by="key:many"), steps.add(created_by="key:few")
    assert steps.taken("task").job.id == large
    made = steps.taken("plan")
    assert made.job.id == small
    steps.plan(made, 3)
    order = [steps.taken().job.id for _ in range(12)]
    assert order == [small, large, small, large, small, *[large] * 6, second]


def test_who_has_less_at_work_is_not_held_up_by_whose_turn_it_is(steps: Steps) -> None:
    """Passes over the queued job of one who has the other places already."""
    large = steps.planned(9, created_by="key:many")
    steps.add(created_by="key:many")
    small = [steps.add(created_by="key:few") for _ in range(3)]
    assert steps.taken().job.id == large
    for number in small:
        for phase in ("plan", "publish"):
            made = steps.taken(phase)
            assert made.job.id == number
            steps.finish(made)
    assert steps.taken().job.id == large


# -- several at once -----------------------------------------------------------------------------------------


def together(count: int, act: Callable[[], None]) -> None:
    """Act in so many threads at one moment."""
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


def test_many_submit_the_same_at_once(steps: Steps) -> None:
    """Gives all of them the one job, and says to one that it made it."""
    spec = JobSpec(kind="verify", params={}, created_by="test", dedup_key="one")
    found: list[tuple[int, bool]] = []
    together(6, lambda: found.append(steps.submit_or_join(spec, NOW)))
    assert len({job_id for job_id, _ in found}) == 1
    assert sorted(is_new for _, is_new in found) == [False] * 5 + [True]
    with pytest.raises(ValueError, match="100 characters"):
        steps.add(dedup_key="x" * 101)


def test_many_claim_and_complete_at_once(steps: Steps) -> None:
    """Gives each task one owner; the last one to complete, whoever that is, moves the job on."""
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


def test_a_long_queue_is_no_burden(steps: Steps) -> None:
    """Finds the next one of twenty thousand in an index, without looking at all of them."""
    row = {"kind": "verify", "state": "queued", "params": {}, "created_by": "test", "created_seconds": NOW}
    database = steps.database

    def fill(connection: Connection) -> None:
        connection.execute(insert(jobs), [row | {"priority": n % 3} for n in range(20_000)])
        connection.execute(text("ANALYZE"))

    database.transact(fill)
    asked: list[tuple[str, Any]] = []

    def hear(_connection: Any, _cursor: Any, statement: str, values: Any, *_: Any) -> None:
        if statement.startswith("SELECT") and "FROM" in statement:
            asked.append((statement, values))

    event.listen(database.writer, "before_cursor_execute", hear)
    assert steps.taken().job.priority == 2
    assert steps.expire_leases(NOW) == 0
    event.remove(database.writer, "before_cursor_execute", hear)
    assert len(asked) > 5
    explain = "EXPLAIN QUERY PLAN" if database.dialect == "sqlite" else "EXPLAIN"
    with database.read() as connection:
        for statement, values in asked:
            plan = str(connection.exec_driver_sql(f"{explain} {statement}", values).all())
            assert "SCAN jobs" not in plan and "Seq Scan on jobs" not in plan, f"{statement}\n{plan}"


# -- ends ----------------------------------------------------------------------------------------------------


def test_publishing_is_not_cancelled(steps: Steps) -> None:
    """Refuses to cancel once an attempt to publish has begun, also while nobody is at it."""
    job_id = steps.planned(0)
    published = steps.taken("publish")
    for _ in range(2):
        with pytest.raises(ConflictError, match="being published"):
            steps.request_cancel(job_id, NOW, "test")
        if published is not None:
            steps.release(published.held, NOW)  # its worker was stopped
            published = None


def test_a_lost_publisher_is_never_the_last(steps: Steps) -> None:
    """Ends the job by an attempt that says that it failed; one that is lost may have published."""
    job_id, now = steps.planned(0, max_attempts=2), NOW
    for _ in range(5):
        steps.taken("publish", now)
        now += 1000.0
        assert steps.expire_leases(now) == 1
        now += 1000.0
    steps.fail(steps.taken("publish", now).held, BROKEN, now)
    job = steps.get_job(job_id)
    assert job.is_ending and job.error["type"] == "StorageError"


def test_nothing_is_discarded_while_a_task_runs(steps: Steps) -> None:
    """Waits for tasks that could write what was cleared away, and begins no others of the job."""
    job_id = steps.planned(3)
    first, second = steps.taken("task"), steps.taken("task")
    steps.request_cancel(job_id, NOW, "test")
    assert steps.take() is None
    assert steps.stopped([first.held, second.held]) == {first.held, second.held}
    steps.release(first.held, NOW)
    assert steps.take() is None
    steps.finish(second)  # it was quicker than whoever stops it
    steps.taken("discard")


def test_a_discard_that_fails_does_not_keep_the_job(steps: Steps) -> None:
    """Ends the job after its attempts, and says in its events that something may be left."""
    job_id, now = steps.planned(1, max_attempts=2), NOW
    steps.request_cancel(job_id, NOW, "test")
    for _ in range(2):
        steps.fail(steps.taken("discard", now).held, BROKEN, now)
        now += 1000.0
    assert steps.get_job(job_id).state == "cancelled"
    kinds = [event.kind for event in steps.job_events_after(job_id)]
    assert kinds[-2:] == ["discard_failed", "state"]


def test_claims_of_an_earlier_plan_are_refused(steps: Steps) -> None:
    """Refuses them also where the database gives the numbers of removed rows out again."""
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


# -- storage that is away, disks that are full ---------------------------------------------------------------


@pytest.mark.parametrize(
    "phase", ["task", *(pytest.param(phase, marks=pytest.mark.exhaustive) for phase in ("plan", "publish"))]
)
def test_a_job_waits_for_hours(phase: str, steps: Steps) -> None:
    """Waits with growing pauses up to minutes, then continues where it was, with all of its attempts."""
    job_id = steps.add() if phase == "plan" else steps.planned(1 if phase == "task" else 0)
    now = NOW
    pauses: list[float] = []
    while now < NOW + 20 * HOUR:
        steps.fail(steps.taken(phase, now).held, FULL, now)
        job = steps.get_job(job_id)
        assert not job.is_ending and job.waiting["detail"] == FULL.detail and job.waiting["is_environment"]
        assert (job.waiting["since_seconds"], job.waiting["count"]) == (NOW, len(pauses) + 1)
        pauses.append(job.waiting["next_seconds"] - now)
        assert steps.take(now + pauses[-1] - 0.1) is None
        now += pauses[-1]
    assert pauses[0] <= 3.0 and 300.0 <= max(pauses) <= 450.0 and len(pauses) > 100
    steps.finish(steps.taken(phase, now), now)
    assert steps.get_job(job_id).waiting is None


def test_a_job_does_not_wait_for_ever(steps: Steps) -> None:
    """Fails after a day in a row, with the reason, and can be retried by hand as any other."""
    job_id, now = steps.planned(1), NOW
    while not steps.get_job(job_id).is_ending:
        steps.fail(steps.taken("task", now).held, FULL, now, Backoff(60.0, HOUR))
        now += HOUR * 1.6
    assert 24 * HOUR <= now - NOW < 28 * HOUR
    steps.finish(steps.taken("discard", now), now)
    job = steps.get_job(job_id)
    assert (job.state, job.waiting, job.error["detail"]) == ("failed", None, FULL.detail)
    assert steps.retry(job_id, now, "me").state == "queued"


def test_all_tasks_of_a_job_wait_together(steps: Steps) -> None:
    """Begins no task before the pause is over, which tasks at work do not prolong; other jobs go on."""
    job_id = steps.planned(4)
    for made in (steps.taken("task"), steps.taken("task")):
        steps.fail(made.held, FULL, NOW, Backoff(60.0, HOUR))
    job = steps.get_job(job_id)
    assert job.waiting["count"] == 1
    assert job.not_before_seconds == job.waiting["next_seconds"] <= NOW + 90.0
    other = steps.planned(1)
    assert steps.taken("task").job.id == other and steps.take() is None
    assert steps.taken("task", NOW + 91.0).job.id == job_id


def test_by_hand_it_goes_on_at_once(steps: Steps) -> None:
    """Lets whoever has made space not wait, nor for what failed in passing, nor to cancel."""
    job_id = steps.planned(2)
    with pytest.raises(ConflictError, match="those that wait"):
        steps.retry(job_id, NOW, "me")
    for error in (FULL, BROKEN):
        made = steps.taken("task")
        steps.fail(made.held, error, NOW, Backoff(60.0, HOUR))
        assert steps.get_job(job_id).waiting["next_seconds"] > NOW
        job = steps.retry(job_id, NOW, "me")
        assert (job.state, job.waiting["next_seconds"]) == ("running", NOW)
        again = steps.taken("task")
        assert again.held.task_id == made.held.task_id
        steps.release(again.held, NOW)
    steps.fail(steps.taken("task").held, FULL, NOW, Backoff(HOUR, HOUR))
    steps.request_cancel(job_id, NOW, "me")
    steps.finish(steps.taken("discard"))
    assert steps.get_job(job_id).state == "cancelled"


# -- large plans ---------------------------------------------------------------------------------------------

SPECS: Final = [TaskSpec(payload={"n": n}, weight_bytes=1) for n in range(5)]


def test_half_of_a_plan_is_nobodys(steps: Steps) -> None:
    """Shows no tasks while they are written, and keeps none of a worker that was killed at it."""
    job_id, first = steps.add(), steps.taken("plan")
    steps.add_tasks(first.held, SPECS[:3], 0)
    assert steps.list_tasks(job_id) == [] and steps.progress_of([job_id]) == {} and not steps.has_work(NOW)
    assert steps.expire_leases(NOW + 60) == 1
    second = steps.taken("plan", NOW + 600)
    with pytest.raises(StaleFenceError):
        steps.add_tasks(first.held, SPECS[3:], 3)
    for begin in (0, 2, 2):  # once more where nobody heard that it was written
        steps.add_tasks(second.held, SPECS[begin : begin + 2], begin)
    steps.complete_plan(second.held, {}, SPECS[4:], NOW + 600, after=4)
    assert [task.number for task in steps.list_tasks(job_id)] == [0, 1, 2, 3, 4]
    assert steps.progress_of([job_id])[job_id].total_tasks == 5


@pytest.mark.parametrize("how", ["cancelled", "failed", "released"])
def test_what_ends_in_the_midst_of_a_plan_has_no_tasks(steps: Steps, how: str) -> None:
    """Removes what was written of a plan that is cancelled, fails or is given back."""
    job_id, made = steps.add(), steps.taken("plan")
    steps.add_tasks(made.held, SPECS[:2], 0)
    if how == "failed":
        steps.fail(made.held, FailureFacts(type="E", detail="no"), NOW)
    else:
        if how == "cancelled":
            steps.request_cancel(job_id, NOW, "test")
        steps.release(made.held, NOW)
    assert steps.list_tasks(job_id) == [] and steps.progress_of([job_id]) == {}


# -- errors --------------------------------------------------------------------------------------------------


def problem_of(error: Exception) -> ProblemError:
    """As kinds raise it."""
    problem = storage_problem(error)
    problem.__cause__ = error
    return problem


def test_which_errors_are_of_the_environment() -> None:
    """Counts space, permission, what is away or busy; not data, requests, or the job's own doing."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
    passing: list[Exception] = [OSError(code, os.strerror(code)) for code in codes]
    passing += [StorageFullError("full"), StorageError("503"), ConnectionError(), TimeoutError()]
    passing += [problem_of(error) for error in passing]
    passing += [UnavailableError("the folder of root x is not there"), UnavailableJobError("the database")]
    assert all(map(is_environment, passing)), [error for error in passing if not is_environment(error)]
    lasting = [IsADirectoryError(errno.EISDIR, ""), FileNotFoundError(errno.ENOENT, ""), NotFoundError("x")]
    lasting += [problem_of(StorageError("x", errno=errno.ENAMETOOLONG)), CorruptCheckpointError("flipped")]
    lasting += [PermanentJobError("x"), TransientJobError("x"), ValueError(), MemoryError()]
    assert not any(map(is_environment, lasting)), [error for error in lasting if is_environment(error)]


def test_which_errors_are_worth_another_attempt() -> None:
    """Tries again what storage and network may heal; not what is damaged, refused or a mistake."""
    again = (TransientJobError(), StorageError(), ConnectionError(), TimeoutError(), UnavailableError("x"))
    never = (PermanentJobError(), CorruptCheckpointError(), CheckpointConflictError(), NotFoundError("x"))
    assert all(map(is_retryable, again)) and not any(map(is_retryable, (*never, ValueError(), KeyError())))
    told = error_of(StorageError("https://user:SECRET@host/ is away"))
    assert told.is_retryable and "SECRET" not in told.detail


def test_backoff_doubles_and_is_bounded() -> None:
    """Waits twice as long each time, spread by up to a half, so that not all try again together."""
    backoff = Backoff(2.0, 300.0)
    for attempt in range(1, 40):
        plain = min(300.0, 2.0 * 2 ** (attempt - 1))
        values = {backoff.seconds(attempt, salt) for salt in range(50)}
        assert all(plain <= value <= 1.5 * plain for value in values) and len(values) > 10


# -- periodic work -------------------------------------------------------------------------------------------


class Clock:
    """Time that passes when it is told to."""

    seconds = NOW

    def __call__(self) -> float:
        """Now."""
        return self.seconds


class Acting:
    """Periodic work that counts, and waits if it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.count = 0
        self.go = threading.Event()
        self.go.set()
        self._error = error

    def __call__(self, context: ScheduleContext) -> None:
        """What a schedule does."""
        self.count += 1
        assert self.go.wait(60)
        if self._error is not None:
            raise self._error


def owner_of(database: Database, name: str) -> str | None:
    """Who is at it."""
    with database.read() as connection:
        query = select(schedules.c.lease_owner).where(schedules.c.name == name)
        return connection.execute(query).scalar_one_or_none()


def test_periodic_work_is_done_again_after_its_interval(database: Database, tmp_path: Path) -> None:
    """Counts the interval from its end; does again what failed; writes nothing that is not needed."""
    clock, acting, failing, needed = Clock(), Acting(), Acting(ValueError("of a test")), threading.Event()
    works = (
        PeriodicWork("good", 10.0, acting, lambda *_: needed.is_set()),
        PeriodicWork("bad", 10.0, failing),
    )
    one = Scheduler(job_settings(database, tmp_path), database, works, "one", clock)
    one.tick()
    until(lambda: failing.count == 1, "the other one")
    with database.read() as connection:
        assert connection.execute(select(schedules.c.name)).scalars().all() == ["bad"]
    needed.set()
    for count in (1, 2, 3):
        one.tick()
        until(lambda n=count: acting.count == n and owner_of(database, "good") is None, "its end")  # type: ignore[misc]
        clock.seconds += 9.0
        one.tick()
        clock.seconds += 2.0
    one.close()
    assert acting.count == 3 and failing.count >= 3


def test_periodic_work_is_of_one_process_at_a_time(database: Database, tmp_path: Path) -> None:
    """Keeps it while its lease is renewed; another one takes over from the dead, once the lease is over."""
    clock, acting = Clock(), Acting()
    settings = job_settings(database, tmp_path, lease_seconds=30.0)
    work = PeriodicWork("s", 10.0, acting)
    with database.write() as connection:
        dead = {"name": "s", "due_seconds": 0.0, "lease_owner": "dead", "lease_until_seconds": NOW + 20}
        connection.execute(insert(schedules).values(**dead))
    one, two = (Scheduler(settings, database, [work], name, clock) for name in ("one", "two"))
    one.tick()
    assert (acting.count, owner_of(database, "s")) == (0, "dead")
    acting.go.clear()
    clock.seconds += 30.0
    one.tick()
    until(lambda: acting.count == 1, "its turn")
    for _ in range(2):
        clock.seconds += 25.0
        one.tick()  # its lease is renewed
        two.tick()
    acting.go.set()
    until(lambda: owner_of(database, "s") is None, "its end")
    two.tick()
    one.close()
    two.close()
    assert acting.count == 1


def test_documents_that_nothing_refers_to_are_removed(database: Database, tmp_path: Path) -> None:
    """Removes what a killed writer has left, a day after that was seen."""
    settings, now, counts = job_settings(database, tmp_path), 1_000_000.0, []
    (clean,) = (one for one in built_in_schedules(settings) if one.name == "clean-up")
    database.transact(lambda connection: write_document(connection, {"tensors": [1, 2]}))
    prepare_document(database, {"tensors": [3, 4]}, now=now)
    for seconds in (0.0, 86_000.0, 87_000.0):
        clean.act(ScheduleContext(settings, database, now + seconds, threading.Event()))
        with database.read() as connection:
            counts.append(len(connection.execute(select(document_parts.c.document_id)).all()))
    assert counts == [2, 2, 0]


def test_roots_are_scanned_as_often_as_they_say(database: Database, tmp_path: Path) -> None:
    """Has one scan of a root at a time; a root that says 0 is scanned on demand only."""
    places = {
        name: RootSettings(url=str(tmp_path / name), scan_seconds=seconds)
        for name, seconds in (("main", 5.0), ("still", 0.0))
    }
    settings = job_settings(database, tmp_path, roots=places)
    scans = [one for one in built_in_schedules(settings) if one.name.startswith("scan:")]
    assert [(one.name, one.interval_seconds) for one in scans] == [("scan:main", 5.0)]
    for _ in range(2):
        scans[0].act(ScheduleContext(settings, database, NOW, threading.Event()))
    found = Steps(database).list_jobs()
    assert [(job.kind, job.root, job.created_by) for job in found] == [("scan", "main", "system")]
