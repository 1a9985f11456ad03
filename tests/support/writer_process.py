"""Sessions that save by a writer process."""

from __future__ import annotations

import array
import fcntl
import termios
import time
from typing import Final

from dcp.background.process.writer import ProcessWriter
from dcp.background.session import AsyncSession

__all__ = ["TIMEOUT_SECONDS", "pid_of", "until_heard"]

TIMEOUT_SECONDS: Final = 240.0


def pid_of(session: AsyncSession) -> int:
    """The writer process of this rank."""
    worker = session._worker
    assert isinstance(worker, ProcessWriter)
    return worker.pid


def until_heard(session: AsyncSession) -> None:
    """Until the writer process has acted on all that it was sent, but for what its saves have to do."""
    worker = session._worker
    assert isinstance(worker, ProcessWriter) and worker._child is not None
    worker._child.send({"kind": "go", "serial": -1})  # once it reads this it is done with what came before
    unread = array.array("i", [1])
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while unread[0]:
        assert time.monotonic() < deadline, "the writer process does not listen"
        time.sleep(0.001)
        fcntl.ioctl(worker._child._connection._sock, termios.TIOCOUTQ, unread)
