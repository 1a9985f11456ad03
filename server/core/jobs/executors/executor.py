"""Executors carry out the phases and tasks of jobs: in subprocesses of this machine, or on a Dask cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dcp.server.core.jobs.executors.subprocess_messages import Order
from dcp.server.core.jobs.ledger.states import Json
from dcp.server.records.jobs import JobFailure

__all__ = ["Executor", "OnDone", "OnProgress", "ProcessOutcome", "Running"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOutcome:
    """The end of an order: a result, an error, or killed on request (neither)."""

    result: Json | None = None
    error: JobFailure | None = None


OnProgress = Callable[[int], None]
OnDone = Callable[[ProcessOutcome], None]


class Running(Protocol):
    """An order that is being carried out."""

    def kill(self) -> None:
        """End it now; `OnDone` is still called, once nothing of it runs any more."""


class Executor(Protocol):
    """Carries out orders. Callbacks come from threads of its own, and must be quick."""

    def start(self, order: Order, on_progress: OnProgress, on_done: OnDone) -> Running:
        """Begin; ``on_done`` is called exactly once."""

    def close(self) -> None:
        """Kill what runs, and wait for that."""
