"""The service's job kinds under difficult conditions, for workers in processes of their own.

Importing the module changes the process according to ``DCP_TEST_HARD``: "small" converts in batches of 1 MiB;
"halt" stops while reserving files as long as the gate file exists.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Final

from dcp.conversion import driver, running
from dcp.conversion.running import observers
from dcp.server.core.jobs.ledger.rows import Backoff
from dcp.server.core.jobs.worker import Worker
from dcp.server.core.settings import Settings
from dcp.server.features import kinds
from dcp.server.features import schedules as schedules_of

__all__ = ["kinds", "serve"]

_HARD: Final = os.environ.get("DCP_TEST_HARD", "")
_GATE: Final = Path(os.environ.get("DCP_TEST_GATE", "/nonexistent"))
_created: list[str] = []


def _halt(op: str, name: str) -> None:
    if op == "create":
        _created.append(name)
    while len(_created) == 2 and _GATE.exists():
        _GATE.with_suffix(".reached").touch()
        time.sleep(0.01)


if _HARD == "halt":
    observers.append(_halt)
elif _HARD == "small":
    driver.BATCH_BYTES = running.TASK_BYTES = 1 << 20  # type: ignore[misc]


def serve(settings: Settings, hard: str, gate: str = "/nonexistent") -> None:
    """Run a worker until SIGTERM; with "small", with all periodic work."""
    os.environ.update(DCP_TEST_HARD=hard, DCP_TEST_GATE=gate)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    named = "tests.support.hard_kinds:kinds" if hard else "dcp.server.features:kinds"
    periodic = schedules_of(settings) if hard == "small" else ()
    Worker(settings, kinds=named, schedules=periodic, backoff=Backoff(0.05, 0.2)).run(stop)
