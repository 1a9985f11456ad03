"""``Idempotency-Key``: a repeated POST, whose first answer was lost, takes effect once.

The first answer is kept for a day and returned again. A route that writes to the database stores its answer
in the same transaction (`transact`); other answers are stored afterwards (`settle`). While the first request
is running or after its process died, a second request gets 409. After ``taken_seconds`` the second request
replaces the first, which then has no effect.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeVar

import structlog
from sqlalchemy import ColumnElement, Connection, delete, insert, select, update
from sqlalchemy.exc import IntegrityError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dcp.server.core.answers import answer_model, answer_of
from dcp.server.core.http.context import Service
from dcp.server.core.http.handlers import problem_of, problem_response
from dcp.server.core.problems import BadRequestError, ConflictError, ProblemError, UnprocessableError
from dcp.server.core.security.principal import Principal
from dcp.server.database.engine import Database, DatabaseUnavailableError
from dcp.server.database.tables import idempotency

T = TypeVar("T")
KEPT_SECONDS: Final = 86_400.0
TAKEN_SECONDS: Final = 120.0
_ASK_AGAIN_SECONDS: Final = 1
KEPT_HEADERS: Final = ("content-type", "location", "etag")


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """The answer to the first request."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Reservation:
    """A key reserved by a request, with owner and time."""

    actor: str
    key: str
    since_seconds: float


def hash_of(method: str, path: str, query: bytes, body: bytes, rights: object) -> bytes:
    """Hash a request for comparison, including the rights of the caller: changed rights get no earlier
    answer."""
    digest = hashlib.sha256()
    for part in (method.encode(), path.encode("utf-8", "replace"), query, body, repr(rights).encode()):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def begin(
    database: Database, wanted: Reservation, request_hash: bytes, taken_seconds: float = TAKEN_SECONDS
) -> KeptAnswer | None:
    """Reserve the key for this request, or return the existing answer.

    Raises ConflictError while the first request is running, and UnprocessableError for another request.
    """
    actor, key = wanted.actor, wanted.key

    def act(connection: Connection) -> KeptAnswer | None:
        where = (idempotency.c.actor == actor, idempotency.c.key == key)
        row = connection.execute(select(idempotency).where(*where)).one_or_none()
        values = {
            "request_hash": request_hash,
            "status_code": None,
            "created_seconds": wanted.since_seconds,
        }
        if row is None:
            connection.execute(insert(idempotency).values(actor=actor, key=key, **values))
            return None
        age_seconds = wanted.since_seconds - row.created_seconds
        if age_seconds > KEPT_SECONDS or (row.status_code is None and age_seconds > taken_seconds):
            connection.execute(update(idempotency).where(*where).values(**values, headers=None, body=None))
            return None
        if bytes(row.request_hash) != request_hash:
            raise UnprocessableError(
                "this Idempotency-Key belongs to another request, or was sent with other rights"
            )
        if row.status_code is None:
            raise _at_work()
        return KeptAnswer(row.status_code, row.headers or {}, bytes(row.body or b""))

    try:
        return database.transact(act)
    except IntegrityError:
        # another request reserved the key first and is still running
        raise _at_work() from None


def _at_work() -> ConflictError:
    later = {"Retry-After": str(_ASK_AGAIN_SECONDS)}
    detail = "a request with this Idempotency-Key is still running; retry later for its response"
    return ConflictError(detail, headers=later, state="working")


def keep(connection: Connection, reservation: Reservation, answer: KeptAnswer) -> None:
    """Store the answer in the transaction of the effects.

    Raises ConflictError if another request has taken over the key.
    """
    values = {"status_code": answer.status, "headers": dict(answer.headers), "body": answer.body}
    changed = connection.execute(update(idempotency).where(*_unanswered(reservation)).values(values))
    if changed.rowcount != 1:
        raise ConflictError(
            "the request took too long: another request with this Idempotency-Key replaced it"
        )


def settle(database: Database, reservation: Reservation, answer: KeptAnswer | None) -> None:
    """Store the answer, or free the key of a request without effect, unless another request took over the
    key."""

    def act(connection: Connection) -> None:
        if answer is None:
            connection.execute(delete(idempotency).where(*_unanswered(reservation)))
        else:
            with suppress(ConflictError):
                keep(connection, reservation, answer)

    database.transact(act)


