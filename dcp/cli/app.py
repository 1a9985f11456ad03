"""The command ``dcp``: commands, help groups, and closed output pipes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer import Option
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from dcp.cli import conversion, listing, removal, service, values, watch
from dcp.cli.common import Answer, as_command, has_no_reader
from dcp.version import __version__

__all__ = ["app", "main"]


class Commands(TyperGroup):
    """Builds commands on demand, because building all of them is slow."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = dict.fromkeys((*_COMMANDS, *_GROUPS))  # type: ignore[assignment]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Build a command, or a group with its commands."""
        if cmd_name not in self.commands:
            return None
        own: dict[str, Callable[..., Answer | None]]
        _, about, own = _GROUPS.get(cmd_name) or ("", None, {cmd_name: _COMMANDS[cmd_name]})
        made = typer.Typer(
            name=cmd_name, help=about, no_args_is_help=True, rich_markup_mode=None, add_completion=False
        )
        for name, one in own.items():
            made.command(name, cls=_CLASSES.get(name))(as_command(one))
        return get_command(made)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List commands by panel, with their first sentence as a whole."""
        widest = max(map(len, self.commands))
        for panel, commands in _PANELS.items():
            rows = [(one.__name__, one.__doc__) for one in commands]
            rows += [(name, about) for name, (of, about, _) in _GROUPS.items() if of == panel]
            bare = [TyperCommand(name, help=about) for name, about in rows]
            with formatter.section(panel):
                formatter.write_dl(
                    [(f"{one.name:<{widest}}", one.get_short_help_str(formatter.width * 4)) for one in bare]
                )

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a closed output pipe, as with ``head``, is not an error."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            if not has_no_reader():
                raise
            # avoids a second failure when the interpreter flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None


def demo(
    root: Path | None = Option(None, help="Keep all files in this folder, which must be empty or new."),
    save_every: int = Option(10, min=1, help="Steps between saves; a run has four saves."),
    s3: bool = Option(False, "--s3", help="Start a local S3 server (SeaweedFS) and save to it."),
    serve: bool = Option(False, "--serve", help="Keep the catalog running at the end, until Ctrl-C."),
) -> None:
    """Train a small model, kill a save, resume on other numbers of ranks, and check every claim."""
    from dcp.demo.story import run_to_exit_status

    raise typer.Exit(run_to_exit_status(root, save_every, s3, serve))


_PANELS: dict[str, tuple[Callable[..., Answer | None], ...]] = {
    "Look": (
        *(listing.ls, listing.show, values.cat, values.stats),
        *(values.diff, values.digest, watch.watch),
    ),
    "Check and convert": (values.verify, conversion.convert, conversion.merge),
    "Remove": (removal.rm, removal.prune, removal.gc),
    "The service": (service.serve, service.worker),
    "Try it": (demo,),
}
_COMMANDS = {one.__name__: one for commands in _PANELS.values() for one in commands}
_GROUPS: dict[str, tuple[str, str, dict[str, Callable[..., Answer | None]]]] = {
    "map": ("Check and convert", "List and try weight maps between model definitions.", conversion.MAP),
    "db": ("The service", "Upgrade the database of the service, or show its revision.", service.DB),
    "keys": ("The service", "Create, list and revoke API keys of the service.", service.KEYS),
    "roots": ("The service", "List roots of the service, and accept lost checkpoints.", service.ROOTS),
}
_CLASSES = {"convert": conversion.ConvertCommand}

app = typer.Typer(
    name="dcp",
    help="Inspect, compare, verify, convert and remove checkpoints: sharded, torch.save, safetensors.",
    no_args_is_help=True,
    cls=Commands,
    context_settings={"max_content_width": 120},
    # plain messages: a usage error is a line, not a box
    rich_markup_mode=None,
    # commands report known errors; others are bugs, reported by a plain traceback
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: bool = Option(
        False, "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Options without a command."""


def main() -> None:
    """Run the command line; exits with 0 fine, 1 findings, 2 usage, 3 failure."""
    app(prog_name="dcp")
