"""Metrics that a process of the API counts itself: an ASGI middleware, and listeners of the engines.

All else is read from the database when it is asked for (`state.py`), because it has to be right whichever
process answers, and for workers that listen on no port.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import InterfaceError, OperationalError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcp.server.database.engine import Database

__all__ = ["Instruments", "MeasureMiddleware", "watch_database"]

_REQUEST_SECONDS: Final = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STATEMENT_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 10)


@dataclass(frozen=True)
class Instruments:
    """Counters and histograms of a service, in a registry of its own.

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
        """Create all at zero."""
        # A series more for each counter, which Prometheus has no use for.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = CollectorRegistry()
        return cls(
            registry=registry,
            requests=Counter(
                "dcp_http_requests",
                "Requests answered, by method, route and status",
                ["method", "route", "status"],
                registry=registry,
            ),
            request_seconds=Histogram(
                "dcp_http_request_seconds",
                "From the request to the first byte of the answer",
                ["method", "route"],
                buckets=_REQUEST_SECONDS,
                registry=registry,
            ),
            requests_in_progress=Gauge(
                "dcp_http_requests_in_progress",
                "Requests whose answer has not ended, downloads and event streams among them",
                registry=registry,
                multiprocess_mode="livesum",
            ),
            response_bytes=Counter(
                "dcp_http_response_bytes", "Bytes of bodies sent", ["route"], registry=registry
            ),
            responses_cut=Counter(
                "dcp_http_responses_cut",
                "Answers that ended before their last byte: a client that left, or a source found damaged",
                registry=registry,
            ),
            statement_seconds=Histogram(
                "dcp_database_statement_seconds",
                "Time in the database, of single statements of the API, by what they do",
                ["access"],
                buckets=_STATEMENT_SECONDS,
                registry=registry,
            ),
            database_errors=Counter(
                "dcp_database_errors",
                "Statements and connections that failed because the database was away, locked or full",
                registry=registry,
            ),
        )


_METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_STARTED: Final = "dcp_statement_started"
_WRITES: Final = ("INSERT", "UPDATE", "DELETE", "BEGIN IMMEDIATE")  # the last one waits for other writers


class MeasureMiddleware:
    """Counts requests, their time to the first byte, and the bytes sent; the outermost middleware."""

    def __init__(self, app: ASGIApp, instruments: Instruments) -> None:
        self.app = app
        self.instruments = instruments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and look."""
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
        self._status = 500  # what the server makes of an exception that nobody handled
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
    """Measure every statement of ``database`` from now on."""
    engines = [database.writer]
    if database.dialect == "sqlite":  # on PostgreSQL the reader is the writer with an option
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
