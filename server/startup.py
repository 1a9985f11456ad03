"""What happens beside the requests: the database is brought up to date, and small things are written down.

A service starts although its database is away, says so in ``/readyz``, and goes on by itself once it is back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import structlog
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from dcp.server.context import Service
from dcp.server.database.engine import DatabaseUnavailableError
from dcp.server.security.idempotency import forget_old

__all__ = ["Readiness", "lifespan", "prepare_database"]

_RETRY_SECONDS: Final = 1.0
_FLUSH_SECONDS: Final = 15.0
_log = structlog.get_logger(__name__)


class Readiness:
    """Whether this process may take requests: the schema is the one it was written for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_prepared = False

    def prepare(self, service: Service) -> str | None:
        """Bring the database up to date where the settings allow that; what is missing, or None.

        Raises `DatabaseUnavailableError`. Once all is well nothing more is done.
        """
        with self._lock:
            if not self._is_prepared:
                problem = prepare_database(service)
                if problem is not None:
                    return problem
                self._is_prepared = True
        return None


def prepare_database(service: Service) -> str | None:
    """Migrate SQLite if ``migrate`` is set; else only look. What is to be done by the operator, or None."""
    # here, because alembic is needed for a moment only
    from dcp.server.database import migrations

    database = service.database
    if migrations.is_current(database):
        return None
    if not (service.settings.migrate and database.dialect == "sqlite"):
        return f"the database is at revision {migrations.current(database)}; run dcp db upgrade"
    before = migrations.upgrade(database)
    _log.info("database upgraded", before=before, after=migrations.current(database))
    return None


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Of the application `create_app` makes."""
    service: Service = app.state.service
    readiness: Readiness = app.state.readiness
    with suppress(DatabaseUnavailableError):
        # before the first request, where that is possible
        await run_in_threadpool(readiness.prepare, service)
    chores = asyncio.create_task(_chores(service, readiness))
    try:
        yield
    finally:
        chores.cancel()
        with suppress(asyncio.CancelledError):
            await chores
        with suppress(DatabaseUnavailableError):
            await run_in_threadpool(service.keys.flush)
        await run_in_threadpool(service.close)


async def _chores(service: Service, readiness: Readiness) -> None:
    is_ready = False
    while True:
        await asyncio.sleep(_FLUSH_SECONDS if is_ready else _RETRY_SECONDS)
        try:
            is_ready = await run_in_threadpool(readiness.prepare, service) is None
            if is_ready:
                await run_in_threadpool(service.keys.flush)
                await run_in_threadpool(forget_old, service.database, service.clock())
        except DatabaseUnavailableError as error:
            _log.warning("database unavailable", error=str(error))
        except Exception:  # noqa: BLE001 - the next round tries again; the log says what it was
            _log.exception("chores failed")
