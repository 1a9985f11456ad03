"""Signing in with a key and out again, and the colours, which are nobody's but the browser's."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request
from fastapi.responses import RedirectResponse, Response
from sqlalchemy import Connection

from dcp.server.catalog import audit
from dcp.server.core.http.context import Service
from dcp.server.core.http.dependencies import ServiceDep, public
from dcp.server.core.http.middleware.authentication import SESSION_COOKIE
from dcp.server.core.pages.queries import pages_router
from dcp.server.core.pages.rendering import THEME_COOKIE, THEMES, page
from dcp.server.core.pages.tokens import VISIT_COOKIE, FormDep, set_cookie
from dcp.server.core.security.keys import KeyRecord, prefix_of
from dcp.server.core.security.sessions import begin_session, end_session

__all__ = ["router"]

router = pages_router()

_YEAR_SECONDS = 365 * 86_400.0

Next = Annotated[str, Query(max_length=8192)]


@router.get("/sign-in", dependencies=[public])
def sign_in_page(request: Request, service: ServiceDep, next: Next = "/") -> Response:
    """The form; where no keys are needed there is nothing to sign in to."""
    if service.settings.auth == "off":
        return RedirectResponse(_own(next), 303)
    return page(request, "sign_in.html", next=_own(next), fault=None)


@router.post("/sign-in", dependencies=[public])
def sign_in_form(request: Request, service: ServiceDep, form: FormDep) -> Response:
    """A session of the key, in a cookie; the key itself stays nowhere."""
    target = _own(form.text("next"))
    address = "unknown" if request.client is None else request.client.host
    secret = form.text("key")
    record = service.keys.find(secret)
    if record is None:
        service.rates.count_refused(address, prefix_of(secret))
        fault = "This key is unknown, has been revoked or has expired."
        return page(request, "sign_in.html", 403, next=target, fault=fault)
    answer = RedirectResponse(target, 303)
    lasts_seconds = service.settings.session_seconds
    set_cookie(request, answer, SESSION_COOKIE, _begun(service, record, request, address), lasts_seconds)
    return answer


@router.post("/sign-out", dependencies=[public])
def sign_out_form(request: Request, service: ServiceDep, form: FormDep) -> Response:
    """The session is over, and the browser forgets what it has shown."""
    token = request.cookies.get(SESSION_COOKIE)
    if token is not None:
        service.database.transact(lambda connection: end_session(connection, token))
    answer = RedirectResponse("/sign-in", 303, {"Clear-Site-Data": '"cache"'})
    for name in (SESSION_COOKIE, VISIT_COOKIE):
        answer.delete_cookie(name, path="/", httponly=True, samesite="lax")
    return answer


@router.post("/theme", dependencies=[public])
def theme_form(request: Request, form: FormDep) -> Response:
    """The colours of this browser; the script of the pages does it without this."""
    answer = RedirectResponse(_own(form.text("next")), 303)
    theme = form.text("theme")
    if theme in THEMES:
        answer.set_cookie(THEME_COOKIE, theme, max_age=int(_YEAR_SECONDS), path="/", samesite="lax")
    return answer


def _begun(service: Service, record: KeyRecord, request: Request, address: str) -> str:
    now_seconds = service.clock()

    def act(connection: Connection) -> str:
        token = begin_session(connection, record.id, now_seconds, service.settings.session_seconds)
        audit.record(
            connection,
            record.principal.name,
            "session.begin",
            f"key:{record.id}",
            now=now_seconds,
            request_id=getattr(request.state, "request_id", None),
            address=address,
        )
        return token

    return service.database.transact(act)


def _own(url: str) -> str:
    """A page of this service: nobody is sent elsewhere by a link to the form."""
    is_path = url.startswith("/") and not url.startswith("//") and "\\" not in url and url.isprintable()
    return url if is_path else "/"
