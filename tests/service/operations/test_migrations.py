"""Migrations of the database. Internal: databases of other versions are made with SQL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Column, Integer, Table, inspect, text
from sqlalchemy.exc import DBAPIError

from dcp.server.catalog.runs import sync_roots
from dcp.server.database import migrations
from dcp.server.database.engine import Database, DatabaseUnavailableError
from dcp.server.database.tables import metadata
from tests.support.app import running_app
from tests.support.command import run as command

pytestmark = pytest.mark.each_database  # their SQL differs


def differences(database: Database) -> list[Any]:
    """Return the differences between the database and the tables of this version."""
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return [*compare_metadata(context, metadata)]


def test_an_empty_database_gets_all_tables(empty_database: Database) -> None:
    """An upgrade of an empty database creates all tables, without a difference to the declared tables."""
    assert migrations.current(empty_database) is None
    assert migrations.is_pending(empty_database)
    assert migrations.upgrade(empty_database) is None
    assert migrations.current(empty_database) == migrations.REVISION
    assert not migrations.is_pending(empty_database)
    with empty_database.read() as connection:
        names = set(inspect(connection).get_table_names())
    assert names == set(metadata.tables) | {"alembic_version"}
    assert differences(empty_database) == []


def test_tables_of_a_new_feature_are_created(database: Database, tmp_path: Path) -> None:
    """Tables of a new feature are created in an up-to-date database."""
    table = Table("brought_later", metadata, Column("id", Integer, primary_key=True))
    try:
        assert migrations.is_pending(database)
        assert migrations.upgrade(database) == migrations.REVISION
        assert not migrations.is_pending(database) and differences(database) == []
    finally:
        metadata.remove(table)


def test_a_database_of_the_first_version_is_upgraded(database: Database) -> None:
    """A database of revision 0.1.0 keeps its rows, and a second upgrade has nothing to do."""
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0.1.0'"))
        connection.execute(text("ALTER TABLE retention_policies DROP COLUMN maker"))
        sync_roots(connection, {"kept": "/runs"}, now=1.0)
    assert migrations.is_pending(database)
    assert migrations.upgrade(database) == "0.1.0"
    assert migrations.current(database) == migrations.REVISION == "0.2.0"
    assert not migrations.is_pending(database) and differences(database) == []
    with database.read() as connection:
        assert connection.execute(text("SELECT name FROM roots")).scalars().all() == ["kept"]


def test_a_database_of_an_unknown_version_is_refused(database: Database, tmp_path: Path) -> None:
    """An unknown revision is refused by readiness and commands, with the remedy; nothing changes."""
    with database.write() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0011'"))
    with pytest.raises(migrations.UnknownRevisionError, match=r"revision 0011; .* configure a new one"):
        migrations.upgrade(database)
    assert migrations.current(database) == "0011"
    url = database.url.render_as_string(hide_password=False)
    with running_app(url, tmp_path, auth="off") as app:
        answer = app.base.get("/readyz")
        assert answer.status_code == 503 and "revision 0011;" in answer.json()["checks"]["database"]
    for line in ("db upgrade", "keys list"):
        done = command(*line.split(), "--database", url)
        assert done.status == 3 and "configure a new one" in " ".join(done.err.split())


@pytest.mark.parametrize("revision", ["0.1.0", migrations.REVISION])
@pytest.mark.parametrize(
    "change",
    ["ALTER TABLE audit DROP COLUMN other_roots", "ALTER TABLE audit RENAME COLUMN target TO subject"],
)
def test_a_database_with_other_columns_is_refused(
    database: Database, tmp_path: Path, change: str, revision: str
) -> None:
    """Columns of an unreleased version are refused with table and remedy; nothing changes."""
    with database.write() as connection:
        connection.execute(text(f"UPDATE alembic_version SET version_num = '{revision}'"))
        if "target" in change:
            connection.execute(text("DROP INDEX ix_audit_target"))
        connection.execute(text(change))
    url = database.url.render_as_string(hide_password=False)
    needs_command = database.dialect == "postgresql" and revision != migrations.REVISION
    with running_app(url, tmp_path, auth="off") as app:
        answer = app.base.get("/readyz")
        problem = "run dcp db upgrade" if needs_command else "table audit differs in"
        assert answer.status_code == 503 and problem in answer.json()["checks"]["database"]
    for line in ("db upgrade", "keys list"):
        problem = "run dcp db upgrade" if needs_command and line == "keys list" else "configure a new one"
        done = command(*line.split(), "--database", url)
        assert done.status == 3 and problem in " ".join(done.err.split())
    assert migrations.current(database) == revision


def test_a_migration_that_fails_leaves_nothing(empty_database: Database) -> None:
    """A failing migration creates no table and can be repeated; tables of other programs are kept."""
    with empty_database.write() as connection:
        connection.execute(text("CREATE TABLE webhooks (x INTEGER)"))
        connection.execute(text("CREATE TABLE unrelated (x JSONB)"))
    with pytest.raises((DBAPIError, DatabaseUnavailableError)):
        migrations.upgrade(empty_database)
    with empty_database.write() as connection:
        assert sorted(inspect(connection).get_table_names()) == ["unrelated", "webhooks"]
        connection.execute(text("DROP TABLE webhooks"))
    assert migrations.upgrade(empty_database) is None
    assert not migrations.is_pending(empty_database)
    with empty_database.read() as connection:
        assert str(inspect(connection).get_columns("unrelated")[0]["type"]) == "JSONB"


def test_concurrent_upgrades_migrate_once(empty_database: Database) -> None:
    """Of several concurrent upgrades one migrates, and the others find the database up to date."""
    others = [Database(empty_database.url.render_as_string(hide_password=False)) for _ in range(3)]
    with ThreadPoolExecutor(4) as pool:
        before = list(pool.map(migrations.upgrade, [empty_database, *others]))
    for other in others:
        other.close()
    assert sorted(before, key=str) == [migrations.REVISION] * 3 + [None]
    assert differences(empty_database) == []