def _unanswered(reservation: Reservation) -> tuple[ColumnElement[bool], ...]:
    return (
        idempotency.c.actor == reservation.actor,
        idempotency.c.key == reservation.key,
        idempotency.c.created_seconds == reservation.since_seconds,
        idempotency.c.status_code.is_(None),
    )


def forget_old(database: Database, now_seconds: float) -> None:
    """Delete expired answers."""
    is_old = idempotency.c.created_seconds < now_seconds - KEPT_SECONDS
    with database.read() as connection:
        found = connection.execute(select(idempotency.c.key).where(is_old).limit(1)).first()
    if found is not None:  # avoids a write transaction if no row has expired
        database.transact(lambda connection: connection.execute(delete(idempotency).where(is_old)))


_KEY: Final = re.compile(r"[\x21-\x7e]{1,128}")
_MAX_KEPT_BYTES: Final = 1 << 20
_log = structlog.get_logger(__name__)


def transact(database: Database, request: Request, response: Response, act: Callable[[Connection], T]) -> T:
    """Run ``act`` in a transaction that also stores its answer, with the headers set in ``response``.

    The answer is a record, a model or None. Raises ConflictError without effect if another request took over
    the key.
    """
    reservation = getattr(request.state, "reservation", None)
    if not isinstance(reservation, Reservation):
        return database.transact(act)

    def both(connection: Connection) -> T:
        answer = act(connection)
        keep(connection, reservation, _kept(request, response, answer))
        return answer

    answer = database.transact(both)
    request.state.is_kept = True
    return answer


def _kept(request: Request, response: Response, answer: object) -> KeptAnswer:
    headers = {name: response.headers[name] for name in KEPT_HEADERS if name in response.headers}
    status = response.status_code or request.scope["route"].status_code or 200
    if answer is None:
        return KeptAnswer(status, headers, b"")
    body = answer_of(answer_model(type(answer)), answer).model_dump_json().encode()
    return KeptAnswer(status, {"content-type": "application/json", **headers}, body)


class IdempotencyMiddleware:
    """Stores answers of successful requests; failed requests can be repeated."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle the ``Idempotency-Key`` (ASGI)."""
        key = Headers(scope=scope).get("idempotency-key") if _is_post(scope) else None
        principal = scope.get("state", {}).get("principal")
        if key is None or not isinstance(principal, Principal):
            await self.app(scope, receive, send)
            return
        try:
            if not _KEY.fullmatch(key):
                raise BadRequestError("Idempotency-Key must have 1 to 128 visible ASCII characters")
            # complete, because an outer middleware has read the body within the limits
            message = await receive()
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

    async def _begin(self, scope: Scope, wanted: Reservation, body: bytes) -> KeptAnswer | None:
        rights = scope["state"]["principal"].scopes_by_root
        request_hash = hash_of(scope["method"], scope["path"], scope["query_string"], body, rights)
        service = self._service
        taken_seconds = max(TAKEN_SECONDS, 2 * service.settings.request_seconds)
        return await run_in_threadpool(begin, service.database, wanted, request_hash, taken_seconds)

    async def _run(
        self, scope: Scope, message: Message, receive: Receive, send: Send, reservation: Reservation
    ) -> None:
        state = scope["state"]
        state["reservation"] = reservation  # for routes that store their answer themselves
        recorder = _Recorder(message, receive, send)
        try:
            await self.app(scope, recorder.receive, recorder.send)
        except Exception:
            await self._keep(reservation, None)
            raise
        # After a cancellation a thread may still run the request, so the key stays reserved.
        if not state.get("is_kept", False):
            await self._keep(reservation, None if state.get("is_secret", False) else recorder.answer())
        await recorder.release()

    async def _keep(self, reservation: Reservation, answer: KeptAnswer | None) -> None:
        try:
            await run_in_threadpool(settle, self._service.database, reservation, answer)
        except DatabaseUnavailableError as error:
            _log.warning("idempotency key not stored", error=str(error))


class _Recorder:
    """Sends the last part of the answer after storing it, so a received answer is always stored."""

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

    def answer(self) -> KeptAnswer | None:
        is_kept = self._last is not None and 200 <= self._status < 300 and self._size_bytes <= _MAX_KEPT_BYTES
        return KeptAnswer(self._status, self._headers, b"".join(self._parts)) if is_kept else None

    async def release(self) -> None:
        if self._last is not None:
            await self._send(self._last)


def _is_post(scope: Scope) -> bool:
    return bool(scope["type"] == "http" and scope["method"] == "POST")
