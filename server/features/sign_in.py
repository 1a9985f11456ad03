"""Sign-in with a key, sign-out, and the colour theme of each browser."""

from __future__ import annotations

from typing import Any, Final

from fastapi.responses import RedirectResponse, Response

from dcp.server.core.ask import Ask
from dcp.server.core.feature import Feature
from dcp.server.core.http.admission import SESSION_COOKIE
from dcp.server.core.pages.rendering import THEME_COOKIE, THEMES
from dcp.server.core.pages.requests import VISIT_COOKIE, Next, own_path
from dcp.server.core.security.callers import end_session
from dcp.server.core.security.keys import prefix_of
from dcp.server.features.people.settings import provider_settings

feature: Final = Feature("sign_in", __name__)

_YEAR_SECONDS: Final = 365 * 86_400


@feature.page("/sign-in", "sign_in.html", scope="public")
def sign_in_page(ask: Ask, next: Next = "/") -> dict[str, Any] | Response:
    """Show the form; a service without keys needs no sign-in."""
    if ask.settings.auth == "off":
        return RedirectResponse(own_path(next), 303)
    return {"next": own_path(next), "fault": None, "provider": _provider(ask)}


@feature.form("/sign-in", scope="public")
def sign_in_form(ask: Ask) -> Response:
    """Begin a session of the key, in a cookie; the key itself is stored nowhere."""
    target, secret = own_path(ask.form.text("next")), ask.form.text("key")
    caller = ask.service.callers.of_key(secret)
    if caller is None:
        ask.service.rates.count_refused(ask.address or "unknown", prefix_of(secret))
        fault = "This key is unknown, has been revoked or has expired."
        return ask.page("sign_in/sign_in.html", 403, next=target, fault=fault, provider=_provider(ask))
    return ask.sign_in(caller, target)


def _provider(ask: Ask) -> str | None:
    """Return the name of the OpenID Connect provider, if configured."""
    options = provider_settings(ask.settings)
    return None if options is None else options.provider_name


@feature.form("/sign-out", scope="public")
def sign_out_form(ask: Ask) -> Response:
    """End the session, and make the browser forget shown pages."""
    token = ask.request.cookies.get(SESSION_COOKIE)
    if token is not None:
        ask.service.database.transact(lambda connection: end_session(connection, token))
    answer = RedirectResponse("/sign-in", 303, {"Clear-Site-Data": '"cache"'})
    for name in (SESSION_COOKIE, VISIT_COOKIE):
        answer.delete_cookie(name, path="/", httponly=True, samesite="lax")
    return answer


@feature.form("/theme", scope="public")
def theme_form(ask: Ask) -> Response:
    """Set the colour theme of this browser, for browsers without scripts."""
    answer = RedirectResponse(own_path(ask.form.text("next")), 303)
    theme = ask.form.text("theme")
    if theme in THEMES:
        answer.set_cookie(THEME_COOKIE, theme, max_age=_YEAR_SECONDS, path="/", samesite="lax")
    return answer
