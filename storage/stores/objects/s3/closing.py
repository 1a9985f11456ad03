"""When the connections of a client are closed: as soon as nobody holds it, nor any request under way.

The collector notices that, in any thread, also in one that holds locks, and in that of the event loop. So
what it calls here neither waits nor takes a lock.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final
from weakref import finalize

__all__ = ["close_with"]

_INHERITED: Final[list[Any]] = []
"""What a forked child has of its parent's: to close it takes sockets out of the parent's event loop."""


def close_with(client: object, filesystem: Any) -> None:
    """Close the session of ``filesystem`` (of s3fs) on its event loop once ``client`` is gone."""
    session = _Session(filesystem.close_session)
    filesystem.close_session = session
    finalize(client, _end, filesystem, session).atexit = False


class _Session:
    """In place of `S3FileSystem.close_session`, which waits, and is called by the collector and at exit."""

    def __init__(self, close: Callable[[Any, Any], None]) -> None:
        self.is_closed = False
        self.pid = os.getpid()
        self._close = close

    def __call__(self, loop: Any, s3: Any) -> None:
        if not self.is_closed and self.pid == os.getpid():
            self._close(loop, s3)


def _end(filesystem: Any, session: _Session) -> None:
    if session.pid != os.getpid():
        _INHERITED.append(filesystem)
        return
    session.is_closed = True
    loop = filesystem.loop
    with suppress(RuntimeError):  # the loop was closed, and with it what it watched
        loop.call_soon_threadsafe(lambda: loop.create_task(_close(filesystem)))


async def _close(filesystem: Any) -> None:
    creator = getattr(filesystem, "_s3creator", None)  # it has none before its first request
    if creator is not None:
        with suppress(OSError, asyncio.TimeoutError):
            await creator.__aexit__(None, None, None)
