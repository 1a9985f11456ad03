"""A worker that converts in parts of 1 MiB."""

from __future__ import annotations

import signal
import threading
from typing import Final

from dcp.server.automation.schedules import built_in_schedules
from dcp.server.jobs.ledger import Backoff
from dcp.server.jobs.worker import Worker
from dcp.server.settings import Settings

__all__ = ["SMALL_KINDS", "serve"]

SMALL_KINDS: Final = "tests.support.small_parts:KINDS"


def serve(settings: Settings) -> None:
    """Be a worker with all its periodic work, until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    periodic = built_in_schedules(settings)
    Worker(settings, schedules=periodic, kinds=SMALL_KINDS, backoff=Backoff(0.05, 0.2)).run(stop)
