"""The command ``dcp`` and its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp.cli import cat, convert, db, demo, diff, gc, keys, ls, rm, roots, serve, show, stats, verify, worker
from dcp.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    name="dcp",
    help="Look at checkpoints, compare, verify, convert, remove them: sharded ones, torch.save, safetensors.",
    no_args_is_help=True,
    # plain messages: a usage error is a line, not a box
    rich_markup_mode=None,
    # our own errors are reported by each command; what escapes is a bug, and its plain traceback the report
    pretty_exceptions_enable=False,
)
app.command("ls")(ls.command)
app.command("show")(show.command)
app.command("cat")(cat.command)
app.command("stats")(stats.command)
app.command("diff")(diff.command)
app.command("verify")(verify.command)
app.command("convert")(convert.command)
app.command("rm")(rm.command)
app.command("gc")(gc.command)
app.command("serve")(serve.command)
app.command("worker")(worker.command)
app.add_typer(db.app, name="db")
app.add_typer(keys.app, name="keys")
app.add_typer(roots.app, name="roots")
app.command("demo")(demo.command)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Options that belong to no command."""


def main() -> None:
    """Run the command line; exits with 0 fine, 1 findings, 2 usage, 3 failure."""
    app(prog_name="dcp")
