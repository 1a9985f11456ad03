"""Processes of `dcp serve`: uvicorn, the embedded worker, and a clean shutdown."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, Final

import h11
import structlog
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from dcp.server.app import create_app
from dcp.server.core.http.context import Service
from dcp.server.core.http.metrics import shared_folder
from dcp.server.core.http.readiness import prepare_database
from dcp.server.core.logs import configure_logs
from dcp.server.core.problems import UnavailableError
from dcp.server.core.roots import Roots
from dcp.server.core.settings import Settings
from dcp.server.database.engine import DatabaseUnavailableError
from dcp.server.features import schedules
from dcp.storage.errors import CheckpointError

_KEEP_ALIVE_SECONDS: Final = 15
_FORCED_SECONDS: Final = 2.0
_SETTLE_SECONDS: Final = 0.5  # let the first requests pass
_log = structlog.get_logger(__name__)


class PortError(CheckpointError):
    """The service cannot listen on the address."""


def serve(settings: Settings, flags: Mapping[str, Any]) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit status. Running requests finish within limits.

    Args:
        settings: The settings of the service.
        flags: Settings from the command line, passed on to the child processes.

    Raises:
        PortError: The address is not available.
        FeatureError: A feature cannot be imported.
    """
    configure_logs(settings)
    schedules(settings)  # a feature that cannot be imported must fail here too, not only in the worker
    _check_port(settings.host.strip("[]"), settings.port)
    if "roots" not in settings.model_fields_set:  # the default folder may be missing
        for root in settings.roots.values():
            Path(root.url).mkdir(exist_ok=True)
    _tell_roots(settings)
    with ExitStack() as stack:
        # Handlers for the time before and after those of uvicorn, which raises the final signal again.
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, _end))
        stack.enter_context(_environment(flags_environment(flags)))
        started = threading.Event()
        if settings.embedded_worker:
            stack.enter_context(worker_beside(settings.shutdown_seconds, started))
        if settings.api_workers == 1:
            return _serve_here(settings, started)
        return _serve_many(settings, started)


def _check_port(host: str, port: int) -> None:
    """Refuse an unavailable port early: before a database is created, with a message of one line."""
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise PortError(
                        f"port {port} of {host} is already in use, perhaps by another dcp serve: stop the "
                        "other process, or choose another port with --port"
                    ) from None


def _tell_roots(settings: Settings) -> None:
    for root in Roots(settings.roots):
        try:
            root.check_there()
            _log.info("root", name=root.name, place=root.url)
        except UnavailableError:
            _log.warning(
                "root does not exist: check its URL, or mount its disk", name=root.name, place=root.url
            )


def _tell_address(host: str, port: int) -> None:
    shown = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    address = f"http://{shown}:{port}"
    _log.info("serving", api=f"{address}/api/v1", docs=f"{address}/docs")


_ending = threading.Event()
"""Set by a signal that arrives before uvicorn handles signals."""


def _end(_number: int, _frame: object) -> None:
    _ending.set()
    raise SystemExit(0)


def _app(settings: Settings) -> FastAPI:
    """Create the application. A signal during the creation ends the process as usual, although pydantic wraps
    exceptions raised while it builds a model.
    """
    try:
        return create_app(settings)
    except Exception:
        if _ending.is_set():
            raise SystemExit(0) from None
        raise


_MADE_OBJECTS: Final = 50_000
"""Allocations between garbage collections: creating 200,000 objects takes three times as long with 700."""


class _Server(uvicorn.Server):
    """uvicorn's server, which reports the start of listening: a worker that starts earlier would slow it
    down."""

    def __init__(self, config: uvicorn.Config, begun: threading.Event) -> None:
        super().__init__(config)
        self._begun = begun

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            bound = [each.getsockname() for server in self.servers for each in server.sockets]
            _tell_address(self.config.host, bound[0][1] if bound else self.config.port)
        asyncio.get_running_loop().call_later(_SETTLE_SECONDS, _settle)
        self._begun.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.force_exit:  # after a second signal uvicorn skips the shutdown of the application
            await self._cut_short()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.lifespan.shutdown(), _FORCED_SECONDS)

    async def _cut_short(self) -> None:
        """Disconnect the clients of running requests."""
        running = list(self.server_state.tasks)
        if not running:
            return
        _log.warning("stopped immediately; running requests were aborted", requests=len(running))
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.wait(running, timeout=_FORCED_SECONDS)


def _settle() -> None:
    gc.collect()
    gc.freeze()  # exclude permanent objects from collections
    gc.set_threshold(_MADE_OBJECTS)
    gc.enable()


