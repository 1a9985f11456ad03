"""The list of commands in the help, and what becomes of a command whose reader has gone."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from dcp.cli.common import nobody_reads

__all__ = ["Commands"]


class Commands(TyperGroup):
    """Lists commands by their ``rich_help_panel``, with their first sentence as a whole."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """As of a `TyperGroup`, whose list is one and cuts sentences."""
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
        """A reader that has seen enough, as ``head`` has, is no failure."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            if not nobody_reads():
                raise
            # so that the interpreter, which flushes at its end, does not fail of it once more
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
