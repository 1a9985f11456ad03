"""SIGTERM, as schedulers send it before they take a machine away, noticed by any number of listeners.

The handler only sets flags: what has to be done happens in the training loop, at a step.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

__all__ = ["StopSignal"]

logger = logging.getLogger(__name__)


class StopSignal:
    """Whether SIGTERM has arrived since `listen`.

    All listeners of a process share one handler. It is installed with the first and taken away with the last,
    and calls the Python handler that was there before. It can only be installed from the main thread;
    elsewhere `listen` says False.
    """

    def __init__(self) -> None:
        self.received = False

    def listen(self) -> bool:
        """Notice SIGTERM from now on; False where that is not possible."""
        global _installed
        if _installed is None or not _installed.is_in_place():
            if threading.current_thread() is not threading.main_thread():
                logger.warning("SIGTERM is not handled: only the main thread can install a signal handler")
                return False
            if _installed is not None and _installed.pid != os.getpid():
                _listeners.clear()  # a fork: those who listened are in the parent
            _installed = _Handler()
        _listeners.add(self)
        return True

    def close(self) -> None:
        """Notice it no longer; idempotent. The last to leave puts the handler back that was there before."""
        global _installed
        _listeners.discard(self)
        if not _listeners and _installed is not None and _installed.take_away():
            _installed = None


class _Handler:
    """Installs itself, over the handler that is there.

    It runs between two instructions of the main thread, which may hold any lock: so it takes none, and sets
    plain attributes. If somebody else's handler has come on top, the next one is another instance above that,
    so that handlers which call each other do not run in a circle.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._previous = signal.getsignal(signal.SIGTERM)  # before: the signal may come at once
        signal.signal(signal.SIGTERM, self._on_signal)

    def is_in_place(self) -> bool:
        return self.pid == os.getpid() and signal.getsignal(signal.SIGTERM) == self._on_signal

    def take_away(self) -> bool:
        """Put the previous handler back, unless another has come on top, which may call this one."""
        if threading.current_thread() is not threading.main_thread() or not self.is_in_place():
            return False
        if self._previous is None:  # not installed from Python, so that Python cannot put it back
            return False
        signal.signal(signal.SIGTERM, self._previous)
        return True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A forked child (a data loader's worker) has this handler too, but must end as if it had not.
        heard = self.pid == os.getpid() and bool(_listeners)
        if heard:
            for listener in tuple(_listeners):
                listener.received = True
        if callable(self._previous):
            self._previous(number, frame)
        elif not heard and self._previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_listeners: set[StopSignal] = set()
_installed: _Handler | None = None
