"""Database access in short transactions, on SQLite with a single writer or on PostgreSQL.

SQLite runs in WAL mode: readers see a snapshot and never wait. Writers of this process take turns with a
lock, writers of other processes with the lock of SQLite. A write transaction starts with ``BEGIN
IMMEDIATE``, so a conflict cannot occur halfway.
"""

from __future__ import annotations

import json
import random
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from sqlalchemy import URL, Connection, Engine, FromClause, Table, create_engine, event, make_url, text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.sqlite.base import SQLiteCompiler
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

T = TypeVar("T")
Dialect = Literal["sqlite", "postgresql"]

_BUSY_SECONDS: Final = 5.0
_PATIENCE_SECONDS: Final = 10.0
_ATTEMPTS: Final = 5
_PAUSE_SECONDS: Final = 0.05
_CACHE_KIB: Final = 4_096  # for each connection; the page cache of the system holds the rest
_WAL_LIMIT_BYTES: Final = 64 << 20
_REPEATABLE: Final = {"40001", "40P01"}
"""SQLSTATEs of PostgreSQL that permit a repetition: serialization failure, deadlock."""

_AWAY: Final = ("08", "53", "57", "25006", "55P03")
"""Prefixes of SQLSTATEs of PostgreSQL for an unavailable server: connection, resources, shutdown, timeouts,
read-only after a failover, unreleased locks."""

_AWAY_SQLITE: Final = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
}

_POSTGRES: Final[Mapping[str, Any]] = {
    "connect_timeout": 5,
    "application_name": "dcphub",
    # without an encoding on both sides, text would be bytes (databases of servers without a locale)
    "client_encoding": "utf8",
    # detect a silent server after 10 seconds instead of two hours
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "options": "-c statement_timeout=60s -c lock_timeout=10s -c idle_in_transaction_session_timeout=120s",
}
"""Connection options of libpq; options in the URL also apply."""


class Encoded(str):
    """JSON for a JSON column, encoded before the transaction begins to keep the transaction short."""

    __slots__ = ()


class DatabaseUnavailableError(RuntimeError):
    """The database is unreachable, full, or was locked for too long; `__cause__` has the cause."""


class Database:
    """Database at ``url``: ``sqlite:///PATH`` or ``postgresql+psycopg://...``. Creating the object opens
    nothing.

    Thread-safe. Failures of connection or disk raise `DatabaseUnavailableError`; the next call tries again.
    Raises ValueError for other kinds of databases.
    """

    def __init__(self, url: str, *, pool_size: int = 8) -> None:
        try:
            self.url: URL = make_url(url)
        except ArgumentError:
            raise ValueError("database: not a URL such as sqlite:///catalog.sqlite") from None
        self._file: tuple[int, int] | None = None
        backend = self.url.get_backend_name()
        if backend == "sqlite":
            if not self.url.database or self.url.database == ":memory:":
                raise ValueError("database: SQLite needs a file, as in sqlite:///catalog.sqlite")
            self.dialect: Dialect = "sqlite"
            self._turns: threading.Lock | None = threading.Lock()
            self.reader = _sqlite(self.url, "BEGIN", pool_size, query_only=True)
            self.writer = _sqlite(self.url, "BEGIN IMMEDIATE", 1, query_only=False)
        elif backend == "postgresql":
            self.dialect = "postgresql"
            self._turns = None
            self.writer = create_engine(
                self.url.set(drivername="postgresql+psycopg"),
                pool_size=pool_size,
                max_overflow=pool_size,
                pool_timeout=_BUSY_SECONDS,
                pool_pre_ping=True,
                hide_parameters=True,
                json_serializer=_encode,
                connect_args={name: value for name, value in _POSTGRES.items() if name not in self.url.query},
            )
            self.reader = self.writer.execution_options(postgresql_readonly=True)
        else:
            raise ValueError(f"database: {backend} is not supported; use sqlite:/// or postgresql://")

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Yield a read-only connection: with one snapshot on SQLite, one snapshot per statement on
        PostgreSQL."""
        with _translated(self), self.reader.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Yield a connection with one transaction: committed at the end, rolled back on an exception.

        Keep the block short and free of other I/O: on SQLite all other writers wait.
        """
        with _translated(self), self._turn(), self.writer.begin() as connection:
            yield connection

    def transact(self, act: Callable[[Connection], T]) -> T:
        """Call ``act`` in a `write` transaction, and repeat it on conflicts; ``act`` must tolerate a
        repetition.

        A locked database is not retried, since waiting threads cannot answer requests.
        """
        last_start = time.monotonic() + _PATIENCE_SECONDS
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with self.write() as connection:
                    return act(connection)
            except DatabaseUnavailableError as error:
                is_last = attempt == _ATTEMPTS or time.monotonic() > last_start
                if is_last or not _is_repeatable(error.__cause__):
                    raise
                time.sleep(_PAUSE_SECONDS * attempt * (0.5 + random.random()))
        raise AssertionError("unreachable")

    def ping(self) -> None:
        """Read and write once. Raises `DatabaseUnavailableError` on a failure."""
        if self.dialect == "sqlite":
            self._check_file()
        with self.read() as connection:
            connection.execute(text("SELECT 1"))
        with self.write() as connection:
            if self.dialect == "sqlite":
                version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
                connection.exec_driver_sql(f"PRAGMA user_version = {int(version)}")
            else:
                connection.execute(text("SELECT txid_current()"))  # fails on a replica

    def _check_file(self) -> None:
        # Writing to a removed or replaced file would raise no error.
        try:
            status = Path(self.url.database or "").stat()
        except OSError:
            status = None
        found = None if status is None else (status.st_dev, status.st_ino)
        before, self._file = self._file, found
        if before is not None and found != before:
            self.close()
            raise DatabaseUnavailableError("sqlite: the database file was removed or replaced")

    def close(self) -> None:
        """Close all connections; a later call opens new ones."""
        self.writer.dispose()
        self.reader.dispose()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if self._turns is None:
            yield
            return
        if not self._turns.acquire(timeout=2 * _BUSY_SECONDS):
            raise DatabaseUnavailableError("sqlite: timeout while another thread holds the write lock")
        try:
            yield
        finally:
            self._turns.release()


