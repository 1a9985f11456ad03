"""Cookies of pages, and the token that each form has: no page of another site knows it.

It is made of what only the browser's cookie has, so that nothing is kept for it: of the session's, or, where
nobody signs in, of one that a visit begins with.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Final
from urllib.parse import parse_qs

from fastapi import Depends, Request, Response

from dcp.server.core.http.admission import SESSION_COOKIE
from dcp.server.core.problems import BadRequestError, ForbiddenError

__all__ = ["VISIT_COOKIE", "Form", "FormDep", "form_token", "is_visit", "set_cookie"]

VISIT_COOKIE: Final = "dcphub_visit"
_VISIT: Final = re.compile(r"[A-Za-z0-9_-]{43}")
_MAX_FIELDS: Final = 200
_TOKEN_BYTES: Final = hashlib.sha256().digest_size
_TOKEN: Final = re.compile(f"[0-9a-f]{{{4 * _TOKEN_BYTES}}}")


def is_visit(value: str) -> bool:
    """Whether this is a cookie of ours."""
    return _VISIT.fullmatch(value) is not None


def form_token(request: Request, visit: str) -> str:
    """What the forms of this browser have to send: behind a random mask, so that no two pages have the same
    letters, which lengths of compressed answers would tell."""
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
    """What a form sent, its token checked."""

    def __init__(self, fields: Mapping[str, list[str]]) -> None:
        self._fields = fields

    def text(self, name: str) -> str:
        """One field without blanks around; "" if it is not there."""
        return (self._fields.get(name) or [""])[0].strip()

    def optional(self, name: str) -> str | None:
        """The same; None if nothing was said."""
        return self.text(name) or None

    def all(self, name: str) -> list[str]:
        """All that was said under this name, as of boxes; without what is empty."""
        return [value.strip() for value in self._fields.get(name, ()) if value.strip()]

    def is_checked(self, name: str) -> bool:
        """Of a box."""
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
