"""Tables that fit the terminal, pictures made of characters, and progress bars."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Final, TypeAlias, TypeVar

import typer

from dcp.cli.common import printable

__all__ = [
    "Top",
    "bar",
    "counted",
    "largest_first",
    "output_columns",
    "print_rest",
    "print_table",
    "progress_bar",
    "shortened",
    "sort_key",
    "sparkline",
    "top_of",
]


_HEIGHTS: Final = " ▁▂▃▄▅▆▇█"
_WIDTHS: Final = " ▏▎▍▌▋▊▉█"
_ASCII_HEIGHTS: Final = " .:-=+*%#"


def sparkline(counts: Sequence[int]) -> str:
    """Draw one character for each of ``counts``, as high as it is; whatever is not 0 can be seen."""
    heights = _HEIGHTS if can_print(_HEIGHTS) else _ASCII_HEIGHTS
    largest = max(counts, default=0)
    return "".join(heights[-(-count * 8 // largest) if largest else 0] for count in counts)


def bar(count: int, largest: int, width: int) -> str:
    """Draw a bar of ``width`` characters for ``largest``, and of its share for ``count``."""
    eighths = -(-count * width * 8 // largest) if largest else 0
    if not can_print(_WIDTHS):
        return "#" * -(-eighths // 8)
    return ("█" * (eighths // 8) + _WIDTHS[eighths % 8]).rstrip()


def can_print(text: str) -> bool:
    """Return whether standard output can show these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


Show: TypeAlias = Callable[[int, int], None]

_UPDATE_SECONDS = 0.1


@contextmanager
def progress_bar(what: str) -> Iterator[Show | None]:
    """Give a function of (bytes done, bytes in all) that shows rate and time left on stderr; None if that is
    no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(printable(what), total=None)
        shown_seconds = 0.0

        def show(done: int, total: int) -> None:
            nonlocal shown_seconds
            now = time.monotonic()
            if now - shown_seconds > _UPDATE_SECONDS:  # small blocks come faster than the bar can be drawn
                shown_seconds = now
                bar.update(task, completed=done, total=total)

        yield show


T = TypeVar("T")

Top: TypeAlias = Annotated[
    int | None, typer.Option("--top", metavar="N", min=1, help="Show the first N rows only.")
]

_GAP = "  "


def output_columns() -> int | None:
    """Return the width of the output: the terminal's width or ``COLUMNS``; None where nothing bounds it, as
    in a pipe."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return None


def counted(count: int, what: str) -> str:
    """Count things, as ``1 file``, ``2,000 files``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def top_of(rows: list[T], top: int | None) -> list[T]:
    """Return the first ``top`` of ``rows``, all without."""
    return rows if top is None else rows[:top]


def print_rest(rows: Sequence[object], top: int | None, what: str) -> None:
    """Say how many rows were left out."""
    if top is not None and len(rows) > top:
        print(f"and {counted(len(rows) - top, f'more {what}')}")


def sort_key(option: str, keys: Mapping[str, Callable[[T], Any]]) -> Callable[[T], Any]:
    """Return the key of ``--sort``; its mistakes are wrong usage."""
    if option not in keys:
        raise typer.BadParameter(f"{option!r} is none of {', '.join(keys)}", param_hint="--sort")
    return keys[option]


def largest_first(figure_of: Callable[[T], float | None]) -> Callable[[T], tuple[bool, float]]:
    """Make a key that sorts by a figure, the largest first, and what has none last."""

    def key(row: T) -> tuple[bool, float]:
        figure = figure_of(row)
        return figure is None, 0.0 if figure is None else -figure

    return key


def print_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[str] = (),
    narrow: Sequence[str] = (),
) -> None:
    """Print aligned columns; those named in ``right`` are flushed right.

    Where the output is too narrow for them, columns without any value are left out, and then, one by one
    until it is wide enough, what ``narrow`` says: ``name`` leaves that column out, ``name:20`` shortens what
    is in it, down to so many characters.

    Written by hand because rich lays out 20,000 rows in seconds.
    """
    columns = {
        name: [printable(cell) for cell in column]
        for name, *column in zip(header, *rows, strict=True)  # a column of each name
    }
    widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    available = output_columns()
    if available is not None:
        _fit(columns, widths, available, narrow)
    layout = _GAP.join(f"{{:{'>' if name in right else '<'}{widths[name]}}}" for name in columns)
    lines = [layout.format(*columns).rstrip()]
    lines += [layout.format(*row).rstrip() for row in zip(*columns.values(), strict=True)]
    if sys.stdout.isatty():
        lines[0] = f"\x1b[1m{lines[0]}\x1b[0m"
    print("\n".join(lines))


def _fit(
    columns: dict[str, list[str]], widths: dict[str, int], available: int, narrow: Sequence[str]
) -> None:
    least: dict[str, int] = {}

    def excess() -> int:
        wanted = sum(min(width, least.get(name, width)) for name, width in widths.items())
        return wanted + len(_GAP) * (len(widths) - 1) - available

    if excess() > 0:
        for name in [name for name, cells in columns.items() if cells and not {*cells} - {"", "-"}]:
            del columns[name], widths[name]
    for step in narrow:
        if excess() <= 0:
            break
        name, _, characters = step.partition(":")
        if name not in columns:
            continue
        if characters:
            least[name] = max(int(characters), len(name))
        else:
            del columns[name], widths[name]
            least.pop(name, None)
    spare = max(0, -excess())
    for name, characters_left in least.items():
        width = min(widths[name], characters_left + spare)
        spare -= max(0, width - characters_left)
        widths[name], columns[name] = width, [shortened(cell, width) for cell in columns[name]]


def shortened(text: str, width: int) -> str:
    """Return ``text``, without its middle if it is longer than ``width``: names differ at both ends."""
    if len(text) <= width:
        return text
    mark = "…" if can_print("…") else "..."
    tail = (width - len(mark) + 1) // 2
    return f"{text[: width - len(mark) - tail]}{mark}{text[len(text) - tail :]}"
