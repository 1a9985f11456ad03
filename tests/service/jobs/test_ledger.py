"""Steps of the ledger one by one. Internal: leases, turns and pauses of days, which no test can wait for."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
from sqlalchemy import Connection, event, insert, text

from dcp.server.catalog.roots import sync_roots
from dcp.server.database.engine import Database
from dcp.server.database.tables import jobs
from dcp.server.jobs import ledger
from dcp.server.jobs.executors.subprocess_main import error_of
from dcp.server.jobs.kind import (
    PermanentJobError,
    TransientJobError,
    UnavailableJobError,
    is_environment,
    is_retryable,
)
from dcp.server.jobs.ledger import (
    Backoff,
    Claim,
    FailureFacts,
    Held,
    JobRow,
    JobSpec,
    StaleFenceError,
    TaskSpec,
)
from dcp.server.problems import ConflictError, NotFoundError, ProblemError, UnavailableError
from dcp.server.roots import storage_problem
from dcp.storage.errors import CheckpointConflictError, CorruptCheckpointError, StorageError, StorageFullError

pytestmark = pytest.mark.each_database  # their SQL differs

NOW = 1000.0


def step(database: Database, act: Any, *arguments: Any, **options: Any) -> Any:
    """One transaction."""
    return database.transact(lambda connection: act(connection, *arguments, **options))


def add(database: Database, now: float = NOW, **changes: Any) -> int:
    """A new job."""
    spec = JobSpec(**{"kind": "verify", "params": {}, "created_by": "test"} | changes)
    made: int = step(database, ledger.submit, spec, now)
    return made


def take(database: Database, now: float = NOW, **options: Any) -> Claim | None:
    """The next thing to do."""
    made: Claim | None = step(database, ledger.claim, "worker", now, 10.0, **options)
    return made


def taken(database: Database, now: float = NOW) -> Claim:
    """The next thing to do, which there is."""
    made = take(database, now)
    assert made is not None
    return made


def planned(database: Database, count: int, **changes: Any) -> int:
    """A job, the next one, with so many tasks."""
    job_id = add(database, **changes)
    made = taken(database)
    assert made.job.id == job_id
    specs = [TaskSpec(payload={"n": n}, weight_bytes=1) for n in range(count)]
    step(database, ledger.complete_plan, made.held, {"plan": 1}, specs, NOW)
    return job_id


def job_of(database: Database, job_id: int) -> JobRow:
    """As it is now."""
    with database.read() as connection:
        return ledger.get_job(connection, job_id)


BROKEN = FailureFacts(type="StorageError", detail="away")


def test_backoff_doubles_and_is_bounded() -> None:
    """Twice as long each time, spread by up to a half, never longer than half as much again as the most."""
    backoff = Backoff(2.0, 300.0)
    for attempt in range(1, 40):
        plain = min(300.0, 2.0 * 2 ** (attempt - 1))
        values = {backoff.seconds(attempt, salt) for salt in range(50)}
        assert all(plain <= value <= 1.5 * plain for value in values)
        assert len(values) > 10, "what failed together is not tried together"


def test_what_failed_waits_for_its_turn(database: Database) -> None:
    """Before that others go on; a job that is not to begin yet waits as well."""
    job_id = planned(database, 2)
    first = taken(database)
    step(database, ledger.fail, first.held, BROKEN, NOW, Backoff(10.0, 10.0))
    second = taken(database)
    assert second.task is not None and second.task.number == 1
    assert take(database) is None
    later = add(database, not_before_seconds=NOW + 100.0)
    assert take(database, NOW + 9.0) is None
    again = taken(database, NOW + 20.0)
    assert again.task is not None and (again.task.number, again.task.attempt) == (0, 1)
    assert again.fence > first.fence and again.job.id == job_id
    assert taken(database, NOW + 101.0).job.id == later


def test_priorities_and_age(database: Database) -> None:
    """The highest first, the oldest of one; in one priority what has begun before what has not."""
    low, old, young = add(database, priority=-3), add(database), add(database)
    high = add(database, priority=9)
    order = []
    while (made := take(database)) is not None:
        order.append((made.job.id, made.phase))
        if made.phase == "plan":
            step(database, ledger.complete_plan, made.held, {}, [TaskSpec(payload={})], NOW)
        elif made.phase == "task":
            step(database, ledger.complete_task, made.held, {}, NOW)
        else:
            step(database, ledger.complete_publish, made.held, {}, NOW)
    phases = ("plan", "task", "publish")
    assert order == [(job_id, phase) for job_id in (high, old, young, low) for phase in phases]


def test_keys_and_roots_take_turns(database: Database) -> None:
    """However many jobs one key has queued, others need not wait for all of them; a key has a share in each
    root, and whoever has much at work comes after those who have less."""
    database.transact(
        lambda connection: sync_roots(connection, {"main": "/main", "other": "/other"}, now=NOW)
    )
    many = [add(database, created_by="key:many", root="main") for _ in range(6)]
    assert taken(database).job.id == many[0]
    few = [add(database, created_by="key:few", root="main") for _ in range(2)]
    other = add(database, created_by="key:many", root="other")
    urgent = add(database, created_by="key:many", root="main", priority=1)
    order = [taken(database).job.id for _ in range(9)]
    assert order == [urgent, few[0], other, few[1], *many[1:]]


def test_keys_take_turns_at_one_place(database: Database) -> None:
    """Does a job of each key in turn where each ends before the next begins."""
    many = [add(database, created_by="key:many") for _ in range(4)]
    few = [add(database, created_by="key:few") for _ in range(2)]
    order = []
    for _ in range(6):
        made = taken(database)
        order.append(made.job.id)
        step(database, ledger.complete_plan, made.held, {}, [], NOW)
        step(database, ledger.complete_publish, taken(database).held, {}, NOW)
    assert order == [many[0], few[0], many[1], few[1], *many[2:]]


def test_a_job_of_many_tasks_leaves_a_share_to_others(database: Database) -> None:
    """With several places, who has one already is served after who has none."""
    large = planned(database, 9, created_by="key:many")
    second = add(database, created_by="key:many")
    small = add(database, created_by="key:few")
    first = taken(database)
    assert (first.job.id, first.phase) == (large, "task")
    made = taken(database)
    assert (made.job.id, made.phase) == (small, "plan")
    step(database, ledger.complete_plan, made.held, {}, [TaskSpec(payload={})] * 3, NOW)
    order = [taken(database).job.id for _ in range(12)]
    assert order == [small, large, small, large, small, *[large] * 6, second]


def test_who_has_less_at_work_is_not_held_up_by_whose_turn_it_is(database: Database) -> None:
    """The queued job whose turn it is may be of one who has the other places already: those behind it go."""
    large = planned(database, 9, created_by="key:many")
    add(database, created_by="key:many")
    small = [add(database, created_by="key:few") for _ in range(3)]
    assert taken(database).job.id == large
    for number in small:
        made = taken(database)
        assert (made.job.id, made.phase) == (number, "plan")
        step(database, ledger.complete_plan, made.held, {}, [], NOW)
        made = taken(database)
        assert (made.job.id, made.phase) == (number, "publish")
        step(database, ledger.complete_publish, made.held, {}, NOW)
    assert taken(database).job.id == large


def test_a_key_is_free_again_at_the_end(database: Database) -> None:
    """One unfinished job for the same thing; a retry takes the key back, unless another one has it."""
    job_id = add(database, dedup_key="one")
    assert add(database, dedup_key="one") == job_id and add(database, dedup_key="two") != job_id
    step(database, ledger.request_cancel, job_id, NOW, "test")
    second = add(database, dedup_key="one")
    assert second != job_id
    with pytest.raises(ConflictError, match=f"job {second} does the same"):
        step(database, ledger.retry, job_id, NOW, "test")
    step(database, ledger.request_cancel, second, NOW, "test")
    assert step(database, ledger.retry, job_id, NOW, "test").dedup_key == "one"
    assert add(database, dedup_key="one") == job_id
    with pytest.raises(ValueError, match="100 characters"):
        add(database, dedup_key="x" * 101)


def test_many_submit_the_same_at_once(database: Database) -> None:
    """Gives all of them the one job, and says to one that it made it."""
    spec = JobSpec(kind="verify", params={}, created_by="test", dedup_key="one")
    found: list[tuple[int, bool]] = []
    barrier = threading.Barrier(6)

    def ask() -> None:
        barrier.wait(60)
        found.append(step(database, ledger.submit_or_join, spec, NOW))

    _together(6, ask)
    assert len({job_id for job_id, _ in found}) == 1
    assert sorted(is_new for _, is_new in found) == [False] * 5 + [True]


def test_many_claim_and_complete_at_once(database: Database) -> None:
    """Each task has one owner; the last one to complete, whoever that is, moves the job on."""
    count = 12
    job_id = planned(database, count)
    claims: list[Claim] = []
    barrier = threading.Barrier(4)

    def work() -> None:
        barrier.wait(60)
        while len(claims) < count:
            made = take(database)
            if made is not None and made.phase == "task":
                claims.append(made)
                step(database, ledger.complete_task, made.held, {}, NOW)

    _together(4, work)
    assert sorted(made.task.number for made in claims if made.task is not None) == list(range(count))
    assert job_of(database, job_id).state == "publishing"


def _together(count: int, act: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
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


def test_publishing_is_not_cancelled(database: Database) -> None:
    """Refuses to cancel once an attempt to publish has begun; before that nothing is published."""
    job_id = planned(database, 0)
    published = taken(database)
    assert published.phase == "publish"
    with pytest.raises(ConflictError, match="being published"):
        step(database, ledger.request_cancel, job_id, NOW, "test")
    step(database, ledger.release, published.held, NOW)  # its worker was stopped
    with pytest.raises(ConflictError, match="being published"):
        step(database, ledger.request_cancel, job_id, NOW, "test")
    step(database, ledger.complete_publish, taken(database).held, {}, NOW)
    other = planned(database, 0)
    assert step(database, ledger.request_cancel, other, NOW, "test").is_ending
    discard = taken(database)
    assert discard.phase == "discard"
    step(database, ledger.complete_discard, discard.held, NOW)
    assert job_of(database, other).state == "cancelled"


def test_a_lost_publisher_is_never_the_last(database: Database) -> None:
    """Only an attempt that says that it failed ends the job; one that is lost may have published."""
    job_id = planned(database, 0, max_attempts=2)
    now = NOW
    for _ in range(5):
        assert taken(database, now).phase == "publish"
        now += 1000.0
        assert step(database, ledger.expire_leases, now) == 1
        now += 1000.0
    step(database, ledger.fail, taken(database, now).held, BROKEN, now)
    job = job_of(database, job_id)
    assert job.is_ending and job.error is not None and job.error["type"] == "StorageError"


def test_nothing_is_discarded_while_a_task_runs(database: Database) -> None:
    """It could write what has just been cleared away; the others of its job are not begun any more."""
    job_id = planned(database, 3)
    first, second = taken(database), taken(database)
    step(database, ledger.request_cancel, job_id, NOW, "test")
    assert take(database) is None
    with database.read() as connection:
        assert ledger.stopped(connection, [first.held, second.held]) == {first.held, second.held}
    step(database, ledger.release, first.held, NOW)
    assert take(database) is None
    step(database, ledger.complete_task, second.held, {}, NOW)  # it was quicker than whoever stops it
    assert taken(database).phase == "discard"


def test_a_discard_that_fails_does_not_keep_the_job(database: Database) -> None:
    """After its attempts the job is over all the same, and its events say that something may be left."""
    job_id = planned(database, 1, max_attempts=2)
    step(database, ledger.request_cancel, job_id, NOW, "test")
    now = NOW
    for _ in range(2):
        made = taken(database, now)
        assert made.phase == "discard"
        step(database, ledger.fail, made.held, BROKEN, now)
        now += 1000.0
    assert job_of(database, job_id).state == "cancelled"
    with database.read() as connection:
        kinds = [event.kind for event in ledger.job_events_after(connection, job_id)]
    assert kinds[-2:] == ["discard_failed", "state"]


def test_claims_of_an_earlier_plan_are_refused(database: Database) -> None:
    """Refuses them, also if the database gives the numbers of removed rows out again."""
    job_id = planned(database, 2)
    old = [taken(database), taken(database)]
    step(database, ledger.request_cancel, job_id, NOW, "test")
    for made in old:
        step(database, ledger.release, made.held, NOW)
    step(database, ledger.complete_discard, taken(database).held, NOW)
    step(database, ledger.retry, job_id, NOW, "test")
    step(database, ledger.complete_plan, taken(database).held, {}, [TaskSpec(payload={})] * 2, NOW)
    new = [taken(database), taken(database)]
    for made in old:
        for reached in (made.held, *(Held(job_id, one.held.task_id, made.fence) for one in new)):
            with pytest.raises(StaleFenceError):
                step(database, ledger.complete_task, reached, {}, NOW)
    for made in new:
        step(database, ledger.complete_task, made.held, {}, NOW)
    assert job_of(database, job_id).state == "publishing"


def test_a_long_queue_is_no_burden(database: Database) -> None:
    """The next one of twenty thousand is found in an index, without looking at or sorting all of them."""
    row = {"kind": "verify", "state": "queued", "params": {}, "created_by": "test", "created_seconds": NOW}

    def fill(connection: Connection) -> None:
        connection.execute(insert(jobs), [row | {"priority": n % 3} for n in range(20_000)])
        connection.execute(text("ANALYZE"))

    database.transact(fill)
    asked: list[tuple[str, Any]] = []

    def hear(_connection: Any, _cursor: Any, statement: str, values: Any, *_: Any) -> None:
        if statement.startswith("SELECT") and "FROM" in statement:
            asked.append((statement, values))

    event.listen(database.writer, "before_cursor_execute", hear)
    begun = time.perf_counter()
    assert taken(database).job.priority == 2
    assert step(database, ledger.expire_leases, NOW) == 0
    print(f"a claim of 20,000: {(time.perf_counter() - begun) * 1000:.1f} ms")
    event.remove(database.writer, "before_cursor_execute", hear)
    assert len(asked) > 5
    explain = "EXPLAIN QUERY PLAN" if database.dialect == "sqlite" else "EXPLAIN"
    with database.read() as connection:
        for statement, values in asked:
            lines = connection.exec_driver_sql(f"{explain} {statement}", values)
            plan = "\n".join(str(line) for line in lines)
            assert "SCAN jobs" not in plan and "Seq Scan on jobs" not in plan, f"{statement}\n{plan}"


# -- storage that is away, disks that are full ---------------------------------------------------------------


HOUR: Final = 3600.0


FULL = FailureFacts(type="StorageFullError", detail="the storage of root x is full", is_environment=True)


@pytest.mark.parametrize(
    "phase", ["task", *(pytest.param(phase, marks=pytest.mark.exhaustive) for phase in ("plan", "publish"))]
)
def test_a_job_waits_for_hours(phase: str, database: Database) -> None:
    """Waits with growing pauses up to minutes, then continues where it was, with all of its attempts."""
    job_id = add(database) if phase == "plan" else planned(database, 1 if phase == "task" else 0)
    now = NOW
    pauses: list[float] = []
    while now < NOW + 20 * HOUR:
        made = taken(database, now)
        assert made.phase == phase
        step(database, ledger.fail, made.held, FULL, now)
        job = job_of(database, job_id)
        assert not job.is_ending and job.waiting is not None
        assert job.waiting["detail"] == FULL.detail and job.waiting["is_environment"]
        assert job.waiting["since_seconds"] == NOW and job.waiting["count"] == len(pauses) + 1
        pauses.append(job.waiting["next_seconds"] - now)
        assert take(database, now + pauses[-1] - 0.1) is None
        now += pauses[-1]
    assert pauses[0] <= 3.0 and 300.0 <= max(pauses) <= 450.0 and len(pauses) > 100
    made = taken(database, now)
    assert made.phase == phase
    done: Any = {"plan": ({}, []), "task": ({},), "publish": ({},)}[phase]
    step(database, getattr(ledger, f"complete_{phase}"), made.held, *done, now)
    assert job_of(database, job_id).waiting is None


def test_a_job_does_not_wait_for_ever(database: Database) -> None:
    """After a day in a row it has failed, with the reason; then it can be retried by hand as any other."""
    job_id, now = planned(database, 1), NOW
    while not job_of(database, job_id).is_ending:
        step(database, ledger.fail, taken(database, now).held, FULL, now, Backoff(60.0, HOUR))
        now += HOUR * 1.6
    assert 24 * HOUR <= now - NOW < 28 * HOUR
    step(database, ledger.complete_discard, taken(database, now).held, now)
    job = job_of(database, job_id)
    assert (job.state, job.waiting) == ("failed", None)
    assert job.error is not None and job.error["detail"] == FULL.detail
    assert step(database, ledger.retry, job_id, now, "me").state == "queued"


def test_all_tasks_of_a_job_wait_together(database: Database) -> None:
    """Begins no task before the pause is over, which tasks at work do not prolong; other jobs continue."""
    job_id = planned(database, 4)
    first, second = taken(database), taken(database)
    for made in (first, second):
        step(database, ledger.fail, made.held, FULL, NOW, Backoff(60.0, HOUR))
    job = job_of(database, job_id)
    assert job.waiting is not None and job.waiting["count"] == 1
    assert job.not_before_seconds == job.waiting["next_seconds"] <= NOW + 90.0
    other = planned(database, 1)
    made = taken(database)
    assert made.job.id == other and take(database) is None
    assert taken(database, NOW + 91.0).job.id == job_id


def test_by_hand_it_goes_on_at_once(database: Database) -> None:
    """Whoever has made space need not wait; nor for what failed in passing. What does not wait is refused."""
    job_id = planned(database, 2)
    with pytest.raises(ConflictError, match="those that wait"):
        step(database, ledger.retry, job_id, NOW, "me")
    for error in (FULL, BROKEN):
        made = taken(database)
        step(database, ledger.fail, made.held, error, NOW, Backoff(60.0, HOUR))
        waiting = job_of(database, job_id).waiting
        assert waiting is not None and waiting["next_seconds"] > NOW
        job = step(database, ledger.retry, job_id, NOW, "me")
        assert job.state == "running" and job.waiting is not None and job.waiting["next_seconds"] == NOW
        again = taken(database)
        assert again.held.task_id == made.held.task_id
        step(database, ledger.release, again.held, NOW)


def test_a_waiting_job_is_cancelled_at_once(database: Database) -> None:
    """It need not wait to be cleared away."""
    job_id = planned(database, 1)
    step(database, ledger.fail, taken(database).held, FULL, NOW, Backoff(HOUR, HOUR))
    step(database, ledger.request_cancel, job_id, NOW, "me")
    made = taken(database)
    assert made.phase == "discard"
    step(database, ledger.complete_discard, made.held, NOW)
    assert job_of(database, job_id).state == "cancelled"


# -- large plans ---------------------------------------------------------------------------------------------


def test_half_of_a_plan_is_nobodys(database: Database) -> None:
    """While it is written there are no tasks; of a worker that was killed none is left, and one that was only
    believed dead adds none; the next plan is whole."""
    spec = JobSpec(kind="verify", params={}, created_by="test")
    specs = [TaskSpec(payload={"n": n}, weight_bytes=1) for n in range(4)]
    job_id = database.transact(lambda connection: ledger.submit(connection, spec, NOW))
    first = taken(database)
    database.transact(lambda connection: ledger.add_tasks(connection, first.held, specs[:3], 0))
    with database.read() as connection:
        assert ledger.list_tasks(connection, job_id) == []
        assert ledger.progress_of(connection, [job_id]) == {}
        assert not ledger.has_work(connection, NOW)
    assert database.transact(lambda connection: ledger.expire_leases(connection, NOW + 60)) == 1
    second = taken(database, NOW + 600)
    assert second.phase == "plan"
    with pytest.raises(StaleFenceError):
        database.transact(lambda connection: ledger.add_tasks(connection, first.held, specs[3:], 3))
    database.transact(lambda connection: ledger.add_tasks(connection, second.held, specs[:2], 0))
    database.transact(
        lambda connection: ledger.complete_plan(connection, second.held, {}, specs[2:], NOW + 600, after=2)
    )
    with database.read() as connection:
        found = ledger.list_tasks(connection, job_id)
    assert [task.number for task in found] == [0, 1, 2, 3]
    with database.read() as connection:
        assert ledger.progress_of(connection, [job_id])[job_id].total_tasks == 4


def test_tasks_that_were_written_unheard_are_written_again(database: Database) -> None:
    """The connection was lost when their transaction had ended: the plan is whole, each task there once."""
    spec = JobSpec(kind="verify", params={}, created_by="test")
    specs = [TaskSpec(payload={"n": n}, weight_bytes=1) for n in range(5)]
    job_id = database.transact(lambda connection: ledger.submit(connection, spec, NOW))
    held = taken(database).held
    for first in (0, 2, 2):
        database.transact(partial(ledger.add_tasks, held=held, specs=specs[first : first + 2], first=first))
    database.transact(lambda connection: ledger.complete_plan(connection, held, {}, specs[4:], NOW, after=4))
    with database.read() as connection:
        assert [task.number for task in ledger.list_tasks(connection, job_id)] == list(range(5))


@pytest.mark.parametrize("how", ["cancelled", "failed", "released"])
def test_what_ends_in_the_midst_of_a_plan_has_no_tasks(database: Database, how: str) -> None:
    """Cancelled, failed or given back: what was written of the plan is gone."""
    spec = JobSpec(kind="verify", params={}, created_by="test")
    job_id = database.transact(lambda connection: ledger.submit(connection, spec, NOW))
    held = taken(database).held
    part = [TaskSpec(payload={}, weight_bytes=1)] * 2
    database.transact(lambda connection: ledger.add_tasks(connection, held, part, 0))
    if how == "failed":
        error = ledger.FailureFacts(type="E", detail="no")
        database.transact(lambda connection: ledger.fail(connection, held, error, NOW))
    else:
        if how == "cancelled":
            database.transact(lambda connection: ledger.request_cancel(connection, job_id, NOW, "test"))
        database.transact(lambda connection: ledger.release(connection, held, NOW))
    with database.read() as connection:
        assert ledger.list_tasks(connection, job_id) == []
        assert ledger.progress_of(connection, [job_id]) == {}


# -- errors --------------------------------------------------------------------------------------------------


def problem_of(error: Exception) -> ProblemError:
    """As kinds raise it."""
    problem = storage_problem(error)
    problem.__cause__ = error
    return problem


def test_which_errors_are_of_the_environment() -> None:
    """Space, permission, what is away or busy; not data, requests, or what may be the job's own doing."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
    passing: list[Exception] = [OSError(code, os.strerror(code)) for code in codes]
    passing += [
        StorageFullError("full"),
        StorageError("503 of the service"),
        ConnectionError(),
        TimeoutError(),
    ]
    passing += [problem_of(error) for error in passing]
    passing += [UnavailableError("the folder of root x is not there"), UnavailableJobError("the database")]
    assert all(map(is_environment, passing)), [error for error in passing if not is_environment(error)]
    lasting: list[Exception] = [IsADirectoryError(errno.EISDIR, ""), FileNotFoundError(errno.ENOENT, "")]
    lasting += [problem_of(StorageError("x", errno=errno.ENAMETOOLONG)), CorruptCheckpointError("flipped")]
    lasting += [
        NotFoundError("x"),
        PermanentJobError("x"),
        TransientJobError("x"),
        ValueError(),
        MemoryError(),
    ]
    assert not any(map(is_environment, lasting)), [error for error in lasting if is_environment(error)]


def test_which_errors_are_worth_another_attempt() -> None:
    """Storage and network that may come back; not what is damaged, refused or a mistake."""
    again = (TransientJobError(), StorageError(), ConnectionError(), TimeoutError(), UnavailableError("x"))
    never = (
        PermanentJobError(),
        CorruptCheckpointError(),
        CheckpointConflictError(),
        NotFoundError("x"),
        ValueError(),
        KeyError(),
    )
    assert all(map(is_retryable, again)) and not any(map(is_retryable, never))
    told = error_of(StorageError("https://user:SECRET@host/ is away"))
    assert told.is_retryable and "SECRET" not in told.detail
