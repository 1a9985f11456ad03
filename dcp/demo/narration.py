"""How the demo speaks: headings, sentences, commands and their output; with colours on a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from dcp.demo.checks import Checks

__all__ = ["Narrator"]

_WIDTH = 100
_INDENT = "   "


class Narrator:
    """Writes to stdout: sentences in lines of at most 100 characters, tables and output as they are."""

    def __init__(self, checks: Checks) -> None:
        if hasattr(sys.stdout, "reconfigure"):
            # a terminal without Unicode shows question marks instead of bars, and the demo goes on
            sys.stdout.reconfigure(errors="replace", line_buffering=True)
        self._width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 25)).columns)
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._checks = checks
        self._chapters = 0

    def chapter(self, title: str) -> None:
        """A numbered heading."""
        self._chapters += 1
        self._console.print(f"\n{self._chapters}. {title}", style="bold cyan")

    def say(self, text: str) -> None:
        """A paragraph."""
        self._console.print(self._wrapped(text, _INDENT, _INDENT))

    def check(self, claim: str, held: bool, reason: str = "") -> None:
        """A claim and whether it held; ``reason`` says what was seen instead if it did not."""
        self._checks.add(claim, held, reason)
        mark, style = ("ok    ", "green") if held else ("FAILED", "red")
        text = claim if held or not reason else f"{claim}: {reason}"
        hanging = _INDENT + " " * (len(mark) + 1)
        body = self._wrapped(text, hanging, hanging).removeprefix(hanging)
        self._console.print(Text(_INDENT) + Text(mark, style=f"bold {style}") + Text(f" {body}"))

    def command(self, line: str, output: str, exit_code: int) -> None:
        """A command as it would be typed, what it printed, and its exit status if it is not 0."""
        self._console.print(f"{_INDENT}  $ {line}", style="bold")
        self.output(output)
        if exit_code:
            self.output(f"(exit status {exit_code})")

    def output(self, text: str) -> None:
        """Lines as a program printed them."""
        for line in text.rstrip().splitlines():
            self._console.print(f"{_INDENT}  {line}", style="dim")

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
    ) -> None:
        """Aligned columns; those named in ``right`` are flushed right."""
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for number, row in enumerate([header, *rows]):
            cells = (
                cell.rjust(width) if name in right else cell.ljust(width)
                for name, cell, width in zip(header, row, widths, strict=True)
            )
            line = f"{_INDENT}  {'  '.join(cells)}".rstrip()
            self._console.print(line, style="bold" if number == 0 else None)

    @contextmanager
    def training(self, text: str, steps: int) -> Iterator[Callable[[int, float], None]]:
        """Announce a job; gives the function to call with each step and its loss, for a line redrawn."""
        self.say(text)
        if not self._console.is_terminal:
            yield lambda step, loss: None
            return
        with self._console.status("starting processes ...") as status:
            yield lambda step, loss: status.update(f"step {step} of {steps}, loss {loss:.3f}")

    def _wrapped(self, text: str, first: str, rest: str) -> str:
        # Names and paths stay whole, so that they can be copied.
        return textwrap.fill(
            " ".join(text.split()),
            self._width,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
