"""Subcommands of the service: it and its workers, its database, and its keys and roots.

They call `dcp.server`, which nothing else of the command line imports.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from dcp.cli.common import (
    EXIT_FAILURE,
    EXIT_FINDINGS,
    Debug,
    Json,
    describe_time,
    errors_as_lines,
    print_error,
    print_json,
    printable,
)
from dcp.cli.tables import print_table

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dcp.server.database.engine import Database
    from dcp.server.security.keys import KeyRecord
    from dcp.server.security.principal import Scope
    from dcp.server.settings import Settings

__all__ = ["db_app", "keys_app", "roots_app", "serve_command", "worker"]


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Settings as TOML; else DCP_SERVER_CONFIG names it, or it is dcp-server.toml in this folder.",
    ),
]


def serve_command(
    config: Config = None,
    host: Annotated[str | None, typer.Option("--host", help="The address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option("--port", help="The port to listen on [8470].")] = None,
    root: Annotated[
        list[str] | None,
        typer.Option(
            "--root",
            metavar="[NAME=]URL",
            help="Where checkpoints are: a folder or a URL, which is there; several times for several "
            "[checkpoints=./checkpoints].",
        ),
    ] = None,
    database: Annotated[
        str | None, typer.Option("--database", metavar="URL", help="[sqlite:///dcp-catalog.sqlite]")
    ] = None,
    worker: Annotated[
        bool | None, typer.Option("--worker/--no-worker", help="Whether to start a worker, too [yes].")
    ] = None,
    debug: Debug = False,
) -> None:
    """Serve the catalog over HTTP: with nothing given, of ./checkpoints, on this machine only.

    All settings may stand in a file or in the environment; see docs/operations.md.
    """
    flags: dict[str, Any] = {
        "host": host,
        "port": port,
        "roots": _roots_of(root),
        "database_url": database,
        "embedded_worker": worker,
    }
    with errors_as_lines(debug=debug):
        gc.disable()  # until it listens: some hundred modules are to be imported
        settings = read_settings(config, **flags)
        from dcp.server.process.serving import serve

        raise typer.Exit(serve(settings, flags))


def read_settings(config: Path | None, **flags: Any) -> Settings:
    """Read flags that were given, then the environment, then the file; one line for what is wrong with
    them."""
    from pydantic import ValidationError

    from dcp.server.settings import CONFIG_VARIABLE, DEFAULT_CONFIG, Settings

    if config is not None:
        if not config.is_file():
            print_error(f"--config: {config} is not a file")
            raise typer.Exit(EXIT_FAILURE)
        os.environ[CONFIG_VARIABLE] = str(config.absolute())  # a worker that is started reads the same
    try:
        return Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False):
            place = ".".join(map(str, item["loc"])) or "settings"
            print_error(f"{place}: {item['msg'].removeprefix('Value error, ')}")
        raise typer.Exit(EXIT_FAILURE) from None
    except ValueError as error:  # of bytes that are no text, too
        print_error(f"{os.environ.get(CONFIG_VARIABLE, DEFAULT_CONFIG)} is no TOML: {error}")
        raise typer.Exit(EXIT_FAILURE) from None


def _roots_of(given: list[str] | None) -> dict[str, dict[str, str]] | None:
    if not given:
        return None
    roots: dict[str, dict[str, str]] = {}
    for item in given:
        before, equals, url = item.partition("=")
        is_named = bool(equals) and "/" not in before
        name, url = (before, url) if is_named else (_name_of(item), item)
        if not name or not url:
            raise typer.BadParameter(f"{item!r} is neither a folder or URL nor NAME=URL", param_hint="--root")
        if name in roots:
            raise typer.BadParameter(f"two roots are called {name}: give NAME=URL", param_hint="--root")
        roots[name] = {"url": url}
    return roots


def _name_of(url: str) -> str:
    """Name it after the folder, or the last part of the URL, in the letters that names of roots have."""
    _, scheme, place = url.rpartition("://")
    last = place.rstrip("/").rpartition("/")[2] if scheme else Path(url).expanduser().resolve().name
    return re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip("-._")[:63]


def worker(
    config: Config = None,
    database: Annotated[
        str | None, typer.Option("--database", metavar="URL", help="Instead of the one of the settings.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="How many tasks run at a time [2].")
    ] = None,
    until_input_ends: Annotated[
        bool, typer.Option("--until-input-ends", hidden=True, help="End when standard input does.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Do the jobs of the service: conversions, verifications, scans and what else is in its queue.

    As many as one likes may run, on one machine or on several that share the database and the roots. Ends on
    SIGTERM and SIGINT; what it was doing is done by another one.
    """
    with errors_as_lines(debug=debug):
        settings = read_settings(config, database_url=database, concurrency=concurrency)
        from dcp.server.automation.schedules import built_in_schedules
        from dcp.server.jobs.worker import Worker
        from dcp.server.process.logs import configure_logs

        configure_logs(settings)
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: stop.set())
        if until_input_ends:
            threading.Thread(target=_watch_input, args=(stop,), name="input", daemon=True).start()
        Worker(settings, schedules=built_in_schedules(settings)).run(stop)


