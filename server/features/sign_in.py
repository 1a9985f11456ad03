"""Signing in with a key and out again, and the colours of the pages, which each browser has for itself."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Query
from fastapi.responses import RedirectResponse, Response
from sqlalchemy import Connection

from dcp.server.catalog import audit
from dcp.server.core.ask import Ask
from dcp.server.core.feature import Feature
from dcp.server.core.http.admission import SESSION_COOKIE
from dcp.server.core.pages.rendering import THEME_COOKIE, THEMES
from dcp.server.core.pages.requests import VISIT_COOKIE, set_cookie
from dcp.server.core.security.keys import begin_session, end_session, prefix_of, principal_of
from dcp.server.records.administration import Key

__all__ = ["feature"]

feature: Final = Feature("sign_in", __name__)

_YEAR_SECONDS: Final = 365 * 86_400

Next = Annotated[str, Query(max_length=8192)]


@feature.page("/sign-in", "sign_in.html", scope="public")
def sign_in_page(ask: Ask, next: Next = "/") -> dict[str, Any] | Response:
    """Show the form; where no keys are needed there is nothing to sign in to."""
    if ask.settings.auth == "off":
        return RedirectResponse(_own(next), 303)
    return {"next": _own(next), "fault": None}


@feature.form("/sign-in", scope="public")
def sign_in_form(ask: Ask) -> Response:
    """Begin a session of the key, in a cookie; the key itself is stored nowhere."""
    target, secret = _own(ask.form.text("next")), ask.form.text("key")
    key = ask.service.keys.find(secret)
    if key is None:
        ask.service.rates.count_refused(ask.address or "unknown", prefix_of(secret))
        fault = "This key is unknown, has been revoked or has expired."
        return ask.page("sign_in/sign_in.html", 403, next=target, fault=fault)
    answer = RedirectResponse(target, 303)
    token = ask.service.database.transact(lambda connection: _begin(connection, key, ask))
    set_cookie(ask.request, answer, SESSION_COOKIE, token, ask.settings.session_seconds)
    return answer


def _begin(connection: Connection, key: Key, ask: Ask) -> str:
    audit.record(
        connection,
        principal_of(key).name,
        "session.begin",
        f"key:{key.id}",
        now=ask.now,
        request_id=ask.request_id,
        address=ask.address or "unknown",
    )
    return begin_session(connection, key.id, ask.now, ask.settings.session_seconds)


@feature.form("/sign-out", scope="public")
def sign_out_form(ask: Ask) -> Response:
    """End the session; the browser forgets the pages that it has shown."""
    token = ask.request.cookies.get(SESSION_COOKIE)
    if token is not None:
        ask.service.database.transact(lambda connection: end_session(connection, token))
    answer = RedirectResponse("/sign-in", 303, {"Clear-Site-Data": '"cache"'})
    for name in (SESSION_COOKIE, VISIT_COOKIE):
        answer.delete_cookie(name, path="/", httponly=True, samesite="lax")
    return answer


@feature.form("/theme", scope="public")
def theme_form(ask: Ask) -> Response:
    """Set the colours of this browser, where the script of the pages does not."""
    answer = RedirectResponse(_own(ask.form.text("next")), 303)
    theme = ask.form.text("theme")
    if theme in THEMES:
        answer.set_cookie(THEME_COOKIE, theme, max_age=_YEAR_SECONDS, path="/", samesite="lax")
    return answer


def _own(url: str) -> str:
    """Return a path of this service: a link to the form leads nowhere else."""
    is_path = url.startswith("/") and not url.startswith("//") and "\\" not in url and url.isprintable()
    return url if is_path else "/"
