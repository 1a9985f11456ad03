"""Startup and readiness: lifespan of the application, and checks of database and roots.

Only the database decides readiness: a load balancer must not remove the whole catalog because of one root.
Each check has a separate thread, runs once at a time and at most every other second, so answers arrive in
time and report a hanging check. The service starts without a database, reports this in ``/readyz``, and
recovers later.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Annotated, Final

import structlog
from fastapi import Depends, FastAPI, Request
from starlette.concurrency import run_in_threadpool

from dcp.server.catalog.errors import MissingError
from dcp.server.catalog.runs import has_living, root_row, sync_roots
from dcp.server.core.http.context import Service
from dcp.server.core.http.idempotency import forget_old
from dcp.server.core.problems import UnavailableError
from dcp.server.core.roots import StorageRoot
from dcp.server.database import migrations
from dcp.server.database.engine import DatabaseUnavailableError

OK: Final = "ok"
_FRESH_SECONDS: Final = 2.0
_PATIENCE_SECONDS: Final = 5.0
_EMPTY: Final = "empty"
"""State of an empty root: fine unless the catalog knows checkpoints in it."""
_NOT_MOUNTED: Final = "the folder is empty, but the catalog has checkpoints in it: is the disk mounted?"
_OTHER_PLACE: Final = "none of the known checkpoints was found; see dcp roots list"
_NO_ANSWER: Final = "does not respond"
_NAME: Final = ".dcp-readiness"
"""Name of a nonexistent file: asking for it is the cheapest request to a storage."""

_log = structlog.get_logger(__name__)


class Readiness:
    """Checks of one service by name: "ok", or the problem without places and secrets."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._is_prepared = False
        patience_seconds = min(_PATIENCE_SECONDS, service.settings.request_seconds / 2)
        self._database = _Probe("database", self._look_at_database, patience_seconds)
        self._roots = {
            root.name: _Probe(f"root {root.name}", partial(_look_at_root, root), patience_seconds)
            for root in service.roots
        }
        self._catalog = _Probe("catalog", self._look_at_catalog, patience_seconds)
        self._empty: frozenset[str] = frozenset()
        self._doubts: dict[str, str] = {}

    async def check(self) -> dict[str, str]:
        """Check the database, which the service requires. Does not wait for roots."""
        return {"database": await self._database.ask()}

    async def check_roots(self) -> dict[str, str]:
        """Check all roots concurrently, by name, and compare with the catalog if available."""
        found = await asyncio.gather(*(probe.ask() for probe in self._roots.values()))
        results = dict(zip(self._roots, found, strict=True))
        self._empty = frozenset(name for name, result in results.items() if result == _EMPTY)
        await self._catalog.ask()
        doubts = self._doubts
        return {
            name: doubts.get(name, OK) if result in (OK, _EMPTY) else result
            for name, result in results.items()
        }

    def prepare(self) -> str | None:
        """Upgrade the database if the settings allow it, and return the remaining problem or None.

        Raises `DatabaseUnavailableError`. Does nothing after the first success.
        """
        with self._lock:
            if not self._is_prepared:
                problem = prepare_database(self._service)
                if problem is not None:
                    return problem
                self._is_prepared = True
        return None

    def _look_at_database(self) -> str:
        try:
            self._service.database.ping()
            return self.prepare() or OK
        except DatabaseUnavailableError as error:
            _log.warning("database unavailable", error=str(error))
            return "is unreachable, full or locked"

    def _look_at_catalog(self) -> str:
        doubts = {}
        with suppress(DatabaseUnavailableError), self._service.database.read() as connection:
            for name in self._roots:
                with suppress(MissingError):
                    if root_row(connection, name).is_other_place:
                        doubts[name] = _OTHER_PLACE
                    elif name in self._empty and has_living(connection, name):
                        doubts[name] = _NOT_MOUNTED
            self._doubts = doubts
        return OK


async def _readiness(request: Request) -> Readiness:
    readiness: Readiness = request.app.state.readiness
    return readiness


ReadinessDep = Annotated[Readiness, Depends(_readiness)]


