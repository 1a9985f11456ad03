"""Commands of the service: server, workers, database, keys and roots.

Only these commands import `dcp.server`.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import typer
from typer import Argument, Option

from dcp.cli import printing
from dcp.cli.common import EXIT_FINDINGS, Answer, Strings, fail
from dcp.cli.printing import describe_time

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dcp.server.catalog.runs import RootRow
    from dcp.server.core.settings import Settings
    from dcp.server.database.engine import Database

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:@+=-]{0,127}")
_ACCOUNT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+@=-]{0,63}")

_CONFIG: Final = Option(
    None, metavar="FILE", help="TOML file of settings [$DCP_SERVER_CONFIG or dcp-server.toml]."
)
_DATABASE: Final = Option(None, metavar="URL", help="Database URL; overrides the settings.")


def serve(
    config: Path | None = _CONFIG,
    host: str | None = Option(None, help="The address to listen on [127.0.0.1]."),
    port: int | None = Option(None, help="The port to listen on [8470]."),
    root: Strings = Option(None, metavar="[NAME=]URL", help="Folder or URL of runs [./checkpoints]."),
    database: str | None = Option(None, metavar="URL", help="Database URL [sqlite:///dcp-catalog.sqlite]."),
    worker: bool | None = Option(None, "--worker/--no-worker", help="Start a worker too [yes]."),
) -> None:
    """Serve the catalog over HTTP. Without options: of ./checkpoints, on this machine only.

    Settings can also be set in a file or in environment variables; see docs/how-to/run-the-service.md.
    """
    flags: dict[str, Any] = {
        "host": host,
        "port": port,
        "roots": _roots_of(root or []),
        "database_url": database,
        "embedded_worker": worker,
    }
    gc.disable()  # faster imports of some hundred modules; enabled when the service listens
    settings = _settings(config, **flags)
    from dcp.server.serving import serve

    raise typer.Exit(serve(settings, flags))


def _settings(config: Path | None, **flags: Any) -> Settings:
    """Read flags, then the environment, then the file; errors become one line."""
    from pydantic import ValidationError

    from dcp.server.core.settings import CONFIG_VARIABLE, DEFAULT_CONFIG, Settings

    if config is not None:
        if not config.is_file():
            fail(f"--config: {config} is not a file")
        os.environ[CONFIG_VARIABLE] = str(config.absolute())  # for the worker process
    try:
        return Settings(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, item['loc'])) or 'settings'}: {item['msg'].removeprefix('Value error, ')}"
            for item in error.errors(include_url=False, include_input=False)
        ]
        for line in lines[:-1]:
            printing.error(line)
        fail(lines[-1])
    except ValueError as error:  # including invalid UTF-8
        fail(f"{os.environ.get(CONFIG_VARIABLE, DEFAULT_CONFIG)} is not valid TOML: {error}")


def _settings_options(config: Path | None = _CONFIG, database: str | None = _DATABASE) -> Settings:
    return _settings(config, database_url=database)


_SETTINGS: Any = _settings_options


def _roots_of(given: list[str]) -> dict[str, dict[str, str]] | None:
    roots: dict[str, dict[str, str]] = {}
    for item in given:
        before, equals, url = item.partition("=")
        is_named = bool(equals) and "/" not in before
        name, url = (before, url) if is_named else (_name_of(item), item)
        if not name or not url:
            raise typer.BadParameter(f"{item!r} is not a folder, a URL or NAME=URL", param_hint="--root")
        if name in roots:
            raise typer.BadParameter(
                f"two roots have the name {name!r}: pass NAME=URL with unique names", param_hint="--root"
            )
        roots[name] = {"url": url}
    return roots or None


def _name_of(url: str) -> str:
    """Derive a root's name from the folder, or the last part of the URL."""
    _, scheme, place = url.rpartition("://")
    last = place.rstrip("/").rpartition("/")[2] if scheme else Path(url).expanduser().resolve().name
    return re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip("-._")[:63]


