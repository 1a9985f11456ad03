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
    """Return the time before the end at which saves are called off: their files have to be removed in that
    time."""
    return min(_LARGEST_RESERVE_SECONDS, grace_seconds / 10)


class Notices:
    """Notices that the run is to stop. ``signals`` and ``files`` have the seconds of grace of each; of a
    signal None means that it is not known.

    Files are looked for by a thread, and a deadline is seen to by it, once `see_to_it` has begun it. Time is
    that of `time.monotonic`, so that no clock that is set has a part in it. All notices of a process share
    one handler a signal, which is installed with the first and taken away with the last, and calls the Python
    handler that was there before.
    """

    def __init__(self, signals: Mapping[int, float | None], files: Mapping[str, float] | None = None) -> None:
        self.signals = tuple(signals)
        self.moments: dict[int | str, float] = {}
        """The time at which each notice came first."""
        self._grace = dict[int | str, float | None]([*signals.items(), *(files or {}).items()])
        self._there = {path: _identity(path) for path in files or ()}
        self._closed = threading.Event()
        for path, identity in self._there.items():
            if identity is not None:
                logger.warning("%s is there already: it is no notice until it appears anew", path)

    def listen(self) -> None:
        """Notice signals from now on, until `close`; only the main thread can install their handlers."""
        for number in self.signals:
            installed = _installed.get(number)
            if installed is None or not installed.is_in_place():
                if threading.current_thread() is not threading.main_thread():
                    name = signal.Signals(number).name
                    logger.warning(
                        "%s is not handled: only the main thread can install a signal handler", name
                    )
                    continue
                if installed is not None and installed.pid != os.getpid():
                    _listeners.clear()  # a fork: those who listened are in the parent
                _installed[number] = _Handler(number)
            _listeners.add((number, self))

    @property
    def has_grace(self) -> bool:
        """Tell whether a deadline may come of one."""
        return any(grace is not None for grace in self._grace.values())

    def seconds_left(self) -> float:
        """Return the time until saves have to be called off, at the earliest by all that has come; infinite
        if nothing has that has a deadline."""
        end = math.inf
        for notice, moment in tuple(self.moments.items()):
            grace = self._grace[notice]
            if grace is not None:
                end = min(end, moment + grace - _reserve_seconds(grace))
        return end - time.monotonic()

    def see_to_it(self, call_off: Callable[[], None]) -> None:
        """Look for files from now on, and call ``call_off`` again and again once a deadline has come."""
        threading.Thread(target=self._look, args=(call_off,), name="dcp-notices", daemon=True).start()

    def close(self) -> None:
        """Notice nothing any more; idempotent. The last to leave puts former handlers back."""
        self._closed.set()
        for number in self.signals:
            _listeners.discard((number, self))
            installed = _installed.get(number)
            if installed is not None and not _of(number) and installed.take_away():
                del _installed[number]

    def _look(self, call_off: Callable[[], None]) -> None:
        while not self._closed.wait(min(_LOOK_SECONDS, max(_SHORTEST_SECONDS, self.seconds_left()))):
            for path in self._there.keys() - self.moments.keys():
                identity = _identity(path)
                if identity not in (None, self._there[path]):
                    self.moments[path] = time.monotonic()
                    logger.warning("the notice %s has appeared", path)
                self._there[path] = identity
            if self.seconds_left() <= 0:
                call_off()


def _identity(path: str) -> tuple[int, int, int] | None:
    """Return the identity of the file or folder that is there; None if none is, or it cannot be read."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_size, found.st_mtime_ns  # inode numbers change on some FUSE mounts


def grace_of(
    grace: Grace | None, *, handle_sigterm: bool
) -> tuple[dict[int, float | None], dict[str, float]]:
    """Return the arguments of `Notices`. Raises OptionError for what is no notice, or no time."""
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


class _Handler:
    """Installs itself, over the handler that is there.

    It runs between two instructions of the main thread, which may hold any lock: so it takes none, and sets
    plain attributes. If another handler has come on top, the next one is another instance above that,
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
                listener.moments.setdefault(number, now)
        if callable(self._previous):
            self._previous(number, frame)
        elif not heard and number == signal.SIGTERM and self._previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_listeners: set[tuple[int, Notices]] = set()
_installed: dict[int, _Handler] = {}


def _of(number: int) -> list[Notices]:
    return [notices for listened, notices in tuple(_listeners) if listened == number]
