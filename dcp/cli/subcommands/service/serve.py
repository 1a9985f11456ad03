"""``dcp serve``: the service over HTTP, with a worker for its jobs beside it."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dcp.cli.common import EXIT_FAILURE, Debug, errors_as_lines, print_error

if TYPE_CHECKING:
    from dcp.server.settings import Settings

__all__ = ["Config", "command", "read_settings"]

Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Settings as TOML; else DCP_SERVER_CONFIG names it, or it is dcp-server.toml in this folder.",
    ),
]


def command(
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
        "roots": _roots(root),
        "database_url": database,
        "embedded_worker": worker,
    }
    with errors_as_lines(debug=debug):
        gc.disable()  # until it listens: some hundred modules are to be imported
        settings = read_settings(config, **flags)
        from dcp.server.process.serving import serve

        raise typer.Exit(serve(settings, flags))


def read_settings(config: Path | None, **flags: Any) -> Settings:
    """Flags that were given, then the environment, then the file; one line for what is wrong with them."""
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


def _roots(given: list[str] | None) -> dict[str, dict[str, str]] | None:
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
    """After the folder, or the last part of the URL, in the letters that names of roots have."""
    _, scheme, place = url.rpartition("://")
    last = place.rstrip("/").rpartition("/")[2] if scheme else Path(url).expanduser().resolve().name
    return re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip("-._")[:63]
