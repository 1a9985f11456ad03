"""Reference of the command line, from the typer application."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from dcp.cli.app import app
from tools.reference.markdown import code, paragraphs, table

__all__ = ["command_line"]

HEAD = """\
# Command line

Every command takes `--help`. Most print JSON with `--json`, and show the traceback of an error with
`--debug`. [Inspect checkpoints](../../how-to/inspect.md) shows the commands in use.

| exit status | meaning |
| --- | --- |
| 0 | success |
| 1 | findings: `verify` or `diff` found something, or the command of `watch --exec` failed |
| 2 | wrong usage |
| 3 | failure: the message on stderr names the cause |
| 130, 143 | `watch` was ended by SIGINT or SIGTERM |
"""


def command_line() -> str:
    """Return the page: each command with its arguments and options."""
    group: Any = get_command(app)
    found = list(_commands(group, "dcp"))
    names = table(["command", ""], [(f"[`{name}`](#{_anchor(name)})", _brief(one)) for name, one in found])
    return "\n".join([HEAD, names, *(_section(name, one) for name, one in found)])


def _commands(group: Any, name: str) -> Iterator[tuple[str, Any]]:
    for word in sorted(group.commands):
        command = group.get_command(None, word)
        if hasattr(command, "commands"):
            yield from _commands(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def _anchor(name: str) -> str:
    return name.replace(" ", "-")


def _brief(command: Any) -> str:
    return re.split(r"(?<=\.)\s|\n\n", paragraphs(command.help or ""), maxsplit=1)[0]


def _section(name: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *map(_metavar, arguments)])
    rows = [
        (code(_metavar(one)), "required" if one.required else _default(one), one.help or "")
        for one in arguments
    ]
    rows += [(_names(one), "required" if one.required else _default(one), one.help or "") for one in options]
    parts = [f"## {name}\n", f"{paragraphs(command.help or '')}\n", f"```text\n{usage}\n```\n"]
    return "\n".join([*parts, table(["argument or option", "default", "description"], rows)])


def _metavar(argument: Any) -> str:
    named = (argument.metavar or argument.name.upper()).removesuffix("...")
    named += "..." if argument.nargs == -1 else ""
    return named if argument.required else f"[{named}]"


def _names(option: Any) -> str:
    names = [*option.opts, *option.secondary_opts]
    value = "" if option.is_flag or option.count else f" {option.metavar or _type_name(option)}"
    return ", ".join(code(f"{name}{value}" if name.startswith("--") else name) for name in names)


def _type_name(option: Any) -> str:
    name = getattr(option.type_descriptor.annotation, "__name__", "value").upper()
    return {"STR": "TEXT", "INT": "N", "FLOAT": "NUMBER"}.get(name, name)


def _default(option: Any) -> str:
    value = option.default
    if value is None or value is False or value == "" or value == [] or callable(value):
        return "can be repeated" if option.multiple else ""
    return code(str(value)) if value is not True else "on"
