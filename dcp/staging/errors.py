"""Errors of staging besides `StagingError` itself; on other ranks they arrive as that."""

from __future__ import annotations

from dcp.storage.errors import StagingError

__all__ = ["StagingMemoryError", "StagingTimeoutError"]


class StagingMemoryError(StagingError, MemoryError):
    """The host has no memory of the kind asked for; ``needed_bytes`` and ``available_bytes`` say how much."""

    available_bytes: int | None = None
    needed_bytes: int | None = None


class StagingTimeoutError(StagingError, TimeoutError):
    """Staging waited longer than allowed, for a save that holds the memory or for other copies."""

    def __str__(self) -> str:  # OSError would show errno and strerror
        return Exception.__str__(self)
