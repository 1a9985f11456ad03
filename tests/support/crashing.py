"""A service process that dies in the middle of a request, before or after a commit of its database."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, Final, Literal

from sqlalchemy import event

from tests.support.app import running_app
from tests.support.forking import forkserver_context

__all__ = ["Instant", "die_in_post"]

Instant = Literal["before the commit", "after the commit"]
"""Relative to the transaction that stores the result of the request."""

_HANG_SECONDS: Final = 120.0


def die_in_post(
    database_url: str, folder: Path, path: str, body: Any, key: str, table: str, instant: Instant
) -> None:
    """POST ``body`` with this Idempotency-Key to an application without keys, in a process that kills itself
    at ``instant`` of the transaction that inserts into ``table``."""
    arguments = (database_url, folder, path, body, key, table, instant)
    process = forkserver_context().Process(target=_post, args=arguments)
    process.start()
    process.join(_HANG_SECONDS)
    assert process.exitcode == -signal.SIGKILL, f"exit code {process.exitcode}"


def _post(
    database_url: str, folder: Path, path: str, body: Any, key: str, table: str, instant: Instant
) -> None:
    is_near = False

    def die(*_: Any) -> None:
        if is_near:
            os.kill(os.getpid(), signal.SIGKILL)

    def look(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        nonlocal is_near
        is_near = is_near or statement.startswith(f"INSERT INTO {table} ")

    with running_app(database_url, folder, auth="off") as app:
        engine = app.service.database.writer
        event.listen(engine, "before_cursor_execute", look)
        # A connection returns to its pool when its transaction has ended.
        event.listen(engine, "commit" if instant == "before the commit" else "checkin", die)
        app.base.post(path, json=body, headers={"Idempotency-Key": key})
