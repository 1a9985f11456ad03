"""Rendering of templates: all is escaped, nothing is inline, and each page has a content security policy."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import Request
from fastapi.responses import HTMLResponse
from jinja2 import ChoiceLoader, DictLoader, Environment, FileSystemLoader, PrefixLoader, StrictUndefined

from dcp.server.core.feature import Feature, FeatureError
from dcp.server.core.pages.assets import Assets
from dcp.server.core.pages.formatting import FILTERS, visible
from dcp.server.core.pages.tokens import VISIT_COOKIE, form_token, is_visit, set_cookie
from dcp.server.core.security.principal import Principal
from dcp.version import __version__

__all__ = ["THEMES", "THEME_COOKIE", "environment_of", "page"]

THEMES: Final = ("system", "light", "dark")
THEME_COOKIE: Final = "dcphub_theme"

_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    # with no-referrer a browser would send its own forms without saying where they come from
    "Referrer-Policy": "same-origin",
    # kept for the way back, and asked for again; signing out has them forgotten
    "Cache-Control": "private, no-cache",
    "Vary": "Accept, Cookie",
}


def environment_of(features: Sequence[Feature], assets: Assets) -> Environment:
    """Templates: those of the core by their names, those of a feature by its name and a slash before it."""
    own = {
        one.name: ChoiceLoader([DictLoader(one.templates), FileSystemLoader(one.folder / "templates")])
        for one in features
    }
    environment = Environment(
        loader=ChoiceLoader([FileSystemLoader(Path(__file__).parent / "templates"), PrefixLoader(own)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
        finalize=visible,
    )
    environment.filters.update(FILTERS)
    known = set(environment.list_templates())
    for one in features:
        named = {f"{one.name}/{page.template}" for page in one.pages if page.template}
        if missing := sorted((named | {panel.template for panel in one.panels}) - known):
            raise FeatureError(f"feature {one.name!r}: there is no template {missing[0]}")
    environment.globals.update(asset=assets.url, links=partial(_links, features), version=__version__)
    return environment


def page(request: Request, template: str, status_code: int = 200, **values: Any) -> HTMLResponse:
    """The page that ``template`` makes of ``values``, and of who asks; ``twin`` is where its JSON is."""
    service = request.app.state.service
    caller = getattr(request.state, "principal", None)
    visit = request.cookies.get(VISIT_COOKIE, "")
    is_new = not is_visit(visit)
    if is_new:
        visit = secrets.token_urlsafe(32)
    theme = request.cookies.get(THEME_COOKIE)
    text = request.app.state.templates.get_template(template).render(
        request=request,
        here=_here(request),
        link=lambda **changes: _link(request, changes),
        now=service.clock(),
        who=caller if isinstance(caller, Principal) else None,
        is_keyless=service.settings.auth == "off",
        theme=theme if theme in THEMES else THEMES[0],
        token=form_token(request, visit),
        **{"twin": None, "done": request.query_params.get("done"), **values},
    )
    answer = HTMLResponse(text, status_code, _HEADERS)
    if is_new:
        set_cookie(request, answer, VISIT_COOKIE, visit)
    return answer


def _links(features: Sequence[Feature], place: str, number: int) -> list[tuple[str, str]]:
    """Labels and paths of the links that features put on a page, such as the one of a run."""
    found = [link for feature in features for link in feature.links if link.on == place]
    return [(link.label, link.path.format(id=number)) for link in found]


def _here(request: Request) -> str:
    """The address of this page, without what was said once."""
    return _link(request, {"done": None})


def _link(request: Request, changes: dict[str, Any]) -> str:
    """The address of this page with other values in its query; None removes one, and the cursor always is."""
    changed = {"cursor": None, "done": None, **changes}
    kept = [pair for pair in request.query_params.multi_items() if pair[0] not in changed]
    given = [(name, value) for name, value in changed.items() if value is not None]
    query = urlencode(kept + given)
    return request.url.path + (f"?{query}" if query else "")
