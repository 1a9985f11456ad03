"""Who asks: the key of a request, or of the session that a browser has signed in to, and how often it may.

Below ``/api/`` nobody comes without a valid key, whatever a route says of itself; and what is sent with a key
that is not valid goes nowhere, so that a wrong one is noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from anyio import to_thread
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send

from dcp.server.core.http.context import Service
from dcp.server.core.http.handlers import problem_of, problem_response
from dcp.server.core.http.middleware.hosts import API_PREFIX, FOREIGN, SAFE
from dcp.server.core.problems import ProblemError, UnauthorizedError, UnavailableError
from dcp.server.core.security.keys import prefix_of, principal_of
from dcp.server.core.security.principal import LOCAL, Principal
from dcp.server.core.security.sessions import find_session
from dcp.server.database.engine import DatabaseUnavailableError
from dcp.server.records.administration import Key

__all__ = ["SESSION_COOKIE", "STATIC_PREFIX", "AuthenticationMiddleware", "session_token"]

SESSION_COOKIE: Final = "dcphub_session"

STATIC_PREFIX: Final = "/static/"
"""Of files that are the same for everybody, and answered from memory."""
_UNCOUNTED: Final = frozenset({"/healthz", "/readyz", "/metrics"})
"""Asked by machines, often, and answered from memory or nearly so."""


class AuthenticationMiddleware:
    """Sets ``state.principal``: who asks, or None without a key."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http":
            try:
                scope["state"]["principal"] = await self._principal(scope)
            except (ProblemError, DatabaseUnavailableError) as error:
                await problem_response(problem_of(error), scope)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    async def _principal(self, scope: Scope) -> Principal | None:
        rates = self._service.rates
        address = str((scope.get("client") or ("unknown",))[0])
        is_counted = not (scope["path"] in _UNCOUNTED or scope["path"].startswith(STATIC_PREFIX))
        if self._service.settings.auth == "off":
            if is_counted:
                rates.count_address(address)
            return LOCAL
        secret = _secret_of(Headers(scope=scope))
        token = session_token(scope) if secret is None else None
        if secret is not None:
            record = await self._in_time(self._service.keys.find, secret)
            if record is None:
                rates.count_refused(address, prefix_of(secret))
                raise UnauthorizedError("this key is unknown, has been revoked or has expired")
        elif token is None or (record := await self._in_time(self._of_session, token)) is None:
            if is_counted:
                rates.count_address(address)
            if scope["path"].startswith(API_PREFIX):
                raise UnauthorizedError("send a key: Authorization: Bearer dcp_...")
            return None
        if is_counted:
            rates.count(f"key:{record.id}")
        return principal_of(record)

    def _of_session(self, token: str) -> Key | None:
        with self._service.database.read() as connection:
            record = find_session(connection, token, self._service.clock())
        self._service.keys.note_use(record)
        return record

    async def _in_time(self, find: Callable[[str], Key | None], secret: str) -> Key | None:
        seconds = self._service.settings.request_seconds
        try:
            # The thread is left to itself, should the database hang.
            looking = to_thread.run_sync(find, secret, abandon_on_cancel=True)
            return await asyncio.wait_for(looking, seconds)
        except TimeoutError:
            raise UnavailableError(f"the database does not answer within {seconds:g} s") from None


def session_token(scope: Scope) -> str | None:
    """Of the session's cookie. Below ``/api/`` it is for reading alone, and for pages of this service:
    requests that change something are to say the key, which no page of another site can."""
    headers = Headers(scope=scope)
    if scope["path"] == "/healthz" or scope["path"].startswith(STATIC_PREFIX):
        return None
    if scope["path"].startswith(API_PREFIX) and (
        scope["method"] not in SAFE or headers.get("sec-fetch-site", "") in FOREIGN
    ):
        return None
    return cookie_parser(headers.get("cookie", "")).get(SESSION_COOKIE)


def _secret_of(headers: Headers) -> str | None:
    values = headers.getlist("authorization")
    if not values:
        return None
    scheme, _, secret = values[0].partition(" ")
    if len(values) > 1 or scheme.lower() != "bearer":
        raise UnauthorizedError("Authorization is to be: Bearer dcp_...")
    return secret.strip()
