"""Features in the application: routes of FastAPI made of what features declare."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from fastapi import Request, Response
from fastapi.responses import RedirectResponse
from starlette.routing import BaseRoute

from dcp.server.core.answers import problems
from dcp.server.core.ask import Ask, AskDep
from dcp.server.core.data.responses import NotModifiedError, not_modified
from dcp.server.core.feature import Feature, Page, Route
from dcp.server.core.http.dependencies import requires
from dcp.server.core.http.routers import API, api_router
from dcp.server.core.pages.queries import pages_router
from dcp.server.core.pages.rendering import page
from dcp.server.core.pages.tokens import FormDep
from dcp.server.core.record_answers import answer_model, answer_of

__all__ = ["routes_of"]


def routes_of(features: Iterable[Feature]) -> list[BaseRoute]:
    """The routes of the API, pages and forms that ``features`` declare."""
    found: list[BaseRoute] = []
    for feature in features:
        routers = feature.load()
        api, pages = api_router(), pages_router()
        for route in feature.routes:
            _add_route(api, route)
        for declared in feature.pages:
            _add_page(pages, feature, declared)
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
        tags=[route.tag],
        dependencies=[requires(route.scope, all_roots=route.all_roots)],
        responses=route.responses | problems(*route.errors),
    )


def _add_page(router: Any, feature: Feature, declared: Page) -> None:
    signature = _signature(declared.handle)
    extra = inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY, annotation=Request)
    if not declared.template:
        extra = inspect.Parameter("form_", inspect.Parameter.KEYWORD_ONLY, annotation=FormDep)

    @functools.wraps(declared.handle)
    def handle(*args: Any, **kwargs: Any) -> Response:
        given = kwargs.pop(extra.name)
        found = declared.handle(*args, **kwargs)
        if isinstance(found, Response):
            return found
        if declared.template:
            values = {"found": found} if declared.tag else found
            return page(given, f"{feature.name}/{declared.template}", **{**_twin(feature, given), **values})
        return RedirectResponse(found, 303)

    parameters = [*signature.parameters.values(), extra]
    _declare(handle, signature.replace(parameters=parameters, return_annotation=Response))
    router.add_api_route(
        declared.path, handle, methods=[declared.method], dependencies=[requires(declared.scope)]
    )


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
    del handle.__wrapped__  # FastAPI would look at the annotations of what is wrapped
