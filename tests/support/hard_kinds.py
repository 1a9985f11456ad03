"""The service's own kinds of jobs where work is hard, for workers in processes of their own.

To import it changes the process, as ``DCP_TEST_HARD`` says: "small" converts in batches of 1 MiB, "halt"
stops in the middle of reserving files as long as a gate is there, "full" has a disk that is full until it is.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from dcp.conversion import driver
from dcp.conversion.copying import tasks
from dcp.conversion.copying.sinks import observers
from dcp.server.automation.schedules import built_in_schedules
from dcp.server.jobs.kinds import KINDS
from dcp.server.jobs.ledger import Backoff
from dcp.server.jobs.worker import Worker
from dcp.server.settings import Settings
from tests.support.outages import limited_files

__all__ = ["KINDS", "serve"]

_HARD: Final = os.environ.get("DCP_TEST_HARD", "")
_GATE: Final = Path(os.environ.get("DCP_TEST_GATE", "/nonexistent"))
_FILE_BYTES: Final = 5 << 20
"""Room for the database's files, not for the 6 MiB that are converted."""
_created: list[str] = []


def _halt(op: str, name: str) -> None:
    if op == "create":
        _created.append(name)
    while len(_created) == 2 and _GATE.exists():
        _GATE.with_suffix(".reached").touch()
        time.sleep(0.01)


def _named_as_by_a_disk(call: Callable[..., Any]) -> Callable[..., Any]:
    """The limit on the size of files is EFBIG, the fault of one file: a full disk says ENOSPC."""

    def called(*args: Any) -> Any:
        try:
            return call(*args)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None

    return called


if _HARD == "halt":
    observers.append(_halt)
elif _HARD == "small":
    driver.BATCH_BYTES = tasks.TASK_BYTES = 1 << 20  # type: ignore[misc]
elif _HARD == "full":
    for _name in ("posix_fallocate", "ftruncate", "pwrite"):
        setattr(os, _name, _named_as_by_a_disk(getattr(os, _name)))


def serve(settings: Settings, hard: str, gate: str = "/nonexistent") -> None:
    """Be a worker until SIGTERM; one of "small" parts with all its periodic work."""
    os.environ.update(DCP_TEST_HARD=hard, DCP_TEST_GATE=gate)
    if hard == "full":  # for its subprocesses, too
        limits = limited_files(os.getpid(), _FILE_BYTES, with_children=True)
        limits.__enter__()

        def free() -> None:
            while not Path(gate).exists():
                time.sleep(0.01)
            limits.__exit__(None, None, None)

        threading.Thread(target=free, daemon=True).start()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    kinds = "tests.support.hard_kinds:KINDS" if hard else "dcp.server.jobs.kinds:KINDS"
    periodic = built_in_schedules(settings) if hard == "small" else ()
    Worker(settings, kinds=kinds, schedules=periodic, backoff=Backoff(0.05, 0.2)).run(stop)
