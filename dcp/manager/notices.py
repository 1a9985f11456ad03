"""Notices that the machine goes away, by signals and by files that appear, and how long the run has then."""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from dcp.storage.errors import OptionError

__all__ = ["Grace", "Notices", "grace_of"]

logger = logging.getLogger(__name__)

Grace = float | Mapping[signal.Signals | str | os.PathLike[str], float]
"""Seconds that are left after a SIGTERM; or after each of several signals, and files that appear."""

_LOOK_SECONDS = 0.25
_SHORTEST_SECONDS = 0.02
_LARGEST_RESERVE_SECONDS = 5.0


def _reserve_seconds(grace_seconds: float) -> float:
    """Time before the end at which saves are called off: their files have to be removed in that time."""
    return min(_LARGEST_RESERVE_SECONDS, grace_seconds / 10)


class Notices:
    """Notices that the run is to stop. ``signals`` and ``files`` have the seconds of grace of each; of a
    signal None means that nobody knows.

    Files are looked for by a thread, and a deadline is seen to by it, once `see_to_it` has begun it. Time is
    that of `time.monotonic`, so that no clock that is set has a part in it.
    """

    def __init__(self, signals: Mapping[int, float | None], files: Mapping[str, float] | None = None) -> None:
        self._signals = {StopSignal(number): grace for number, grace in signals.items()}
        self._files = dict(files or {})
        self._there = {path: _identity(path) for path in self._files}
        self._appeared: dict[str, float] = {}
        self._closed = threading.Event()
        for path, identity in self._there.items():
            if identity is not None:
                logger.warning("%s is there already: it is no notice until it appears anew", path)

    def listen(self) -> None:
        """Notice signals from now on, until `close`."""
        for stop in self._signals:
            stop.listen()

    @property
    def received(self) -> bool:
        """Tell whether one has come."""
        return bool(self._appeared) or any(stop.received for stop in self._signals)

    @property
    def has_grace(self) -> bool:
        """Tell whether a deadline may come of one."""
        return bool(self._files) or any(grace is not None for grace in self._signals.values())

    def seconds_left(self) -> float:
        """Until saves have to be called off, at the earliest by all that has come; infinite if nothing has
        that has a deadline."""
        moments = [(stop.moment, grace) for stop, grace in self._signals.items()]
        moments += [(self._appeared.get(path), grace) for path, grace in self._files.items()]
        ends = [
            moment + grace - _reserve_seconds(grace)
            for moment, grace in moments
            if moment is not None and grace is not None
        ]
        return min(ends, default=math.inf) - time.monotonic()

    def see_to_it(self, call_off: Callable[[], None]) -> None:
        """Look for files from now on, and call ``call_off`` again and again once a deadline has come."""
        threading.Thread(target=self._look, args=(call_off,), name="dcp-notices", daemon=True).start()

    def close(self) -> None:
        """Notice nothing any more; idempotent."""
        self._closed.set()
        for stop in self._signals:
            stop.close()

    def _look(self, call_off: Callable[[], None]) -> None:
        while not self._closed.wait(min(_LOOK_SECONDS, max(_SHORTEST_SECONDS, self.seconds_left()))):
            for path in self._files.keys() - self._appeared.keys():
                identity = _identity(path)
                if identity not in (None, self._there[path]):
                    self._appeared[path] = time.monotonic()
                    logger.warning("the notice %s has appeared", path)
                self._there[path] = identity
            if self.seconds_left() <= 0:
                call_off()


def _identity(path: str) -> tuple[int, int, int] | None:
    """Identity of the file or folder that is there; None if none is, or it cannot be read."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_size, found.st_mtime_ns  # inode numbers change on some FUSE mounts


def grace_of(
    grace: Grace | None, *, handle_sigterm: bool
) -> tuple[dict[int, float | None], dict[str, float]]:
    """Arguments of `Notices`. Raises OptionError for what is no notice, or no time."""
    given: Mapping[signal.Signals | str | os.PathLike[str], float]
    given = grace if isinstance(grace, Mapping) else {} if grace is None else {signal.SIGTERM: grace}
    signals: dict[int, float | None] = {signal.SIGTERM: None} if handle_sigterm else {}
    files: dict[str, float] = {}
    for notice, seconds in given.items():
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise OptionError(f"grace_seconds must be a number above 0, not {seconds!r}")
        if isinstance(notice, int):
            signals[_handled(notice, handle_sigterm=handle_sigterm)] = seconds
        elif isinstance(notice, str | os.PathLike) and isinstance(os.fspath(notice), str):
            files[_place(os.fspath(notice))] = seconds
        else:
            raise OptionError(f"grace_seconds: {notice!r} is neither a signal nor the path of a file")
    return signals, files


def _handled(number: int, *, handle_sigterm: bool) -> int:
    try:
        known = signal.Signals(number)
    except ValueError:
        raise OptionError(f"grace_seconds: there is no signal {number!r}") from None
    if known in (signal.SIGKILL, signal.SIGSTOP):
        raise OptionError(f"grace_seconds: {known.name} cannot be noticed")
    if known is signal.SIGTERM and not handle_sigterm:
        raise OptionError("grace_seconds of SIGTERM means nothing with handle_sigterm=False")
    return known


def _place(path: str) -> str:
    if not path or "\0" in path or Path(path).is_dir():
        raise OptionError(f"grace_seconds: {path!r} is no path of a file; name the file that will appear")
    return os.path.abspath(path)  # noqa: PTH100 - no links are resolved


# -- signals -------------------------------------------------------------------------------------------------


class StopSignal:
    """Tell whether the signal ``number`` has arrived since `listen`, and when first (`time.monotonic`).

    All listeners of a process share one handler a signal. It is installed with the first and taken away with
    the last, and calls the Python handler that was there before. It can only be installed from the main
    thread; elsewhere `listen` says False.
    """

    def __init__(self, number: int = signal.SIGTERM) -> None:
        self.number = number
        self.moment: float | None = None

    @property
    def received(self) -> bool:
        """True once it has arrived."""
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
