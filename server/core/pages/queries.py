"""Routes of pages: their router, and addresses without the empty fields that forms send."""

from __future__ import annotations

from typing import Any, Final, TypeVar
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.routing import Match
from starlette.types import Scope as AsgiScope

from dcp.server.core.http.handlers import wants_page
from dcp.server.core.pages.problems import MovedError
from dcp.server.core.problems import UnprocessableError

__all__ = ["BrowserRoute", "checked", "pages_router", "query_of"]

Q = TypeVar("Q", bound=BaseModel)


async def _tidy(request: Request) -> None:
    """Raises `MovedError` to the same address without what is empty."""
    given = request.query_params.multi_items()
    kept = [(name, value) for name, value in given if value != ""]
    if len(kept) < len(given) and request.method == "GET":
        query = urlencode(kept)
        raise MovedError(request.url.path + (f"?{query}" if query else ""))


_TIDY: Final[Any] = Depends(_tidy)


def pages_router() -> APIRouter:
    """A router for pages and forms; each declares its access."""
    return APIRouter(dependencies=[_TIDY], include_in_schema=False)


class BrowserRoute(APIRoute):
    """A route that matches for browsers alone; programs get JSON at the same path."""

    def matches(self, scope: AsgiScope) -> tuple[Match, AsgiScope]:
        """As of FastAPI; none for programs."""
        return super().matches(scope) if wants_page(scope) else (Match.NONE, {})


def query_of(kind: type[Q], **given: Any) -> Q:
    """Ask the API for what the address of a page says. Raises RequestValidationError, as the API's own routes
    do, for what ``kind`` refuses."""
    try:
        return kind(**given)
    except ValidationError as error:
        found = [{**one, "loc": ("query", *one["loc"])} for one in error.errors(include_url=False)]
        raise RequestValidationError(found) from None


def checked(kind: type[Q], **given: Any) -> Q:
    """Make a model of the fields of a form. Raises UnprocessableError with the first mistake."""
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = f"{where}: {first['msg']}" if where else str(first["msg"])
        raise UnprocessableError(message, field=where) from None
