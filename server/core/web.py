"""Routes of FastAPI made from the declarations of features."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, get_args

import structlog
from fastapi import Request, Response
from fastapi.responses import JSONResponse, RedirectResponse
from pydantic import create_model
from starlette.routing import BaseRoute

from dcp.server.core.answers import answer_model, answer_of, problems
from dcp.server.core.ask import Ask, AskDep
from dcp.server.core.data.responses import NotModifiedError, not_modified
from dcp.server.core.feature import Access, Feature, PageRoute, Panel, Route
from dcp.server.core.http.dependencies import public, requires
from dcp.server.core.http.routes import API, api_router
from dcp.server.core.pages.requests import BrowserRoute, FormDep, pages_router
from dcp.server.records.lists import Items

_log = structlog.get_logger(__name__)


def routes_of(features: Iterable[Feature]) -> list[BaseRoute]:
    """Return the API routes, pages and forms declared by ``features``."""
    found: list[BaseRoute] = []
    loaded = [(feature, feature.load()) for feature in features]
    panels = sorted(
        (panel for feature, _ in loaded for panel in feature.panels), key=lambda panel: panel.order
    )
    for feature, routers in loaded:
        api, pages = api_router(), pages_router()
        for route in feature.routes:
            _add_route(api, route)
        for declared in feature.pages:
            own = [one for one in panels if declared.panels and one.on.split(".")[0] == declared.panels]
            _add_page(pages, feature, declared, own)
        found += [route for router in (api, pages, *routers) for route in router.routes]
    return found


def _add_route(router: Any, route: Route) -> None:
    signature = _signature(route.handle)
    model = answer_model(signature.return_annotation)

    @functools.wraps(route.handle)
    def handle(*args: Any, **kwargs: Any) -> Any:
        try:
            return answer_of(model, route.handle(*args, **kwargs))
        except NotModifiedError as found:
            return not_modified(found.etag)

    _declare(handle, signature.replace(return_annotation=model))
    router.add_api_route(
        route.path,
        handle,
        methods=[route.method],
        status_code=route.status,
        response_class=Response if model is Response else JSONResponse,
        tags=[route.tag],
        dependencies=[_access(route.scope, route.all_roots)],
        responses=route.responses | problems(*route.errors),
    )


def _access(scope: Access, all_roots: bool) -> Any:
    if scope == "public":
        return public
    return requires(None if scope == "any" else scope, all_roots=all_roots)


def _add_page(router: Any, feature: Feature, declared: PageRoute, panels: Sequence[Panel]) -> None:
    signature = _with_queries(_signature(declared.handle), panels)
    extra = inspect.Parameter("form_", inspect.Parameter.KEYWORD_ONLY, annotation=FormDep)
    if declared.method == "GET":
        extra = inspect.Parameter("ask_", inspect.Parameter.KEYWORD_ONLY, annotation=AskDep)

    @functools.wraps(declared.handle)
    def handle(*args: Any, **kwargs: Any) -> Response:
        given: Ask = kwargs.pop(extra.name)
        found = declared.handle(*args, **kwargs)
        if isinstance(found, Response):
            return found
        if declared.method == "POST":
            if not found.startswith("/") or found.startswith("//"):
                raise ValueError(f"{declared.path}: a form returns a path of this service, not {found!r}")
            return RedirectResponse(found, 303)
        values = {"found": found} if declared.tag else found
        if declared.panels:
            shown = values["found"]
            values["panels"] = (
                [_filled(panels, given, one) for one in shown.items]
                if isinstance(shown, Items)
                else _filled(panels, given, shown)
            )
        return given.page(
            f"{feature.name}/{declared.template}", **{**_twin(feature, given.request), **values}
        )

    parameters = [*signature.parameters.values(), extra]
    _declare(handle, signature.replace(parameters=parameters, return_annotation=Response))
    router.add_api_route(
        declared.path,
        handle,
        methods=[declared.method],
        name=f"{declared.handle.__name__}_page" if declared.tag else None,
        dependencies=[_access(declared.scope, declared.all_roots)],
        route_class_override=BrowserRoute if declared.only_browsers else None,
    )


def _filled(panels: Iterable[Panel], ask: Ask, found: Any) -> dict[str, list[dict[str, Any]]]:
    """Return the panels with content, by place."""
    shown: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for panel in panels:
        try:
            values = panel.fill(ask, found)
        except Exception:  # noqa: BLE001 - a panel must not take the page of another feature with it
            _log.exception("panel failed", template=panel.template)
            continue
        if values is not None:
            shown[panel.on].append({**values, "template": panel.template})
    return shown


def _with_queries(signature: inspect.Signature, panels: Iterable[Panel]) -> inspect.Signature:
    """Return the page query ``view`` extended by the fields of the panels."""
    queries = [panel.query for panel in panels if panel.query is not None]
    if not queries:
        return signature
    view = signature.parameters["view"]
    model, *notes = get_args(view.annotation)
    joined = create_model(model.__name__, __base__=(model, *queries))
    parameters = signature.parameters | {"view": view.replace(annotation=Annotated[joined, *notes])}
    return signature.replace(parameters=list(parameters.values()))


def _twin(feature: Feature, request: Request) -> dict[str, str]:
    template = request.scope["route"].path
    has_twin = any(route.path == template and route.method == "GET" for route in feature.routes)
    return {"twin": f"{API}{request.url.path}"} if has_twin else {}


def _signature(handle: Callable[..., Any]) -> inspect.Signature:
    found = inspect.signature(handle, eval_str=True)
    parameters = [
        one.replace(annotation=AskDep) if one.annotation is Ask else one for one in found.parameters.values()
    ]
    return found.replace(parameters=parameters)


def _declare(handle: Any, signature: inspect.Signature) -> None:
    handle.__signature__ = signature
    del handle.__wrapped__  # otherwise FastAPI would inspect the annotations of the wrapped function