def worker(
    config: Path | None = _CONFIG,
    database: str | None = _DATABASE,
    concurrency: int | None = Option(None, min=1, help="Number of concurrent tasks [2]."),
    until_input_ends: bool = Option(False, "--until-input-ends", hidden=True),
) -> None:
    """Run the jobs of the service: conversions, verifications, scans and others.

    Several workers can run, also on other machines with access to the database and the roots.
    SIGTERM and SIGINT end a worker; another worker continues its job.
    """
    settings = _settings(config, database_url=database, concurrency=concurrency)
    from dcp.server.core.jobs.worker import Worker
    from dcp.server.core.logs import configure_logs
    from dcp.server.features import allowances, role_settings
    from dcp.server.features import schedules as schedules_of

    configure_logs(settings)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    if until_input_ends:
        threading.Thread(target=_watch_input, args=(stop,), name="input", daemon=True).start()
    worker = Worker(
        settings,
        schedules=schedules_of(settings),
        allowances=allowances(settings),
        roles=role_settings(settings),
    )
    worker.run(stop)


def _watch_input(stop: threading.Event) -> None:
    # The other process sends no data; end of file means that it has ended, even if killed. Read the
    # descriptor: a thread waiting in sys.stdin would hold a lock at exit.
    while os.read(sys.stdin.fileno(), 4096):
        continue
    stop.set()


# -- the database --------------------------------------------------------------------------------------------


@contextmanager
def _opened(settings: Settings, *, with_tables: bool = True, is_made: bool = False) -> Iterator[Database]:
    """Open the database of the settings; exit with a line for a wrong URL or an unreachable database.

    ``with_tables``: require current tables. SQLite is upgraded, as in `dcp serve`; for other databases the
    line names the command. ``is_made``: create a missing file.
    """
    from dcp.server.core.problems import ProblemError
    from dcp.server.database import migrations
    from dcp.server.database.engine import Database, DatabaseUnavailableError

    try:
        with closing(Database(settings.database_url.get_secret_value(), pool_size=2)) as opened:
            file = Path(opened.url.database or "")
            if opened.dialect == "sqlite" and not (is_made or file.exists()):
                fail(f"database file {file} not found: create it with dcp serve or dcp db upgrade")
            if with_tables and migrations.is_pending(opened):
                if opened.dialect != "sqlite" or not settings.migrate:
                    fail("the database lacks the tables of this version: back it up and run dcp db upgrade")
                migrations.upgrade(opened)
            with opened.read():
                pass
            yield opened
    except ProblemError as error:
        fail(error.detail)
    except (ValueError, DatabaseUnavailableError) as error:
        fail(str(error))


def _upgrade(settings: Settings = _SETTINGS) -> None:
    """Create the database, or upgrade it from any older version. Make a backup first."""
    from dcp.server.database import migrations
    from dcp.server.features import features

    features()  # imports the features, which declare tables
    with _opened(settings, with_tables=False, is_made=True) as opened:
        before, after = migrations.upgrade(opened), migrations.REVISION
    print(f"upgraded: {before or 'empty'} -> {after}" if before != after else f"up to date at {after}")


def _status(settings: Settings = _SETTINGS) -> Answer:
    """Print the revision of the database and the required one; exit with 1 if they differ."""
    from dcp.server.database import migrations

    with _opened(settings, with_tables=False, is_made=True) as opened:
        current, head = migrations.current(opened), migrations.REVISION
    is_current = current == head
    state = f"at revision {current}" if current else "empty"
    shown = f"up to date at {head}" if is_current else f"{state}, but {head} is required: run dcp db upgrade"
    data = {"current": current, "needed": head, "is_current": is_current}
    return Answer(data, lambda: print(shown), 0 if is_current else EXIT_FINDINGS)


DB: Final[dict[str, Callable[..., Answer | None]]] = {"upgrade": _upgrade, "status": _status}

# -- keys ----------------------------------------------------------------------------------------------------


