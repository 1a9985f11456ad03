"""Threads that work for a caller who may leave: Ctrl-C cancels the requests that they wait for.

Python interrupts the main thread only. A thread that waits for a service in vain would keep it, and so the
end of the process, until the timeouts of that service are over.
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
"""Set once the results of the current thread, which works for another one, are not waited for any more.
Passed on to further threads with the context."""

_UNWANTED: Final[ContextVar[threading.Event | None]] = ContextVar("_UNWANTED", default=None)

_LOOK_SECONDS: Final = 0.25
_CLEARING_SECONDS: Final = 3.0


class AnyEvent(threading.Event):
    """Set as soon as one of several is; never itself."""

    def __init__(self, *events: threading.Event) -> None:
        super().__init__()
        self._events = events

    def is_set(self) -> bool:
        """Test whether one is."""
        return any(event.is_set() for event in self._events)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until one is."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            rest = _LOOK_SECONDS if end is None else min(_LOOK_SECONDS, end - time.monotonic())
            if rest <= 0:
                return False
            self._events[0].wait(rest)
        return True


@contextmanager
def unwanted_once(called_off: threading.Event | None) -> Iterator[None]:
    """End requests within this block once ``called_off`` is set, except those of `clearing_up`."""
    token = _UNWANTED.set(called_off)
    try:
        yield
    finally:
        _UNWANTED.reset(token)


def or_unwanted(called_off: threading.Event) -> threading.Event:
    """Make an event that is set as soon as ``called_off`` is, or this thread's results are not waited for."""
    others = [event for event in (CALLER_LEFT.get(), _UNWANTED.get()) if event is not None]
    return AnyEvent(called_off, *others) if others else called_off


@contextmanager
def clearing_up() -> Iterator[None]:
    """Let this block, which only removes what is not needed any more, take its time; while Ctrl-C is handled,
    all such blocks together end after a few seconds, because a caller waits."""
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
    """Set once some seconds have passed."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._end = time.monotonic() + seconds

    def is_set(self) -> bool:
        """Test whether they have."""
        return time.monotonic() >= self._end

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until then."""
        rest = max(0.0, self._end - time.monotonic())
        time.sleep(rest if timeout is None else min(rest, timeout))
        return self.is_set()


class WorkerThreads(ThreadPoolExecutor):
    """As a context manager it ends when none of its threads runs any more; `CALLER_LEFT` is set for them if
    the block is left by an interrupt, or one comes while they are waited for."""

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
                # Not cancelled before: `concurrent.futures.wait` would never hear of it.
                self.shutdown(wait=True, cancel_futures=self.left.is_set())
                break
            except BaseException as another:  # noqa: BLE001 - raised below
                self.left.set()
                interrupt = interrupt or another
        if interrupt is not None:
            raise interrupt


def result_of(future: Future[T]) -> T:
    """Wait for a result. Ctrl-C is noticed soon, however late that is.

    Python runs handlers of signals between two calls, and a signal wakes a thread that waits; one that comes
    when the thread is about to wait is noticed when the wait is over, so no wait is long.
    """
    while not future.done():
        wait((future,), _LOOK_SECONDS)
    return future.result()


def work_off(
    units: Iterable[T], threads: int, work: Callable[[Iterator[T]], None], name: str = "dcp"
) -> None:
    """Have ``work`` go through ``units`` on so many threads, the caller's among them; each unit is one's.

    Raises the first failure after all have stopped, which they do with the unit that they are at.
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
