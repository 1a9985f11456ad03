"""Subprocesses of a worker: forked from a warm process, bounded in memory and time, killable."""

from __future__ import annotations

import json
import os
import pickle
import selectors
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from dcp.server.core.jobs.executors.executor import (
    Messages,
    OnDone,
    OnProgress,
    Order,
    ProcessOutcome,
    WorkFolders,
    send_message,
)
from dcp.server.core.jobs.executors.subprocess_main import CONTROL_BYTES, TOO_MUCH_MEMORY, Setup
from dcp.server.core.jobs.ledger.rows import Json
from dcp.server.records.jobs import JobFailure

_START: Final = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[1]); "
    "from dcp.server.core.jobs.executors.subprocess_main import serve; serve(0)"
)
_LOOK_SECONDS: Final = 0.1
_DEATH_SECONDS: Final = 5.0
_ONE_THREAD: Final = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
"""Limits libraries to one thread: forks need single-threaded processes, and tasks run in parallel."""


class TaskProcess:
    """One subprocess with its order."""

    def __init__(
        self,
        pool: WarmProcessPool,
        number: int,
        order: Order,
        connection: socket.socket,
        on_progress: OnProgress,
        on_done: OnDone,
    ) -> None:
        self._pool = pool
        self.number = number
        self.order = order
        self.pid: int | None = None
        self.is_killed = False
        self.error: JobFailure | None = None  # reason of the kill
        self.result: Json | None = None
        self.connection = connection
        self.messages = Messages(connection)
        self.on_progress = on_progress
        self.on_done = on_done
        self.until_seconds = time.monotonic() + order.seconds if order.seconds else float("inf")
        self.is_over = False

    def kill(self) -> None:
        """Kill the process; see `Running.kill`."""
        self._pool.kill(self)

    def outcome(self, status: int | None) -> ProcessOutcome:
        """Return the outcome after the end with ``status``."""
        if self.result is not None and status == 0:  # finished before the kill
            return ProcessOutcome(result=self.result)
        if self.error is not None:
            return ProcessOutcome(error=self.error)
        if self.is_killed:
            return ProcessOutcome()
        return ProcessOutcome(error=_died(status))


def _died(status: int | None) -> JobFailure:
    if status is None:
        how = "could not start, or died with its parent process"
    elif (code := os.waitstatus_to_exitcode(status)) < 0:
        how = f"was killed by signal {-code}" + (" (often out of memory)" if code == -9 else "")
    else:
        how = f"ended with exit code {code} and without a result"
    return JobFailure(type="TaskProcessError", detail=f"the subprocess {how}")


