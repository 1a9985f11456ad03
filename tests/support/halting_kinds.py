"""The service's own kinds of jobs, whose conversions halt in the middle of reserving their files.

For processes of their own: to import it changes all conversions. They halt as long as there is the file that
``DCP_TEST_HALT`` names, and note that they do beside it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Final

from dcp.conversion.copying.sinks import observers
from dcp.server.jobs.kinds import KINDS
from dcp.server.jobs.ledger import Backoff
from dcp.server.jobs.worker import Worker
from dcp.server.settings import Settings

__all__ = ["HALTING_KINDS", "KINDS", "serve"]

HALTING_KINDS: Final = "tests.support.halting_kinds:KINDS"
_created: list[str] = []


def _halt(op: str, name: str) -> None:
    if op == "create":
        _created.append(name)
    gate = Path(os.environ.get("DCP_TEST_HALT", "/nonexistent"))
    while len(_created) == 2 and gate.exists():
        gate.with_suffix(".reached").touch()
        time.sleep(0.01)


observers.append(_halt)


def serve(settings: Settings, gate: str) -> None:
    """Be a worker without periodic work, until SIGTERM."""
    os.environ["DCP_TEST_HALT"] = gate
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    Worker(settings, kinds=HALTING_KINDS, schedules=(), backoff=Backoff(0.05, 0.2)).run(stop)
