"""Writer processes of tests come from a process that has torch imported, because each would import it again.

The fork server of the tests (`tests.support.forking`) forks that process once it has imported all. A writer
gets what a new process would: a session of its own, the environment, the folder and the output of its
trainer, and no descriptor but its socket. `cold_writers` has them started as users have it, and so has what
runs as a program of its own, but for those of `tests.support.programs`, which come from that process, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from dcp.background.process import child
from dcp.background.process.main import main
from tests.support.forking import ADDRESS, ensure_fork_server
from tests.support.processes import lives

__all__ = [
    "cold_writers",
    "end_with_parent",
    "fork_off",
    "fork_one",
    "start_warm",
    "use_warm_writers",
]

_START_SECONDS: Final = 240.0
_NUMBER: Final = struct.Struct("=q")
_LENGTH_BYTES: Final = 1 << 20
_PR_SET_PDEATHSIG: Final = 1
_OUTPUTS: Final = (1, 2)
_MAX_FDS: Final = 4
_EXECUTABLE: Final = sys.executable
_start_cold: Final = child._popen
_processes_with_fork_server: Final[set[int]] = set()


def use_warm_writers() -> None:
    """In this process, and in those that the fork server makes from now on."""
    os.environ.setdefault(ADDRESS, f"tests-{uuid.uuid4().hex}")
    _processes_with_fork_server.add(os.getpid())
    child._popen = start_warm


@contextlib.contextmanager
def cold_writers() -> Iterator[None]:
    """Writers of this process are started as users have it, until the end of the block."""
    before, child._popen = child._popen, _start_cold
    try:
        yield
    finally:
        child._popen = before


class _Started:
    """A writer, with as much of `subprocess.Popen` as is asked of it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._status: int | None = None
        self.pid = _receive_number(connection)

    def kill(self) -> None:
        """SIGKILL, unless it is known to have ended."""
        if self._status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative for a signal; TimeoutExpired."""
        with self._lock:
            if self._status is None:
                self._connection.settimeout(timeout)
                try:
                    self._status = os.waitstatus_to_exitcode(_receive_number(self._connection))
                except TimeoutError:
                    raise subprocess.TimeoutExpired("writer", timeout or 0.0) from None
                self._connection.close()
            return self._status


def _receive_number(connection: socket.socket) -> int:
    number: int = _NUMBER.unpack(connection.recv(_NUMBER.size, socket.MSG_WAITALL))[0]
    return number


def start_warm(theirs: socket.socket, nice: int) -> Any:
    """In place of `subprocess.Popen` of a writer."""
    if sys.executable != _EXECUTABLE:  # a test is about what happens where it is not there
        return _start_cold(theirs, nice)
    order = (os.getpid(), nice, str(Path.cwd()), child.child_environment())
    return _Started(_ask(_be_writer, order, [theirs.fileno(), *_OUTPUTS]))


def fork_one(what: Callable[..., None], order: tuple[Any, ...], fds: list[int]) -> tuple[socket.socket, int]:
    """Have a process call ``what(fds, *order)``, outside of all that could catch what it raises: its id, and
    whence eight bytes come at its end: its status, as `os.waitpid` has it."""
    connection = _ask(what, order, fds)
    return connection, _receive_number(connection)


def _ask(what: Callable[..., None], order: tuple[Any, ...], fds: list[int]) -> socket.socket:
    data = pickle.dumps((what, order))
    connection = _connect()
    socket.send_fds(connection, [_NUMBER.pack(len(data)) + data], fds)
    return connection


def _connect() -> socket.socket:
    if os.getpid() in _processes_with_fork_server:
        ensure_fork_server()
    give_up = time.monotonic() + _START_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect("\0" + os.environ[ADDRESS])
            return connection
        except ConnectionRefusedError:
            connection.close()
            if time.monotonic() > give_up:
                raise
            time.sleep(0.02)


def end_with_parent(number: signal.Signals) -> None:
    """This process gets that signal when the one ends that has forked it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


# -- the process that is forked ------------------------------------------------------------------------------


def _serve(listener: socket.socket) -> Callable[[], None]:
    """Returns in the processes that are asked for only: what each has to do."""
    os.closerange(3, listener.fileno())
    os.closerange(listener.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if os.fork() == 0:
            listener.close()
            return _keep(connection)
        connection.close()


def _keep(connection: socket.socket) -> Callable[[], None]:
    """Start one process, and tell of it and of its end; returns in that process only: what it has to do."""
    end_with_parent(signal.SIGKILL)
    (what, order), fds = _received(connection)
    pid = os.fork()
    if pid == 0:
        connection.close()
        return partial(what, fds, *order)
    for fd in fds:
        os.close(fd)
    try:
        connection.sendall(_NUMBER.pack(pid))
        connection.sendall(_NUMBER.pack(os.waitpid(pid, 0)[1]))
    except OSError:
        pass
    finally:
        os._exit(0)


def _received(connection: socket.socket) -> tuple[Any, list[int]]:
    data, fds, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, _MAX_FDS)
    length = _NUMBER.unpack(data[: _NUMBER.size])[0]
    order = data[_NUMBER.size :]
    while len(order) < length:
        order += connection.recv(length - len(order))
    return pickle.loads(order), fds


def _be_writer(fds: list[int], trainer: int, nice: int, folder: str, environment: dict[str, str]) -> None:
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, fd in zip(_OUTPUTS, fds[1:], strict=True):
            os.dup2(fd, number)
        os.closerange(3, fds[0])
        os.closerange(fds[0] + 1, os.sysconf("SC_OPEN_MAX"))
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        paths = environment["PYTHONPATH"].split(os.pathsep)
        sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
        os.getppid = lambda: trainer if lives(trainer) else 1  # its own is who tells of its end
        main([str(fds[0]), str(trainer), str(nice)])
    finally:
        sys.stderr.flush()
        os._exit(1)


def fork_off() -> None:
    """That process, of the fork server, which has no threads."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0" + os.environ[ADDRESS])
    listener.listen(64)
    server = os.getpid()
    if os.fork() == 0:
        end_with_parent(signal.SIGKILL)
        if os.getppid() != server:
            os._exit(0)
        _serve(listener)()
    listener.close()
    child._popen = start_warm
