"""Requests of browsers: page routes, queries and forms, cookies, and form tokens.

The token of a form is unknown to other sites. It is derived from a cookie, so the service stores nothing:
from the session cookie, or, without sign-in, from a cookie set on the first visit.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar
from urllib.parse import parse_qs, urlencode

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.routing import Match
from starlette.types import Scope as AsgiScope

from dcp.server.core.http.admission import SESSION_COOKIE
from dcp.server.core.http.handlers import wants_page
from dcp.server.core.problems import BadRequestError, ForbiddenError, ProblemError, UnprocessableError

Next = Annotated[str, Query(max_length=8192)]
"""The page after a sign-in, for `own_path`."""
VISIT_COOKIE: Final = "dcphub_visit"
_VISIT: Final = re.compile(r"[A-Za-z0-9_-]{43}")
_MAX_FIELDS: Final = 200
_TOKEN_BYTES: Final = hashlib.sha256().digest_size
_TOKEN: Final = re.compile(f"[0-9a-f]{{{4 * _TOKEN_BYTES}}}")


def own_path(url: str) -> str:
    """Return ``url`` if it is a path of this service, else "/", so links cannot redirect elsewhere."""
    is_path = url.startswith("/") and not url.startswith("//") and "\\" not in url and url.isprintable()
    return url if is_path else "/"


def is_visit(value: str) -> bool:
    """Return True if this service made the cookie value."""
    return _VISIT.fullmatch(value) is not None


def form_token(request: Request, visit: str) -> str:
    """Return the form token of this browser behind a random mask.

    The mask differs in each page, since lengths of compressed answers would reveal repeated text.
    """
    mask = secrets.token_bytes(_TOKEN_BYTES)
    return (mask + _masked(_secret(request, visit), mask)).hex()


def _secret(request: Request, visit: str) -> bytes:
    secret = request.cookies.get(SESSION_COOKIE, "") + "." + visit
    return hmac.digest(secret.encode(), b"a form of dcphub", hashlib.sha256)


def _masked(value: bytes, mask: bytes) -> bytes:
    return bytes(one ^ other for one, other in zip(value, mask, strict=True))


def _is_token(given: str, request: Request, visit: str) -> bool:
    if _TOKEN.fullmatch(given) is None:
        return False
    sent = bytes.fromhex(given)
    found = _masked(sent[_TOKEN_BYTES:], sent[:_TOKEN_BYTES])
    return hmac.compare_digest(found, _secret(request, visit))


def set_cookie(
    request: Request, response: Response, name: str, value: str, lasts_seconds: float | None = None
) -> None:
    """Set a cookie hidden from scripts and other sites, and limited to HTTPS where used."""
    response.set_cookie(
        name,
        value,
        max_age=None if lasts_seconds is None else int(lasts_seconds),
        path="/",
        httponly=True,
        samesite="lax",
        secure=request.url.scheme == "https",
    )


class Form:
    """The fields of a submitted form with a valid token."""

    def __init__(self, fields: Mapping[str, list[str]]) -> None:
        self._fields = fields

    def text(self, name: str) -> str:
        """Return one field without surrounding blanks; "" if missing."""
        return (self._fields.get(name) or [""])[0].strip()

    def optional(self, name: str) -> str | None:
        """Return one field; None if empty or missing."""
        return self.text(name) or None

    def all(self, name: str) -> list[str]:
        """Return all nonempty values of a field, such as check boxes."""
        return [value.strip() for value in self._fields.get(name, ()) if value.strip()]

    def is_checked(self, name: str) -> bool:
        """Return True if the check box is ticked."""
        return bool(self.text(name))


async def _form(request: Request) -> Form:
    try:
        body = (await request.body()).decode()
        fields = parse_qs(body, keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="strict")
    except ValueError:  # also for invalid encodings
        raise BadRequestError("the body is not an HTML form") from None
    form = Form(fields)
    visit = request.cookies.get(VISIT_COOKIE, "")
    if not is_visit(visit) or not _is_token(form.text("token"), request, visit):
        raise ForbiddenError("the form belongs to another browser or is too old: reload the page")
    request.state.sent_form = fields
    return form


FormDep = Annotated[Form, Depends(_form)]
"""Parameter type of routes that change data."""


# -- routes of pages -----------------------------------------------------------------------------------------


Q = TypeVar("Q", bound=BaseModel)


class MovedError(ProblemError):
    """Redirect to another address of the page."""

    status, slug, title = 303, "see-other", "See other"

    def __init__(self, url: str) -> None:
        super().__init__("it is at another address", headers={"Location": url})


async def _tidy(request: Request) -> None:
    """Raise `MovedError` to the same address without empty parameters."""
    given = request.query_params.multi_items()
    kept = [(name, value) for name, value in given if value != ""]
    if len(kept) < len(given) and request.method == "GET":
        query = urlencode(kept)
        raise MovedError(request.url.path + (f"?{query}" if query else ""))


_TIDY: Final[Any] = Depends(_tidy)


def pages_router() -> APIRouter:
    """Return a router for pages and forms; each declares its access."""
    return APIRouter(dependencies=[_TIDY], include_in_schema=False)


class BrowserRoute(APIRoute):
    """A route for browsers only; programs get JSON at the same path."""

    def matches(self, scope: AsgiScope) -> tuple[Match, AsgiScope]:
        """Match like FastAPI, but never for programs."""
        return super().matches(scope) if wants_page(scope) else (Match.NONE, {})


def query_of(kind: type[Q], **given: Any) -> Q:
    """Return the query of a page address as ``kind``. Raises RequestValidationError like the API."""
    try:
        return kind(**given)
    except ValidationError as error:
        found = [{**one, "loc": ("query", *one["loc"])} for one in error.errors(include_url=False)]
        raise RequestValidationError(found) from None


def checked(kind: type[Q], **given: Any) -> Q:
    """Return a model made of form fields. Raises UnprocessableError with the first error."""
    try:
        return kind(**given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        message = f"{where}: {first['msg']}" if where else str(first["msg"])
        raise UnprocessableError(message, field=where) from None
