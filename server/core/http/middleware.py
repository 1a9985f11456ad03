"""Middleware of all responses: request limits, ids and log lines, security headers, compression.

Limits apply to the size and media type of requests, and to the time until the request has arrived and the
answer begins.

Compression applies to complete answers (pages, JSON, scripts, styles) for clients that accept gzip. Streams,
ranges, compressed or small bodies, and answers with a strong entity tag pass unchanged. The compressed
length reveals content: an attacker who makes a browser load pages with chosen words in the address could
guess other text of the page (BREACH). The only secret of a page is the form token, which differs in each
page (`dcp.server.core.pages.requests`).
"""

from __future__ import annotations

import asyncio
import gzip
import re
import secrets
import time
from typing import Final

import anyio.to_thread
import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcp.server.core.http.admission import API_PREFIX
from dcp.server.core.http.handlers import problem_of, problem_response
from dcp.server.core.problems import (
    BadRequestError,
    BrokenBodyError,
    ProblemError,
    TooLargeError,
    UnavailableError,
    UnsupportedMediaTypeError,
)

CSP: Final = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
"""Content security policy of answers other than pages; a page sets its own."""

_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_QUIET: Final = frozenset({"/healthz", "/readyz", "/metrics"})
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_request_log = structlog.get_logger("dcp.server.requests")


class RequestMiddleware:
    """Sets ``state.request_id``, the ``X-Request-ID`` of the caller if it is well-formed.

    Logs paths, but neither queries nor headers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle the request (ASGI)."""
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
            _request_log.exception("request failed", method=scope["method"], path=scope["path"])
            if status:
                raise BrokenBodyError("error after the start of the response") from error
            await problem_response(problem_of(error), scope)(scope, receive, send_guarded)
        finally:
            seconds = time.perf_counter() - started_seconds
            log = _request_log.debug if scope["path"] in _QUIET else _request_log.info
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
"""Size from which compression runs in a thread, because it takes milliseconds."""
_LEVEL: Final = 5


class CompressionMiddleware:
    """Compresses answers sent in one piece."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compress the answer (ASGI)."""
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
    """Return the compressed body and update the headers in ``start``; unchanged if not worthwhile."""
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
    """Return True if ``Accept-Encoding`` names gzip with a weight above 0."""
    for one in said.lower().split(","):
        name, _, weight = one.partition(";")
        if name.strip() in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


# -- limits of requests --------------------------------------------------------------------------------------


_JSON: Final = re.compile(r"application/([a-z.+-]+\+)?json\s*(;.*)?", re.IGNORECASE)
_FORM: Final = re.compile(r"application/x-www-form-urlencoded\s*(;.*)?", re.IGNORECASE)
_MAX_TARGET_BYTES: Final = 16 << 10
_log = structlog.get_logger(__name__)


class _SlowRequestError(ProblemError):
    """The request did not arrive in time."""

    status, slug, title = 408, "request-timeout", "The request did not arrive in time"


class LimitMiddleware:
    """Accepts JSON bodies up to ``max_body_bytes``, and requires an answer to begin within ``seconds``.

    Outside of the API, forms are accepted too. The body is read first, so a slow sender holds no thread and
    no database connection. A started answer has no time limit.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, seconds: float) -> None:
        self.app = app
        self._max_body_bytes = max_body_bytes
        self._seconds = seconds
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Enforce the limits (ASGI)."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._body(scope, receive), self._seconds)
        except TimeoutError:
            problem: ProblemError = _SlowRequestError(f"the body did not arrive within {self._seconds:g} s")
        except ProblemError as error:
            problem = error
        else:
            if body is not None:
                await self._answer(scope, _Replayed(body, receive), send)
            return
        # the rest of the body is unread, so the connection cannot be reused
        problem.headers["Connection"] = "close"
        await problem_response(problem, scope)(scope, receive, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the complete body; None if the sender disconnected."""
        if len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > _MAX_TARGET_BYTES:
            raise BadRequestError("the URL is too long")
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy might use the other length and treat a part of the body as the next request.
            raise BadRequestError("Transfer-Encoding and Content-Length exclude each other")
        if not length.isdecimal():
            raise BadRequestError("Content-Length is not a number")
        if int(length[:20]) > self._max_body_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        left_bytes = self._max_body_bytes
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            left_bytes -= len(part)
            if left_bytes < 0:
                raise self._too_large()
            parts.append(part)
            if not message.get("more_body", False):
                body = b"".join(parts)
                if body:
                    _check_type(scope["path"], headers.get("content-type", ""))
                return body

    def _too_large(self) -> TooLargeError:
        return TooLargeError(f"a body may have {self._max_body_bytes} bytes at most")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = _TimedAnswer(send)
        task = asyncio.create_task(_run(self.app, scope, receive, answer))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        waiting = asyncio.create_task(answer.begun.wait())
        try:
            await asyncio.wait((task, waiting), timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            waiting.cancel()
        if task.done() or answer.begun.is_set():
            await task
            return
        # A thread cannot be stopped; its late answer is discarded.
        answer.is_late = True
        task.cancel()
        task.add_done_callback(_retrieve)
        _log.warning("request took too long", path=scope["path"], seconds=self._seconds)
        problem = UnavailableError(f"no response within {self._seconds:g} s; retry later")
        await problem_response(problem, scope)(scope, receive, send)


def _check_type(path: str, content_type: str) -> None:
    is_form = not path.startswith(API_PREFIX) and _FORM.fullmatch(content_type)
    if not (is_form or _JSON.fullmatch(content_type)):
        raise UnsupportedMediaTypeError("the body must have Content-Type: application/json")


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


class _Replayed:
    """Delivers the body read before, then messages of the server: the disconnect."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()


class _TimedAnswer:
    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = asyncio.Event()
        self.is_late = False

    async def __call__(self, message: Message) -> None:
        if self.is_late:
            return
        self.begun.set()
        await self._send(message)


def _retrieve(task: asyncio.Task[None]) -> None:
    # avoids a message of asyncio about an unretrieved exception
    if not task.cancelled() and task.exception() is not None:
        _log.warning("request failed after its timeout", error=repr(task.exception()))