def _create(
    name: str = Argument(..., help="Owner or purpose; shown as key:NAME in the audit log."),
    scope: Strings = Option(None, help="read, write, convert, delete or admin; repeatable [read]."),
    root: Strings = Option(None, help="Restrict to this root; repeatable [all]."),
    expires: str | None = Option(None, metavar="TIME", help="Time until expiry: 12h, 30d, 52w [never]."),
    account: str | None = Option(None, help="Service account of the key; created if missing [none]."),
    settings: Settings = _SETTINGS,
) -> Answer:
    """Create a key and print it once, alone on stdout for use in a pipe."""
    lasts_seconds = None if expires is None else _duration(expires)
    from sqlalchemy import select

    from dcp.server.catalog import audit
    from dcp.server.core.security import keys
    from dcp.server.database.tables import grants
    from dcp.server.records.administration import Scope

    scopes: list[Any] = scope or ["read"]
    _check_names("--scope", scopes, get_args(Scope))
    _check_names("--root", root or (), sorted(settings.roots))
    if not _NAME.fullmatch(name):
        raise typer.BadParameter(
            f"{name!r} is not a valid name: use up to 128 letters, digits and _./:@+=-", param_hint="NAME"
        )
    now_seconds = time.time()
    with _opened(settings, is_made=True) as opened, opened.write() as connection:
        made = keys.create_key(
            connection,
            account_id=None if account is None else _service_account(connection, account, now_seconds),
            name=name,
            scopes=scopes,
            roots=root,
            expires_seconds=None if lasts_seconds is None else now_seconds + lasts_seconds,
            now_seconds=now_seconds,
        )
        detail = {"name": name, "scopes": sorted({*scopes}), "roots": root, "account": made.account}
        audit.record(connection, "cli", "key.create", f"key:{made.id}", detail, now=now_seconds)
        granted = select(grants.c.id).where(grants.c.account_id == made.account_id).limit(1)
        is_idle = made.account_id is not None and connection.execute(granted).first() is None
    if is_idle:
        where = f"the page /people/{made.account_id}, or by POST /api/v1/grants"
        print(
            f"{made.account} has no role yet, so the key is refused until an admin grants one on {where}",
            file=sys.stderr,
        )
    data = {"id": made.id, "name": name, "scopes": sorted({*scopes}), "key": made.key}
    return Answer(data, lambda: print(made.key))


def _service_account(connection: Connection, name: str, now_seconds: float) -> int:
    """Return the id of a service account, creating the account if necessary."""
    from sqlalchemy import insert

    from dcp.server.catalog import audit
    from dcp.server.core.security.accounts import actor_of, find_account
    from dcp.server.database.tables import accounts

    found = find_account(connection, "service", name)
    if found is not None:
        return int(found.id)
    if not _ACCOUNT.fullmatch(name) or find_account(connection, "person", name) is not None:
        raise typer.BadParameter(
            f"{name!r} is not a valid name: use up to 64 letters, digits and _.+@=-, and not the name of a "
            "person",
            param_hint="--account",
        )
    times = {"created_seconds": now_seconds, "updated_seconds": now_seconds}
    values = {"kind": "service", "name": name, "groups": [], **times}
    number = connection.execute(insert(accounts).values(values).returning(accounts.c.id)).scalar_one()
    detail = {"account": actor_of("service", name)}
    audit.record(connection, "cli", "account.create", f"account:{number}", detail, now=now_seconds)
    return int(number)


def _check_names(option: str, given: Any, known: Any) -> None:
    for name in given:
        if name not in known:
            choices = f"choose from: {', '.join(known)}" if known else "none is configured"
            raise typer.BadParameter(f"{name!r} is unknown; {choices}", param_hint=option)


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    if match is None or int(match[1]) == 0:
        raise typer.BadParameter(
            f"{text!r} is not a duration such as 12h, 30d or 52w", param_hint="--expires"
        )
    return float(match[1]) * _UNITS[match[2]]


def _list_keys(settings: Settings = _SETTINGS) -> Answer:
    """List all keys, including revoked and expired ones, without their secrets."""
    from dcp.server.core.security import keys

    with _opened(settings) as opened, opened.read() as connection:
        records = keys.list_keys(connection)
    rows = [_facts_of(key) | {"is_valid": keys.is_valid(key, time.time())} for key in records]
    return Answer(rows, lambda: _print_keys(rows))


def _facts_of(record: Any) -> dict[str, Any]:
    """List the fields of a record, times as seconds."""
    return {
        f"{name.removesuffix('_at')}_seconds" if name.endswith("_at") else name: (
            value.timestamp() if isinstance(value, datetime) else value
        )
        for name, value in asdict(record).items()
    }


def _print_keys(keys: list[dict[str, Any]]) -> None:
    rows = []
    for key in keys:
        roots = "all" if key["roots"] is None else ",".join(key["roots"])
        times = describe_time(key["created_seconds"]), describe_time(key["used_seconds"])
        state = "valid" if key["is_valid"] else "revoked" if key["revoked_seconds"] else "expired"
        owner = key["account"] or "-"
        rows.append(
            (key["id"], key["name"], owner, key["prefix"], ",".join(key["scopes"]), roots, *times, state)
        )
    header = (">id", "name", "account", "prefix", "scopes", "roots", "created", "used", "state")
    printing.table(header, rows)


