"""Steps of the ledger one by one, where the machine of `test_ledger_machine.py` does not look."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, event, insert, text

from dcp.server.catalog.roots import sync_roots
from dcp.server.database.engine import Database
from dcp.server.database.tables import jobs
from dcp.server.jobs import ledger
from dcp.server.jobs.ledger import (
    Backoff,
    Claim,
    ClaimLimits,
    FailureFacts,
    Held,
    JobFilter,
    JobRow,
    JobSpec,
    StaleFenceError,
    TaskSpec,
)
from dcp.server.problems import ConflictError, NotFoundError
from tests.support.catalog_rows import add_checkpoint

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


def test_limits_of_kinds(database: Database) -> None:
    """A kind has as many at a time as it may; others pass by; kinds that are not known wait."""
    first, second = add(database), add(database)
    other, unknown = add(database, kind="scan"), add(database, kind="new")
    limits = ClaimLimits(by_kind={"verify": 1}, only=frozenset({"verify", "scan"}))
    made = take(database, limits=limits)
    assert made is not None and made.job.id == first
    assert (following := take(database, limits=limits)) is not None and following.job.id == other
    assert take(database, limits=limits) is None
    step(database, ledger.complete_plan, made.held, {}, [TaskSpec(payload={})], NOW)
    task = take(database, limits=limits)
    assert task is not None and (task.job.id, task.phase) == (first, "task")
    assert take(database, limits=limits) is None
    assert {job_of(database, one).state for one in (second, unknown)} == {"queued"}


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
    """All of them get the one job, and one is told that it made it."""
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
    """Nor is it once an attempt has begun; before that it is, and nothing is published."""
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
    """Also where the database gives the numbers of removed rows out again."""
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


def test_events_are_paged(database: Database) -> None:
    """Behind the last one that was seen; only those of the job."""
    job_id, other = add(database), add(database)
    step(database, ledger.request_cancel, job_id, NOW, "test")
    with database.read() as connection:
        every = ledger.job_events_after(connection, job_id)
        assert [event.kind for event in every] == ["submitted", "cancel_requested", "state"]
        assert ledger.job_events_after(connection, job_id, every[0].id) == every[1:]
        assert ledger.job_events_after(connection, job_id, every[0].id, limit=1) == every[1:2]
        assert [event.job_id for event in ledger.job_events_after(connection, other)] == [other]


def test_visibility(database: Database) -> None:
    """A job is seen by whoever may see its root and that of its checkpoint."""
    checkpoint_id = add_checkpoint(database, "run/step-1", root="other")
    step(database, sync_roots, {"main": "/main", "other": "/other"})
    plain, across = add(database, root="main"), add(database, root="main", checkpoint_id=checkpoint_id)
    nowhere = add(database)
    with database.read() as connection:
        for visible, expected in (
            (None, {plain, across, nowhere}),
            (frozenset({"main"}), {plain}),
            (frozenset({"main", "other"}), {plain, across}),
            (frozenset[str](), set()),
        ):
            assert {job.id for job in ledger.list_jobs(connection, visible=visible)} == expected
            for job_id in (plain, across, nowhere):
                assert (ledger.find_job(connection, job_id, visible) is not None) == (job_id in expected)
        assert [job.id for job in ledger.list_jobs(connection, JobFilter(root="main"))] == [across, plain]
    with pytest.raises(NotFoundError, match="no root 'nowhere'"):
        add(database, root="nowhere")


@pytest.mark.parametrize("param", ["sources", "adapters"])
def test_who_sees_a_merge_sees_all_that_it_is_made_of(database: Database, param: str) -> None:
    """Its errors and its result name them: a job whose root and first checkpoint may be seen does not do."""
    here = add_checkpoint(database, "run/step-1", root="main")
    there = add_checkpoint(database, "run/step-1", root="other")
    step(database, sync_roots, {"main": "/main", "other": "/other"})
    given: dict[str, Any] = {"kind": "merge", "root": "main", "checkpoint_id": here}
    own = add(database, **given, params={"sources": [here], "adapters": []})
    across = add(database, **given, params={"sources": [here], "adapters": [], param: [here, there]})
    gone = add(database, **given, params={"sources": [here, 999], "adapters": []})
    with database.read() as connection:
        for visible, expected in (
            (frozenset({"main"}), {own, gone}),
            (frozenset({"main", "other"}), {own, across, gone}),
            (frozenset({"other"}), set()),
        ):
            assert {job.id for job in ledger.list_jobs(connection, visible=visible)} == expected
            assert (ledger.find_job(connection, across, visible) is not None) == (across in expected)


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
