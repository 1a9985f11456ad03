"""``dcp db``: the service's database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dcp.cli.common import EXIT_FAILURE, EXIT_FINDINGS, Debug, Json, errors_as_lines, print_error, print_json
from dcp.cli.subcommands.service.serve import Config, read_settings

if TYPE_CHECKING:
    from dcp.server.database.engine import Database

__all__ = ["DatabaseUrl", "app", "open_database"]

DatabaseUrl = Annotated[
    str | None, typer.Option("--database", metavar="URL", help="Instead of the one of the settings.")
]

app = typer.Typer(help="The database of the service: bring it up to date, look at it.", no_args_is_help=True)


@app.command("upgrade")
def upgrade(config: Config = None, database: DatabaseUrl = None, debug: Debug = False) -> None:
    """Bring the database up to date: from nothing, or from any older version. Back it up before."""
    with errors_as_lines(debug=debug):
        from dcp.server.database import migrations

        with open_database(config, database, is_made=True) as opened:
            before = migrations.upgrade(opened)
            after = migrations.current(opened)
        print(f"{before or 'empty'} -> {after}" if before != after else f"up to date at {after}")


@app.command("status")
def status(
    config: Config = None, database: DatabaseUrl = None, json: Json = False, debug: Debug = False
) -> None:
    """The revision that the database has, and the one that this version needs; 1 if they differ."""
    with errors_as_lines(debug=debug):
        from dcp.server.database import migrations

        with open_database(config, database, is_made=True) as opened:
            current, head = migrations.current(opened), migrations.head()
    if json:
        print_json({"current": current, "needed": head, "is_current": current == head})
    else:
        print(f"{current or 'empty'}, needed is {head}" if current != head else f"up to date at {head}")
    if current != head:
        raise typer.Exit(EXIT_FINDINGS)


@contextmanager
def open_database(
    config: Config, url: str | None, *, with_tables: bool = False, is_made: bool = False
) -> Iterator[Database]:
    """The database of the settings; exits with a line for a wrong URL, and for one that is away.

    ``with_tables``: those of this version. SQLite gets them, as from `dcp serve`; for another one the line
    says what to do. ``is_made``: also where there is no file yet.
    """
    settings = read_settings(config, database_url=url)
    from dcp.server.database import migrations
    from dcp.server.database.engine import Database, DatabaseUnavailableError

    try:
        with closing(Database(settings.database_url.get_secret_value(), pool_size=2)) as opened:
            file = Path(opened.url.database or "")
            if opened.dialect == "sqlite" and not (is_made or file.exists()):
                print_error(f"there is no database {file}: dcp serve makes it, or dcp db upgrade")
                raise typer.Exit(EXIT_FAILURE)
            if with_tables and not migrations.is_current(opened):
                if opened.dialect != "sqlite" or not settings.migrate:
                    print_error("the database has not the tables of this version: run dcp db upgrade first")
                    raise typer.Exit(EXIT_FAILURE)
                migrations.upgrade(opened)
            with opened.read():
                pass
            yield opened
    except (ValueError, DatabaseUnavailableError) as error:
        print_error(str(error))
        raise typer.Exit(EXIT_FAILURE) from None
