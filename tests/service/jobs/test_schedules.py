"""Periodic work, of one process at a time. Internal: intervals and leases under a clock of the test."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from dcp.server.automation.schedules import built_in_schedules
from dcp.server.database.documents import prepare_document, write_document
from dcp.server.database.engine import Database
from dcp.server.database.tables import document_parts, job_events, jobs, lineage, roots, schedules, tasks
from dcp.server.jobs.cleaning import forget_jobs, forget_scans
from dcp.server.jobs.ledger import JobSpec, list_jobs, submit
from dcp.server.jobs.schedules import PeriodicWork, ScheduleContext, Scheduler
from dcp.server.settings import RootSettings
from tests.support.catalog_rows import add_checkpoint
from tests.support.job_workers import job_settings, put, until, wait_for_end, working


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        """Now."""
        return self.seconds


class Acting:
    """Counts how often it is called; waits if it is told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.count = 0
        self.now = 0
        self.most = 0
        self.go = threading.Event()
        self.go.set()
        self._error = error
        self._lock = threading.Lock()

    def __call__(self, context: ScheduleContext) -> None:
        """What a schedule does."""
        with self._lock:
            self.count += 1
            self.now += 1
            self.most = max(self.most, self.now)
        assert self.go.wait(60)
        with self._lock:
            self.now -= 1
        if self._error is not None:
            raise self._error


def scheduler(database: Database, folder: Path, clock: Clock, owner: str, *made: PeriodicWork) -> Scheduler:
    """One process's."""
    return Scheduler(job_settings(database, folder, lease_seconds=30.0), database, made, owner, clock)


def row(database: Database, name: str) -> Any:
    """As it is kept."""
    with database.read() as connection:
        return connection.execute(select(schedules).where(schedules.c.name == name)).one()


def is_free(database: Database, name: str) -> bool:
    """Whether nobody is at it."""
    return row(database, name).lease_owner is None


def test_it_is_done_again_after_its_interval(database: Database, tmp_path: Path) -> None:
    """Counted from its end; what fails is done again as well."""
    clock, acting, failing = Clock(), Acting(), Acting(ValueError("of a test"))
    one = scheduler(
        database,
        tmp_path,
        clock,
        "one",
        PeriodicWork("good", 10.0, acting),
        PeriodicWork("bad", 10.0, failing),
    )
    for expected in (1, 2, 3):
        one.tick()
        until(lambda n=expected: (acting.count, failing.count) == (n, n), "both")  # type: ignore[misc]
        until(lambda: is_free(database, "good") and is_free(database, "bad"), "their ends")
        clock.seconds += 9.0
        one.tick()
        clock.seconds += 2.0
    one.close()
    assert (acting.count, failing.count) == (3, 3)


def test_one_process_at_a_time(database: Database, tmp_path: Path) -> None:
    """Whoever is first; the other one finds it done."""
    clock, acting = Clock(), Acting()
    acting.go.clear()
    both = [scheduler(database, tmp_path, clock, n, PeriodicWork("s", 10.0, acting)) for n in ("one", "two")]
    for one in both * 2:
        one.tick()
    until(lambda: acting.count == 1, "the first one")
    clock.seconds += 25.0
    both[0].tick()  # its lease is renewed
    clock.seconds += 25.0
    both[1].tick()
    acting.go.set()
    until(lambda: is_free(database, "s"), "its end")
    for one in both:
        one.tick()
        one.close()
    assert (acting.count, acting.most) == (1, 1)


def test_another_one_takes_over_from_the_dead(database: Database, tmp_path: Path) -> None:
    """Once the lease is over; until then it may only be slow."""
    clock, acting = Clock(), Acting()
    with database.write() as connection:
        dead = {"name": "s", "due_seconds": 0.0, "lease_owner": "dead", "lease_until_seconds": 1020.0}
        connection.execute(insert(schedules).values(**dead))
    one = scheduler(database, tmp_path, clock, "one", PeriodicWork("s", 10.0, acting))
    one.tick()
    assert acting.count == 0 and row(database, "s").lease_owner == "dead"
    clock.seconds += 30.0
    one.tick()
    until(lambda: acting.count == 1 and is_free(database, "s"), "its turn")
    one.close()


def test_what_is_not_needed_is_not_written(database: Database, tmp_path: Path) -> None:
    """A service with nothing to do leaves its database alone."""
    clock, acting, needed = Clock(), Acting(), threading.Event()

    def is_needed(connection: Connection, now: float) -> bool:
        assert connection.execute(select(1)).scalar_one() == 1 and now >= 1000.0
        return needed.is_set()

    one = scheduler(database, tmp_path, clock, "one", PeriodicWork("s", 10.0, acting, is_needed))
    one.tick()
    with database.read() as connection:
        assert connection.execute(select(func.count()).select_from(schedules)).scalar_one() == 0
    needed.set()
    one.tick()
    until(lambda: acting.count == 1, "its turn")
    one.close()


