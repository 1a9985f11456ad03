"""``Idempotency-Key``: a POST that is sent again, because its answer was lost, is done once.

The answer of the first is kept for a day and given again. What is done by writing to the database is done in
the transaction that keeps the answer (`keep`; see `idempotent_transaction`), so that no crash comes between;
of the rest the answer is kept afterwards (`finish`). A request that is still at work, or that ended with the
process it was in, answers 409 to a second one; after ``taken_seconds`` the second is taken for the first,
which then does nothing any more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from dcp.server.core.problems import ConflictError, UnprocessableError
from dcp.server.database.engine import Database
from dcp.server.database.tables import idempotency

__all__ = [
    "KEPT_HEADERS",
    "KEPT_SECONDS",
    "TAKEN_SECONDS",
    "KeptAnswer",
    "Reservation",
    "begin",
    "finish",
    "forget",
    "forget_old",
    "hash_of",
    "keep",
]

KEPT_SECONDS: Final = 86_400.0
TAKEN_SECONDS: Final = 120.0
_ASK_AGAIN_SECONDS: Final = 1
KEPT_HEADERS: Final = ("content-type", "location", "etag")


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """What the first request was answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Reservation:
    """A key that a request has: whose it is, and since when."""

    actor: str
    key: str
    since_seconds: float


def hash_of(method: str, path: str, query: bytes, body: bytes) -> bytes:
    """Tells whether two requests are the same."""
    digest = hashlib.sha256()
    for part in (method.encode(), path.encode("utf-8", "replace"), query, body):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def begin(
    database: Database,
    actor: str,
    key: str,
    request_hash: bytes,
    now_seconds: float,
    taken_seconds: float = TAKEN_SECONDS,
) -> KeptAnswer | None:
    """Reserve the key for this request, or return the answer that there is.

    Raises ConflictError while the first is at work, UnprocessableError if the key was another request's.
    """
    try:
        return database.transact(
            lambda connection: _begin(connection, actor, key, request_hash, now_seconds, taken_seconds)
        )
    except IntegrityError:
        # another one was quicker; it is at work now
        raise _at_work() from None


def _begin(
    connection: Connection,
    actor: str,
    key: str,
    request_hash: bytes,
    now_seconds: float,
    taken_seconds: float,
) -> KeptAnswer | None:
    where = (idempotency.c.actor == actor, idempotency.c.key == key)
    row = connection.execute(select(idempotency).where(*where)).one_or_none()
    values = {"request_hash": request_hash, "status_code": None, "created_seconds": now_seconds}
    if row is None:
        connection.execute(insert(idempotency).values(actor=actor, key=key, **values))
        return None
    age_seconds = now_seconds - row.created_seconds
    if age_seconds > KEPT_SECONDS or (row.status_code is None and age_seconds > taken_seconds):
        connection.execute(update(idempotency).where(*where).values(**values, headers=None, body=None))
        return None
    if bytes(row.request_hash) != request_hash:
        raise UnprocessableError("this Idempotency-Key belongs to another request")
    if row.status_code is None:
        raise _at_work()
    return KeptAnswer(row.status_code, row.headers or {}, bytes(row.body or b""))


def _at_work() -> ConflictError:
    later = {"Retry-After": str(_ASK_AGAIN_SECONDS)}
    detail = "a request with this Idempotency-Key is being worked on; ask again for its answer"
    return ConflictError(detail, headers=later, state="working")


def keep(connection: Connection, reservation: Reservation, answer: KeptAnswer) -> None:
    """Keep what is answered, with what else is done in this transaction.

    Raises ConflictError if another request has taken the key since, and does it in place of this one.
    """
    values = {"status_code": answer.status, "headers": dict(answer.headers), "body": answer.body}
    changed = connection.execute(update(idempotency).where(*_unanswered(reservation)).values(values))
    if changed.rowcount != 1:
        raise ConflictError("this took too long: another request with this Idempotency-Key goes on with it")


def finish(database: Database, reservation: Reservation, answer: KeptAnswer) -> None:
    """Keep what was answered, unless another request has taken the key since."""
    with suppress(ConflictError):
        database.transact(lambda connection: keep(connection, reservation, answer))


def forget(database: Database, reservation: Reservation) -> None:
    """The request changed nothing; the key is free again."""
    database.transact(
        lambda connection: connection.execute(delete(idempotency).where(*_unanswered(reservation)))
    )


def _unanswered(reservation: Reservation) -> tuple[ColumnElement[bool], ...]:
    return (
        idempotency.c.actor == reservation.actor,
        idempotency.c.key == reservation.key,
        idempotency.c.created_seconds == reservation.since_seconds,
        idempotency.c.status_code.is_(None),
    )


def forget_old(database: Database, now_seconds: float) -> None:
    """Drop what has been kept for long enough."""
    with database.read() as connection:
        old = connection.execute(
            select(idempotency.c.key)
            .where(idempotency.c.created_seconds < now_seconds - KEPT_SECONDS)
            .limit(1)
        ).first()
    if old is not None:  # so that nobody waits for a writer who has nothing to write
        database.transact(
            lambda connection: connection.execute(
                delete(idempotency).where(idempotency.c.created_seconds < now_seconds - KEPT_SECONDS)
            )
        )
