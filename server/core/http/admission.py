"""Admission of requests: by host name and origin, then by key or session, and by rate.

Any page on the Internet can make a browser request ``127.0.0.1``: through DNS rebinding, a form sent across
sites, or, without keys, an image with the address of a slow download. All of these are refused. Below
``/api/`` every request needs a valid key, whatever the route declares. An invalid key is refused everywhere,
so that it is noticed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import urlsplit

from anyio import to_thread
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send

from dcp.server.core.http.context import Service
from dcp.server.core.http.handlers import problem_of, problem_response
from dcp.server.core.problems import (
    BadRequestError,
    ForbiddenError,
    ProblemError,
    UnauthorizedError,
    UnavailableError,
)
from dcp.server.core.security.keys import prefix_of
from dcp.server.core.security.principal import LOCAL, Principal
from dcp.server.database.engine import DatabaseUnavailableError

API_PREFIX: Final = "/api/"
_HOST: Final = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]*))(?::[0-9]{1,5})?")
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
FOREIGN: Final = frozenset({"cross-site", "same-site"})


class MisdirectedError(ProblemError):
    """421: the host name is not allowed."""

    status, slug, title = 421, "misdirected", "Not a name of this host"


class HostMiddleware:
    """Accepts requests with an ``allowed`` Host (names without port; ``*`` for all, ``*.name``).

    ``is_keyless``: no key is needed, so reading is limited to the own pages. External links may lead to
    pages, not below `API_PREFIX`.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], *, is_keyless: bool = False) -> None:
        self.app = app
        self._is_keyless = is_keyless
        self._allowed = frozenset(name.lower().strip("[]") for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the host and origin (ASGI)."""
        if scope["type"] == "http":
            problem = self._problem(scope)
            if problem is not None:
                await problem_response(problem, scope)(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _problem(self, scope: Scope) -> ProblemError | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            return BadRequestError("exactly one Host header is required")
        host = _HOST.fullmatch(hosts[0].strip())
        if host is None:
            return BadRequestError("Host must be a name or an address, optionally with a port")
        if not self._is_allowed((host["address"] or host["name"] or "").lower()):
            return MisdirectedError("this host name is not in allowed_hosts of the settings")
        if "\0" in scope["path"] or b"%00" in scope.get("query_string", b""):
            return BadRequestError("the URL contains NUL")
        if scope["method"] not in SAFE and _is_foreign(headers, hosts[0]):
            return ForbiddenError("refused: the request comes from a page of another site")
        if self._is_keyless and headers.get("sec-fetch-site", "") in FOREIGN and not _is_link(headers, scope):
            return ForbiddenError("refused: a page of another site may not read this resource")
        return None

    def _is_allowed(self, name: str) -> bool:
        if name in self._allowed or "*" in self._allowed:
            return True
        _, dot, domain = name.partition(".")
        return bool(dot) and f"*.{domain}" in self._allowed


def _is_foreign(headers: Headers, host: str) -> bool:
    if headers.get("sec-fetch-site", "") in FOREIGN:
        return True
    origin = headers.get("origin")
    if origin is None:
        return False
    try:
        return urlsplit(origin).netloc.lower() != host.strip().lower()
    except ValueError:  # not an origin
        return True


def _is_link(headers: Headers, scope: Scope) -> bool:
    """Return True for top-level navigation to a page of this service (Fetch Metadata, W3C)."""
    is_page = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return is_page and not scope["path"].startswith(API_PREFIX)


SESSION_COOKIE: Final = "dcphub_session"

STATIC_PREFIX: Final = "/static/"
"""Prefix of public static files, answered from memory."""
_UNCOUNTED: Final = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths polled by machines, without rate limits."""


class AuthenticationMiddleware:
    """Sets ``state.principal``: the caller, or None without a key."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticate the request (ASGI)."""
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
            caller = await self._in_time(self._service.callers.of_key, secret)
            if caller is None:
                rates.count_refused(address, prefix_of(secret))
                raise UnauthorizedError("this key is unknown, has been revoked or has expired")
        elif (
            token is None or (caller := await self._in_time(self._service.callers.of_session, token)) is None
        ):
            if is_counted:
                rates.count_address(address)
            if scope["path"].startswith(API_PREFIX):
                raise UnauthorizedError("send a key: Authorization: Bearer dcp_...")
            return None
        if is_counted:
            self._service.count_request(caller)
        return caller

    async def _in_time(self, find: Callable[[str], Principal | None], secret: str) -> Principal | None:
        seconds = self._service.settings.request_seconds
        try:
            # Do not wait for the thread if the database hangs.
            looking = to_thread.run_sync(self._look, find, secret, abandon_on_cancel=True)
            return await asyncio.wait_for(looking, seconds)
        except TimeoutError:
            raise UnavailableError(
                f"the database did not respond within {seconds:g} s; retry later"
            ) from None

    def _look(self, find: Callable[[str], Principal | None], secret: str) -> Principal | None:
        self._service.allowances.refresh(self._service.database)
        return find(secret)


def session_token(scope: Scope) -> str | None:
    """Return the token of the session cookie.

    Below ``/api/`` a session only reads, and only for pages of this service: changes need a key, which no
    foreign page has.
    """
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
        raise UnauthorizedError("the header must have the form Authorization: Bearer dcp_...")
    return secret.strip()