def _revoke(
    key: str = Argument(..., help="Id of the key, or its prefix from the list."),
    settings: Settings = _SETTINGS,
) -> None:
    """Revoke a key immediately and permanently."""
    from dcp.server.catalog import audit
    from dcp.server.core.security import keys

    now_seconds = time.time()
    with _opened(settings) as opened, opened.write() as connection:
        found = [one for one in keys.list_keys(connection) if key in (str(one.id), one.prefix)]
        if not found:
            fail(f"key {key!r} not found; dcp keys list shows all keys")
        record = keys.revoke_key(connection, found[0].id, now_seconds)
        detail = {"name": record.name}
        audit.record(connection, "cli", "key.revoke", f"key:{record.id}", detail, now=now_seconds)
    print(f"revoked: {record.name} ({record.prefix})")


KEYS: Final[dict[str, Callable[..., Answer | None]]] = {
    "create": _create,
    "list": _list_keys,
    "revoke": _revoke,
}

# -- roots ---------------------------------------------------------------------------------------------------


def _list_roots(settings: Settings = _SETTINGS) -> Answer:
    """List all roots with their last scan, including roots no longer configured."""
    from dcp.server.catalog.runs import list_roots

    with _opened(settings) as opened, opened.read() as connection:
        rows = list_roots(connection)
    fields = ("name", "url", "is_configured", "scanned_seconds", "scan_error", "lost")
    data = [{field: getattr(row, field) for field in fields} | {"last_scan": row.scan_state} for row in rows]
    return Answer(data, lambda: _print_roots(rows))


def _print_roots(rows: list[RootRow]) -> None:
    cells = []
    for row in rows:
        state = row.scan_state if isinstance(row.scan_state, dict) else {}
        scanned = describe_time(row.scanned_seconds) if row.is_configured else "no longer configured"
        cells.append((row.name, scanned, state.get("found"), row.lost or None))
    printing.table(("name", "scanned", ">found", ">lost"), cells)
    for row in rows:
        if row.scan_error is not None:
            printing.line(f"{row.name}: {row.scan_error}")


def _accept(
    name: str = Argument(..., help="The root."),
    yes: bool = Option(False, "--yes", help="Carry out the change; default: a dry run."),
    settings: Settings = _SETTINGS,
) -> None:
    """Mark checkpoints that the last scan missed as vanished.

    A scan that misses many checkpoints keeps them, because the storage may only be unmounted. This command
    scans the root again, and confirms the loss unless more checkpoints are missing than in the last scan.
    """
    from dcp.server.catalog import audit
    from dcp.server.catalog.runs import list_roots
    from dcp.server.core.roots import Roots
    from dcp.server.core.settings import RootSettings
    from dcp.server.features.scan.scanner import scan_root

    with _opened(settings) as opened:
        with opened.read() as connection:
            rows = {row.name: row for row in list_roots(connection) if row.is_configured}
        if name not in rows:
            known = f"configured are {', '.join(rows)}" if rows else "no root is configured"
            fail(f"root {name!r} not found: {known}")
        row = rows[name]
        if not row.lost:
            print(f"root {name}: no checkpoint is reported as missing; nothing to accept")
            return
        print(row.scan_error)
        if not yes:
            print("dry run: pass --yes to scan again and mark the missing checkpoints as vanished")
            return
        # roots given as flags of `dcp serve` are in the database only
        place = settings.roots.get(name) or RootSettings(url=row.url)
        report = scan_root(opened, Roots({name: place}), name, accepted=row.lost)
        if report.lost:
            fail(f"no checkpoint was marked, because more are missing now: {report.trouble[0]}")
        detail = {"accepted": row.lost, "vanished": report.vanished}
        opened.transact(
            lambda connection: audit.record(connection, "cli", "root.accept", f"root:{name}", detail)
        )
        marked = printing.counted(report.vanished, "checkpoint")
        print(f"{marked} marked as vanished; {report.found} found")


ROOTS: Final[dict[str, Callable[..., Answer | None]]] = {"list": _list_roots, "accept": _accept}
