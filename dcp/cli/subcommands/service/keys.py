"""``dcp keys``: who may use the service."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from dcp.cli.common import (
    EXIT_FAILURE,
    Debug,
    Json,
    describe_time,
    errors_as_lines,
    print_error,
    print_json,
)
from dcp.cli.subcommands.service.db import DatabaseUrl, open_database
from dcp.cli.subcommands.service.serve import Config, read_settings
from dcp.cli.tables import print_table

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from dcp.server.security.principal import Scope

__all__ = ["app"]

app = typer.Typer(help="API keys of the service: make, list, revoke them.", no_args_is_help=True)

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:@+=-]{0,127}")


@app.command("create")
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
    _check(name, scopes, get_args(Scope), root, configured)
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
    """(the number of the new key, what it is)."""
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


@app.command("list")
def list_(
    config: Config = None, database: DatabaseUrl = None, json: Json = False, debug: Debug = False
) -> None:
    """All keys, revoked and expired ones too, without what they are made of."""
    with errors_as_lines(debug=debug):
        from dcp.server.security import keys

        with open_database(config, database, with_tables=True) as opened, opened.read() as connection:
            records = keys.list_keys(connection)
    if json:
        print_json([{**_plain(record), "is_valid": record.is_valid(time.time())} for record in records])
        return
    header = ("id", "name", "prefix", "scopes", "roots", "created", "used", "state")
    print_table(header, [_row(record) for record in records], right=("id",))


@app.command("revoke")
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


def _check(
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


def _plain(record: Any) -> dict[str, Any]:
    return {
        "id": record.id,
        "name": record.name,
        "prefix": record.prefix,
        "scopes": sorted(record.scopes),
        "roots": None if record.roots is None else sorted(record.roots),
        "created_seconds": record.created_seconds,
        "expires_seconds": record.expires_seconds,
        "revoked_seconds": record.revoked_seconds,
        "used_seconds": record.used_seconds,
    }


def _row(record: Any) -> tuple[str, ...]:
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
