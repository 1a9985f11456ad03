"""Migrations: an empty database gets the tables of this version, one of an older release is brought up to it.

Tables that a feature declares of the same ``metadata`` are created where they are missing, also in a database
that is up to date: a plug-in may come later than its first checkpoint.

Alembic takes a third of a second and 15 MB to import, and is only imported where something has to be done.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, inspect, text

from dcp.server.database.engine import Database
from dcp.server.database.tables import metadata

if TYPE_CHECKING:
    from alembic.config import Config


REVISION: Final = "0.1.0"
"""The newest one in ``versions``, which the tables of this version have."""

_LOCK: Final = 0x64_63_70_68_75_62  # "dcphub": of all processes that start at once, one migrates


class UnknownRevisionError(ValueError):
    """The database was made by a version of this program that this one cannot upgrade from."""


def upgrade(database: Database) -> str | None:
    """Bring the database up to date, all of it or nothing; returns the revision it had, None if it was empty.

    Raises `DatabaseUnavailableError`; UnknownRevisionError for one of a newer or an unreleased version.
    """
    with database.write() as connection:
        if database.dialect == "postgresql":
            # An index of a large table takes as long as it takes, and so does waiting for who builds it.
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            connection.execute(text("SET LOCAL lock_timeout = 0"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        before = _revision(connection)
        if before is None or _is_older(before):
            _migrate(connection, is_empty=before is None)
        metadata.create_all(connection)  # those of features that are new here
        return before


def _migrate(connection: Connection, *, is_empty: bool) -> None:
    from alembic import command

    config = _config()
    config.attributes["connection"] = connection
    if is_empty:
        metadata.create_all(connection, checkfirst=False)
        command.stamp(config, "head")
    else:
        command.upgrade(config, "head")


def is_pending(database: Database) -> bool:
    """Return whether `upgrade` has something to do. Raises UnknownRevisionError as it does."""
    with database.read() as connection:
        before = _revision(connection)
        missing = metadata.tables.keys() - inspect(connection).get_table_names()
    return before is None or _is_older(before) or bool(missing)


def _is_older(revision: str) -> bool:
    if revision == REVISION:
        return False
    from alembic.script import ScriptDirectory

    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if revision not in known:
        raise UnknownRevisionError(
            f"the database is of another version (revision {revision}; this one needs {REVISION}) and "
            "cannot be upgraded: run that version, or configure a new database; roots are scanned again"
        )
    return True


def current(database: Database) -> str | None:
    """Return the revision of the database; None if it is empty."""
    with database.read() as connection:
        return _revision(connection)


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()


def _config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    return config
