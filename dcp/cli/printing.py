"""Output of the commands: lines, JSON, tables that fit the terminal, character charts, progress."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

from dcp.progress import drawn_bar

MAX_JSON_ELEMENTS: Final = 1_000_000

_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB")
_HEIGHTS: Final = " ▁▂▃▄▅▆▇█"
_ASCII_HEIGHTS: Final = " .:-=+*%#"
_WIDTHS: Final = " ▏▎▍▌▋▊▉█"
_GAP: Final = "  "
_UPDATE_SECONDS: Final = 0.1

# -- lines and JSON ------------------------------------------------------------------------------------------


def line(text: str) -> None:
    """Print a line that may contain file names."""
    print(printable(text))


def error(message: str) -> None:
    """Print one line on stderr."""
    print(f"dcp: {printable(' '.join(message.split()))}", file=sys.stderr)


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped: names come from files, and must not steer the
    terminal."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print ``value`` (plain data, data classes) as JSON on stdout; bytes and NaN as their repr.

    Without ``indent`` the value is one line, flushed at once.
    """
    plain = _jsonable(value)
    try:
        print(json.dumps(plain, indent=indent, ensure_ascii=False, allow_nan=False), flush=indent is None)
    except UnicodeEncodeError:  # unpaired surrogates in names, or a terminal without Unicode
        print(json.dumps(plain, indent=indent, allow_nan=False), flush=indent is None)


def _jsonable(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else repr(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {item.name: _jsonable(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if hasattr(value, "tolist") and value.size <= MAX_JSON_ELEMENTS:  # arrays and scalars of numpy
        return _jsonable(value.tolist())
    from dcp.storage.formats.torch.python_values import value_text

    return value_text(value)


# -- cells ---------------------------------------------------------------------------------------------------


def size(count: int | None) -> str | None:
    """Format a size with three digits and a binary unit; None if unknown."""
    if count is None or count < 1024:
        return None if count is None else f"{count} B"
    value = float(count)
    for unit in _UNITS:
        value /= 1024
        if value < 999.5 or unit == _UNITS[-1]:
            break
    return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"


def shape(sizes: Sequence[int]) -> str:
    """Return ``64x32``; ``scalar`` without dimensions."""
    return "x".join(map(str, sizes)) or "scalar"


def shown_value(value: object, most: int) -> str:
    """Format a value that is not a tensor, up to a number of characters."""
    from dcp.storage.formats.torch.python_values import value_text

    text = value_text(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def describe_time(seconds: float | None) -> str:
    """Format seconds since the epoch as local time; - if unknown or out of range."""
    try:
        when = None if seconds is None else datetime.fromtimestamp(seconds, UTC).astimezone()
    except (ValueError, OverflowError, OSError):
        when = None
    return "-" if when is None else f"{when:%Y-%m-%d %H:%M:%S}"


def counted(count: int, what: str) -> str:
    """Count things, as ``1 file``, ``2,000 files``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def sparkline(counts: Sequence[int]) -> str:
    """Draw one character for each of ``counts``; every count above 0 is visible."""
    heights = _HEIGHTS if _can_print(_HEIGHTS) else _ASCII_HEIGHTS
    largest = max(counts, default=0)
    return "".join(heights[-(-count * 8 // largest) if largest else 0] for count in counts)


def bar(count: int, largest: int, width: int) -> str:
    """Draw a bar for ``count``, where ``largest`` has ``width`` characters."""
    eighths = -(-count * width * 8 // largest) if largest else 0
    if not _can_print(_WIDTHS):
        return "#" * -(-eighths // 8)
    return ("█" * (eighths // 8) + _WIDTHS[eighths % 8]).rstrip()


def _can_print(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


# -- tables --------------------------------------------------------------------------------------------------


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    narrow: Sequence[str] = (),
    top: int | None = None,
    what: str = "",
    total: Sequence[object] | None = None,
) -> None:
    """Print aligned columns; names with a ``>`` prefix align right, None is a dash.

    The first ``top`` of ``rows`` are printed, with the number of remaining ``what``; ``total`` is the last
    row. If the output is too narrow, empty columns are left out first. Entries of ``narrow`` follow one by
    one: ``name`` leaves out a column, ``name:20`` shortens a column to 20 characters.

    Written by hand, because rich takes seconds for 20,000 rows.
    """
    shown = [*islice(rows, top), *(() if total is None else [total])]
    columns = {
        name: [printable("-" if cell is None else str(cell)) for cell in column]
        for name, *column in zip(header, *shown, strict=True)  # one column for each name
    }
    columns = {name.removeprefix(">"): cells for name, cells in columns.items()}
    widths = {name: max(map(len, (name, *cells))) for name, cells in columns.items()}
    available = output_columns()
    if available is not None:
        _fit(columns, widths, available, narrow)
    layout = _GAP.join(f"{{:{'>' if f'>{name}' in header else '<'}{widths[name]}}}" for name in columns)
    lines = [layout.format(*row).rstrip() for row in (columns, *zip(*columns.values(), strict=True))]
    if sys.stdout.isatty():
        lines[0] = f"\x1b[1m{lines[0]}\x1b[0m"
    print("\n".join(lines))
    if top is not None and len(rows) > top:
        print(f"and {counted(len(rows) - top, f'more {what}')}")


def _fit(
    columns: dict[str, list[str]], widths: dict[str, int], available: int, narrow: Sequence[str]
) -> None:
    least: dict[str, int] = {}

    def excess() -> int:
        wanted = sum(min(width, least.get(name, width)) for name, width in widths.items())
        return wanted + len(_GAP) * (len(widths) - 1) - available

    empty = [name for name, cells in columns.items() if cells and not {*cells} - {"", "-"}]
    for step in (*(empty if excess() > 0 else ()), *narrow):
        name, _, characters = step.partition(":")
        if name not in columns or (excess() <= 0 and name not in empty):
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
        widths[name], columns[name] = width, [_shortened(cell, width) for cell in columns[name]]


def _shortened(text: str, width: int) -> str:
    """Shorten ``text`` to ``width`` in the middle, because names differ at both ends."""
    if len(text) <= width:
        return text
    mark = "…" if _can_print("…") else "..."
    tail = (width - len(mark) + 1) // 2
    return f"{text[: width - len(mark) - tail]}{mark}{text[len(text) - tail :]}"


def output_columns() -> int | None:
    """Return the width of the terminal or ``COLUMNS``; None without a limit, as in a pipe."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return None


def largest_first(part: str, field: str) -> Callable[[object], tuple[bool, float]]:
    """Make a sort key by a figure, the largest first, rows without the figure last."""

    def key(row: object) -> tuple[bool, float]:
        figure = getattr(getattr(row, part), field, None)
        return figure is None, 0.0 if figure is None else -figure

    return key


# -- progress ------------------------------------------------------------------------------------------------


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int], None] | None]:
    """Return a function of (bytes done, total bytes) that shows rate and remaining time on stderr; None
    without a terminal."""
    with drawn_bar("", of_command=True) as update:
        if update is None:
            yield None
            return
        shown_seconds = 0.0

        def show(done: int, total: int) -> None:
            nonlocal shown_seconds
            now = time.monotonic()
            if now - shown_seconds > _UPDATE_SECONDS:  # limits the rate of updates
                shown_seconds = now
                update(completed=done, total=total)

        yield show
