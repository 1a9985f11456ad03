"""Requests of browsers: routes of pages, queries and forms, cookies, and the token of each form.

No page of another site knows the token. It is derived from a cookie, so that the service stores nothing: from
the session's, or, where there is no sign-in, from one that is set on the first visit.
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
"""The page to show after a sign-in, for `own_path`."""
VISIT_COOKIE: Final = "dcphub_visit"
_VISIT: Final = re.compile(r"[A-Za-z0-9_-]{43}")
_MAX_FIELDS: Final = 200
_TOKEN_BYTES: Final = hashlib.sha256().digest_size
_TOKEN: Final = re.compile(f"[0-9a-f]{{{4 * _TOKEN_BYTES}}}")


def own_path(url: str) -> str:
    """Return ``url`` if it is a path of this service, else "/": a link to a form leads nowhere else."""
    is_path = url.startswith("/") and not url.startswith("//") and "\\" not in url and url.isprintable()
    return url if is_path else "/"


def is_visit(value: str) -> bool:
    """Return whether the value of the cookie was made by this service."""
    return _VISIT.fullmatch(value) is not None


def form_token(request: Request, visit: str) -> str:
    """Return the token that forms of this browser have to send: behind a random mask, so that it differs in
    each page, since lengths of compressed answers would reveal equal letters."""
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
    """One that scripts do not see, other sites do not send, and plain HTTP does not carry where HTTPS is."""
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
    """The fields of a form that was sent; its token was checked."""

    def __init__(self, fields: Mapping[str, list[str]]) -> None:
        self._fields = fields

    def text(self, name: str) -> str:
        """One field without surrounding blanks; "" if it is missing."""
        return (self._fields.get(name) or [""])[0].strip()

    def optional(self, name: str) -> str | None:
        """One field; None if it is empty or missing."""
        return self.text(name) or None

    def all(self, name: str) -> list[str]:
        """All values of a field, as of check boxes, except empty ones."""
        return [value.strip() for value in self._fields.get(name, ()) if value.strip()]

    def is_checked(self, name: str) -> bool:
        """Return whether the check box is ticked."""
        return bool(self.text(name))


async def _form(request: Request) -> Form:
    try:
        body = (await request.body()).decode()
        fields = parse_qs(body, keep_blank_values=True, max_num_fields=_MAX_FIELDS, errors="strict")
    except ValueError:  # also of bytes that are no text
        raise BadRequestError("this is no form") from None
    form = Form(fields)
    visit = request.cookies.get(VISIT_COOKIE, "")
    if not is_visit(visit) or not _is_token(form.text("token"), request, visit):
        raise ForbiddenError("this form was not made for this browser, or is too old: load its page again")
    request.state.sent_form = fields
    return form


FormDep = Annotated[Form, Depends(_form)]
"""In a route that changes something."""


# -- routes of pages -----------------------------------------------------------------------------------------


Q = TypeVar("Q", bound=BaseModel)


class MovedError(ProblemError):
    """Not an error: the page is at another address."""

    status, slug, title = 303, "see-other", "See other"

    def __init__(self, url: str) -> None:
        super().__init__("it is at another address", headers={"Location": url})


async def _tidy(request: Request) -> None:
    """Raises `MovedError` to the same address without what is empty."""
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
