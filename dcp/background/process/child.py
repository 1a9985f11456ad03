"""A writer process as its trainer sees it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dcp.background.process.wire import Connection, connected_pair, watch_process
from dcp.version import __version__

__all__ = ["Child", "child_environment"]

logger = logging.getLogger(__name__)

_REAP_SECONDS = 5.0

_ENDED = frozenset({errno.EPIPE, errno.ECONNRESET, errno.EBADF})
"""Errors of sending to a process that has ended."""

_DROPPED = ("TORCHELASTIC_", "MASTER_ADDR", "MASTER_PORT")
"""Variables that would tie the writers' group to the trainers' launcher."""

_SET = {
    # the cores are the training's
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # staged copies are host memory: no memory of a device is spent on a context here
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
}


class Child:
    """Starts a writer process in a session of its own; never raises: a process that cannot start has ended.
    ``arguments`` are its rank, the world size, and the timeout in seconds.

    ``on_message`` gets what it says and ``on_end`` is called once when it has ended, both in a thread of this
    object. ``end`` then says how it ended, as the rest of a sentence; it is empty before.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        *,
        on_message: Callable[[Child, dict[str, Any]], None],
        on_end: Callable[[Child], None],
    ) -> None:
        self.end = ""
        self._on_message = on_message
        self._on_end = on_end
        self._killed_because = ""
        self._ended = threading.Event()
        ours, theirs = connected_pair()
        with theirs:
            try:
                self._process = _popen(theirs, arguments)
            except OSError as error:
                ours.close()
                self._pid = 0
                self._note_end(f"could not be started: {error}")
                return
        self._pid = self._process.pid
        self._connection = Connection(ours, watch_process(self._pid))
        threading.Thread(target=self._receive, name="dcp-writer-watch", daemon=True).start()

    def send(self, body: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send it a message; one that has ended, or does not take messages any more, shows by its ``end``."""
        if self.end:
            return
        try:
            self._connection.send(body, fds)
        except BlockingIOError:
            self.kill("did not take messages any more and was killed")
        except OSError as error:
            if error.errno not in _ENDED:  # its save would never be heard to end
                self.kill(f"could not be sent a message and was killed: {error}")
            logger.debug("writer process %d: %s", self._pid, error)

    def kill(self, because: str) -> None:
        """Send SIGKILL; ``because`` becomes its ``end``."""
        if not self.end:
            self._killed_because = because
            self._process.kill()

    def close(self, timeout_seconds: float) -> None:
        """Have it end, by itself if it does so in time."""
        self.send({"kind": "close"})
        if not self._ended.wait(timeout_seconds):
            self.kill("did not end when it was asked to, and was killed")
            self._ended.wait(_REAP_SECONDS)

    def _receive(self) -> None:
        try:
            while (message := self._connection.receive()) is not None:
                for fd in message.fds:
                    os.close(fd)
                self._on_message(self, message.body)
        except Exception as error:
            logger.exception("a message of writer process %d", self._pid)
            self.kill(f"could not be understood and was killed: {type(error).__name__}: {error}")
        end = self._killed_because or _end_of(self._reap())
        self._connection.close()  # before `on_end`, which may look for what is still open
        self._note_end(end)

    def _reap(self) -> int:
        """Return the exit status; the connection is closed, so the process has ended or has no business any
        more."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(_REAP_SECONDS)
        self._process.kill()
        return self._process.wait()

    def _note_end(self, end: str) -> None:
        if self._pid:
            self._reap()
        self.end = end
        self._ended.set()
        self._on_end(self)


def _popen(theirs: socket.socket, arguments: Sequence[object]) -> subprocess.Popen[bytes]:
    fd = theirs.fileno()
    # -P: a folder that training happens to run in must not provide modules that it does not provide there
    command = [sys.executable or "", "-P", "-m", "dcp.background.process.main"]
    return subprocess.Popen(
        [*command, *map(str, (fd, os.getpid(), __version__, *arguments))],
        stdin=subprocess.DEVNULL,
        pass_fds=[fd],
        start_new_session=True,  # else Ctrl-C and the launcher's signals to the trainer's group reach it
        env=child_environment(),
    )


def child_environment() -> dict[str, str]:
    """Make the trainer's environment without what ties a process to its launcher, with its module search
    path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    paths = [os.path.abspath(path) for path in sys.path if isinstance(path, str)]  # noqa: PTH100 - "" is cwd
    return kept | _SET | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _end_of(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status} (see its messages on stderr)"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"