def _watch_input(stop: threading.Event) -> None:
    # Nothing is ever sent; the end comes with the process that holds the other side, even if it was killed.
    # Straight from the descriptor: a thread that waits in sys.stdin would hold its lock when Python ends.
    while os.read(sys.stdin.fileno(), 4096):
        continue
    stop.set()


DatabaseUrl = Annotated[
    str | None, typer.Option("--database", metavar="URL", help="Instead of the one of the settings.")
]

db_app = typer.Typer(
    help="The database of the service: bring it up to date, look at it.", no_args_is_help=True
)


@db_app.command("upgrade")
def upgrade(config: Config = None, database: DatabaseUrl = None, debug: Debug = False) -> None:
    """Bring the database up to date: from nothing, or from any older version. Back it up before."""
    with errors_as_lines(debug=debug):
        from dcp.server.database import migrations

        with open_database(config, database, is_made=True) as opened:
            before = migrations.upgrade(opened)
            after = migrations.current(opened)
        print(f"{before or 'empty'} -> {after}" if before != after else f"up to date at {after}")


@db_app.command("status")
def status(
    config: Config = None, database: DatabaseUrl = None, json: Json = False, debug: Debug = False
) -> None:
    """Print the revision of the database and the one that this version needs; exit with 1 if they differ."""
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
    """Open the database of the settings; exits with a line for a wrong URL, and for one that is away.

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


keys_app = typer.Typer(help="API keys of the service: make, list, revoke them.", no_args_is_help=True)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:@+=-]{0,127}")


@keys_app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Who or what it is for; the audit log says key:NAME.")],
    scope: Annotated[
        list[str] | None,
        typer.Option(
            "--scope", help="read, write, convert, delete, admin; several times for several [read]."
        ),
    ] = None,
    root: Annotated[
        list[str] | None, typer.Option("--root", help="Only for this root; several times for several [all].")
    ] = None,
    expires: Annotated[
        str | None, typer.Option("--expires", metavar="TIME", help="After this time: 12h, 30d, 52w [never].")
    ] = None,
    config: Config = None,
    database: DatabaseUrl = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Make a key and print it, for the only time. It is on stdout alone, so that it can be piped."""
    scopes = scope or ["read"]
    lasts_seconds = None if expires is None else _duration(expires)
    with errors_as_lines(debug=debug):
        configured = read_settings(config, database_url=database).roots
        from dcp.server.security.principal import Scope
    _check_key(name, scopes, get_args(Scope), root, configured)
    with (
        errors_as_lines(debug=debug),
        open_database(config, database, with_tables=True, is_made=True) as opened,
        opened.write() as connection,
    ):
        number, secret = _made(connection, name, scopes, root or None, lasts_seconds)
    if json:
        print_json({"id": number, "name": name, "scopes": sorted(set(scopes)), "key": secret})
    else:
        print(secret)


def _made(
    connection: Connection, name: str, scopes: list[str], roots: list[str] | None, lasts_seconds: float | None
) -> tuple[int, str]:
    """Make a key: (its number, what it is)."""
    from dcp.server.catalog import audit
    from dcp.server.problems import ProblemError
    from dcp.server.security import keys

    now_seconds = time.time()
    try:
        record, secret = keys.create_key(
            connection,
            name=name,
            scopes=cast("list[Scope]", scopes),
            roots=roots,
            expires_seconds=None if lasts_seconds is None else now_seconds + lasts_seconds,
            now_seconds=now_seconds,
        )
    except ProblemError as error:
        print_error(error.detail)
        raise typer.Exit(EXIT_FAILURE) from None
    detail = {"name": name, "scopes": sorted(set(scopes)), "roots": roots}
    audit.record(connection, "cli", "key.create", f"key:{record.id}", detail, now=now_seconds)
    return record.id, secret


