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
        if not _handler.install():
            return False
        _handler.listeners.add(self)
        return True

    def close(self) -> None:
        """Notice it no longer; idempotent. The last to leave puts the handler back that was there before."""
        _handler.listeners.discard(self)
        if not _handler.listeners:
            _handler.uninstall()


class _Handler:
    """The one handler of this process.

    It runs between two instructions of the main thread, which may hold any lock: so it takes none, and sets
    plain attributes.
    """

    def __init__(self) -> None:
        self.listeners: set[StopSignal] = set()
        self._previous: signal.Handlers | signal._HANDLER | None = None
        self._pid = 0

    def install(self) -> bool:
        if signal.getsignal(signal.SIGTERM) == self._on_signal and self._pid == os.getpid():
            return True
        if threading.current_thread() is not threading.main_thread():
            logger.warning("SIGTERM is not handled: only the main thread can install a signal handler")
            return False
        previous = signal.signal(signal.SIGTERM, self._on_signal)
        if self._pid != os.getpid():  # a fork: those who listened are in the parent
            self.listeners.clear()
        if previous != self._on_signal:
            self._previous = previous
        self._pid = os.getpid()
        return True

    def uninstall(self) -> None:
        """Put the previous handler back, unless another has come on top, which may call this one."""
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) == self._on_signal
            and self._previous is not None
        ):
            signal.signal(signal.SIGTERM, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # A forked child (a data loader's worker) has this handler too, but must end as if it had not.
        heard = self._pid == os.getpid() and bool(self.listeners)
        if heard:
            for listener in tuple(self.listeners):
                listener.received = True
        if callable(self._previous):
            self._previous(number, frame)
        elif not heard and self._previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_handler = _Handler()
