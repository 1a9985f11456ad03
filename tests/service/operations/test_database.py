"""The database below the service. Internal: transactions and orders of commits that no request shows.

Moves to HTTP when the service is rebuilt, where it is seen there.
"""

from __future__ import annotations

import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Connection, insert, select, text
from sqlalchemy.exc import IntegrityError, InternalError, OperationalError

from dcp.server.catalog.events import emit, events_after, last_event_id, move_on, position
from dcp.server.database.engine import Database, DatabaseUnavailableError
from dcp.server.database.tables import checkpoint_names, consumers
from tests.support.databases import MakeDatabase, PostgresServer

pytestmark = pytest.mark.each_database  # their SQL differs


def names(database: Database) -> list[str]:
    """What is in the table that these tests write."""
    with database.read() as connection:
        return sorted(connection.execute(select(checkpoint_names.c.name)).scalars())


def add(connection: Connection, name: str) -> None:
    """Write one row."""
    connection.execute(insert(checkpoint_names).values(name=name))


def test_a_transaction_is_written_whole_or_not_at_all(database: Database) -> None:
    """What raises leaves nothing; the next one works."""
    with pytest.raises(ZeroDivisionError), database.write() as connection:
        add(connection, "a")
        raise ZeroDivisionError
    with database.write() as connection:
        add(connection, "b")
        add(connection, "c")
    assert names(database) == ["b", "c"]


def test_who_reads_cannot_write(database: Database) -> None:
    """A slip in a route that only reads is refused by the database."""
    with (
        pytest.raises((DatabaseUnavailableError, OperationalError, InternalError)),
        database.read() as connection,
    ):
        add(connection, "a")
    assert names(database) == []


def test_readers_do_not_wait_for_a_writer(database: Database) -> None:
    """While a transaction is open others read what was there before it."""
    with database.write() as connection:
        add(connection, "a")
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(names, database).result(timeout=60) == []
    assert names(database) == ["a"]


def test_a_file_that_is_gone_or_broken_is_unavailable(tmp_path: Path) -> None:
    """Removed below the service, or no database at all: said so, not a crash."""
    path = tmp_path / "a.sqlite"
    database = Database(f"sqlite:///{path}")
    with database.write() as connection:
        connection.execute(text("CREATE TABLE t (x)"))
    database.ping()
    path.unlink()
    with pytest.raises(DatabaseUnavailableError, match="removed"):
        database.ping()
    database.ping()  # a new one has been made, as at a first start
    database.close()
    (tmp_path / "b.sqlite").write_bytes(b"no database" * 1000)
    broken = Database(f"sqlite:///{tmp_path / 'b.sqlite'}")
    with pytest.raises(DatabaseUnavailableError, match="not a database"):
        broken.ping()
    broken.close()


def test_a_folder_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    """Made later, the same object works."""
    database = Database(f"sqlite:///{tmp_path / 'later' / 'a.sqlite'}")
    with pytest.raises(DatabaseUnavailableError):
        database.ping()
    (tmp_path / "later").mkdir()
    database.ping()
    database.close()


def test_a_server_that_only_reads_is_unavailable_for_writes(postgres_server: PostgresServer) -> None:
    """As after a failover to a replica: that is no error of the program."""
    name = postgres_server.create_migrated()
    database = Database(postgres_server.url(name))
    with pytest.raises(DatabaseUnavailableError, match="read-only"), database.write() as connection:
        connection.execute(text("SET TRANSACTION READ ONLY"))
        add(connection, "a")
    assert names(database) == []
    database.close()
    postgres_server.drop(name)


def test_a_database_without_an_encoding_gives_text(postgres_server: PostgresServer) -> None:
    """As `initdb` makes them where there is no locale."""
    name = postgres_server.create(options="ENCODING 'SQL_ASCII' LOCALE 'C'")
    database = Database(postgres_server.url(name))
    with database.read() as connection:
        assert connection.execute(text("SELECT 'run-ä'")).scalar_one() == "run-ä"
    database.close()
    postgres_server.drop(name)


def test_errors_do_not_tell_values(database: Database) -> None:
    """Neither a refused row nor an unavailable database puts parameters into its message."""
    with pytest.raises(IntegrityError) as refused, database.write() as connection:
        add(connection, "a")
        connection.execute(insert(consumers).values(name="whsec_SECRET", event_id=None))
    told = "".join(traceback.format_exception(refused.value))
    assert "event_id" in told
    assert "whsec_SECRET" not in told.replace('"whsec_SECRET"', "")  # this file's own line


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "mysql://a/b", "oracle://x"])
def test_other_databases_are_refused(url: str) -> None:
    """At once, and with what to use instead."""
    with pytest.raises(ValueError, match="database: "):
        Database(url)


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