def prepare_database(service: Service) -> str | None:
    """Migrate SQLite if ``migrate`` is set, otherwise only check. Returns the problem for the operator, or
    None.

    Registers the configured roots in the catalog. Raises `DatabaseUnavailableError`.
    """
    database = service.database
    try:
        if migrations.is_pending(database):
            if not (service.settings.migrate and database.dialect == "sqlite"):
                before = migrations.current(database)
                if before == migrations.REVISION:
                    return "tables of a feature are missing: run dcp db upgrade"
                return (
                    f"the database is {'empty' if before is None else f'at revision {before}'}, but "
                    f"{migrations.REVISION} is required: back it up and run dcp db upgrade"
                )
            before = migrations.upgrade(database)
            event = "new database" if before is None else "database upgraded"
            _log.info(event, file=database.url.database, before=before, after=migrations.REVISION)
    except migrations.UnknownRevisionError as error:
        return str(error)
    urls = {root.name: root.url for root in service.roots}
    database.transact(lambda connection: sync_roots(connection, urls, now=service.clock()))
    return None


def _look_at_root(root: StorageRoot) -> str:
    try:
        root.check_there()
        if root.path is None:
            root.store("").stat(_NAME)
        return _EMPTY if root.is_empty() else OK
    except UnavailableError as error:
        return error.detail
    except Exception as error:  # noqa: BLE001 - whatever a storage raises, it is not ready
        _log.warning("root unavailable", root=root.name, error=repr(error))
        return "unavailable"


class _Probe:
    """Runs ``look`` in a thread, one call at a time."""

    def __init__(self, name: str, look: Callable[[], str], patience_seconds: float) -> None:
        self._name = name
        self._patience_seconds = patience_seconds
        self._look = look
        self._lock = threading.Lock()
        self._result = ""
        self._until_seconds = 0.0
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self._is_running = False
        self._hangs_from_seconds = 0.0

    async def ask(self) -> str:
        """Return the result, at most some seconds old. Does not wait for a hanging check."""
        done = asyncio.Event()
        with self._lock:
            if time.monotonic() < self._until_seconds:
                return self._result
            if self._is_running and time.monotonic() >= self._hangs_from_seconds:
                return _NO_ANSWER
            self._waiting.append((asyncio.get_running_loop(), done))
            if not self._is_running:
                self._is_running = True
                self._hangs_from_seconds = time.monotonic() + self._patience_seconds
                threading.Thread(target=self._run, name=f"probe {self._name}", daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), self._patience_seconds)
        except TimeoutError:
            return _NO_ANSWER
        return self._result

    def _run(self) -> None:
        result = "failed"
        try:
            result = self._look()
        finally:
            with self._lock:
                self._result = result
                self._until_seconds = time.monotonic() + _FRESH_SECONDS
                self._is_running = False
                waiting, self._waiting = self._waiting, []
            _wake(waiting)


def _wake(waiting: Iterable[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    for loop, event in waiting:
        try:
            loop.call_soon_threadsafe(event.set)
        except RuntimeError:  # the event loop has ended, so no request waits
            continue


# -- the lifespan of the application -------------------------------------------------------------------------


_RETRY_SECONDS: Final = 1.0
_FLUSH_SECONDS: Final = 15.0


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Return the lifespan of the application made by `create_app`."""
    service: Service = app.state.service
    readiness: Readiness = app.state.readiness
    try:
        # before the first request if possible
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
            await run_in_threadpool(service.callers.flush)
        await run_in_threadpool(service.close)


async def _chores(service: Service, readiness: Readiness) -> None:
    is_ready = False
    while True:
        await asyncio.sleep(_FLUSH_SECONDS if is_ready else _RETRY_SECONDS)
        try:
            is_ready = await run_in_threadpool(readiness.prepare) is None
            if is_ready:
                await run_in_threadpool(service.callers.flush)
                await run_in_threadpool(forget_old, service.database, service.clock())
        except DatabaseUnavailableError as error:
            _log.warning("database unavailable", error=str(error))
        except Exception:  # noqa: BLE001 - the next round tries again; the log says what it was
            _log.exception("chores failed")
