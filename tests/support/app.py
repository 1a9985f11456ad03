"""Application in the test process, for tests of routes: no socket, everything else real."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import SecretStr

from dcp.server.app import create_app
from dcp.server.core.jobs.schedules import ScheduleContext
from dcp.server.core.security.keys import create_key
from dcp.server.core.security.principal import Scope
from dcp.server.core.settings import Settings
from dcp.server.features import schedules
from tests.support.databases import migrated_sqlite

__all__ = ["App", "running_app"]


class App:
    """A started application; `client` makes clients, with a key or without."""

    def __init__(self, app: FastAPI, base: TestClient) -> None:
        self.app = app
        self.service = app.state.service
        self.base = base

    def client(self, *scopes: Scope, roots: list[str] | None = None, name: str | None = None) -> TestClient:
        """Return a client with a new key for these scopes; without scopes, one without a key (with
        auth=off)."""
        headers = {"Authorization": f"Bearer {self.key(*scopes, roots=roots, name=name)}"} if scopes else {}
        # no context manager: the application already runs, in an event loop shared by all clients
        made = TestClient(
            self.app, base_url="http://localhost", headers=headers, raise_server_exceptions=False
        )
        made.portal = self.base.portal
        return made

    def work(self, now: float, *names: str) -> list[Any]:
        """Run the periodic work of a worker with these names at the time ``now``."""
        context = ScheduleContext(self.service.settings, self.service.database, now, threading.Event())
        return [one.act(context) for one in schedules(self.service.settings) if one.name in names]

    def key(self, *scopes: Scope, roots: list[str] | None = None, name: str | None = None) -> str:
        """Create and return an API key."""
        with self.service.database.write() as connection:
            made = create_key(
                connection,
                name=name or "-".join([*scopes, *(roots or ())]),
                scopes=scopes,
                roots=roots,
                expires_seconds=None,
                now_seconds=self.service.clock(),
            )
        return made.key


@contextmanager
def running_app(
    database_url: str, folder: Path, *, clock: Callable[[], float] = time.time, **settings: Any
) -> Iterator[App]:
    """Run the application over ``database_url``, with the roots "main" and "other" below ``folder``.

    A missing SQLite file is created, and migrated unless ``migrate`` is False.
    """
    roots = {name: {"url": str(folder / name)} for name in ("main", "other")}
    for name in roots:
        (folder / name).mkdir(parents=True, exist_ok=True)
    file = Path(database_url.removeprefix("sqlite:///"))
    if database_url.startswith("sqlite:///") and settings.get("migrate", True) and not file.exists():
        file.write_bytes(migrated_sqlite())
    given = {"roots": roots, "auth": "keys", "log_level": "warning", **settings}
    app = create_app(Settings(database_url=SecretStr(database_url), **given), clock=clock)
    with TestClient(app, base_url="http://localhost", raise_server_exceptions=False) as base:
        yield App(app, base)