def _serve_here(settings: Settings, begun: threading.Event) -> int:
    server = _Server(uvicorn.Config(_app(settings), **_options(settings)), begun)
    server.run()
    return 0 if server.started else 3


def _serve_many(settings: Settings, begun: threading.Event) -> int:
    from uvicorn.supervisors import Multiprocess

    # migrate once, before several processes start
    service = Service.from_settings(settings)
    try:
        prepare_database(service)
    except DatabaseUnavailableError as error:
        _log.warning("database unavailable", error=str(error))
    finally:
        service.close()
    config = uvicorn.Config(
        "dcp.server.serving:app_of_environment",
        factory=True,
        workers=settings.api_workers,
        **_options(settings),
    )
    gc.enable()
    begun.set()
    with shared_folder():
        bound = config.bind_socket()
        _tell_address(config.host, bound.getsockname()[1])
        Multiprocess(config, sockets=[bound]).run()
    return 0


def app_of_environment() -> Any:
    """Create the application of an API process, which reads its settings from the environment only."""
    settings = Settings()
    configure_logs(settings)
    return create_app(settings)


def _options(settings: Settings) -> dict[str, Any]:
    return {
        "host": settings.host.strip("[]"),
        "port": settings.port,
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,  # the application handles proxies, trusted ones only
        "http": TimedHeads,
        "ws": "none",
        "timeout_keep_alive": _KEEP_ALIVE_SECONDS,
        "timeout_graceful_shutdown": max(1, int(settings.shutdown_seconds)),
        "h11_max_incomplete_event_size": 64 << 10,
    }


def flags_environment(flags: Mapping[str, Any]) -> dict[str, str]:
    """Return settings given as flags as the environment of a child process.

    Other settings reach the child from the file and the inherited environment, so no secret of a file enters
    an environment.
    """
    return {
        f"DCP_SERVER_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
        for name, value in flags.items()
        if value is not None
    }


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# -- the ``dcp worker`` beside ``dcp serve`` -----------------------------------------------------------------


_FIRST_PAUSE_SECONDS: Final = 1.0
_LAST_PAUSE_SECONDS: Final = 30.0
_STABLE_SECONDS: Final = 60.0


@contextmanager
def worker_beside(shutdown_seconds: float, begin: threading.Event) -> Iterator[None]:
    """Run a worker with the environment of this process, started when ``begin`` is set.

    At the end the worker has ``shutdown_seconds`` to stop. If this process is killed, the worker ends when
    its standard input closes.
    """
    keeper = _Keeper(shutdown_seconds, begin)
    keeper.thread.start()
    try:
        yield
    finally:
        keeper.stop()


class _Keeper:
    def __init__(self, shutdown_seconds: float, begin: threading.Event) -> None:
        self._begin = begin
        self._shutdown_seconds = shutdown_seconds
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self.thread = threading.Thread(target=self._keep, name="worker-keeper", daemon=True)

    def stop(self) -> None:
        with self._lock:
            self._stopping.set()
            self._begin.set()
            process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(self._shutdown_seconds)
            except subprocess.TimeoutExpired:
                _log.warning("worker did not stop in time; killing it", seconds=self._shutdown_seconds)
                process.kill()
        self.thread.join()

    def _keep(self) -> None:
        self._begin.wait()
        pause_seconds = _FIRST_PAUSE_SECONDS
        while (process := self._start()) is not None:
            started_seconds = time.monotonic()
            status = process.wait()
            if self._stopping.is_set():
                return
            if time.monotonic() - started_seconds > _STABLE_SECONDS:
                pause_seconds = _FIRST_PAUSE_SECONDS
            _log.warning("worker ended; restarting it", status=status, pause_seconds=pause_seconds)
            self._stopping.wait(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LAST_PAUSE_SECONDS)

    def _start(self) -> subprocess.Popen[bytes] | None:
        arguments = [sys.executable, "-m", "dcp", "worker", "--until-input-ends"]
        with self._lock:
            if self._stopping.is_set():
                return None
            # A separate session: Ctrl-C reaches only this process, which stops the worker.
            self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, start_new_session=True)
            return self._process


# -- timeouts of request heads -------------------------------------------------------------------------------


class TimedHeads(H11Protocol):
    """Protocol that closes a connection whose request head is incomplete after ``head_seconds``.

    The time starts with the connection or with the first byte of the head. uvicorn's ``timeout_keep_alive``
    bounds idle time.
    """

    head_seconds: ClassVar[float] = 10.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timer of the first head."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Start or stop the timer of the current head."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:  # the head is complete
            self._stop()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.head_seconds, self._end)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        if self.conn.their_state is h11.IDLE:
            self.transport.abort()
