"""Executor interface: phases and tasks of jobs in local subprocesses or on a Dask cluster.

Orders and outcomes are messages on a stream socket: JSON after its length. Output of a subprocess is never
unpickled, since the subprocess reads foreign files.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from dcp.server.core.jobs.ledger.rows import Json, Phase
from dcp.server.records.jobs import JobFailure

_LENGTH: Final = struct.Struct("<I")
_MAX_BYTES: Final = 1 << 30
_READ_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order for a subprocess, as plain data."""

    kind: str
    phase: Phase
    job_id: int
    attempt_name: str
    task_number: int | None = None
    params: Json = field(default_factory=dict)
    prepared: Json = field(default_factory=dict)
    payload: Json = field(default_factory=dict)
    plan_data: Json = field(default_factory=dict)
    results: Sequence[Json] = ()
    memory_bytes: int = 0
    seconds: float = 0.0
    work_folder: str = ""  # filled in by the executor


def send_message(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message. Raises ValueError or TypeError for invalid JSON before sending."""
    data = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    if len(data) > _MAX_BYTES:
        raise ValueError(f"a message of {len(data)} bytes exceeds the limit of a subprocess")
    connection.sendall(_LENGTH.pack(len(data)) + data)


def receive_message(connection: socket.socket) -> dict[str, Any]:
    """Return the next message. Raises EOFError if it is incomplete."""
    head = connection.recv(_LENGTH.size, socket.MSG_WAITALL)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    with connection.makefile("rb") as stream:
        data = stream.read(length)
    if len(data) < length:
        raise EOFError
    message: dict[str, Any] = json.loads(data)
    return message


class Messages:
    """Messages received on a socket so far, without blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._data = bytearray()

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the complete messages, and True if more may follow. Raises ValueError for invalid data."""
        is_open = True
        while True:
            try:
                part = self._connection.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            if not part:
                is_open = False
                break
            self._data += part
        return self._whole(), is_open

    def _whole(self) -> list[dict[str, Any]]:
        found = []
        place = 0
        while len(self._data) - place >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, place)
            if length > _MAX_BYTES:
                raise ValueError("the message is too long")
            end = place + _LENGTH.size + length
            if len(self._data) < end:
                break
            found.append(json.loads(self._data[place + _LENGTH.size : end]))
            place = end
        del self._data[:place]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOutcome:
    """The end of an order: a result, an error, or neither if killed on request."""

    result: Json | None = None
    error: JobFailure | None = None


OnProgress = Callable[[int], None]
OnDone = Callable[[ProcessOutcome], None]


class Running(Protocol):
    """A running order."""

    def kill(self) -> None:
        """Kill the order; `OnDone` is still called once all of its processes ended."""


class Executor(Protocol):
    """Runs orders. Callbacks come from internal threads, and must be quick."""

    def start(self, order: Order, on_progress: OnProgress, on_done: OnDone) -> Running:
        """Start an order; ``on_done`` is called exactly once."""

    def close(self) -> None:
        """Kill all orders and wait for their end."""


_PREFIX: Final = "dcp-work-"
_LOCK: Final = ".lock"


class WorkFolders:
    """Temporary folders below ``base`` (default: the system's temporary folder), in one locked parent
    folder.

    The first folder removes leftovers of killed processes. A removed parent is created again: another
    process may take it for a leftover before it is locked, and temporary folders are cleaned by age.
    """

    def __init__(self, base: Path | None) -> None:
        self._base = Path(tempfile.gettempdir()) if base is None else base
        self._own: Path | None = None
        self._lock_fd = -1
        self._mutex = threading.Lock()

    def make(self) -> Path:
        """Return a new, empty folder."""
        with self._mutex:
            while self._own is None or not (self._own / _LOCK).exists():
                self._give_up()
                self._begin()
            return Path(tempfile.mkdtemp(prefix="task-", dir=self._own))

    def _begin(self) -> None:
        self._base.mkdir(parents=True, exist_ok=True)
        self._remove_left()
        self._own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._base))
        self._lock_fd = os.open(self._own / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock_fd, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove all folders."""
        with self._mutex:
            self._give_up()

    def _give_up(self) -> None:
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None
        if self._lock_fd >= 0:  # -1 if a full disk or too many open files prevented the lock
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _remove_left(self) -> None:
        for folder in self._base.glob(f"{_PREFIX}*"):
            try:
                fd = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:  # belongs to another program, or was just created
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            else:
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(fd)
