"""Several processes scan, register and label at once: nothing is lost, doubled, or told out of order."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Connection, func, select

from dcp.server.catalog.checkpoints import CheckpointFacts, upsert_checkpoints
from dcp.server.catalog.contents.structures import StructureFacts, StructureTensor
from dcp.server.catalog.events import emit, events_after, last_event_id, move_on, position
from dcp.server.catalog.labelling.labels import Change, add_tags
from dcp.server.catalog.roots import sync_roots
from dcp.server.catalog.runs import RunFilter, list_runs
from dcp.server.database.engine import Database
from dcp.server.database.tables import checkpoints, structures, tags
from tests.support.databases import MakeDatabase

pytestmark = pytest.mark.each_database  # their SQL differs

MODEL = StructureFacts.of([StructureTensor("w", "tensor", "float32", (2,), 8)])


def found(number: int) -> CheckpointFacts:
    """One of 60 checkpoints in three runs."""
    return CheckpointFacts(
        root="main",
        key=f"run-{number % 3}/step-{number}",
        format="dcp",
        observed_seconds=1.0,
        step=number,
        save_id=f"{number}",
        bytes=10,
        structure=MODEL,
    )


def test_scanners_that_find_the_same_at_once_write_it_once(make_database: MakeDatabase) -> None:
    """Four that know nothing of each other, in different orders: each row, event and sum once."""
    url = make_database()
    databases = [Database(url) for _ in range(4)]
    with databases[0].write() as connection:
        sync_roots(connection, {"main": "./main"})
    together = threading.Barrier(4)

    def scan(which: int) -> int:
        together.wait(60)
        new = 0
        order = range(60) if which % 2 else range(59, -1, -1)
        for start in range(0, 60, 15):
            batch = [found(number) for number in list(order)[start : start + 15]]
            done = databases[which].transact(
                lambda connection, batch=batch: upsert_checkpoints(connection, batch)  # type: ignore[misc]
            )
            new += sum(one.is_new for one in done)
        return new

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(scan, range(4))) == 60
    with databases[0].read() as connection:
        assert connection.execute(select(func.count()).select_from(checkpoints)).scalar_one() == 60
        assert connection.execute(select(func.count()).select_from(structures)).scalar_one() == 1
        events = events_after(connection, 0, 1000)
        runs = list_runs(connection, RunFilter()).runs
    assert len(events) == len({event.checkpoint_id for event in events}) == 60
    assert [(run.checkpoint_count, run.bytes) for run in runs] == [(20, 200)] * 3
    for database in databases:
        database.close()


def test_labels_of_many_at_once_are_all_there(make_database: MakeDatabase) -> None:
    """Each has a version of its own: no change is written over another."""
    database = Database(make_database(), pool_size=8)
    with database.write() as connection:
        sync_roots(connection, {"main": "./main"})
        upsert_checkpoints(connection, [found(0)])

    def tag(number: int) -> int:
        def act(connection: Connection) -> int:
            return add_tags(connection, 1, [f"t{number}"], Change(actor="a")).version

        return database.transact(act)

    with ThreadPoolExecutor(6) as pool:
        versions = sorted(pool.map(tag, range(18)))
    assert versions == list(range(2, 20))
    with database.read() as connection:
        assert connection.execute(select(func.count()).select_from(tags)).scalar_one() == 18
    database.close()


def test_who_reads_events_on_and_on_misses_none(make_database: MakeDatabase) -> None:
    """Writers that take their time to commit: who goes on after the last it saw gets all of them."""
    database = Database(make_database(), pool_size=8)
    done = threading.Event()
    seen: list[int] = []

    def read_on() -> None:
        last = 0
        while True:
            is_over = done.is_set()
            with database.read() as connection:
                new = events_after(connection, last, 7)
            seen.extend(event.data["number"] for event in new)
            last = new[-1].id if new else last
            if is_over and not new:
                return

    def write(number: int) -> None:
        def act(connection: Connection) -> None:
            emit(connection, "checkpoint.committed", data={"number": number})
            threading.Event().wait(0.002 * (number % 5))

        database.transact(act)

    reader = threading.Thread(target=read_on)
    reader.start()
    with ThreadPoolExecutor(5) as pool:
        list(pool.map(write, range(60)))
    done.set()
    reader.join(120)
    assert sorted(seen) == list(range(60))
    with database.write() as connection:
        assert position(connection, "webhooks") == 0
        move_on(connection, "webhooks", last_event_id(connection))
        move_on(connection, "webhooks", last_event_id(connection))
        assert events_after(connection, position(connection, "webhooks")) == []
        emit(connection, "checkpoint.deleted")
        kinds = {"checkpoint.deleted"}
        assert [event.kind for event in events_after(connection, 0, kinds=kinds)] == ["checkpoint.deleted"]
    database.close()
