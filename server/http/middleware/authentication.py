"""Who asks: the key of a request, and how often it may.

Below ``/api/`` nobody comes without a valid key, whatever a route says of itself; and what is sent with a key
that is not valid goes nowhere, so that a wrong one is noticed.
"""

from __future__ import annotations

import asyncio
from typing import Final

from anyio import to_thread
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dcp.server.database.engine import DatabaseUnavailableError
from dcp.server.http.context import Service
from dcp.server.http.handlers import problem_of, problem_response
from dcp.server.http.middleware.hosts import API_PREFIX
from dcp.server.problems import ProblemError, UnauthorizedError, UnavailableError
from dcp.server.security.keys import KeyRecord
from dcp.server.security.principal import LOCAL, Principal

__all__ = ["AuthenticationMiddleware"]

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
        is_counted = scope["path"] not in _UNCOUNTED
        if self._service.settings.auth == "off":
            if is_counted:
                rates.count(f"address:{address}")
            return LOCAL
        secret = _secret_of(Headers(scope=scope))
        if secret is None:
            if is_counted:
                rates.count(f"address:{address}")
            if scope["path"].startswith(API_PREFIX):
                raise UnauthorizedError("send a key: Authorization: Bearer dcp_...")
            return None
        rates.check_refused(address)
        record = await self._find(secret)
        if record is None:
            rates.count_refused(address)
            raise UnauthorizedError("this key is unknown, has been revoked or has expired")
        if is_counted:
            rates.count(f"key:{record.id}")
        return record.principal

    async def _find(self, secret: str) -> KeyRecord | None:
        seconds = self._service.settings.request_seconds
        try:
            # The thread is left to itself, should the database hang.
            looking = to_thread.run_sync(self._service.keys.find, secret, abandon_on_cancel=True)
            return await asyncio.wait_for(looking, seconds)
        except TimeoutError:
            raise UnavailableError(f"the database does not answer within {seconds:g} s") from None


def _secret_of(headers: Headers) -> str | None:
    values = headers.getlist("authorization")
    if not values:
        return None
    scheme, _, secret = values[0].partition(" ")
    if len(values) > 1 or scheme.lower() != "bearer":
        raise UnauthorizedError("Authorization is to be: Bearer dcp_...")
    return secret.strip()
