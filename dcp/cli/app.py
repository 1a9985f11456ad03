"""The command ``dcp`` and its subcommands."""

from __future__ import annotations

from typing import Annotated

import typer

from dcp.cli.command_group import Application, Commands
from dcp.cli.subcommands import comparing, conversion, demo, listing, removal, service, values, watch
from dcp.version import __version__

__all__ = ["app", "main"]

app = Application(
    name="dcp",
    help="Look at checkpoints, compare, verify, convert, remove them: sharded ones, torch.save, safetensors.",
    no_args_is_help=True,
    cls=Commands,
    context_settings={"max_content_width": 120},
    # plain messages: a usage error is a line, not a box
    rich_markup_mode=None,
    # our own errors are reported by each command; what escapes is a bug, and its plain traceback the report
    pretty_exceptions_enable=False,
)
app.command("ls", rich_help_panel="Look")(listing.ls)
app.command("show", rich_help_panel="Look")(listing.show)
app.command("cat", rich_help_panel="Look")(values.cat)
app.command("stats", rich_help_panel="Look")(values.stats)
app.command("diff", rich_help_panel="Look")(comparing.diff)
app.command("digest", rich_help_panel="Look")(comparing.digest)
app.command("watch", rich_help_panel="Look")(watch.command)
app.command("verify", rich_help_panel="Check and convert")(comparing.verify)
app.command("convert", cls=conversion.ConvertCommand, rich_help_panel="Check and convert")(
    conversion.convert_command
)
app.command("merge", rich_help_panel="Check and convert")(conversion.merge_command)
app.add_typer(conversion.map_app, name="map", rich_help_panel="Check and convert")
app.command("rm", rich_help_panel="Remove")(removal.rm)
app.command("prune", rich_help_panel="Remove")(removal.prune)
app.command("gc", rich_help_panel="Remove")(removal.gc)
app.command("serve", rich_help_panel="The service")(service.serve_command)
app.command("worker", rich_help_panel="The service")(service.worker)
app.add_typer(service.db_app, name="db", rich_help_panel="The service")
app.add_typer(service.keys_app, name="keys", rich_help_panel="The service")
app.add_typer(service.roots_app, name="roots", rich_help_panel="The service")
app.command("demo", rich_help_panel="Try it")(demo.command)


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
