"""Sign-in at the provider: redirect and return (authorization code flow with PKCE)."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlencode

import structlog
from fastapi import Query
from fastapi.responses import RedirectResponse, Response
from sqlalchemy import Connection

from dcp.server.core.ask import Ask
from dcp.server.core.http.context import Service
from dcp.server.core.pages.requests import VISIT_COOKIE, Next, is_visit, own_path, set_cookie
from dcp.server.core.problems import NotFoundError
from dcp.server.features.people import feature
from dcp.server.features.people.accounts import Refusal, sign_in_person
from dcp.server.features.people.flows import Flow, ProviderError, RefusedError, begin_flow, end_flow
from dcp.server.features.people.settings import CALLBACK_PATH, PeopleSettings, provider_settings

if TYPE_CHECKING:
    from dcp.server.features.people.provider import Provider

_log = structlog.get_logger(__name__)
_Text = Annotated[str, Query(max_length=4096)]
_MAX_TARGET: Final = 2048
_EXPIRED: Final = "This sign-in has expired, or was started in another browser. Try again."
_AWAY: Final = "The sign-in service does not answer. Try again in a moment, or use an API key."
_REFUSED: Final = "The sign-in was refused. Try again, or ask an administrator."
_NO_STORE: Final = {"Cache-Control": "no-store"}


def _provider(service: Service) -> Provider:
    # imported here: takes 9 MiB of memory, and most services have no provider
    from dcp.server.features.people.provider import Provider

    options = provider_settings(service.settings)
    assert options is not None
    return Provider(options, service.clock)


def _options(ask: Ask) -> PeopleSettings:
    options = provider_settings(ask.settings)
    if options is None:
        raise NotFoundError("this path does not exist")
    return options


@feature.page("/sign-in/provider", "failed.html", scope="public", errors=())
def go_to_provider(ask: Ask, next: Next = "/") -> dict[str, Any] | Response:
    """Send the browser to the provider, and remember the browser by a cookie."""
    options = _options(ask)
    redirect_url = options.redirect_url or f"{str(ask.request.base_url).rstrip('/')}{CALLBACK_PATH}"
    visit = ask.request.cookies.get(VISIT_COOKIE, "")
    is_new = not is_visit(visit)
    if is_new:
        visit = secrets.token_urlsafe(32)
    target = own_path(next) if len(next) <= _MAX_TARGET else "/"

    def act(connection: Connection) -> Flow:
        return begin_flow(connection, visit, redirect_url, target, ask.now)

    try:
        provider = ask.service.own(_provider)
        provider.prepare()
        answer = RedirectResponse(provider.address_of(ask.service.database.transact(act)), 303, _NO_STORE)
    except ProviderError as error:
        return _failed(ask, error, _AWAY, 503, target)
    if is_new:
        set_cookie(ask.request, answer, VISIT_COOKIE, visit)
    return answer


@feature.page(CALLBACK_PATH, "failed.html", scope="public", errors=())
def come_back(
    ask: Ask,
    state: _Text = "",
    code: _Text = "",
    error: _Text = "",
    iss: _Text = "",
) -> dict[str, Any] | Response:
    """Begin a session of the signed-in person."""
    options = _options(ask)
    visit = ask.request.cookies.get(VISIT_COOKIE, "")
    flow = ask.service.database.transact(
        lambda connection: end_flow(connection, state, visit, ask.now) if is_visit(visit) else None
    )
    if flow is None:
        return _failed(ask, "state is unknown, already used, or from another browser", _EXPIRED, 400, "/")
    if error or not code or (iss and iss != options.issuer):
        why = f"the error {error[:100]!r}" if error else "another issuer" if code else "no code"
        return _failed(ask, f"the provider returned {why}", _REFUSED, 403, flow.target)
    try:
        claims = ask.service.own(_provider).claims_of(code, flow)
    except ProviderError as fault:
        return _failed(ask, fault, _AWAY, 503, flow.target)
    except RefusedError as fault:
        return _failed(ask, fault, _REFUSED, 403, flow.target)
    found = sign_in_person(ask, claims, options)
    if isinstance(found, Refusal):
        return _failed(ask, found.reason, found.message, 403, "/")
    caller = ask.service.callers.of_account(found)
    if caller is None:
        return _failed(ask, "the account is disabled", _REFUSED, 403, "/")
    answer = ask.sign_in(caller, flow.target)
    answer.headers.update(_NO_STORE)
    return answer


def _failed(ask: Ask, why: object, message: str, status: int, target: str) -> Response:
    _log.warning("sign-in failed", reason=str(why)[:500], address=ask.address)
    again = f"/sign-in/provider?{urlencode({'next': target})}"
    answer = ask.page("people/failed.html", status, message=message, again=again)
    answer.headers.update(_NO_STORE)
    return answer
