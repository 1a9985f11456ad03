"""``Idempotency-Key`` on POST: see `dcp.server.core.http.kept_answers`."""

from __future__ import annotations

import re
from typing import Final

import structlog
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcp.server.core.http import kept_answers
from dcp.server.core.http.context import Service
from dcp.server.core.http.handlers import problem_of, problem_response
from dcp.server.core.http.kept_answers import KEPT_HEADERS, Reservation
from dcp.server.core.problems import BadRequestError, ProblemError
from dcp.server.core.security.principal import Principal
from dcp.server.database.engine import DatabaseUnavailableError

__all__ = ["IdempotencyMiddleware"]

_KEY: Final = re.compile(r"[\x21-\x7e]{1,128}")
_MAX_KEPT_BYTES: Final = 1 << 20
_log = structlog.get_logger(__name__)


class IdempotencyMiddleware:
    """Answers that say that something was done are kept; after others the request may be tried again."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        key = Headers(scope=scope).get("idempotency-key") if _is_post(scope) else None
        principal = scope.get("state", {}).get("principal")
        if key is None or not isinstance(principal, Principal):
            await self.app(scope, receive, send)
            return
        try:
            if not _KEY.fullmatch(key):
                raise BadRequestError("Idempotency-Key has 1 to 128 visible ASCII characters")
            message = await receive()  # whole, since the limits are kept outside of this
            reservation = Reservation(principal.identity, key, self._service.clock())
            answer = await self._begin(scope, reservation, message.get("body", b""))
        except (ProblemError, DatabaseUnavailableError) as error:
            await problem_response(problem_of(error), scope)(scope, receive, send)
            return
        if answer is not None:
            headers = {**answer.headers, "Idempotency-Replayed": "true"}
            await Response(answer.body, answer.status, headers)(scope, receive, send)
            return
        await self._run(scope, message, receive, send, reservation)

    async def _begin(self, scope: Scope, wanted: Reservation, body: bytes) -> kept_answers.KeptAnswer | None:
        request_hash = kept_answers.hash_of(scope["method"], scope["path"], scope["query_string"], body)
        service = self._service
        taken_seconds = max(kept_answers.TAKEN_SECONDS, 2 * service.settings.request_seconds)
        return await run_in_threadpool(
            kept_answers.begin,
            service.database,
            wanted.actor,
            wanted.key,
            request_hash,
            wanted.since_seconds,
            taken_seconds,
        )

    async def _run(
        self, scope: Scope, message: Message, receive: Receive, send: Send, reservation: Reservation
    ) -> None:
        state = scope["state"]
        state["reservation"] = reservation  # for routes that keep their answer themselves
        recorder = _Recorder(message, receive, send)
        try:
            await self.app(scope, recorder.receive, recorder.send)
        except Exception:
            await self._keep(reservation, None)
            raise
        # When it is cancelled, a thread may still do what was asked for, so that the key stays taken.
        if not state.get("is_kept", False):
            await self._keep(reservation, None if state.get("is_secret", False) else recorder.answer())
        await recorder.release()

    async def _keep(self, reservation: Reservation, answer: kept_answers.KeptAnswer | None) -> None:
        database = self._service.database
        try:
            if answer is None:
                await run_in_threadpool(kept_answers.forget, database, reservation)
            else:
                await run_in_threadpool(kept_answers.finish, database, reservation, answer)
        except DatabaseUnavailableError as error:
            _log.warning("idempotency key not kept", error=str(error))


class _Recorder:
    """The last part of the answer is sent once it has been kept, so that whoever has it can rely on that."""

    def __init__(self, message: Message, receive: Receive, send: Send) -> None:
        self._message: Message | None = message
        self._receive = receive
        self._send = send
        self._status = 0
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._size_bytes = 0
        self._last: Message | None = None

    async def receive(self) -> Message:
        if self._message is not None:
            message, self._message = self._message, None
            return message
        return await self._receive()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = Headers(raw=message["headers"])
            self._headers = {name: headers[name] for name in KEPT_HEADERS if name in headers}
        elif message["type"] == "http.response.body":
            self._size_bytes += len(message.get("body", b""))
            if self._size_bytes <= _MAX_KEPT_BYTES:
                self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                self._last = message
                return
        await self._send(message)

    def answer(self) -> kept_answers.KeptAnswer | None:
        is_kept = self._last is not None and 200 <= self._status < 300 and self._size_bytes <= _MAX_KEPT_BYTES
        return (
            kept_answers.KeptAnswer(self._status, self._headers, b"".join(self._parts)) if is_kept else None
        )

    async def release(self) -> None:
        if self._last is not None:
            await self._send(self._last)


def _is_post(scope: Scope) -> bool:
    return bool(scope["type"] == "http" and scope["method"] == "POST")
