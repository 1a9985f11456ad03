"""Databases of the service's tests: SQLite, and a real PostgreSQL server.

Each database is a copy of a migrated template, which is faster than a migration.
"""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.util import LRUCache

from dcp.server.database.engine import Database
from dcp.server.database.migrations import upgrade
from dcp.server.features import features
from tests.support.shared_servers import shared_server

__all__ = [
    "MakeDatabase",
    "PostgresServer",
    "database",
    "empty_database",
    "make_database",
    "migrated_sqlite",
    "postgres_server",
    "share_statements",
]

_STATEMENTS: Final = 1_000
_TEMPLATE: Final = "dcp_template"

MakeDatabase = Callable[[], str]
"""Creates a migrated database and returns its URL."""


class PostgresServer:
    """Databases of the PostgreSQL server at ``url``; one connection creates and drops all of them."""

    def __init__(self, url: str, *, has_template: bool = False) -> None:
        self._url = make_url(url).set(drivername="postgresql+psycopg")
        self._has_template = has_template
        self._engine = create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT", pool_pre_ping=True)

    def url(self, name: str) -> str:
        """Return the URL of the database ``name``."""
        return self._url.set(database=name).render_as_string(hide_password=False)

    def create(self, *, template: str = "template0", options: str = "") -> str:
        """Create a database and return its name."""
        name = f"test_{uuid.uuid4().hex}"
        self._execute(f'CREATE DATABASE "{name}" TEMPLATE {template} STRATEGY file_copy {options}')
        return name

    def create_migrated(self) -> str:
        """Create a database with all tables and return its name."""
        if not self._has_template:
            self.make_template()
        return self.create(template=_TEMPLATE)

    def make_template(self) -> None:
        """Migrate the template of the other databases."""
        self._execute(f"CREATE DATABASE {_TEMPLATE} TEMPLATE template0")
        features()  # features declare tables of their own
        database = Database(self.url(_TEMPLATE))
        upgrade(database)
        database.close()
        self._has_template = True

    def drop(self, name: str) -> None:
        """Drop a database, even with open connections."""
        self._execute(f'DROP DATABASE "{name}" WITH (FORCE)')

    def close(self) -> None:
        """Disconnect."""
        self._engine.dispose()

    def _execute(self, statement: str) -> None:
        with self._engine.connect() as connection:
            connection.execute(text(statement))


def share_statements() -> None:
    """Share compiled statements between all engines; compiling for each takes a tenth of the tests' time."""
    compiled: Any = LRUCache(_STATEMENTS)

    @event.listens_for(Engine, "engine_connect")
    def _(connection: Connection) -> None:
        connection.engine._compiled_cache = compiled

    def likeness(dialect: Any) -> object:
        return type(dialect), dialect.statement_compiler, dialect._json_serializer

    for dialect in (PGDialect_psycopg, SQLiteDialect_pysqlite):  # the cache keys contain the dialect
        dialect.__hash__ = lambda one: hash(likeness(one))  # type: ignore[assignment, method-assign]
        dialect.__eq__ = lambda one, other: likeness(one) == likeness(other)  # type: ignore[method-assign]


@cache
def migrated_sqlite() -> bytes:
    """Return the content of a migrated database file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "catalog.sqlite"
        features()  # features declare tables of their own
        database = Database(f"sqlite:///{path}")
        upgrade(database)
        database.close()  # closing the last connection writes the log into the file
        return path.read_bytes()


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """Provide one PostgreSQL server for all processes of the run, started by the first test that needs it."""

    def prepare(address: dict[str, Any]) -> None:
        with closing(PostgresServer(address["url"])) as server:
            server.make_template()

    address = shared_server("postgres", tmp_path_factory, prepare)
    with closing(PostgresServer(address["url"], has_template=True)) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def make_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeDatabase]:
    """Provide a function that creates migrated databases, on SQLite and on PostgreSQL."""
    made: list[str] = []

    def on_sqlite() -> str:
        path = tmp_path / f"catalog-{len(made)}.sqlite"
        path.write_bytes(migrated_sqlite())
        made.append(str(path))
        return f"sqlite:///{path}"

    def on_postgres() -> str:
        made.append(server.create_migrated())
        return server.url(made[-1])

    if request.param == "sqlite":
        yield on_sqlite
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    yield on_postgres
    for name in made:
        server.drop(name)


@pytest.fixture
def database(make_database: MakeDatabase) -> Iterator[Database]:
    """Provide a migrated database, on SQLite and on PostgreSQL."""
    opened = Database(make_database())
    yield opened
    opened.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """Provide a database without tables, on SQLite and on PostgreSQL."""
    if request.param == "sqlite":
        opened = Database(f"sqlite:///{tmp_path / 'empty.sqlite'}")
        yield opened
        opened.close()
        return
    server: PostgresServer = request.getfixturevalue("postgres_server")
    name = server.create()
    opened = Database(server.url(name))
    yield opened
    opened.close()
    server.drop(name)
