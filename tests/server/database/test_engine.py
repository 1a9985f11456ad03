"""Reading, writing, waiting for others, and a database that is away, full, locked or broken."""

from __future__ import annotations

import resource
import sqlite3
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from sqlalchemy import Connection, insert, select, text
from sqlalchemy.exc import IntegrityError, InternalError, OperationalError

from dcp.server.database import engine
from dcp.server.database.engine import Database, DatabaseUnavailableError
from dcp.server.database.tables import checkpoint_names, consumers
from tests.support.databases import PostgresServer
from tests.support.outages import StoppablePostgres

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


def test_many_threads_write_and_read_at_once(database: Database) -> None:
    """Counting up in eight threads, while others read: nothing is lost, and nobody fails."""
    with database.write() as connection:
        connection.execute(insert(consumers).values(name="n", event_id=0))

    def count_up(_: int) -> None:
        def act(connection: Connection) -> None:
            query = select(consumers.c.event_id).with_for_update()
            number = connection.execute(query).scalar_one()
            connection.execute(consumers.update().values(event_id=number + 1))

        database.transact(act)

    def look(_: int) -> int:
        with database.read() as connection:
            return int(connection.execute(select(consumers.c.event_id)).scalar_one())

    with ThreadPoolExecutor(8) as pool:
        written = pool.map(count_up, range(80))
        seen = list(pool.map(look, range(80)))
        list(written)
    assert look(0) == 80
    assert all(0 <= number <= 80 for number in seen)


def test_readers_do_not_wait_for_a_writer(database: Database) -> None:
    """While a transaction is open others read what was there before it."""
    with database.write() as connection:
        add(connection, "a")
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(names, database).result(timeout=60) == []
    assert names(database) == ["a"]


def test_a_locked_database_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process holds the lock: unavailable after a time; it lets go: all is well."""
    monkeypatch.setattr(engine, "_BUSY_SECONDS", 0.2)
    monkeypatch.setattr(engine, "_PATIENCE_SECONDS", 0.3)
    database = Database(f"sqlite:///{tmp_path / 'a.sqlite'}")
    with database.write() as connection:
        connection.execute(text("CREATE TABLE t (x)"))
    with closing(sqlite3.connect(tmp_path / "a.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        tries: list[float] = []

        def act(connection: Connection) -> None:
            connection.execute(text("INSERT INTO t VALUES (1)"))

        for _ in range(2):
            start = time.monotonic()
            with pytest.raises(DatabaseUnavailableError, match="locked"):
                database.transact(act)
            tries.append(time.monotonic() - start)
        with pytest.raises(DatabaseUnavailableError):
            database.ping()
        other.execute("ROLLBACK")
    assert max(tries) < 30  # five full waits and more if each were repeated on a real one
    database.transact(act)
    database.ping()
    database.close()


def test_waiting_for_a_thread_that_writes_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that does not end its transaction does not hold up all others for ever."""
    monkeypatch.setattr(engine, "_BUSY_SECONDS", 0.05)
    database = Database(f"sqlite:///{tmp_path / 'a.sqlite'}")
    begun, end = threading.Event(), threading.Event()

    def hold() -> None:
        with database.write():
            begun.set()
            end.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert begun.wait(60)
    with pytest.raises(DatabaseUnavailableError, match="another thread"), database.write():
        pass
    end.set()
    thread.join(60)
    with database.write():
        pass
    database.close()


def test_who_opens_a_new_file_as_another_does_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service and its worker that begin at once: SQLite itself says "locked" without waiting."""
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: other.execute("COMMIT"))
        monkeypatch.setattr(engine, "time", clock)
        database = Database(f"sqlite:///{path}")
        with database.read() as connection:
            assert connection.execute(text("SELECT 1")).scalar_one() == 1
        database.close()
        assert not other.in_transaction


def test_a_full_disk_is_seen_by_ping_and_passes(tmp_path: Path) -> None:
    """No file may grow: writes are unavailable and so says ping; then they may, and all is well again."""
    database = Database(f"sqlite:///{tmp_path / 'a.sqlite'}")
    with database.write() as connection:
        connection.execute(text("CREATE TABLE t (x)"))
        connection.execute(text("INSERT INTO t VALUES (zeroblob(100000))"))
    database.ping()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(DatabaseUnavailableError):
            database.ping()
        with pytest.raises(DatabaseUnavailableError), database.write() as connection:
            connection.execute(text("INSERT INTO t VALUES (zeroblob(100000))"))
        with database.read() as connection:
            assert connection.execute(text("SELECT count(*) FROM t")).scalar_one() == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    database.ping()
    database.close()


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


def test_a_server_that_goes_away_and_comes_back() -> None:
    """PostgreSQL stopped: unavailable, by connections that were open and by new ones; back: all is well."""
    server = StoppablePostgres()
    with server.program:
        database = Database(server.url(server.create_migrated()))
        database.transact(lambda connection: add(connection, "a"))
        server.program.stop()
        for _ in range(2):
            with pytest.raises(DatabaseUnavailableError):
                database.transact(lambda connection: add(connection, "b"))
            with pytest.raises(DatabaseUnavailableError):
                database.ping()
        server.program.start()
        database.ping()
        database.transact(lambda connection: add(connection, "c"))
        assert names(database) == ["a", "c"]
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
