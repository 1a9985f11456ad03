"""The ``dcp worker`` beside ``dcp serve``: started again when it ends, ended with it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import structlog

__all__ = ["worker_beside"]

_FIRST_PAUSE_SECONDS: Final = 1.0
_LAST_PAUSE_SECONDS: Final = 30.0
_STABLE_SECONDS: Final = 60.0
_log = structlog.get_logger(__name__)


@contextmanager
def worker_beside(shutdown_seconds: float, begin: threading.Event) -> Iterator[None]:
    """A worker with this process's environment as long as this lasts, from when ``begin`` is set.

    At the end it has ``shutdown_seconds`` to stop. If this process is killed, it ends by itself, because its
    standard input does.
    """
    keeper = _Keeper(shutdown_seconds, begin)
    keeper.thread.start()
    try:
        yield
    finally:
        keeper.stop()


class _Keeper:
    def __init__(self, shutdown_seconds: float, begin: threading.Event) -> None:
        self._begin = begin
        self._shutdown_seconds = shutdown_seconds
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.thread = threading.Thread(target=self._keep, name="worker-keeper", daemon=True)

    def stop(self) -> None:
        with self._lock:
            self._stopping.set()
            self._begin.set()
            process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(self._shutdown_seconds)
            except subprocess.TimeoutExpired:
                _log.warning("worker did not stop in time; it is killed", seconds=self._shutdown_seconds)
                process.kill()
        self.thread.join()

    def _keep(self) -> None:
        self._begin.wait()
        pause_seconds = _FIRST_PAUSE_SECONDS
        while (process := self._start()) is not None:
            started_seconds = time.monotonic()
            status = process.wait()
            if self._stopping.is_set():
                return
            if time.monotonic() - started_seconds > _STABLE_SECONDS:
                pause_seconds = _FIRST_PAUSE_SECONDS
            _log.warning("worker ended; it is started again", status=status, pause_seconds=pause_seconds)
            self._stopping.wait(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LAST_PAUSE_SECONDS)

    def _start(self) -> subprocess.Popen[bytes] | None:
        arguments = [sys.executable, "-m", "dcp", "worker", "--until-input-ends"]
        with self._lock:
            if self._stopping.is_set():
                return None
            # A session of its own: Ctrl-C is for us, who then end it in good order.
            self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, start_new_session=True)
            return self._process
