"""Progress of long saves and loads: bytes done of bytes to do, to a callback or a bar on the terminal."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

__all__ = ["Progress", "ProgressCallback", "harmless", "is_within_callback", "reporting"]

logger = logging.getLogger(__name__)

_INTERVAL_SECONDS = 0.1

_calling = threading.local()


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of this rank: ``phase`` ("write" or "read"), finished and total payload bytes, elapsed
    seconds.
    """

    phase: str
    bytes_done: int
    bytes_total: int
    seconds: float


ProgressCallback = Callable[[Progress], None]


def harmless(callback: ProgressCallback) -> ProgressCallback:
    """Wrap ``callback`` so that an exception is logged and ends the calls, without failing the work."""
    failed = False

    def call(progress: Progress) -> None:
        nonlocal failed
        if failed:
            return
        _calling.now = True
        try:
            callback(progress)
        except BaseException:  # also SystemExit, which would end an I/O thread
            failed = True
            logger.exception("the progress callback of a save raised an error and is no longer called")
        finally:
            _calling.now = False

    return call


def is_within_callback() -> bool:
    """Return whether this thread runs a `harmless` callback."""
    return getattr(_calling, "now", False)


@contextmanager
def reporting(
    progress: bool | ProgressCallback | None, phase: str, total_bytes: int, *, show: bool
) -> Iterator[Callable[[int], None] | None]:
    """Yield a function to call with each number of finished bytes, or None without a callback or bar.

    ``progress`` is True for a bar on stderr, drawn on a terminal if ``show`` is True (on one rank only), or a
    function that receives `Progress` at most ten times a second, from any I/O thread.
    """
    if callable(progress):
        begun, lock = time.monotonic(), threading.Lock()
        done, due = 0, 0.0

        def add(count: int) -> None:
            nonlocal done, due
            now = time.monotonic()
            with lock:
                done += count
                if now >= due or done >= total_bytes:
                    due = now + _INTERVAL_SECONDS
                    progress(Progress(phase, done, total_bytes, now - begun))

        yield add
    elif progress and show:
        with drawn_bar(phase, total_bytes) as update:
            yield None if update is None else lambda count: update(advance=count)
    else:
        yield None


@contextmanager
def drawn_bar(
    phase: str, total_bytes: int | None = None, *, of_command: bool = False
) -> Iterator[Callable[..., None] | None]:
    """Draw a bar with rate and remaining time on stderr, and yield its ``update`` of
    `rich.progress.Progress`.

    Yields None without a terminal. With ``of_command``, the bar has binary units and disappears at the end.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    sizes = DownloadColumn(binary_units=of_command)
    columns = BarColumn(), sizes, TransferSpeedColumn(), TimeRemainingColumn()
    with Bars(*columns, console=Console(stderr=True), transient=of_command) as bars:
        yield partial(bars.update, bars.add_task(phase, total=total_bytes))
