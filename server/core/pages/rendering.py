"""Rendering of pages: templates, static files, and errors as pages.

Templates escape all values, contain nothing inline, and each page has a content security policy. Static
files are in memory, at addresses that change with their contents: browsers may cache them forever and never
mix versions.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import (
    ChoiceLoader,
    DictLoader,
    Environment,
    FileSystemLoader,
    PrefixLoader,
    StrictUndefined,
    TemplateError,
    TemplateSyntaxError,
)

from dcp.server.core.feature import Feature, FeatureError
from dcp.server.core.http.admission import STATIC_PREFIX
from dcp.server.core.http.dependencies import public
from dcp.server.core.pages.formatting import FILTERS, visible
from dcp.server.core.pages.requests import VISIT_COOKIE, MovedError, form_token, is_visit, set_cookie
from dcp.server.core.problems import NotFoundError, ProblemError
from dcp.server.core.security.principal import Principal
from dcp.version import __version__

_STATIC: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FOR_EVER: Final = "public, max-age=31536000, immutable"

router = APIRouter(dependencies=[public], include_in_schema=False)


@dataclass(frozen=True, slots=True)
class Asset:
    """A file; ``digest`` is the first 16 digits of its SHA-256."""

    body: bytes
    media_type: str
    digest: str


class Assets:
    """All files except licences, by path below ``static/``; files of a feature are prefixed with its name."""

    def __init__(self, features: Iterable[Feature]) -> None:
        own = {f"{one.name}/": one.folder / "static" for one in features if one.is_package}
        self._files = {
            start + path.relative_to(folder).as_posix(): _read(path)
            for start, folder in {"": _STATIC, **own}.items()
            for path in sorted(folder.rglob("*"))
            if path.suffix in _TYPES
        }

    def url(self, name: str) -> str:
        """Return the address of the file ``name``."""
        return f"{STATIC_PREFIX}{self._files[name].digest}/{name}"

    def find(self, name: str) -> Asset | None:
        """Return the file ``name``."""
        return self._files.get(name)


def _read(path: Path) -> Asset:
    body = path.read_bytes()
    return Asset(body, _TYPES[path.suffix], hashlib.sha256(body).hexdigest()[:16])


@router.get(STATIC_PREFIX + "{digest}/{name:path}")
async def get_asset(digest: str, name: str, request: Request) -> Response:
    """Return a file. An outdated address returns the current file, without caching."""
    asset = request.app.state.assets.find(name)
    if asset is None:
        raise NotFoundError("no page or resource at this path")
    kept = _FOR_EVER if digest == asset.digest else "no-cache"
    return Response(asset.body, media_type=asset.media_type, headers={"Cache-Control": kept})


# -- rendering of templates ----------------------------------------------------------------------------------


THEMES: Final = ("system", "light", "dark")
THEME_COOKIE: Final = "dcphub_theme"

_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    # with no-referrer, browsers would send forms without an Origin header
    "Referrer-Policy": "same-origin",
    # cached for back navigation with revalidation; sign-out clears the cache
    "Cache-Control": "private, no-cache",
    "Vary": "Accept, Cookie",
}


def environment_of(features: Sequence[Feature], assets: Assets) -> Environment:
    """Return the templates: those of the core by name, those of a feature as ``feature/name``."""
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
            raise FeatureError(f"{one.label}: template {missing[0]} not found")
        if one.package:
            _compile(environment, one, sorted(name for name in known if name.startswith(f"{one.name}/")))
    environment.globals.update(asset=assets.url, links=partial(_links, features), version=__version__)
    return environment


def _compile(environment: Environment, feature: Feature, names: Iterable[str]) -> None:
    """Compile the templates of a plug-in now, to report errors at the start."""
    for name in names:
        try:
            environment.get_template(name)
        except TemplateError as error:
            line = f", line {error.lineno}" if isinstance(error, TemplateSyntaxError) else ""
            raise FeatureError(f"{feature.label}: template {name}{line}: {error.message}") from error


def page(request: Request, template: str, status_code: int = 200, **values: Any) -> HTMLResponse:
    """Return the page of ``template`` with ``values`` and the caller; ``twin`` is the address of the JSON."""
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
    """Return labels and paths of the links of features on a page, such as the page of a run."""
    found = [link for feature in features for link in feature.links if link.on == place]
    return [(link.label, link.path.format(id=number)) for link in found]


def _here(request: Request) -> str:
    """Return the address of this page without one-time parameters."""
    return _link(request, {"done": None})


def _link(request: Request, changes: dict[str, Any]) -> str:
    """Return the address of this page with changed query values; None removes a value, and the cursor is
    always removed."""
    changed = {"cursor": None, "done": None, **changes}
    kept = [pair for pair in request.query_params.multi_items() if pair[0] not in changed]
    given = [(name, value) for name, value in changed.items() if value is not None]
    query = urlencode(kept + given)
    return request.url.path + (f"?{query}" if query else "")


# -- errors as pages -----------------------------------------------------------------------------------------


_ADVICE: Final = {
    401: "Sign in with an API key.",
    403: "An administrator can create a key with the scope: dcp keys create NAME --scope SCOPE.",
    404: "It may have been renamed, or your key may not see its root.",
    409: "Reload its page for its present state.",
    410: "The page of the checkpoint still has its entry in the catalog.",
    412: "It was changed in the meantime. Reload its page.",
    429: "Wait a moment.",
    500: "See the log of the service for the id of the request.",
    503: "The page reloads in a moment.",
}

_MAX_FIELDS: Final = 50
_MAX_NAME: Final = 128
_UNSEEN: Final = frozenset(
    {"etag", "alias_etag", "prefix", "fqn", "next", "cursor", "done", "remove", "pinned"}
)
_LABELS: Final = {
    "target_root": "Target root",
    "target_key": "Target key",
    "dtype": "Cast to",
    "map": "Weight map",
    "inverse": "Reverse mapping (true or empty)",
    "below": "Prefix of the map's model",
    "drop_objects": "Drop values that the format cannot hold (true or empty)",
    "exclude": "Exclude",
    "leave_out": "Exclude",
    "formula": "Or a formula",
    "last": "Number of steps",
    "decay": "Decay",
    "keep_last": "Newest",
    "keep_every": "Every N steps",
    "keep_days": "Younger than days",
}

_BELOW: Final = re.compile(r"(/(checkpoint|job|run)s/[1-9][0-9]{0,17})/.")
"""Pattern of paths below the page of an object, and of its forms."""


def problem_page(problem: ProblemError, scope: Any) -> Response:
    """Return the page of a problem."""
    request = Request(scope)
    if problem.status == MovedError.status:
        return RedirectResponse(problem.headers["Location"], problem.status)
    if problem.status == 401 and request.method == "GET":
        return _to_sign_in(request)
    answer = page(
        request,
        "problem.html",
        problem.status,
        problem=problem.document(),
        advice=_ADVICE.get(problem.status, ""),
        **_above(request, problem),
        sent=_sent(request, problem),
        request_id=scope.get("state", {}).get("request_id"),
        retry_seconds=problem.headers.get("Retry-After") if request.method == "GET" else None,
    )
    answer.headers.update(problem.headers)
    return answer


def _sent(request: Request, problem: ProblemError) -> list[tuple[str, str, str]]:
    """Return the fields of the refused form for repetition: names, labels ("" if hidden) and values."""
    if request.method == "POST" and problem.status in (409, 422):
        form = getattr(request.state, "sent_form", None) or {}
        found = [(name, value) for name, values in form.items() for value in values if name != "token"]
    elif request.method == "GET" and problem.status == 422:
        given = request.query_params.multi_items()
        found = [pair for pair in given if pair[0] not in ("cursor", "done")]
    else:
        return []
    return [(name[:_MAX_NAME], _label(name), value) for name, value in found[:_MAX_FIELDS]]


def _label(name: str) -> str:
    return "" if name in _UNSEEN else _LABELS.get(name, name.replace("_", " ").capitalize())


def _above(request: Request, problem: ProblemError) -> dict[str, str | None]:
    """Return the parent page in the catalog for a failed page or form."""
    found = None if problem.status in (401, 404) else _BELOW.match(request.url.path)
    return (
        {"above": None, "above_kind": None} if found is None else {"above": found[1], "above_kind": found[2]}
    )


def _to_sign_in(request: Request) -> Response:
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    url = "/sign-in" if path == "/" else f"/sign-in?{urlencode({'next': path})}"
    if request.headers.get("hx-request"):  # the request came for a part of a page: redirect the whole page
        return Response(status_code=401, headers={"HX-Redirect": url})
    return RedirectResponse(url, 303)
