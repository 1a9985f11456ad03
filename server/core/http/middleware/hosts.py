"""Which requests are meant for this service at all: by its names, and from its own pages.

A browser is made to ask ``127.0.0.1`` by any page on the Internet: by a name that now resolves to it (DNS
rebinding), by a form sent across sites, or, where no keys are needed, by an image whose address is a download
that costs seconds. None of them passes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from dcp.server.core.http.handlers import problem_response
from dcp.server.core.problems import BadRequestError, ForbiddenError, ProblemError

__all__ = ["API_PREFIX", "FOREIGN", "SAFE", "HostMiddleware", "MisdirectedError"]

API_PREFIX: Final = "/api/"
_HOST: Final = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]*))(?::[0-9]{1,5})?")
SAFE: Final = frozenset({"GET", "HEAD", "OPTIONS"})
FOREIGN: Final = frozenset({"cross-site", "same-site"})


class MisdirectedError(ProblemError):
    """Not a name of this host."""

    status, slug, title = 421, "misdirected", "Not a name of this host"


class HostMiddleware:
    """Lets requests pass whose Host is in ``allowed`` (names without port; ``*`` for all, ``*.name``).

    ``is_keyless``: whoever asks is answered, so that reading is for its own pages alone as well. Links from
    elsewhere lead to its pages, not below `API_PREFIX`.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], *, is_keyless: bool = False) -> None:
        self.app = app
        self._is_keyless = is_keyless
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
        host = _HOST.fullmatch(hosts[0].strip())
        if host is None:
            return BadRequestError("Host is to be a name or an address, with a port or without")
        if not self._is_allowed((host["address"] or host["name"] or "").lower()):
            return MisdirectedError(
                "this host is not called so; allowed_hosts of the settings lists its names"
            )
        if "\0" in scope["path"] or b"%00" in scope.get("query_string", b""):
            return BadRequestError("a NUL in the address")
        if scope["method"] not in SAFE and _is_foreign(headers, hosts[0]):
            return ForbiddenError("a page of another site may not do this")
        if self._is_keyless and headers.get("sec-fetch-site", "") in FOREIGN and not _is_link(headers, scope):
            return ForbiddenError("a page of another site may not read this")
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
    except ValueError:  # it is no origin, and so not this one
        return True


def _is_link(headers: Headers, scope: Scope) -> bool:
    """Whether somebody goes to a page of ours, in a window of its own (Fetch Metadata, W3C)."""
    is_page = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return is_page and not scope["path"].startswith(API_PREFIX)
