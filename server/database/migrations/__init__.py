"""Migrations: from nothing, or from any released version, to the tables of this one.

No `alembic.ini`: `upgrade` says all there is to say, and takes the connection of the `Database`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from dcp.server.database.engine import Database, DatabaseUnavailableError
from dcp.server.database.tables import metadata

__all__ = ["check", "current", "head", "is_current", "upgrade"]

_LOCK: Final = 0x64_63_70_68_75_62  # "dcphub": of all processes that start at once, one migrates


def upgrade(database: Database, to: str | None = None) -> str | None:
    """Bring the database up to date, all of it or nothing; the revision it had, None if it was empty.

    ``to`` is an older revision to stop at, for tests. Does nothing if it is up to date. Raises
    `DatabaseUnavailableError`, also for one of a newer version of this program.
    """
    with database.write() as connection:
        if database.dialect == "postgresql":
            # An index of a large table takes as long as it takes, and so does waiting for who builds it.
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            connection.execute(text("SET LOCAL lock_timeout = 0"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        before = _revision(connection)
        if before is not None and before not in _known():
            raise DatabaseUnavailableError(
                f"the database is of a newer version: revision {before}, and {head()} is known here"
            )
        if before != head():
            config = _config()
            config.attributes["connection"] = connection
            command.upgrade(config, to or "head")
        return before


def current(database: Database) -> str | None:
    """The revision of the database; None if it has none of our tables."""
    with database.read() as connection:
        return _revision(connection)


def head() -> str:
    """The revision that this version of the program needs."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    assert revision is not None
    return revision


def is_current(database: Database) -> bool:
    """Whether the database has the revision that this version of the program needs."""
    return current(database) == head()


def check(database: Database) -> list[str]:
    """What differs between the database and the tables of this program, in words; nothing if all is well."""
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return [str(difference) for difference in compare_metadata(context, metadata)]


def _known() -> set[str]:
    return {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    return config
