"""A progress bar for long work, on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from dcp.cli.common import printable

__all__ = ["progress_bar"]

Show: TypeAlias = Callable[[int, int], None]

_UPDATE_SECONDS = 0.1


@contextmanager
def progress_bar(what: str) -> Iterator[Show | None]:
    """Takes (bytes done, bytes in all), and shows rate and time left on stderr; None if that is no
    terminal."""
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
