"""Requests with large bodies: handled in threads of their own, a few of one key at a time.

To parse and check 8 MB of JSON takes a second or more of a processor, for which the event loop would answer
nobody else.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute

from dcp.server.core.problems import TooManyRequestsError
from dcp.server.core.security.principal import Principal

__all__ = ["LargeBodies", "LargeBodyRoute"]

_LARGE_BYTES: Final = 256 << 10
_OF_KEY: Final = 2
_THREADS: Final = 4
_RETRY_SECONDS: Final = 5

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class LargeBodies:
    """The threads of one application, and how many requests of each key they have; for its event loop."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="dcp-large-body")
        self._of: Counter[str] = Counter()

    async def handle(self, request: Request, handler: Handler) -> Response:
        """Handle the request in a thread. Raises TooManyRequestsError where its key has enough under way."""
        principal = getattr(request.state, "principal", None)
        who = principal.identity if isinstance(principal, Principal) else ""
        if self._of[who] >= _OF_KEY:
            raise TooManyRequestsError(
                f"{_OF_KEY} large bodies of this key are being read, and no more at a time are taken",
                headers={"Retry-After": str(_RETRY_SECONDS)},
            )
        self._of[who] += 1
        context = contextvars.copy_context()
        done = self._pool.submit(context.run, lambda: asyncio.run(handler(request)))
        loop = asyncio.get_running_loop()
        done.add_done_callback(lambda _: _call(loop, self._leave, who))
        return await asyncio.wrap_future(done)

    def _leave(self, who: str) -> None:
        self._of[who] -= 1
        if not self._of[who]:
            del self._of[who]


def _call(loop: asyncio.AbstractEventLoop, act: Callable[[str], None], who: str) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(act, who)


class LargeBodyRoute(APIRoute):
    """A route whose large bodies are for `LargeBodies`, which is ``app.state.large_bodies``."""

    def get_route_handler(self) -> Handler:
        """As of FastAPI, which reads and checks the body in it; that alone where the route takes none."""
        handler: Handler = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def handle(request: Request) -> Response:
            if len(await request.body()) < _LARGE_BYTES:
                return await handler(request)
            bodies: LargeBodies = request.app.state.large_bodies
            return await bodies.handle(request, handler)

        return handle
