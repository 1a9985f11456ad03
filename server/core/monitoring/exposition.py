"""The text that Prometheus fetches, added up over the processes of one API.

Processes count in files of one folder: the multi-process mode of prometheus_client, whose folder is named by
an environment variable that has to be set before the processes start. One process needs none of it.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from fastapi import FastAPI
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector
from sqlalchemy.exc import SQLAlchemyError

from dcp.server.core.monitoring.measuring import Instruments, MeasureMiddleware, watch_database
from dcp.server.core.monitoring.state import read_state
from dcp.server.database.engine import Database, DatabaseUnavailableError
from dcp.version import __version__

__all__ = [
    "CONTENT_TYPE",
    "FOLDER_VARIABLE",
    "Monitoring",
    "install",
    "living_processes",
    "resident_bytes",
    "shared_folder",
]

FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A folder for the counts of all processes that are started inside; removed at the end.

    A folder that the environment names already is taken as it is, and stays.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        yield Path(named)
        return
    with tempfile.TemporaryDirectory(prefix="dcp-metrics-", ignore_cleanup_errors=True) as folder:
        os.environ[FOLDER_VARIABLE] = folder
        try:
            yield Path(folder)
        finally:
            del os.environ[FOLDER_VARIABLE]


def living_processes(folder: Path | None) -> set[int]:
    """The processes that count in ``folder`` and run, this one among them."""
    found = {os.getpid()}
    if folder is not None:
        numbers = {path.stem.rpartition("_")[2] for path in folder.glob("*_*.db")}
        found |= {int(number) for number in numbers if number.isdigit() and _is_alive(int(number))}
    return found


def resident_bytes(pid: int) -> int:
    """Memory of a process that is not swapped out; 0 where it, or ``/proc``, is not there."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_KEPT_SECONDS: Final = 5.0
"""How old the state of the database may be: many that scrape cost no more than one."""


class Monitoring:
    """All metrics of one service; `text` may be called by many threads."""

    def __init__(self, database: Database, instruments: Instruments) -> None:
        named = os.environ.get(FOLDER_VARIABLE)
        self.folder = Path(named) if named else None
        self.instruments = instruments
        self._state = _StateCollector(database)
        self._processes = _ProcessCollector(self.folder)

    def text(self, roots: Mapping[str, bool]) -> bytes:
        """In Prometheus' text format; if the database is away, ``dcp_database_up`` 0 in place of its part.
        ``roots``: whether each answers."""
        registry = CollectorRegistry()
        registry.register(_RootCollector(roots))
        registry.register(self._state)
        registry.register(self._processes)
        if self.folder is None:
            return generate_latest(registry) + generate_latest(self.instruments.registry)
        self._forget_dead_processes(self.folder)
        MultiProcessCollector(registry, path=str(self.folder))  # type: ignore[no-untyped-call]
        return generate_latest(registry)

    def _forget_dead_processes(self, folder: Path) -> None:
        # What a dead process had in progress is not; what it has counted stays.
        alive = living_processes(folder)
        for path in folder.glob("gauge_live*_*.db"):
            number = path.stem.rpartition("_")[2]
            if number.isdigit() and int(number) not in alive:
                mark_process_dead(int(number), str(folder))  # type: ignore[no-untyped-call]


def install(app: FastAPI, database: Database) -> Monitoring:
    """Measure ``app`` and ``database``; also kept in ``app.state.monitoring``.

    To be called after all other middlewares were added, so that it sees what they answer.
    """
    instruments = Instruments.create()
    watch_database(database, instruments)
    app.add_middleware(MeasureMiddleware, instruments=instruments)
    app.state.monitoring = Monitoring(database, instruments)
    return app.state.monitoring  # type: ignore[no-any-return]


class _StateCollector(Collector):
    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._kept: list[Metric] = []
        self._kept_until = 0.0

    def describe(self) -> list[Metric]:
        return []  # nothing is read to be registered

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            if time.monotonic() >= self._kept_until:
                self._kept = self._read()
                self._kept_until = time.monotonic() + _KEPT_SECONDS
            kept = self._kept
        yield from kept

    def _read(self) -> list[Metric]:
        began = time.perf_counter()
        try:
            with self._database.read() as connection:
                found = read_state(connection, time.time())
        except (DatabaseUnavailableError, SQLAlchemyError):  # away, or not migrated yet
            return [GaugeMetricFamily("dcp_database_up", "1 if the database answers", value=0)]
        seconds = time.perf_counter() - began
        return [
            GaugeMetricFamily("dcp_database_up", "1 if the database answers", value=1),
            GaugeMetricFamily("dcp_database_state_seconds", "How long reading these took", value=seconds),
            *found,
        ]


class _RootCollector(Collector):
    def __init__(self, roots: Mapping[str, bool]) -> None:
        self._roots = roots

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("dcp_root_up", "1 if the storage of a root answers", labels=["root"])
        for name, is_up in self._roots.items():
            up.add_metric([name], is_up)
        yield up


class _ProcessCollector(Collector):
    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        pids = living_processes(self._folder)
        yield GaugeMetricFamily("dcp_api_processes", "Processes of the API on this machine", value=len(pids))
        yield GaugeMetricFamily(
            "dcp_api_resident_bytes",
            "Their memory, summed",
            value=sum(resident_bytes(pid) for pid in pids),
        )
        build = GaugeMetricFamily("dcp_build_info", "Always 1", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