@keys_app.command("list")
def list_all_keys(
    config: Config = None, database: DatabaseUrl = None, json: Json = False, debug: Debug = False
) -> None:
    """All keys, revoked and expired ones too, without what they are made of."""
    with errors_as_lines(debug=debug):
        from dcp.server.security import keys

        with open_database(config, database, with_tables=True) as opened, opened.read() as connection:
            records = keys.list_keys(connection)
    if json:
        print_json([{**_plain_key(record), "is_valid": record.is_valid(time.time())} for record in records])
        return
    header = ("id", "name", "prefix", "scopes", "roots", "created", "used", "state")
    print_table(header, [_key_row(record) for record in records], right=("id",))


@keys_app.command("revoke")
def revoke(
    key: Annotated[str, typer.Argument(help="Its id, or the prefix that the list shows.")],
    config: Config = None,
    database: DatabaseUrl = None,
    debug: Debug = False,
) -> None:
    """End a key, at once and for ever."""
    with errors_as_lines(debug=debug):
        from dcp.server.catalog import audit
        from dcp.server.security import keys

        now_seconds = time.time()
        with open_database(config, database, with_tables=True) as opened, opened.write() as connection:
            found = [one for one in keys.list_keys(connection) if key in (str(one.id), one.prefix)]
            if not found:
                print_error(f"there is no key {key!r}; dcp keys list shows all")
                raise typer.Exit(EXIT_FAILURE)
            record = keys.revoke_key(connection, found[0].id, now_seconds)
            detail = {"name": record.name}
            audit.record(connection, "cli", "key.revoke", f"key:{record.id}", detail, now=now_seconds)
        print(f"revoked: {record.name} ({record.prefix})")


def _check_key(
    name: str, scopes: list[str], known: tuple[str, ...], roots: list[str] | None, configured: Any
) -> None:
    for scope in scopes:
        if scope not in known:
            raise typer.BadParameter(f"{scope!r} is none of {', '.join(known)}", param_hint="--scope")
    for root in roots or ():
        if root not in configured:
            names = ", ".join(sorted(configured)) or "none"
            raise typer.BadParameter(f"the settings have no root {root!r}: {names}", param_hint="--root")
    if not _NAME.fullmatch(name):
        raise typer.BadParameter("letters, digits and _./:@+=- are taken, 128 at most", param_hint="NAME")


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if match is None or int(match[1]) == 0:
        raise typer.BadParameter(f"{text!r} is not such as 12h, 30d or 52w", param_hint="--expires")
    return float(match[1]) * _UNITS[match[2]]


def _plain_key(record: KeyRecord) -> dict[str, Any]:
    roots = None if record.roots is None else sorted(record.roots)
    return asdict(record) | {"scopes": sorted(record.scopes), "roots": roots}


def _key_row(record: KeyRecord) -> tuple[str, ...]:
    state = "valid" if record.is_valid(time.time()) else "revoked" if record.revoked_seconds else "expired"
    return (
        str(record.id),
        record.name,
        record.prefix,
        ",".join(sorted(record.scopes)),
        "all" if record.roots is None else ",".join(sorted(record.roots)),
        describe_time(record.created_seconds),
        describe_time(record.used_seconds),
        state,
    )


roots_app = typer.Typer(
    help="The roots of the service: list them, and say what is gone.", no_args_is_help=True
)


@roots_app.command("list")
def list_all_roots(
    config: Config = None, database: DatabaseUrl = None, json: Json = False, debug: Debug = False
) -> None:
    """All roots with their last scan, those that are not configured any more too."""
    with errors_as_lines(debug=debug):
        from dcp.server.catalog.roots import list_roots

        with open_database(config, database, with_tables=True) as opened, opened.read() as connection:
            rows = list_roots(connection)
    if json:
        print_json([_plain_root(row) for row in rows])
        return
    print_table(
        ("name", "scanned", "found", "lost"), [_root_row(row) for row in rows], right=("found", "lost")
    )
    for row in rows:
        if row.scan_error is not None:
            print(printable(f"{row.name}: {row.scan_error}"))


@roots_app.command("accept")
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


def _plain_root(row: Any) -> dict[str, Any]:
    return {
        "name": row.name,
        "url": row.url,
        "is_configured": row.is_configured,
        "scanned_seconds": row.scanned_seconds,
        "scan_error": row.scan_error,
        "lost": row.lost,
        "last_scan": row.scan_state,
    }


def _root_row(row: Any) -> tuple[str, ...]:
    state = row.scan_state if isinstance(row.scan_state, dict) else {}
    return (
        row.name,
        describe_time(row.scanned_seconds) if row.is_configured else "not configured any more",
        str(state.get("found", "-")),
        str(row.lost or "-"),
    )
