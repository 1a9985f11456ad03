"""Where the phases and tasks of jobs are carried out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dcp.server.core.jobs.executors.subprocess_main import Setup
from dcp.server.core.jobs.executors.subprocess_messages import Order
from dcp.server.core.jobs.executors.subprocesses import ProcessOutcome, WarmProcessPool

__all__ = ["Executor", "OnDone", "OnProgress", "ProcessExecutor", "Running"]

OnProgress = Callable[[int], None]
OnDone = Callable[[ProcessOutcome], None]


class Running(Protocol):
    """Something that is being carried out."""

    def kill(self) -> None:
        """End it now; `OnDone` is still called, once nothing of it runs any more."""


class Executor(Protocol):
    """Carries out orders. Callbacks come from threads of its own, and must be quick."""

    def start(self, order: Order, on_progress: OnProgress, on_done: OnDone) -> Running:
        """Begin; ``on_done`` is called exactly once."""

    def close(self) -> None:
        """Kill what runs, and wait for that."""


class _Process:
    def __init__(self, pool: WarmProcessPool, order: Order, on_progress: OnProgress, on_done: OnDone) -> None:
        self._pool = pool
        self._child = pool.start(order, on_progress, on_done)

    def kill(self) -> None:
        self._pool.kill(self._child)


class ProcessExecutor:
    """A subprocess of this machine for each order."""

    def __init__(self, setup: Setup) -> None:
        self._pool = WarmProcessPool(setup)

    def start(self, order: Order, on_progress: OnProgress, on_done: OnDone) -> Running:
        """As `Executor.start`."""
        return _Process(self._pool, order, on_progress, on_done)

    def warm(self) -> None:
        """Let what begins next begin at once."""
        self._pool.warm()

    def close(self) -> None:
        """As `Executor.close`."""
        self._pool.close()
