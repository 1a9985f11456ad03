"""Databases and disks that fail while a service runs, and recover."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator

from tests.support.databases import PostgresServer
from tests.support.postgres import PostgresProgram
from tests.support.processes import children

__all__ = ["StoppablePostgres", "limited_files"]


class StoppablePostgres(PostgresServer):
    """A PostgreSQL server of one test; its ``program`` may be stopped and started again with its data."""

    def __init__(self) -> None:
        self.program = PostgresProgram()
        super().__init__(self.program.url)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Keep connections open but unanswered during the block."""
        pids = _with_children(self.program.pid)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def limited_files(pid: int, limit_bytes: int, *, with_children: bool = False) -> Iterator[None]:
    """Limit the size of files written by a process: writes beyond ``limit_bytes`` fail, as on a full disk.

    Child processes inherit the limit; ``with_children``, the limit is also lifted for them at the end.
    """
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        for each in _with_children(pid) if with_children else [pid]:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(each, resource.RLIMIT_FSIZE, before)


def _with_children(pid: int) -> list[int]:
    return [pid, *children(pid)]
