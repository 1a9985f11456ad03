"""For routes that are a POST and write to the database: the effect and the answer in one transaction.

A process that dies between the two would have done what it was asked for, and not know the answer: a second
request with the same ``Idempotency-Key`` would do it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

from fastapi import Depends, Request, Response
from sqlalchemy import Connection

from dcp.server.core.http.dependencies import Db
from dcp.server.core.http.idempotency import KEPT_HEADERS, KeptAnswer, Reservation, keep
from dcp.server.core.record_answers import answer_model, answer_of
from dcp.server.database.engine import Database

__all__ = ["IdempotentDep", "IdempotentTransaction"]

A = TypeVar("A")


class IdempotentTransaction:
    """Transactions of one request."""

    def __init__(self, database: Database, request: Request, response: Response) -> None:
        self._database = database
        self._request = request
        self._response = response

    def __call__(self, act: Callable[[Connection], A]) -> A:
        """Return the record or answer that ``act`` makes, which also sets the headers of the response.

        Raises ConflictError, and does nothing, if another request has taken the key since.
        """
        reservation = getattr(self._request.state, "reservation", None)
        if not isinstance(reservation, Reservation):
            return self._database.transact(act)

        def both(connection: Connection) -> A:
            answer = act(connection)
            keep(connection, reservation, self._kept(answer))
            return answer

        answer = self._database.transact(both)
        self._request.state.is_kept = True
        return answer

    def _kept(self, made: object) -> KeptAnswer:
        set_by_route = self._response.headers
        headers = {name: set_by_route[name] for name in KEPT_HEADERS if name in set_by_route}
        status = self._response.status_code or self._request.scope["route"].status_code or 200
        body = answer_of(answer_model(type(made)), made).model_dump_json().encode()
        return KeptAnswer(status, {"content-type": "application/json", **headers}, body)


async def _transaction(database: Db, request: Request, response: Response) -> IdempotentTransaction:
    return IdempotentTransaction(database, request, response)


IdempotentDep = Annotated[IdempotentTransaction, Depends(_transaction)]