class _HintingCompiler(SQLiteCompiler):
    """Compiler that appends `Select.with_hint` to the table name: ``INDEXED BY ...``, ``NOT INDEXED``."""

    def get_from_hint_text(self, table: FromClause, text: str | None) -> str | None:
        return text


def _sqlite(url: URL, begin: str, pool_size: int, *, query_only: bool) -> Engine:
    engine = create_engine(
        url,
        pool_size=pool_size,
        max_overflow=pool_size if query_only else 0,
        pool_timeout=_BUSY_SECONDS,
        hide_parameters=True,
        json_serializer=_encode,
        connect_args={"timeout": _BUSY_SECONDS, "check_same_thread": False},
    )

    engine.dialect.statement_compiler = _HintingCompiler

    @event.listens_for(engine, "connect")
    def _(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None  # `write` and `read` begin transactions explicitly
        cursor = connection.cursor()
        _log_ahead(cursor)
        for pragma in (
            "synchronous = NORMAL",
            "foreign_keys = ON",
            f"journal_size_limit = {_WAL_LIMIT_BYTES}",
            f"cache_size = -{_CACHE_KIB}",
            "temp_store = MEMORY",
            f"query_only = {'ON' if query_only else 'OFF'}",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _(connection: Connection) -> None:
        connection.exec_driver_sql(begin)

    return engine


def _log_ahead(cursor: sqlite3.Cursor) -> None:
    """Switch to WAL mode, waiting for other processes: SQLite does not wait during the creation of a file."""
    give_up = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            cursor.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
        time.sleep(_PAUSE_SECONDS * random.random())


def _encode(value: Any) -> str:
    return str(value) if isinstance(value, Encoded) else encode_json(value)


def encode_json(value: Any, separators: tuple[str, str] | None = None) -> str:
    """Encode JSON, escaping only invalid text: PostgreSQL without an encoding accepts no other escapes."""
    text = json.dumps(value, ensure_ascii=False, separators=separators)
    try:
        text.encode()
    except UnicodeEncodeError:  # for example a lone surrogate
        return json.dumps(value, separators=separators)
    return text


@contextmanager
def _translated(database: Database) -> Iterator[None]:
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeoutError) as error:
        raise DatabaseUnavailableError(f"{database.dialect}: {_first_line(error)}") from error
    except DBAPIError as error:
        if error.connection_invalidated or _is_repeatable(error) or _is_away(error.orig):
            raise DatabaseUnavailableError(f"{database.dialect}: {_first_line(error)}") from error
        _hide_values(error)
        raise


def _hide_values(error: DBAPIError) -> None:
    # Later lines may contain the refused row, with secrets.
    if error.orig is not None and error.orig.args:
        error.orig.args = (_first_line(error),)
    error.args = tuple(str(arg).partition("\n")[0] for arg in error.args)


def _first_line(error: SQLAlchemyError) -> str:
    # Omit the statement and parameters, which may contain secrets.
    cause = error.orig if isinstance(error, DBAPIError) else error
    return str(cause).strip().partition("\n")[0]


def _is_away(error: BaseException | None) -> bool:
    if isinstance(error, sqlite3.DatabaseError):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in _AWAY_SQLITE
    return str(getattr(error, "sqlstate", None) or "").startswith(_AWAY)


def _is_repeatable(error: BaseException | None) -> bool:
    if not isinstance(error, DBAPIError):
        return False
    if isinstance(error.orig, sqlite3.OperationalError):
        return error.orig.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return getattr(error.orig, "sqlstate", None) in _REPEATABLE


_NAMED: Final = 0x64_63_70  # "dcp": class of the advisory locks below


def dialect_insert(connection: Connection, table: Table) -> sqlite.Insert | postgresql.Insert:
    """Return an INSERT that supports ``ON CONFLICT``."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def insert_missing(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows whose primary keys do not exist yet."""
    if rows:
        connection.execute(dialect_insert(connection, table).on_conflict_do_nothing(), rows)


def insert_or_update(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, or update existing rows with the same primary key."""
    if not rows:
        return
    statement = dialect_insert(connection, table)
    keys = [column.name for column in table.primary_key]
    changed = {name: statement.excluded[name] for name in rows[0] if name not in keys}
    connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=changed), rows)


def lock_names(connection: Connection, names: Iterable[str]) -> None:
    """Wait for locks with these names, and hold them until the transaction ends.

    SQLite has one writer and needs no lock. Two names may share a lock, which delays but never fails.
    """
    if connection.dialect.name == "postgresql":
        numbers = sorted({zlib.crc32(name.encode()) - (1 << 31) for name in names})
        for number in numbers:
            connection.execute(
                text("SELECT pg_advisory_xact_lock(:of, :number)"), {"of": _NAMED, "number": number}
            )
