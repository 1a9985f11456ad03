"""Migrations: create the tables in an empty database, or upgrade the database of an older release.

Tables declared by features are created where missing, even in a current database, because a plug-in may be
installed later. Alembic takes 0.3 s and 15 MB to import, so only an upgrade imports it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from sqlalchemy import Connection, inspect, text

from dcp.server.database.engine import Database
from dcp.server.database.tables import metadata
from dcp.version import __version__

if TYPE_CHECKING:
    from alembic.config import Config


REVISION: Final = "0.2.0"
"""The newest revision in ``versions``."""

_LOCK: Final = 0x64_63_70_68_75_62  # "dcphub": only one of several starting processes migrates

_REMEDY: Final = (
    "Run the version of dcphub that created the database, or configure a new one: the service then scans the "
    "roots again, but API keys, notes, tags and the audit log stay in the old database"
)


class UnknownRevisionError(ValueError):
    """The database cannot be upgraded: its revision is unknown, or an unreleased version made its tables."""


def upgrade(database: Database) -> str | None:
    """Upgrade the database in one transaction.

    Returns:
        The revision before the upgrade; None for an empty database.

    Raises:
        DatabaseUnavailableError: The database does not answer.
        UnknownRevisionError: A newer or an unreleased version made the database.
    """
    with database.write() as connection:
        if database.dialect == "postgresql":
            # Creating an index of a large table, or waiting for another process to do so, has no time limit.
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            connection.execute(text("SET LOCAL lock_timeout = 0"))
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        before = _revision(connection)
        if before is None or _is_older(before):
            _migrate(connection, is_empty=before is None)
        _check_columns(connection)
        metadata.create_all(connection)  # tables of newly installed features
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
    """Return whether `upgrade` would change the database; raise UnknownRevisionError like `upgrade`."""
    with database.read() as connection:
        before = _revision(connection)
        is_old = before is None or _is_older(before)
        missing = metadata.tables.keys() - inspect(connection).get_table_names()
        if not is_old:
            _check_columns(connection)
    return is_old or bool(missing)


def _check_columns(connection: Connection) -> None:
    """Refuse missing columns and unknown required ones: queries would fail later, with an obscure error."""
    for (_, name), columns in inspect(connection).get_multi_columns().items():
        if (table := metadata.tables.get(name)) is not None:
            known = {column.name for column in table.columns}
            needed = {one["name"] for one in columns if not one["nullable"] and not one["default"]}
            missing = known - {one["name"] for one in columns}
            if other := sorted(missing | (needed - known)):
                raise UnknownRevisionError(
                    f"cannot upgrade the database of an unreleased version: table {name} differs in "
                    f"{', '.join(other)}. {_REMEDY}"
                )


def _is_older(revision: str) -> bool:
    if revision == REVISION:
        return False
    from alembic.script import ScriptDirectory

    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if revision not in known:
        raise UnknownRevisionError(
            f"cannot upgrade the database from revision {revision}; dcphub {__version__} needs {REVISION}. "
            f"{_REMEDY}"
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
