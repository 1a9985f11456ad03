"""Application: the core with the features that plug into it. Importing the module has no effect."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from jinja2 import Environment
from starlette.middleware import Middleware
from starlette.routing import BaseRoute
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from dcp.server.core.http.admission import AuthenticationMiddleware, HostMiddleware
from dcp.server.core.http.context import Service
from dcp.server.core.http.handlers import install_handlers
from dcp.server.core.http.idempotency import IdempotencyMiddleware
from dcp.server.core.http.metrics import install_metrics
from dcp.server.core.http.middleware import CompressionMiddleware, LimitMiddleware, RequestMiddleware
from dcp.server.core.http.readiness import Readiness, lifespan
from dcp.server.core.http.routes import (
    API,
    LargeBodies,
    MethodMiddleware,
    Paths,
    check_routes,
    install_documentation,
    operation_id,
)
from dcp.server.core.http.routes import router as documentation
from dcp.server.core.pages.rendering import Assets, environment_of, problem_page
from dcp.server.core.pages.rendering import router as assets
from dcp.server.core.settings import Settings
from dcp.server.core.web import routes_of
from dcp.server.features import allowances, check_settings, features, kinds, role_settings
from dcp.version import __version__

__all__ = ["API", "create_app"]


def create_app(settings: Settings, *, clock: Callable[[], float] = time.time) -> FastAPI:
    """Return the service as an ASGI application; resources open at startup.

    The `Service` is ``app.state.service``. Raises ValueError if a route declares no scope.
    """
    check_settings(settings)
    service = Service.from_settings(settings, clock, kinds(), allowances, role_settings(settings))
    app = FastAPI(
        title="dcphub",
        version=__version__,
        summary="A catalog of checkpoints, and jobs on them.",
        lifespan=lifespan,
        routes=_routes(),
        openapi_url=None,  # the own pages work offline and declare their access
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=operation_id,
        middleware=_middleware(service),
    )
    app.state.service = service
    app.state.paths = _paths()
    app.state.large_bodies = LargeBodies()
    app.state.readiness = Readiness(service)
    install_handlers(app)
    app.state.assets, app.state.templates = _pages()
    app.state.problem_page = problem_page
    check_routes(app)
    install_documentation(app)
    samples = [read for one in features() for read in one.sampled]
    install_metrics(app, service, samples)  # outermost, to measure the final answers
    return app


@cache
def _routes() -> list[BaseRoute]:
    """Return the routes in matching order."""
    return [*documentation.routes, *assets.routes, *routes_of(features())]


@cache
def _pages() -> tuple[Assets, Environment]:
    files = Assets(features())
    return files, environment_of(features(), files)


@cache
def _paths() -> Paths:
    return Paths(iter_route_contexts(_routes()))


def _middleware(service: Service) -> list[Middleware]:
    settings = service.settings
    stack = [
        Middleware(RequestMiddleware),
        Middleware(CompressionMiddleware),
        Middleware(HostMiddleware, allowed=settings.allowed_hosts, is_keyless=settings.auth == "off"),
        Middleware(AuthenticationMiddleware, service=service),
        Middleware(LimitMiddleware, max_body_bytes=settings.max_body_bytes, seconds=settings.request_seconds),
        Middleware(IdempotencyMiddleware, service=service),
        Middleware(MethodMiddleware),
    ]
    if settings.trusted_proxies:
        proxies = list(settings.trusted_proxies)
        stack.insert(0, Middleware(ProxyHeadersMiddleware, trusted_hosts=proxies))
    return stack
