"""The lifespan of the application: prepare the database, and do small periodic work beside the requests.

A service starts although its database is away, reports that in ``/readyz``, and recovers once it is back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import structlog
from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool

from dcp.server.core.http.context import Service
from dcp.server.core.http.idempotency import forget_old
from dcp.server.core.http.readiness import Readiness
from dcp.server.database.engine import DatabaseUnavailableError

__all__ = ["lifespan"]

_RETRY_SECONDS: Final = 1.0
_FLUSH_SECONDS: Final = 15.0
_log = structlog.get_logger(__name__)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The lifespan of the application that `create_app` makes."""
    service: Service = app.state.service
    readiness: Readiness = app.state.readiness
    try:
        # before the first request, where that is possible
        problem = await run_in_threadpool(readiness.prepare)
        if problem is not None:
            _log.error("database not ready", problem=problem)
    except DatabaseUnavailableError as error:
        _log.warning("database unavailable", error=str(error))
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
            is_ready = await run_in_threadpool(readiness.prepare) is None
            if is_ready:
                await run_in_threadpool(service.keys.flush)
                await run_in_threadpool(forget_old, service.database, service.clock())
        except DatabaseUnavailableError as error:
            _log.warning("database unavailable", error=str(error))
        except Exception:  # noqa: BLE001 - the next round tries again; the log says what it was
            _log.exception("chores failed")
