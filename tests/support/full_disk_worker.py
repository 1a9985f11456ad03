"""A worker whose disk is full until a file is there, as any user may have one, and one that has room."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Final

from dcp.server.jobs.ledger import Backoff
from dcp.server.jobs.worker import DEFAULT_KINDS, Worker
from dcp.server.settings import Settings
from tests.support.outages import limited_files

__all__ = ["serve"]

_FULL_DISK_KINDS: Final = "tests.support.full_disk:KINDS"  # importing them changes the process
_FILE_BYTES: Final = 5 << 20
"""Room for the database's files, not for the 6 MiB that are converted."""


def serve(settings: Settings, full: bool, gate: str) -> None:
    """Be a worker until SIGTERM. The limit on the size of files holds for its subprocesses, too."""
    if full:
        limits = limited_files(os.getpid(), _FILE_BYTES, with_children=True)
        limits.__enter__()

        def free() -> None:
            while not Path(gate).exists():
                time.sleep(0.01)
            limits.__exit__(None, None, None)

        threading.Thread(target=free, daemon=True).start()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    kinds = _FULL_DISK_KINDS if full else DEFAULT_KINDS
    Worker(settings, kinds=kinds, schedules=(), backoff=Backoff(0.05, 0.2)).run(stop)
