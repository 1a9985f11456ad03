"""Claims of the demo: compared, printed and counted, with colors on a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

_WIDTH = 100
_INDENT = "   "


class Narrator:
    """Writer to stdout: sentences in lines of up to 100 characters, tables and output unchanged.

    ``claims`` is the number of checks; ``failed`` lists failed claims with reasons.
    """

    def __init__(self) -> None:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace", line_buffering=True)
        self._width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 25)).columns)
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._chapters = 0
        self.claims = 0
        self.failed: list[str] = []

    def chapter(self, title: str) -> None:
        """Print a numbered heading."""
        self._chapters += 1
        self._console.print(f"\n{self._chapters}. {title}", style="bold cyan")

    def say(self, text: str) -> None:
        """Print a paragraph."""
        self._console.print(self._wrapped(text, _INDENT))

    def check(self, claim: str, held: bool, reason: str = "") -> None:
        """Count and print a claim; ``reason`` is the observation of a failed claim."""
        self.claims += 1
        text = claim if held or not reason else f"{claim}: {reason}"
        if not held:
            self.failed.append(text)
        mark, style = ("ok    ", "bold green") if held else ("FAILED", "bold red")
        body = self._wrapped(text, " " * 10).strip()
        self._console.print(Text.assemble(_INDENT, (mark, style), f" {body}"))

    def output(self, text: str, command: str = "") -> None:
        """Print the lines of a program, below the ``command``."""
        if command:
            self._console.print(f"{_INDENT}  $ {command}", style="bold")
        for line in text.rstrip().splitlines():
            self._console.print(f"{_INDENT}  {line}", style="dim")

    def table(self, *rows: Sequence[str]) -> None:
        """Print columns, the first left-aligned, below the first row as heading."""
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for number, (name, *cells) in enumerate(rows):
            rest = "".join(f"  {cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
            style = "bold" if number == 0 else None
            self._console.print(f"{_INDENT}  {name:<{widths[0]}}{rest}", style=style)

    def _wrapped(self, text: str, indent: str) -> str:
        # keep names and paths whole for copying
        return textwrap.fill(
            " ".join(text.split()),
            self._width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )


def compare_digests(wanted: Mapping[str, str], got: Mapping[str, str], *, without: str = "") -> str:
    """Return the difference of two sets of digests as text; empty if equal.

    Names with the prefix ``without`` are ignored. An empty set counts as different.
    """
    names = [name for name in sorted({*wanted, *got}) if not (without and name.startswith(without))]
    compared = [name for name in names if name in wanted]
    if not compared:
        return "there are no digests to compare with"
    differing = [name for name in names if wanted.get(name) != got.get(name)]
    some = ", ".join(differing[:3])
    return f"{len(differing)} of {len(compared)} entries differ, such as {some}" if differing else ""


def largest_difference(reference: Mapping[int, Any], other: Mapping[int, Any], steps: Sequence[int]) -> float:
    """Return the largest absolute difference of two logs over ``steps``; infinite for a missing step."""
    if not steps or any(step not in reference or step not in other for step in steps):
        return float("inf")
    pairs = [(np.asarray(reference[step]), np.asarray(other[step])) for step in steps]
    if any(one.shape != two.shape for one, two in pairs):
        return float("inf")
    return max(float(np.abs(one - two).max()) for one, two in pairs)
