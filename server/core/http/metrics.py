"""Metrics for operators: counters and durations of requests, and samples of the database.

API processes count requests and statements in an ASGI middleware and in listeners of the engines. Other
metrics are read from the database on demand (`dcp.server.core.samples`): they are correct on any process and
include workers without a port.

The processes of one API add up their counts with the multi-process mode of prometheus_client, in files of a
folder named by an environment variable set before the start. A single process does not need this. See
`dcp.server.core.http.readiness` for readiness; a feature has the route.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead
from prometheus_client.registry import Collector
from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import InterfaceError, OperationalError, SQLAlchemyError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcp.server.core.http.context import Service
from dcp.server.core.samples import read_state
from dcp.server.database.engine import Database, DatabaseUnavailableError
from dcp.version import __version__

_REQUEST_SECONDS: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STATEMENT_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 10)


@dataclass(frozen=True)
class Instruments:
    """Counters and histograms of a service, in a separate registry.

    ``route`` is the template of the path (``/api/v1/checkpoints/{checkpoint_id}``), or "(none)".
    """

    registry: CollectorRegistry
    requests: Counter
    request_seconds: Histogram
    requests_in_progress: Gauge
    response_bytes: Counter
    responses_cut: Counter
    statement_seconds: Histogram
    database_errors: Counter

    @classmethod
    def create(cls) -> Instruments:
        """Create all metrics at zero."""
        # Prometheus does not use the ``_created`` series of counters.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = CollectorRegistry()
        return cls(
            registry=registry,
            requests=Counter(
                "dcp_http_requests",
                "Requests, by method, route and status",
                ["method", "route", "status"],
                registry=registry,
            ),
            request_seconds=Histogram(
                "dcp_http_request_seconds",
                "Seconds from a request to the first byte of its answer",
                ["method", "route"],
                buckets=_REQUEST_SECONDS,
                registry=registry,
            ),
            requests_in_progress=Gauge(
                "dcp_http_requests_in_progress",
                "Requests in progress, including downloads and event streams",
                registry=registry,
                multiprocess_mode="livesum",
            ),
            response_bytes=Counter(
                "dcp_http_response_bytes", "Bytes of response bodies", ["route"], registry=registry
            ),
            responses_cut=Counter(
                "dcp_http_responses_cut",
                "Responses that ended early: the client disconnected, or the source is damaged",
                registry=registry,
            ),
            statement_seconds=Histogram(
                "dcp_database_statement_seconds",
                "Seconds of each database statement of the API, by access (read or write)",
                ["access"],
                buckets=_STATEMENT_SECONDS,
                registry=registry,
            ),
            database_errors=Counter(
                "dcp_database_errors",
                "Failed statements and connections: the database was unreachable, locked or full",
                registry=registry,
            ),
        )


_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_STARTED: Final = "dcp_statement_started"
_WRITES: Final = ("INSERT", "UPDATE", "DELETE", "BEGIN IMMEDIATE")  # BEGIN IMMEDIATE waits for other writers


class MeasureMiddleware:
    """Counts requests, their time to the first byte, and sent bytes; the outermost middleware."""

    def __init__(self, app: ASGIApp, instruments: Instruments) -> None:
        self.app = app
        self.instruments = instruments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Measure the request (ASGI)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        watched = _MeasuredAnswer(send, self.instruments, scope)
        self.instruments.requests_in_progress.inc()
        try:
            await self.app(scope, receive, watched.send)
        finally:
            self.instruments.requests_in_progress.dec()
            watched.end(getattr(scope.get("route"), "path_format", "(none)"))


class _MeasuredAnswer:
    def __init__(self, send: Send, instruments: Instruments, scope: Scope) -> None:
        self._send = send
        self._instruments = instruments
        self._scope = scope
        self._began = time.perf_counter()
        self._first_byte_seconds: float | None = None
        self._status = 500  # status of an unhandled exception
        self._sent_bytes = 0
        self._is_whole = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._first_byte_seconds = time.perf_counter() - self._began
            self._status = message["status"]
        await self._send(message)
        if message["type"] == "http.response.body":
            self._sent_bytes += len(message.get("body", b""))
            self._is_whole = not message.get("more_body", False)

    def end(self, route: str) -> None:
        method = self._scope["method"] if self._scope["method"] in _METHODS else "(other)"
        seconds = self._first_byte_seconds
        if seconds is None:
            seconds = time.perf_counter() - self._began
        self._instruments.requests.labels(method, route, str(self._status)).inc()
        self._instruments.request_seconds.labels(method, route).observe(seconds)
        self._instruments.response_bytes.labels(route).inc(self._sent_bytes)
        if self._first_byte_seconds is not None and not self._is_whole:
            self._instruments.responses_cut.inc()


def watch_database(database: Database, instruments: Instruments) -> None:
    """Measure every statement of ``database``."""
    engines = [database.writer]
    if database.dialect == "sqlite":  # on PostgreSQL both share one engine
        engines.append(database.reader)
    for engine in engines:
        _watch(engine, instruments)


def _watch(engine: Engine, instruments: Instruments) -> None:
    reading = instruments.statement_seconds.labels("read")
    writing = instruments.statement_seconds.labels("write")

    @event.listens_for(engine, "before_cursor_execute")
    def _(connection: Connection, *_arguments: Any) -> None:
        connection.info[_STARTED] = time.perf_counter()

    @event.listens_for(engine, "after_cursor_execute")
    def _(connection: Connection, _cursor: Any, statement: str, *_arguments: Any) -> None:
        started = connection.info.pop(_STARTED, None)
        if started is not None:
            access = writing if statement.startswith(_WRITES) else reading
            access.observe(time.perf_counter() - started)

    @event.listens_for(engine, "handle_error")
    def _(context: ExceptionContext) -> None:
        if isinstance(context.sqlalchemy_exception, OperationalError | InterfaceError):
            instruments.database_errors.inc()


# -- the text that Prometheus fetches ------------------------------------------------------------------------


FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Yield a folder for the counts of all processes started inside; removed at the end.

    A folder named by the environment is used as it is, and stays.
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
    """Return the running processes that count in ``folder``, including this one."""
    found = {os.getpid()}
    if folder is not None:
        numbers = {path.stem.rpartition("_")[2] for path in folder.glob("*_*.db")}
        found |= {int(number) for number in numbers if number.isdigit() and _is_alive(int(number))}
    return found


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 without the process or ``/proc``."""
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
"""Maximum age of database samples: many scrapers cost no more than one."""


