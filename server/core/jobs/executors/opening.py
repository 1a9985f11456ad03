"""Which executor the settings name."""

from __future__ import annotations

from dcp.server.core.jobs.executors.executor import Executor, ProcessExecutor
from dcp.server.core.jobs.executors.subprocess_main import Setup
from dcp.server.core.settings import Settings

__all__ = ["open_executor"]


def open_executor(settings: Settings, kinds: str) -> Executor:
    """The one of the settings: ``processes``, or ``dask://HOST:PORT``; ValueError for others."""
    setup = Setup(settings, kinds)
    if settings.executor == "processes":
        return ProcessExecutor(setup)
    if settings.executor.startswith("dask://"):
        from dcp.server.core.jobs.executors.dask import DaskExecutor

        return DaskExecutor(setup, settings.executor.removeprefix("dask://"))
    raise ValueError(f"executor: 'processes' or 'dask://HOST:PORT', not {settings.executor!r}")