class WarmProcessPool:
    """The executor of this machine: subprocesses forked from a warm process, started with the first `start`.

    Thread-safe. One thread of the pool calls ``on_progress`` and ``on_done``, which must be quick.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._folders = WorkFolders(setup.settings.work_folder)
        self._sweeper = ThreadPoolExecutor(1, thread_name_prefix="dcp-sweep")
        self._lock = threading.Lock()
        self._warm: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._children: dict[int, TaskProcess] = {}
        self._number = 0
        self._selector = selectors.DefaultSelector()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def warm(self) -> None:
        """Start the warm process in advance, to hide its import time."""
        with self._lock:
            if not self._is_closed:
                self._ready()

    def start(self, order: Order, on_progress: OnProgress, on_done: OnDone) -> TaskProcess:
        """Start an order; see `Executor.start`. Failures go to ``on_done``."""
        if self._is_closed:
            raise RuntimeError("the pool is closed")
        order = replace(order, work_folder=str(self._folders.make()))
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            if self._is_closed:
                ours.close()
                raise RuntimeError("the pool is closed")
            control = self._ready()
            self._number += 1
            child = TaskProcess(self, self._number, order, ours, on_progress, on_done)
            self._children[child.number] = child
            self._selector.register(ours, selectors.EVENT_READ, child)
            with suppress(OSError):  # the watching thread reports the death of the warm process
                socket.send_fds(control, [json.dumps({"start": child.number}).encode()], [theirs.fileno()])
        with suppress(OSError):  # the child has ended
            send_message(ours, asdict(order))
        return child

    def kill(self, child: TaskProcess, error: JobFailure | None = None) -> None:
        """Kill the process; ``error`` is its own fault, if any."""
        with self._lock:
            if child.is_over or child.is_killed:
                return
            child.is_killed = True
            child.error = error
            if self._control is not None:
                with suppress(OSError):
                    self._control.send(json.dumps({"kill": child.number}).encode())

    def close(self) -> None:
        """Kill all processes; `on_done` of each is called before the return."""
        with self._lock:
            self._is_closed = True
            children = list(self._children.values())
            control, self._control = self._control, None
            if control is not None:
                control.shutdown(socket.SHUT_RDWR)  # ends the warm process and its children
        for child in children:
            child.is_killed = True
        if self._thread is not None:
            self._thread.join()
        if self._warm is not None:
            self._warm.wait()
        self._selector.close()
        self._sweeper.shutdown()
        self._folders.close()

    # -- the warm process --

    def _ready(self) -> socket.socket:
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-c", _START, json.dumps(sys.path)]
        with theirs:
            self._warm = subprocess.Popen(
                command, stdin=theirs.fileno(), env=_environment(), start_new_session=True
            )
        reading, writing = socket.socketpair()
        with reading, writing:
            socket.send_fds(ours, [b"{}"], [reading.fileno()])
            writing.sendall(pickle.dumps(self._setup))
        self._control = ours
        self._selector.register(ours, selectors.EVENT_READ, None)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="dcp-warm-pool", daemon=True)
            self._thread.start()
        return ours

    def _watch(self) -> None:
        while True:
            for key, _ in self._selector.select(_LOOK_SECONDS):
                if key.data is None:
                    self._hear(key.fileobj)
                else:
                    self._read(key.data)
            with self._lock:
                children = list(self._children.values())
                if self._is_closed and not children:
                    return
            for child in children:
                self._look_after(child)

    def _hear(self, control: Any) -> None:
        """Read a message of the warm process; at its end all children are dead."""
        try:
            data = control.recv(CONTROL_BYTES)
        except OSError:
            data = b""
        if not data:
            self._lost(control)
            return
        message = json.loads(data)
        if "started" in message:
            with self._lock:
                if (child := self._children.get(message["started"])) is not None:
                    child.pid = message["pid"]
        elif (ended := self._children.get(message["ended"])) is not None:
            self._end(ended, message["status"])

    def _lost(self, control: socket.socket) -> None:
        with self._lock:
            self._selector.unregister(control)
            control.close()
            if self._control is control:
                self._control = None  # the next start creates a new one
            children = list(self._children.values())
            warm = self._warm
        if warm is not None:
            warm.wait()
        until = time.monotonic() + _DEATH_SECONDS
        for child in children:
            while child.pid is not None and _lives(child.pid) and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS / 10)  # killed by the kernel
            self._end(child, None)

    def _read(self, child: TaskProcess) -> None:
        try:
            messages, is_open = child.messages.read()
        except ValueError:
            messages, is_open = [], False
            self.kill(child, JobFailure(type="TaskProcessError", detail="the subprocess sent no message"))
        for message in messages:
            if "done_bytes" in message:
                child.on_progress(int(message["done_bytes"]))
            elif "error" in message:
                child.error = JobFailure(**message["error"])
            elif "result" in message:
                child.result = message["result"]
        if not is_open:
            with suppress(KeyError, ValueError):
                self._selector.unregister(child.connection)

    def _end(self, child: TaskProcess, status: int | None) -> None:
        self._read(child)  # last message
        with self._lock:
            child.is_over = True
            del self._children[child.number]
        with suppress(KeyError, ValueError):
            self._selector.unregister(child.connection)
        child.connection.close()
        self._sweeper.submit(shutil.rmtree, child.order.work_folder, True)
        child.on_done(child.outcome(status))

    def _look_after(self, child: TaskProcess) -> None:
        if child.pid is None or child.is_over:
            return
        most = child.order.memory_bytes
        if most and resident_bytes(child.pid) > most:
            detail = f"the task used more memory than task_memory_bytes={most} allows"
            self.kill(child, JobFailure(type=TOO_MUCH_MEMORY, detail=detail, is_retryable=False))
        elif time.monotonic() > child.until_seconds:
            detail = f"the task took longer than task_seconds={child.order.seconds:g}"
            self.kill(child, JobFailure(type="TaskTimeoutError", detail=detail))


def _lives(pid: int) -> bool:
    """Return True if the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _environment() -> dict[str, str]:
    """Return the environment without settings of the service, which contain secrets."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("DCP_SERVER_")}
    return plain | _ONE_THREAD


def resident_bytes(pid: int) -> int:
    """Return the anonymous memory of a process in RAM and swap; 0 if ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    parts = (line.split() for line in lines if line.startswith(("RssAnon:", "RssShmem:", "VmSwap:")))
    return sum(int(part[1]) for part in parts) * 1024
