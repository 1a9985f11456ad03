"""Routes of pages: who sees them, and addresses without the empty fields that forms send."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Request
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope as AsgiScope

from dcp.server.http.dependencies import requires
from dcp.server.http.handlers import wants_page
from dcp.server.pages.problems import MovedError

__all__ = ["READ", "BrowserRoute", "pages_router"]


async def _tidy(request: Request) -> None:
    """Raises `MovedError` to the same address without what is empty."""
    given = request.query_params.multi_items()
    kept = [(name, value) for name, value in given if value != ""]
    if len(kept) < len(given) and request.method == "GET":
        query = urlencode(kept)
        raise MovedError(request.url.path + (f"?{query}" if query else ""))


_TIDY: Final[Any] = Depends(_tidy)


def pages_router() -> APIRouter:
    """For pages that whoever may read sees; forms ask for more."""
    return APIRouter(dependencies=[_TIDY], include_in_schema=False)


class BrowserRoute(APIRoute):
    """Of a path that answers others with JSON: only for those who show pages."""

    def matches(self, scope: AsgiScope) -> tuple[Match, AsgiScope]:
        """None for others."""
        return super().matches(scope) if wants_page(scope) else (Match.NONE, {})


READ: Final[list[Any]] = [requires("read")]
"""Of a page's ``dependencies``."""
