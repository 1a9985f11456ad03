"""Worker threads with cancellation: Ctrl-C cancels pending requests.

Python interrupts only the main thread. A thread that waits for a service would otherwise delay the exit
until the service's timeouts.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Final, TypeVar

T = TypeVar("T")

CALLER_LEFT: Final[ContextVar[threading.Event | None]] = ContextVar("CALLER_LEFT", default=None)
"""Set when no caller waits for the results of the present thread. Inherited through the context."""

_UNWANTED: Final[ContextVar[threading.Event | None]] = ContextVar("_UNWANTED", default=None)

_LOOK_SECONDS: Final = 0.25
_CLEARING_SECONDS: Final = 3.0


class AnyEvent(threading.Event):
    """Event that is set when any of several events is set."""

    def __init__(self, *events: threading.Event) -> None:
        super().__init__()
        self._events = events

    def is_set(self) -> bool:
        """Return True if any event is set."""
        return any(event.is_set() for event in self._events)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for any event."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            rest = _LOOK_SECONDS if end is None else min(_LOOK_SECONDS, end - time.monotonic())
            if rest <= 0:
                return False
            self._events[0].wait(rest)
        return True


@contextmanager
def unwanted_once(called_off: threading.Event | None) -> Iterator[None]:
    """End requests within this block when ``called_off`` is set, except in `clearing_up`."""
    token = _UNWANTED.set(called_off)
    try:
        yield
    finally:
        _UNWANTED.reset(token)


def or_unwanted(called_off: threading.Event) -> threading.Event:
    """Return an event that is set when ``called_off`` is set or this thread's results are not wanted."""
    others = [event for event in (CALLER_LEFT.get(), _UNWANTED.get()) if event is not None]
    return AnyEvent(called_off, *others) if others else called_off


@contextmanager
def clearing_up() -> Iterator[None]:
    """Allow cleanup in this block after a cancellation; during Ctrl-C, all such blocks end together after a
    few seconds.
    """
    interrupt = sys.exception()
    if not isinstance(interrupt, KeyboardInterrupt):
        with unwanted_once(None):
            yield
        return
    token = CALLER_LEFT.set(vars(interrupt).setdefault("dcp_deadline", _Deadline(_CLEARING_SECONDS)))
    try:
        yield
    finally:
        CALLER_LEFT.reset(token)


class _Deadline(threading.Event):
    """Event that is set after some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._end = time.monotonic() + seconds

    def is_set(self) -> bool:
        """Return True after the deadline."""
        return time.monotonic() >= self._end

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the deadline."""
        rest = max(0.0, self._end - time.monotonic())
        time.sleep(rest if timeout is None else min(rest, timeout))
        return self.is_set()


class WorkerThreads(ThreadPoolExecutor):
    """Thread pool whose context manager waits for all threads, and sets `CALLER_LEFT` on an interrupt."""

    def __init__(self, count: int, name: str = "dcp") -> None:
        self.left = threading.Event()
        outer = CALLER_LEFT.get()
        seen = self.left if outer is None else AnyEvent(self.left, outer)
        super().__init__(count, thread_name_prefix=name, initializer=CALLER_LEFT.set, initargs=(seen,))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            self.left.set()
        interrupt: BaseException | None = None
        while True:
            try:
                # Cancel only here: `concurrent.futures.wait` would not notice earlier cancellations.
                self.shutdown(wait=True, cancel_futures=self.left.is_set())
                break
            except BaseException as another:  # noqa: BLE001 - raised below
                self.left.set()
                interrupt = interrupt or another
        if interrupt is not None:
            raise interrupt


def result_of(future: Future[T]) -> T:
    """Wait for a result, with prompt handling of Ctrl-C.

    Signal handlers run between calls and a signal may arrive just before a wait; each wait is therefore
    short.
    """
    while not future.done():
        wait((future,), _LOOK_SECONDS)
    return future.result()


def work_off(
    units: Iterable[T], threads: int, work: Callable[[Iterator[T]], None], name: str = "dcp"
) -> None:
    """Process ``units`` by ``work`` on ``threads`` threads including the caller's; each unit once.

    Raises the first failure after all threads have stopped.
    """
    if threads <= 1:
        work(iter(units))
        return
    left, lock, failed = iter(units), threading.Lock(), threading.Event()

    def shared() -> Iterator[T]:
        while True:
            with lock:
                if failed.is_set() or pool.left.is_set():
                    return
                try:
                    unit = next(left)
                except StopIteration:
                    return
            yield unit

    def one() -> None:
        try:
            work(shared())
        except BaseException:
            failed.set()
            raise

    with WorkerThreads(threads - 1, name) as pool:
        futures = [pool.submit(one) for _ in range(threads - 1)]
        one()
        for future in futures:
            result_of(future)
