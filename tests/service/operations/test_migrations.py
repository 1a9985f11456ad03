"""Upgrades of the database. Internal: what an older version has left is rows, which only SQL can write."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import inspect, text
from sqlalchemy.exc import DBAPIError

from dcp.server.catalog.contents.verifications import get_statistics, statistics_tensors
from dcp.server.core.jobs.ledger import get_job, task_results
from dcp.server.database import migrations
from dcp.server.database.engine import Database, DatabaseUnavailableError
from dcp.server.database.tables import metadata

pytestmark = pytest.mark.each_database  # their SQL differs


def test_an_empty_database_gets_all_tables(empty_database: Database) -> None:
    """From nothing to the newest revision: every table, and nothing that differs from what we use."""
    assert migrations.current(empty_database) is None
    assert not migrations.is_current(empty_database)
    assert migrations.upgrade(empty_database) is None
    assert migrations.is_current(empty_database)
    with empty_database.read() as connection:
        names = set(inspect(connection).get_table_names())
    assert names == set(metadata.tables) | {"alembic_version"}
    assert migrations.check(empty_database) == []


def test_a_database_of_a_newer_version_is_left_alone(database: Database) -> None:
    """After a downgrade of the program: said so, and nothing is changed."""
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseUnavailableError, match="newer version: revision 9999"):
        migrations.upgrade(database)
    assert migrations.current(database) == "9999"


def test_a_migration_that_fails_leaves_nothing(empty_database: Database) -> None:
    """A table of ours is in the way: no other one is made, and without it all is well. One of another program
    stays as it is."""
    with empty_database.write() as connection:
        connection.execute(text("CREATE TABLE webhooks (x INTEGER)"))
        connection.execute(text("CREATE TABLE theirs (x JSONB)"))
    with pytest.raises((DBAPIError, DatabaseUnavailableError)):
        migrations.upgrade(empty_database)
    with empty_database.write() as connection:
        assert sorted(inspect(connection).get_table_names()) == ["theirs", "webhooks"]
        connection.execute(text("DROP TABLE webhooks"))
    assert migrations.upgrade(empty_database) is None
    assert migrations.is_current(empty_database)
    with empty_database.read() as connection:
        assert str(inspect(connection).get_columns("theirs")[0]["type"]) == "JSONB"


def test_large_results_become_documents(empty_database: Database) -> None:
    """From revision 0003: results of tasks and jobs, and statistics, are as before; what a job and the
    statistics that it computed have in common is there once."""
    tensors = [{"fqn": f"layers.{n}", "mean": n / 3} for n in range(250)]
    large = {"text": "ä" * 70_000, "tensors": tensors, "bytes_read": 7, "total": {"mean": 1.0}}
    small = {"count": 3}
    migrations.upgrade(empty_database, "0003")
    with empty_database.write() as connection:

        def put(into: str, **values: object) -> None:
            columns = {name: json.dumps(v) if isinstance(v, dict | list) else v for name, v in values.items()}
            names = ", ".join(columns)
            marks = ", ".join(f":{name}" for name in columns)
            connection.execute(text(f"INSERT INTO {into} ({names}) VALUES ({marks})"), columns)

        put("roots", id=1, name="main", url="/main", created_seconds=0)
        put("runs", id=1, root_id=1, key="r", created_seconds=0, updated_seconds=0)
        seconds = dict.fromkeys(("committed_seconds", "discovered_seconds", "updated_seconds"), 0)
        found = {"root_id": 1, "run_id": 1, "name": "a", "format": "dcp", "state": "committed"}
        for number in (1, 2):
            put("checkpoints", id=number, key=f"r/{number}", **found, **seconds)
        for number, short in ((1, {"bytes_read": 7}), (2, small)):
            job = {"kind": "stats", "state": "succeeded", "params": {}, "created_by": "me"}
            put("jobs", id=number, result=short, created_seconds=0, **job)
        put("job_results", job_id=1, result=large)
        for number, result in ((1, large), (2, small)):
            put("tasks", id=number, job_id=2, number=number, state="succeeded", payload={}, result=result)
        kept = {"bytes_read": 7, "total": {"mean": 1.0}, "tensor_count": 250}
        for number, job_id in ((1, 1), (2, None)):
            about = {"checkpoint_id": number, "job_id": job_id, "fingerprint": "f", "created_seconds": 0}
            put("checkpoint_statistics", result=kept, **about)
            for position in range(0, 250, 100):
                some = tensors[position : position + 100]
                put("checkpoint_statistics_parts", checkpoint_id=number, position=position, tensors=some)
    assert migrations.upgrade(empty_database) == "0003"
    with empty_database.read() as connection:
        assert [get_job(connection, number).result for number in (1, 2)] == [large, small]
        assert task_results(connection, 2) == (large, small)
        for number in (1, 2):
            of_all = get_statistics(connection, number)
            assert of_all is not None
            assert (of_all.tensor_count, of_all.result) == (250, {"bytes_read": 7, "total": {"mean": 1.0}})
            assert statistics_tensors(connection, number, 95, 205) == tensors[95:205]
            assert statistics_tensors(connection, number, 0, 999) == tensors
        of_first = text("SELECT document_id FROM checkpoint_statistics WHERE checkpoint_id = 1")
        assert connection.execute(of_first).scalar_one() == get_job(connection, 1).document_id
        assert connection.execute(text("SELECT count(*) FROM documents")).scalar_one() == 3
    assert migrations.check(empty_database) == []


def test_processes_that_start_at_once_migrate_once(empty_database: Database) -> None:
    """Several upgrades at a time: one does it, and the others find it done."""
    others = [Database(empty_database.url.render_as_string(hide_password=False)) for _ in range(3)]
    with ThreadPoolExecutor(4) as pool:
        before = list(pool.map(migrations.upgrade, [empty_database, *others]))
    for other in others:
        other.close()
    assert sorted(before, key=str) == [migrations.head()] * 3 + [None]
    assert migrations.check(empty_database) == []
