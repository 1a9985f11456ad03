"""One or several API processes under uvicorn, a worker beside them, and their end in good order."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import structlog
import uvicorn

from dcp.server.app import create_app
from dcp.server.context import Service
from dcp.server.database.engine import DatabaseUnavailableError
from dcp.server.logs import configure_logs
from dcp.server.monitoring.processes import shared_folder
from dcp.server.readiness import prepare_database
from dcp.server.settings import Settings

__all__ = ["app_of_environment", "serve", "settings_environment"]

_KEEP_ALIVE_SECONDS: Final = 15
_log = structlog.get_logger(__name__)


def serve(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM; the exit status. Requests under way are finished, within limits."""
    configure_logs(settings)
    # For before uvicorn listens to signals and after: it sends itself again what has ended it.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    with _environment(settings):
        if settings.api_workers == 1:
            return _serve_here(settings)
        return _serve_many(settings)


def _end(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def _serve_here(settings: Settings) -> int:
    server = uvicorn.Server(uvicorn.Config(create_app(settings), **_options(settings)))
    server.run()
    return 0 if server.started else 3


def _serve_many(settings: Settings) -> int:
    from uvicorn.supervisors import Multiprocess

    # one migrates, before several would
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
    with shared_folder():
        Multiprocess(config, sockets=[config.bind_socket()]).run()
    return 0


def app_of_environment() -> Any:
    """For API processes, which have their settings from the environment only."""
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
        "proxy_headers": False,  # the application does it, for trusted ones only
        "ws": "none",
        "timeout_keep_alive": _KEEP_ALIVE_SECONDS,
        "timeout_graceful_shutdown": max(1, int(settings.shutdown_seconds)),
        "h11_max_incomplete_event_size": 64 << 10,
    }


def settings_environment(settings: Settings) -> dict[str, str]:
    """The settings as the environment of a process that is to have the same, flags included."""
    environment: dict[str, str] = {}
    for name in settings.model_fields_set:
        value = settings.model_dump(include={name}, mode="python")[name]
        if name == "database_url":
            text = settings.database_url.get_secret_value()
        elif isinstance(value, str | Path):
            text = str(value)
        else:
            text = json.dumps(value)
        environment[f"DCP_SERVER_{name.upper()}"] = text
    return environment


@contextmanager
def _environment(settings: Settings) -> Iterator[None]:
    values = settings_environment(settings)
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