Samples = Callable[[Connection, Service], Iterable[Metric]]
"""Function of a feature that reads metrics from the database."""


class Monitoring:
    """All metrics of one service. Thread-safe."""

    def __init__(self, service: Service, instruments: Instruments, samples: Sequence[Samples]) -> None:
        named = os.environ.get(FOLDER_VARIABLE)
        self.folder = Path(named) if named else None
        self.instruments = instruments
        self._state = _StateCollector(service, samples)
        self._processes = _ProcessCollector(self.folder)

    def text(self, roots: Mapping[str, bool]) -> bytes:
        """Return the metrics in the text format of Prometheus.

        If the database is unreachable, its metrics are replaced by ``dcp_database_up`` 0. ``roots``:
        reachability by root.
        """
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
        # Drop gauges of dead processes; keep their counters.
        alive = living_processes(folder)
        for path in folder.glob("gauge_live*_*.db"):
            number = path.stem.rpartition("_")[2]
            if number.isdigit() and int(number) not in alive:
                mark_process_dead(int(number), str(folder))  # type: ignore[no-untyped-call]


def install_metrics(app: FastAPI, service: Service, samples: Sequence[Samples]) -> Monitoring:
    """Measure ``app`` and its database; also sets ``app.state.monitoring``. ``samples`` come from features.

    Call after adding all other middleware to measure the final answers.
    """
    instruments = Instruments.create()
    watch_database(service.database, instruments)
    app.add_middleware(MeasureMiddleware, instruments=instruments)
    app.state.monitoring = Monitoring(service, instruments, samples)
    return app.state.monitoring  # type: ignore[no-any-return]


class _StateCollector(Collector):
    def __init__(self, service: Service, samples: Sequence[Samples]) -> None:
        self._service = service
        self._samples = samples
        self._lock = threading.Lock()
        self._kept: list[Metric] = []
        self._kept_until = 0.0

    def describe(self) -> list[Metric]:
        return []  # no query at registration

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
            with self._service.database.read() as connection:
                found = read_state(connection, time.time())
                for read in self._samples:
                    found += read(connection, self._service)
        except (DatabaseUnavailableError, SQLAlchemyError):  # includes missing tables
            return [GaugeMetricFamily("dcp_database_up", "1 if the database answers", value=0)]
        seconds = time.perf_counter() - began
        return [
            GaugeMetricFamily("dcp_database_up", "1 if the database answers", value=1),
            GaugeMetricFamily(
                "dcp_database_state_seconds", "Seconds to read the metrics of the database", value=seconds
            ),
            *found,
        ]


class _RootCollector(Collector):
    def __init__(self, roots: Mapping[str, bool]) -> None:
        self._roots = roots

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "dcp_root_up", "1 if the storage of a root answers this process", labels=["root"]
        )
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
            "Resident memory of the API processes on this machine",
            value=sum(resident_bytes(pid) for pid in pids),
        )
        build = GaugeMetricFamily(
            "dcp_build_info", "Version of the service; the value is 1", labels=["version"]
        )
        build.add_metric([__version__], 1)
        yield build
