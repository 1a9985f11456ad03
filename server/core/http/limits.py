"""Limits of requests: their size and media type, and the time until they have arrived and are answered."""

from __future__ import annotations

import asyncio
import re
from typing import Final

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcp.server.core.http.admission import API_PREFIX
from dcp.server.core.http.handlers import problem_response
from dcp.server.core.problems import (
    BadRequestError,
    ProblemError,
    TooLargeError,
    UnavailableError,
    UnsupportedMediaTypeError,
)

__all__ = ["LimitMiddleware"]

_JSON: Final = re.compile(r"application/([a-z.+-]+\+)?json\s*(;.*)?", re.IGNORECASE)
_FORM: Final = re.compile(r"application/x-www-form-urlencoded\s*(;.*)?", re.IGNORECASE)
_MAX_TARGET_BYTES: Final = 16 << 10
_log = structlog.get_logger(__name__)


class _SlowRequestError(ProblemError):
    """The request did not arrive in time."""

    status, slug, title = 408, "request-timeout", "The request did not arrive in time"


class LimitMiddleware:
    """Bodies of JSON and of ``max_body_bytes`` at most, answers that begin within ``seconds``.

    Outside of the API they may be forms, too. The body is read before anything else is done, so that a slow
    or lying sender holds no thread and no connection to the database. An answer that has begun takes as long
    as it takes.
    """

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, seconds: float) -> None:
        self.app = app
        self._max_body_bytes = max_body_bytes
        self._seconds = seconds
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._body(scope, receive), self._seconds)
        except TimeoutError:
            problem: ProblemError = _SlowRequestError(f"its body took more than {self._seconds:g} s")
        except ProblemError as error:
            problem = error
        else:
            if body is not None:
                await self._answer(scope, _Replayed(body, receive), send)
            return
        # what is left of the body is not read, so the connection is of no use any more
        problem.headers["Connection"] = "close"
        await problem_response(problem, scope)(scope, receive, send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """Read the whole body; None if the sender disconnected."""
        if len(scope.get("raw_path") or b"") + len(scope.get("query_string", b"")) > _MAX_TARGET_BYTES:
            raise BadRequestError("the address is too long")
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy might go by the other one, and take a part of the body for the next request.
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
        return TooLargeError(f"bodies have {self._max_body_bytes} bytes at most")

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
        # A thread cannot be stopped; whatever it will say is not sent, and who asked need not wait for it.
        answer.is_late = True
        task.cancel()
        task.add_done_callback(_retrieve)
        _log.warning("request took too long", path=scope["path"], seconds=self._seconds)
        problem = UnavailableError(f"no answer within {self._seconds:g} s; it may be asked again")
        await problem_response(problem, scope)(scope, receive, send)


def _check_type(path: str, content_type: str) -> None:
    is_form = not path.startswith(API_PREFIX) and _FORM.fullmatch(content_type)
    if not (is_form or _JSON.fullmatch(content_type)):
        raise UnsupportedMediaTypeError("bodies are application/json")


async def _run(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


class _Replayed:
    """Gives the body that has been read, then what the server says, which is that the client went away."""

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
    # else asyncio complains of an error that nobody looked at
    if not task.cancelled() and task.exception() is not None:
        _log.warning("request failed after its time", error=repr(task.exception()))
