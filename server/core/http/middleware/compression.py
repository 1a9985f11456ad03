"""Answers compressed with gzip, for whoever takes it: pages, JSON, scripts and styles that are sent at once.

All else goes through untouched: streams (events, downloads), ranges, bodies that are compressed or small, and
answers with a strong entity tag, which names the very bytes.

What is compressed has a length that tells of its content, and so an attacker who makes a browser load pages
with words of theirs in the address could guess what else is in the page (the BREACH attack). The secret of a
page is the token of its forms: that is another one in each page (`dcp.server.core.pages.tokens`).
"""

from __future__ import annotations

import gzip
from typing import Final

import anyio.to_thread
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["CompressionMiddleware"]

_TYPES: Final = frozenset(
    {
        "application/json",
        "application/problem+json",
        "image/svg+xml",
        "text/css",
        "text/html",
        "text/javascript",
        "text/plain",
    }
)
_LEAST_BYTES: Final = 1000
_OWN_THREAD_BYTES: Final = 256 << 10
"""From here on compressing takes milliseconds, in which the other requests would wait."""
_LEVEL: Final = 5


class CompressionMiddleware:
    """Compresses answers that come in one piece."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["method"] == "HEAD":
            await self.app(scope, receive, send)
            return
        accepts = _accepts_gzip(Headers(scope=scope).get("accept-encoding", ""))
        start: Message | None = None

        async def send_compressed(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and _may_be_compressed(message):
                MutableHeaders(raw=message["headers"]).add_vary_header("Accept-Encoding")
                if accepts:
                    start = message
                    return
            elif start is not None and message["type"] == "http.response.body":
                held, start = start, None
                if not message.get("more_body", False):
                    message = await _compressed(held, message)
                await send(held)
            await send(message)

        await self.app(scope, receive, send_compressed)


async def _compressed(start: Message, message: Message) -> Message:
    """The body, and its headers in ``start``; as they are where it is not worth it."""
    body = message.get("body", b"")
    if len(body) < _LEAST_BYTES:
        return message
    if len(body) < _OWN_THREAD_BYTES:
        body = gzip.compress(body, _LEVEL, mtime=0)
    else:
        body = await anyio.to_thread.run_sync(lambda: gzip.compress(body, _LEVEL, mtime=0))
    headers = MutableHeaders(raw=start["headers"])
    headers["Content-Encoding"] = "gzip"
    headers["Content-Length"] = str(len(body))
    return {**message, "body": body}


def _may_be_compressed(start: Message) -> bool:
    headers = Headers(raw=start["headers"])
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return (
        kind in _TYPES
        and start["status"] not in (204, 206, 304)
        and not {"content-encoding", "content-range", "etag"} & set(headers.keys())
    )


def _accepts_gzip(said: str) -> bool:
    """Whether the ``Accept-Encoding`` names it, and not with a weight of 0."""
    for one in said.lower().split(","):
        name, _, weight = one.partition(";")
        if name.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
