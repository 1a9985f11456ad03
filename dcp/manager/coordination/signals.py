"""Signals that schedulers send before they take a machine away, noticed by any number of listeners.

The handler only sets flags: what has to be done happens in the training loop, at a step.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType

__all__ = ["StopSignal"]

logger = logging.getLogger(__name__)


class StopSignal:
    """Whether the signal ``number`` has arrived since `listen`, and when first (`time.monotonic`).

    All listeners of a process share one handler a signal. It is installed with the first and taken away with
    the last, and calls the Python handler that was there before. It can only be installed from the main
    thread; elsewhere `listen` says False.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        self.number = number
        self.moment: float | None = None

    @property
    def received(self) -> bool:
        """Whether it has."""
        return self.moment is not None

    def listen(self) -> bool:
        """Notice it from now on; False where that is not possible."""
        installed = _installed.get(self.number)
        if installed is None or not installed.is_in_place():
            name = signal.Signals(self.number).name
            if threading.current_thread() is not threading.main_thread():
                logger.warning("%s is not handled: only the main thread can install a signal handler", name)
                return False
            if installed is not None and installed.pid != os.getpid():
                _listeners.clear()  # a fork: those who listened are in the parent
            _installed[self.number] = _Handler(self.number)
        _listeners.add(self)
        return True

    def close(self) -> None:
        """Notice it no longer; idempotent. The last to leave puts the handler back that was there before."""
        _listeners.discard(self)
        installed = _installed.get(self.number)
        if installed is not None and not _of(self.number) and installed.take_away():
            del _installed[self.number]


class _Handler:
    """Installs itself, over the handler that is there.

    It runs between two instructions of the main thread, which may hold any lock: so it takes none, and sets
    plain attributes. If somebody else's handler has come on top, the next one is another instance above that,
    so that handlers which call each other do not run in a circle.
    """

    def __init__(self, number: int) -> None:
        self.pid = os.getpid()
        self._number = number
        self._previous = signal.getsignal(number)  # before: the signal may come at once
        signal.signal(number, self._on_signal)

    def is_in_place(self) -> bool:
        return self.pid == os.getpid() and signal.getsignal(self._number) == self._on_signal

    def take_away(self) -> bool:
        """Put the previous handler back, unless another has come on top, which may call this one."""
        if threading.current_thread() is not threading.main_thread() or not self.is_in_place():
            return False
        if self._previous is None:  # not installed from Python, so that Python cannot put it back
            return False
        signal.signal(self._number, self._previous)
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A forked child (a data loader's worker) has this handler too, but must end by SIGTERM as if it had
        # not. Other signals are notices that schedulers may send to all processes, and no reason to end.
        listeners = _of(number)
        heard = self.pid == os.getpid() and bool(listeners)
        if heard:
            now = time.monotonic()
            for listener in listeners:
                listener.moment = now if listener.moment is None else listener.moment
        if callable(self._previous):
            self._previous(number, frame)
        elif not heard and number == signal.SIGTERM and self._previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_listeners: set[StopSignal] = set()
_installed: dict[int, _Handler] = {}


def _of(number: int) -> list[StopSignal]:
    return [listener for listener in tuple(_listeners) if listener.number == number]
