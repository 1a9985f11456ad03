"""Groups of commands: which are made, their list in the help, and a reader that has gone."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup
from typer.models import CommandInfo, TyperInfo

from dcp.cli.common import has_no_reader

__all__ = ["Application", "Commands"]


class Application(typer.Typer):
    """Makes what a call needs: to make all commands with all their options takes as long as many a command
    does."""

    def __call__(self, args: Sequence[str] | None = None, **options: Any) -> Any:
        """As of `typer.Typer`: of the one command that is called, or of the list in the help."""
        given = list(sys.argv[1:] if args is None else args)
        if given and not given[0].startswith("-"):
            own = self._called(given[0]) or self
        else:  # a shell that completes has its words elsewhere
            own = self._listed() if given[:1] == ["--help"] else self
        return typer.Typer.__call__(own, args=args, **options)

    def _called(self, name: str) -> typer.Typer | None:
        own = copy.copy(self)
        own.registered_commands = [one for one in self.registered_commands if one.name == name]
        own.registered_groups = [one for one in self.registered_groups if one.name == name]
        return own if own.registered_commands or own.registered_groups else None

    def _listed(self) -> typer.Typer:
        own = copy.copy(self)
        own.registered_commands = [_without_options(one) for one in self.registered_commands]
        own.registered_groups = [_without_commands(one) for one in self.registered_groups]
        return own


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
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                panel = command.rich_help_panel
                rows = panels.setdefault(panel if isinstance(panel, str) else "Commands", [])
                rows.append((name, command.get_short_help_str(formatter.width * 4)))
        widest = max(len(name) for rows in panels.values() for name, _ in rows)
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl([(name.ljust(widest), text) for name, text in rows])

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
