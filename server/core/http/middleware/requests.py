"""Outermost: the request's id, its line in the log, security headers, and 500 for what nobody caught."""

from __future__ import annotations

import re
import secrets
import time
from typing import Final

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcp.server.core.http.handlers import problem_of, problem_response
from dcp.server.core.problems import BrokenBodyError

__all__ = ["CSP", "RequestMiddleware"]

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
