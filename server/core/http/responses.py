"""Responses of all kinds: ids and lines in the log of their requests, security headers, compression.

Compressed are answers that are sent at once, for clients that accept gzip: pages, JSON, scripts and styles.
Streams (events, downloads), ranges, bodies that are compressed or small, and answers with a strong entity
tag, which names the very bytes, go through untouched. The length of what is compressed tells of its content,
and so an attacker who makes a browser load pages with chosen words in the address could guess other text of
the page (the BREACH attack). The secret of a page is the token of its forms: it differs in each page
(`dcp.server.core.pages.tokens`).
"""

from __future__ import annotations

import gzip
import re
import secrets
import time
from typing import Final

import anyio.to_thread
import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcp.server.core.http.handlers import problem_of, problem_response
from dcp.server.core.problems import BrokenBodyError

__all__ = ["CSP", "CompressionMiddleware", "RequestMiddleware"]

CSP: Final = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
"""For answers that are no pages; a page sets its own."""

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_QUIET: Final = frozenset({"/healthz", "/readyz", "/metrics"})
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_log = structlog.get_logger("dcp.server.requests")


class RequestMiddleware:
    """Gives each request ``state.request_id``: the caller's ``X-Request-ID`` if it is a tame one.

    Paths are logged, queries and headers are not.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = request_id
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            await self._handle(scope, receive, send, request_id)

    async def _handle(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        started_seconds = time.perf_counter()
        status = 0
        sent_bytes = 0

        async def send_guarded(message: Message) -> None:
            nonlocal status, sent_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                _add_headers(MutableHeaders(raw=message["headers"]), request_id)
            elif message["type"] == "http.response.body":
                sent_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, send_guarded)
        except BrokenBodyError:
            raise
        except Exception as error:
            _log.exception("request failed", method=scope["method"], path=scope["path"])
            if status:
                raise BrokenBodyError("the answer had begun") from error
            await problem_response(problem_of(error), scope)(scope, receive, send_guarded)
        finally:
            seconds = time.perf_counter() - started_seconds
            log = _log.debug if scope["path"] in _QUIET else _log.info
            log(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status,
                sent_bytes=sent_bytes,
                milliseconds=round(seconds * 1000, 2),
                actor=getattr(scope["state"].get("principal"), "name", None),
                address=(scope.get("client") or ("?",))[0],
            )


def _add_headers(headers: MutableHeaders, request_id: str) -> None:
    headers["X-Request-ID"] = request_id
    for name, value in _HEADERS.items():
        headers[name] = value
    headers.setdefault("Referrer-Policy", "no-referrer")
    headers.setdefault("Content-Security-Policy", CSP)
    headers.setdefault("Cache-Control", "no-store")


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
    """Return whether ``Accept-Encoding`` names gzip with a weight above 0."""
    for one in said.lower().split(","):
        name, _, weight = one.partition(";")
        if name.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False
