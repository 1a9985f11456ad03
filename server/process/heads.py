"""Heads of requests in time: uvicorn waits for the end of one as long as the other side likes."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["TimedHeads"]


class TimedHeads(H11Protocol):
    """Closes a connection whose next head is not whole ``head_seconds`` after it was opened, or after the
    first byte of the head. How long one may be idle in between is uvicorn's ``timeout_keep_alive``."""

    head_seconds: ClassVar[float] = 10.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """As of asyncio's protocols."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """As of asyncio's protocols."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """As of asyncio's protocols."""
        self._stop()
        super().connection_lost(exc)

    def _watch(self) -> None:
        if self.conn.their_state is not h11.IDLE:  # the head is here
            self._stop()
        elif self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.head_seconds, self._end)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        if self.conn.their_state is h11.IDLE:
            self.transport.abort()
