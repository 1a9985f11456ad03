"""Large plans: others write while one is stored, and half of one is nobody's."""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

import pytest

from dcp.server.database.engine import Database
from dcp.server.jobs import ledger
from dcp.server.jobs.ledger import Claim, JobSpec, StaleFenceError, TaskSpec
from tests.support.databases import MakeDatabase
from tests.support.job_workers import cancel, job_settings, put, state_of, until, wait_for_end, working
from tests.support.written import written_by

NOW = 1000.0


@pytest.mark.parametrize(
    ("tasks", "payload_bytes"), [(64, 20_000), pytest.param(512, 200_000, marks=pytest.mark.exhaustive)]
)
def test_a_large_plan_is_stored_in_short_transactions(
    make_database: MakeDatabase, tmp_path: Path, tasks: int, payload_bytes: int
) -> None:
    """None has more than its share and one task; another process that writes has its turns in between."""
    url = make_database()
    database, other = Database(url), Database(url)  # each with a connection of its own that writes
    turns: list[int] = []  # how many of the plan's transactions were before each
    planned = threading.Event()

    def write() -> None:
        while not planned.is_set():
            other.transact(lambda c: ledger.submit(c, JobSpec(kind="x", params={}, created_by="b"), NOW))
            turns.append(found.transactions)
            time.sleep(0.01)

    job_id = put(database, tmp_path, *["write"] * tasks, payload_bytes=payload_bytes)
    settings = job_settings(database, tmp_path, concurrency=1)
    writing = threading.Thread(target=write)
    with working(settings) as worker, written_by(worker._database) as found:
        writing.start()
        try:
            until(lambda: state_of(database, job_id).state == "running", "planned")
        finally:
            planned.set()
            writing.join()
        cancel(database, job_id)
        assert wait_for_end(database, job_id).state == "cancelled"
    with database.read() as connection:
        numbers = [task.number for task in ledger.list_tasks(connection, job_id, limit=tasks + 1)]
    for one in (database, other):
        one.close()
    assert numbers == list(range(tasks))
    assert found.most < 200_000 + payload_bytes
    if tasks > 500:
        assert len({*turns}) > 10


def claimed(database: Database, now: float) -> Claim:
    """The next thing to do."""
    made = database.transact(lambda connection: ledger.claim(connection, "worker", now, 10.0))
    assert made is not None
    return made


def test_half_of_a_plan_is_nobodys(database: Database) -> None:
    """While it is written there are no tasks; of a worker that was killed none is left, and one that was only
    believed dead adds none; the next plan is whole."""
    spec = JobSpec(kind="verify", params={}, created_by="test")
    specs = [TaskSpec(payload={"n": n}, weight_bytes=1) for n in range(4)]
    job_id = database.transact(lambda connection: ledger.submit(connection, spec, NOW))
    first = claimed(database, NOW)
    database.transact(lambda connection: ledger.add_tasks(connection, first.held, specs[:3], 0))
    with database.read() as connection:
        assert ledger.list_tasks(connection, job_id) == []
        assert ledger.progress_of(connection, [job_id]) == {}
        assert not ledger.has_work(connection, NOW)
    assert database.transact(lambda connection: ledger.expire_leases(connection, NOW + 60)) == 1
    second = claimed(database, NOW + 600)
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
    event = events(database, job_id)[-1]
    assert (event["state"], event["tasks"]) == ("running", 4)


def test_tasks_that_were_written_unheard_are_written_again(database: Database) -> None:
    """The connection was lost when their transaction had ended: the plan is whole, each task there once."""
    spec = JobSpec(kind="verify", params={}, created_by="test")
    specs = [TaskSpec(payload={"n": n}, weight_bytes=1) for n in range(5)]
    job_id = database.transact(lambda connection: ledger.submit(connection, spec, NOW))
    held = claimed(database, NOW).held
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
    held = claimed(database, NOW).held
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


def events(database: Database, job_id: int) -> list[dict[str, object]]:
    """What happened to the job."""
    with database.read() as connection:
        return [dict(one.data) for one in ledger.job_events_after(connection, job_id)]
