"""Claims of the demo: compared, printed and counted, with colours on a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

__all__ = ["Narrator", "compare_digests", "largest_difference", "sparkline"]

_WIDTH = 100
_INDENT = "   "
_BARS = "▁▂▃▄▅▆▇█"
_BARS_WIDTH = 40


class Narrator:
    """Writes to stdout: sentences in lines of at most 100 characters, tables and output as they are.

    ``claims`` counts what was checked; ``failed`` has the claims that did not hold, with the reason.
    """

    def __init__(self) -> None:
        if hasattr(sys.stdout, "reconfigure"):
            # a terminal without Unicode shows question marks instead of bars
            sys.stdout.reconfigure(errors="replace", line_buffering=True)
        self._width = min(_WIDTH, shutil.get_terminal_size((_WIDTH, 25)).columns)
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._chapters = 0
        self.claims = 0
        self.failed: list[tuple[str, str]] = []

    def chapter(self, title: str) -> None:
        """Print a numbered heading."""
        self._chapters += 1
        self._console.print(f"\n{self._chapters}. {title}", style="bold cyan")

    def say(self, text: str) -> None:
        """Print a paragraph."""
        self._console.print(self._wrapped(text, _INDENT))

    def check(self, claim: str, held: bool, reason: str = "") -> None:
        """Count and print a claim; ``reason`` says what was seen instead where it did not hold."""
        self.claims += 1
        if not held:
            self.failed.append((claim, reason))
        mark, style = ("ok    ", "green") if held else ("FAILED", "red")
        text = claim if held or not reason else f"{claim}: {reason}"
        hanging = _INDENT + " " * (len(mark) + 1)
        body = self._wrapped(text, hanging).removeprefix(hanging)
        self._console.print(Text(_INDENT) + Text(mark, style=f"bold {style}") + Text(f" {body}"))

    def output(self, text: str, command: str = "") -> None:
        """Print lines as a program printed them, below the ``command`` that was typed for it."""
        if command:
            self._console.print(f"{_INDENT}  $ {command}", style="bold")
        for line in text.rstrip().splitlines():
            self._console.print(f"{_INDENT}  {line}", style="dim")

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
    ) -> None:
        """Print aligned columns; those named in ``right`` are flushed right."""
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        for number, row in enumerate([header, *rows]):
            cells = (
                cell.rjust(width) if name in right else cell.ljust(width)
                for name, cell, width in zip(header, row, widths, strict=True)
            )
            line = f"{_INDENT}  {'  '.join(cells)}".rstrip()
            self._console.print(line, style="bold" if number == 0 else None)

    def progress(self, text: str) -> None:
        """Print ``text`` over the last such text, on a terminal; nothing elsewhere."""
        if self._console.is_terminal:
            print(f"\r{_INDENT}{text:<{self._width - len(_INDENT) - 1}}\r", end="", flush=True)

    def _wrapped(self, text: str, indent: str) -> str:
        # Names and paths stay whole, so that they can be copied.
        return textwrap.fill(
            " ".join(text.split()),
            self._width,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )


def compare_digests(wanted: Mapping[str, str], got: Mapping[str, str], *, without: str = "") -> str:
    """Say how two sets of digests differ; empty if they do not.

    Names that begin with ``without`` are left out. No digests at all count as a difference, because then
    nothing was compared.
    """
    left, right = (
        {name: value for name, value in digests.items() if not (without and name.startswith(without))}
        for digests in (wanted, got)
    )
    if not left:
        return "there are no digests to compare with"
    differing = [name for name in sorted(left.keys() | right.keys()) if left.get(name) != right.get(name)]
    if not differing:
        return ""
    return f"{len(differing)} of {len(left)} entries differ, such as {', '.join(differing[:3])}"


def largest_difference(reference: Mapping[int, Any], other: Mapping[int, Any], steps: Sequence[int]) -> float:
    """Give the largest absolute difference of two logs over ``steps``; infinite if one is missing."""
    if not steps or any(step not in reference or step not in other for step in steps):
        return float("inf")
    pairs = [(_numbers(reference[step]), _numbers(other[step])) for step in steps]
    if any(len(left) != len(right) for left, right in pairs):
        return float("inf")
    return max(abs(a - b) for left, right in pairs for a, b in zip(left, right, strict=True))


def _numbers(value: Any) -> list[float]:
    return list(value) if isinstance(value, list) else [value]


def sparkline(losses: Mapping[int, float], steps: range, low: float, high: float) -> str:
    """Draw at most 40 characters, a step or more each, higher for a higher loss; blank for missing steps."""

    def bar(step: int) -> str:
        if step not in losses:
            return " "
        height = (losses[step] - low) / max(high - low, 1e-9)
        return _BARS[min(len(_BARS) - 1, max(0, int(height * len(_BARS))))]

    return "".join(bar(step) for step in steps[:: -(-len(steps) // _BARS_WIDTH)])
