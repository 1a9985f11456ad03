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
    """The database was made by a version of this program that this one cannot upgrade from: of an unknown
    revision, or of a known one with other columns, as unreleased versions have made them."""


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
        _check_columns(connection)
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
        is_old = before is None or _is_older(before)
        missing = metadata.tables.keys() - inspect(connection).get_table_names()
        if not is_old:
            _check_columns(connection)
    return is_old or bool(missing)


def _check_columns(connection: Connection) -> None:
    """Compare the columns of the tables that are there with those of this version: a column that is missing,
    or one more that every new row would have to fill, fails queries much later and without a reason."""
    for (_, name), columns in inspect(connection).get_multi_columns().items():
        if (table := metadata.tables.get(name)) is not None:
            known = {column.name for column in table.columns}
            needed = {one["name"] for one in columns if not one["nullable"] and not one["default"]}
            missing = known - {one["name"] for one in columns}
            if other := sorted(missing | (needed - known)):
                raise UnknownRevisionError(
                    f"the database is of an unreleased version (its table {name} differs in "
                    f"{', '.join(other)}) and cannot be upgraded: configure a new database; roots are "
                    "scanned again"
                )


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
