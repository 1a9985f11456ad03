"""Which requests are meant for this service at all: by its names, and from its own pages.

A browser is made to ask ``127.0.0.1`` by any page on the Internet: by a name that now resolves to it (DNS
rebinding), or by a form sent across sites. Neither passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dcp.server.handlers import problem_response
from dcp.server.problems import BadRequestError, ForbiddenError, ProblemError

__all__ = ["HostMiddleware", "MisdirectedError"]

_SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_FOREIGN: Final = frozenset({"cross-site", "same-site"})


class MisdirectedError(ProblemError):
    """Not a name of this host."""

    status, slug, title = 421, "misdirected", "Not a name of this host"


class HostMiddleware:
    """Lets requests pass whose Host is in ``allowed`` (names without port; ``*`` for all, ``*.name``)."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self.app = app
        self._allowed = frozenset(name.lower().strip("[]") for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
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
            return BadRequestError("there is to be one Host")
        if not self._is_allowed(_name_of(hosts[0])):
            return MisdirectedError(
                "this host is not called so; allowed_hosts of the settings lists its names"
            )
        if "\0" in scope["path"] or b"%00" in scope.get("query_string", b""):
            return BadRequestError("a NUL in the address")
        if scope["method"] not in _SAFE and _is_foreign(headers, hosts[0]):
            return ForbiddenError("a page of another site may not do this")
        return None

    def _is_allowed(self, name: str) -> bool:
        if name in self._allowed or "*" in self._allowed:
            return True
        _, dot, domain = name.partition(".")
        return bool(dot) and f"*.{domain}" in self._allowed


def _name_of(host: str) -> str:
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_foreign(headers: Headers, host: str) -> bool:
    if headers.get("sec-fetch-site", "") in _FOREIGN:
        return True
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc.lower() != host.strip().lower()