def test_a_worker_does_periodic_work_beside_its_jobs(database: Database, tmp_path: Path) -> None:
    """Neither waits for the other."""
    acting = Acting()
    acting.go.clear()
    job_id = put(database, tmp_path, "write")
    with working(job_settings(database, tmp_path), schedules=[PeriodicWork("s", 0.01, acting)]):
        until(lambda: acting.count == 1, "the periodic work")
        assert wait_for_end(database, job_id).state == "succeeded"
        acting.go.set()
        until(lambda: acting.count > 3, "more of it")


def test_roots_are_scanned_as_often_as_they_say(database: Database, tmp_path: Path) -> None:
    """There is one scan of a root at a time; a root that says 0 is scanned on demand only."""
    places = {
        "main": RootSettings(url=str(tmp_path / "main"), scan_seconds=5.0),
        "still": RootSettings(url=str(tmp_path / "still"), scan_seconds=0.0),
    }
    settings = job_settings(database, tmp_path, roots=places)
    made = {schedule.name: schedule for schedule in built_in_schedules(settings)}
    scans = [name for name in made if name.startswith("scan:")]
    assert scans == ["scan:main"] and made["scan:main"].interval_seconds == 5.0
    assert set(made) - set(scans) == {"automation", "clean-up", "due", "webhooks"}
    assert made["automation"].interval_seconds == made["webhooks"].interval_seconds == settings.poll_seconds
    for _ in range(2):
        made["scan:main"].act(ScheduleContext(settings, database, time.time(), threading.Event()))
    with database.read() as connection:
        found = list_jobs(connection)
    assert [(job.kind, job.root, job.created_by) for job in found] == [("scan", "main", "system")]


def test_jobs_that_have_been_over_for_long_are_forgotten(database: Database, tmp_path: Path) -> None:
    """Not those that the catalog refers to, nor the newest, nor what has not ended."""
    parent, child = (add_checkpoint(database, f"run/step-{n}") for n in (1, 2))

    def add(kind: str, state: str, ended: float | None, created_by: str = "system") -> int:
        def act(connection: Connection) -> int:
            job_id = submit(connection, JobSpec(kind=kind, params={}, created_by=created_by), 0.0)
            connection.execute(
                update(jobs).where(jobs.c.id == job_id).values(state=state, finished_seconds=ended)
            )
            connection.execute(insert(tasks).values(job_id=job_id, number=0, state="succeeded", payload={}))
            return job_id

        return database.transact(act)

    add("verify", "succeeded", 10.0)
    referred = add("convert", "succeeded", 10.0)
    young, running = add("verify", "failed", 500.0), add("verify", "running", None)
    scans = [
        add("scan", "succeeded", 400.0),
        add("scan", "failed", 400.0),
        add("scan", "succeeded", 400.0, "key:a"),
    ]
    newest = add("verify", "cancelled", 10.0)
    link = {"child_id": child, "parent_id": parent, "kind": "converted_from", "created_seconds": 0.0}
    with database.write() as connection:
        connection.execute(insert(lineage).values(**link, job_id=referred))

    def left() -> set[int]:
        with database.read() as connection:
            return {job.id for job in list_jobs(connection)}

    assert database.transact(lambda connection: forget_jobs(connection, 100.0)) == 2
    assert database.transact(lambda connection: forget_jobs(connection, 100.0)) == 0
    assert left() == {referred, young, running, *scans, newest}
    assert database.transact(lambda connection: forget_scans(connection, 450.0)) == 1
    assert left() == {referred, young, running, *scans[1:], newest}
    with database.read() as connection:
        for table in (tasks, job_events):
            of = set(connection.execute(select(table.c.job_id)).scalars())
            assert of == {young, running, *scans[1:], newest}
        assert connection.execute(select(func.count()).select_from(roots)).scalar_one() == 2


def test_documents_that_nothing_refers_to_are_removed(database: Database, tmp_path: Path) -> None:
    """By the clean-up, a day after it has seen that; a writer that was killed leaves nothing for longer."""
    settings, now = job_settings(database, tmp_path), 1_000_000.0
    (clean,) = (one for one in built_in_schedules(settings) if one.name == "clean-up")
    database.transact(lambda connection: write_document(connection, {"tensors": [1, 2]}))
    prepare_document(database, {"tensors": [3, 4]}, now=now)
    counts = []
    for seconds in (0.0, 86_000.0, 87_000.0):
        clean.act(ScheduleContext(settings, database, now + seconds, threading.Event()))
        with database.read() as connection:
            counts.append(connection.execute(select(func.count()).select_from(document_parts)).scalar_one())
    assert counts == [2, 2, 0]
