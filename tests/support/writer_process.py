"""Sessions that save by a writer process."""

from __future__ import annotations

from typing import Final

from dcp.background.process.writer import ProcessWriter
from dcp.background.session import AsyncSession

__all__ = ["TIMEOUT_SECONDS", "pid_of"]

TIMEOUT_SECONDS: Final = 240.0


def pid_of(session: AsyncSession) -> int:
    """The writer process of this rank."""
    worker = session._worker
    assert isinstance(worker, ProcessWriter)
    return worker.pid
