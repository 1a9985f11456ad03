"""The command ``dcp``: its commands, their list in the help, and a reader that has gone."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer
from typer import Option
from typer.core import TyperGroup
from typer.models import CommandInfo, TyperInfo

from dcp.cli import conversion, listing, removal, service, values, watch
from dcp.cli.common import Answer, as_command, has_no_reader
from dcp.version import __version__

__all__ = ["app", "main"]


class Application(typer.Typer):
    """Makes what a call needs: to make all commands with all their options takes as long as many a command
    does."""

    def __call__(self, args: Sequence[str] | None = None, **options: Any) -> Any:
        """As of `typer.Typer`: of the one command that is called, or of the list in the help."""
        given = list(sys.argv[1:] if args is None else args)
        own = copy.copy(self)  # a shell that completes has its words elsewhere, and needs all
        commands = [one for one in self.registered_commands if one.name == given[0]] if given else []
        groups = [one for one in self.registered_groups if one.name == given[0]] if given else []
        if given[:1] == ["--help"]:
            commands = [_without_options(one) for one in self.registered_commands]
            groups = [_without_commands(one) for one in self.registered_groups]
        if commands or groups:
            own.registered_commands, own.registered_groups = commands, groups
        return typer.Typer.__call__(own, args=args, **options)


def _without_options(one: CommandInfo) -> CommandInfo:
    def nothing() -> None: ...

    nothing.__doc__ = one.callback and one.callback.__doc__
    bare = copy.copy(one)
    bare.callback = nothing
    return bare


def _without_commands(one: TyperInfo) -> TyperInfo:
    bare = copy.copy(one)
    bare.typer_instance = copy.copy(one.typer_instance)
    if bare.typer_instance is not None:
        bare.typer_instance.registered_commands = []
    return bare


class Commands(TyperGroup):
    """Lists commands by their ``rich_help_panel``, with their first sentence as a whole."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List commands as a `TyperGroup`, whose list is one and cuts sentences."""
        panels: dict[str, list[tuple[str, str]]] = {}
        widest = max(map(len, self.commands))
        for name in self.list_commands(ctx):
            command: Any = self.commands[name]
            row = name.ljust(widest), command.get_short_help_str(formatter.width * 4)
            panels.setdefault(command.rich_help_panel, []).append(row)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a reader that has seen enough, as ``head`` has, is no failure."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            if not has_no_reader():
                raise
            # so that the interpreter, which flushes at its end, does not fail of it once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None


def demo(
    root: Path | None = Option(None, help="Keep everything in this folder, which must be empty."),
    save_every: int = Option(10, min=1, help="Steps between saves; a run has four saves."),
    s3: bool = Option(False, "--s3", help="Save to an S3 server, which is started here (SeaweedFS)."),
    serve: bool = Option(False, "--serve", help="Keep the catalog up at the end, until Ctrl-C."),
) -> None:
    """Train a small model, kill it in a save, resume it on other numbers of ranks, and check every claim."""
    from dcp.demo.command import run_to_exit_status

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
_GROUPS = (
    ("map", "Check and convert", "Maps from one model definition's weights to another's.", conversion.MAP),
    ("db", "The service", "The database of the service: bring it up to date, look at it.", service.DB),
    ("keys", "The service", "API keys of the service: make, list, revoke them.", service.KEYS),
    ("roots", "The service", "The roots of the service: list them, and say what is gone.", service.ROOTS),
)
_CLASSES = {"convert": conversion.ConvertCommand}

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
for _panel, _commands in _PANELS.items():
    for _one in _commands:
        _class = _CLASSES.get(_one.__name__)
        app.command(_one.__name__, cls=_class, rich_help_panel=_panel)(as_command(_one))
for _name, _panel, _help, _group in _GROUPS:
    _own = typer.Typer(help=_help, no_args_is_help=True, rich_markup_mode=None)
    for _command, _one in _group.items():
        _own.command(_command)(as_command(_one))
    app.add_typer(_own, name=_name, rich_help_panel=_panel)


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
    """Options that belong to no command."""


def main() -> None:
    """Run the command line; exits with 0 fine, 1 findings, 2 usage, 3 failure."""
    app(prog_name="dcp")
