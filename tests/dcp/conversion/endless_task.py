"""A task that does not end by itself, for tests of what ends it; it says on stderr which process is at it."""

from __future__ import annotations

import os
import time


def run_batch(_job: object, _task: object) -> bytes:
    """Sleeps on."""
    os.write(2, f"{os.getpid()}\n".encode())
    while True:
        time.sleep(600)
