"""``dcp roots``: where the service finds checkpoints, and what its last scan said."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from dcp.cli.common import (
    EXIT_FAILURE,
    Debug,
    Json,
    describe_time,
    errors_as_lines,
    print_error,
    print_json,
    printable,
)
from dcp.cli.subcommands.service.db import DatabaseUrl, open_database
from dcp.cli.subcommands.service.serve import Config, read_settings
from dcp.cli.tables import print_table

__all__ = ["app"]

app = typer.Typer(help="The roots of the service: list them, and say what is gone.", no_args_is_help=True)


@app.command("list")
def list_(
    config: Config = None, database: DatabaseUrl = None, json: Json = False, debug: Debug = False
) -> None:
    """All roots with their last scan, those that are not configured any more too."""
    with errors_as_lines(debug=debug):
        from dcp.server.catalog.roots import list_roots

        with open_database(config, database, with_tables=True) as opened, opened.read() as connection:
            rows = list_roots(connection)
    if json:
        print_json([_plain(row) for row in rows])
        return
    print_table(("name", "scanned", "found", "lost"), [_row(row) for row in rows], right=("found", "lost"))
    for row in rows:
        if row.scan_error is not None:
            print(printable(f"{row.name}: {row.scan_error}"))


@app.command("accept")
def accept(
    name: Annotated[str, typer.Argument(help="The root.")],
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it; without it only say what would be done.")
    ] = False,
    config: Config = None,
    database: DatabaseUrl = None,
    debug: Debug = False,
) -> None:
    """Say that checkpoints which the last scan did not find are gone for good, though they are many.

    The root is looked through once more, here and now. What is still not there is marked as vanished, and
    nothing is if more is missing than the scan before had said.
    """
    with errors_as_lines(debug=debug):
        settings = read_settings(config, database_url=database)
    with (
        errors_as_lines(debug=debug),
        open_database(config, database, with_tables=True) as opened,
    ):
        _accept(opened, settings.roots, name, yes)


def _accept(database: Any, configured: Any, name: str, yes: bool) -> None:
    from dcp.server.catalog import audit
    from dcp.server.catalog.roots import list_roots
    from dcp.server.problems import ProblemError
    from dcp.server.roots import Roots
    from dcp.server.scanning.scanner import Scanner
    from dcp.server.settings import RootSettings

    with database.read() as connection:
        rows = {row.name: row for row in list_roots(connection) if row.is_configured}
    if name not in rows:
        print_error(f"there is no root {name!r}: {', '.join(rows) or 'none'}")
        raise typer.Exit(EXIT_FAILURE)
    row = rows[name]
    # one that `dcp serve` was given as a flag is in the database alone
    settings = configured.get(name) or RootSettings(url=row.url)
    if not row.lost:
        print(f"root {name}: nothing is in doubt")
        return
    print(row.scan_error)
    if not yes:
        print("with --yes: look once more, and mark as vanished what is not there")
        return
    try:
        report = Scanner(database, Roots({name: settings})).scan(name, accepted=row.lost)
    except ProblemError as error:
        print_error(error.detail)
        raise typer.Exit(EXIT_FAILURE) from None
    if report.lost:
        print_error(f"more is missing by now, and nothing was marked: {report.trouble[0]}")
        raise typer.Exit(EXIT_FAILURE)
    detail = {"accepted": row.lost, "vanished": report.vanished}
    database.transact(
        lambda connection: audit.record(connection, "cli", "root.accept", f"root:{name}", detail)
    )
    print(f"{report.vanished} marked as vanished; {report.found} are there")


def _plain(row: Any) -> dict[str, Any]:
    return {
        "name": row.name,
        "url": row.url,
        "is_configured": row.is_configured,
        "scanned_seconds": row.scanned_seconds,
        "scan_error": row.scan_error,
        "lost": row.lost,
        "last_scan": row.scan_state,
    }


def _row(row: Any) -> tuple[str, ...]:
    state = row.scan_state if isinstance(row.scan_state, dict) else {}
    return (
        row.name,
        describe_time(row.scanned_seconds) if row.is_configured else "not configured any more",
        str(state.get("found", "-")),
        str(row.lost or "-"),
    )
