"""The application: middleware, routes, errors, documentation. Nothing happens at import time.

Of an owner of further routes this needs one line: the module in `_ROUTERS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Final

from fastapi import APIRouter, FastAPI
from fastapi.routing import iter_route_contexts
from starlette.middleware import Middleware
from starlette.routing import BaseRoute
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from dcp.server import monitoring
from dcp.server.core.web import routes_of
from dcp.server.features import features
from dcp.server.http import documentation
from dcp.server.http.access import check_routes
from dcp.server.http.context import Service
from dcp.server.http.handlers import install_handlers
from dcp.server.http.large_bodies import LargeBodies
from dcp.server.http.lifespan import lifespan
from dcp.server.http.middleware.authentication import AuthenticationMiddleware
from dcp.server.http.middleware.compression import CompressionMiddleware
from dcp.server.http.middleware.hosts import HostMiddleware
from dcp.server.http.middleware.idempotency import IdempotencyMiddleware
from dcp.server.http.middleware.limits import LimitMiddleware
from dcp.server.http.middleware.methods import MethodMiddleware
from dcp.server.http.middleware.requests import RequestMiddleware
from dcp.server.http.paths import Paths
from dcp.server.http.readiness import Readiness
from dcp.server.http.routers import API, operation_id
from dcp.server.pages import app as pages
from dcp.server.routes.administration import audit, health, keys, metrics, retention, rules, webhooks, whoami
from dcp.server.routes.catalog import checkpoints, deletion, labels, lineage, roots, runs, search
from dcp.server.routes.data import diffs, downloads, drawings, fitting, shards, stats, tensors
from dcp.server.routes.jobs import jobs, verification
from dcp.server.settings import Settings
from dcp.version import __version__

__all__ = ["API", "create_app"]

_OUTSIDE: Final[tuple[APIRouter, ...]] = (health.router, metrics.router, documentation.router)
"""Not below `API`."""

_ROUTERS: Final[tuple[APIRouter, ...]] = (
    audit.router,
    search.router,
    checkpoints.router,
    deletion.router,
    diffs.router,
    downloads.router,
    drawings.router,
    fitting.router,
    jobs.router,
    keys.router,
    labels.router,
    lineage.router,
    retention.router,
    roots.router,
    rules.router,
    runs.router,
    shards.router,
    stats.router,
    tensors.router,
    verification.router,
    webhooks.router,
    whoami.router,
)
"""Below `API`."""

_ROUTES: Final[list[BaseRoute]] = [
    *(route for router in (*_OUTSIDE, *_ROUTERS) for route in router.routes),
    *routes_of(features()),
    *(route for router in (*pages.ROUTERS, health.welcome) for route in router.routes),
]
"""In the order in which they are looked through for each request; of "/" browsers get the page."""


def create_app(settings: Settings, *, clock: Callable[[], float] = time.time) -> FastAPI:
    """The service as an ASGI application; opens nothing before it is started.

    Its `Service` is ``app.state.service``. Raises ValueError if a route does not say who may use it.
    """
    service = Service.from_settings(settings, clock)
    app = FastAPI(
        title="dcphub",
        version=__version__,
        summary="A catalog of checkpoints, and jobs on them.",
        lifespan=lifespan,
        routes=_ROUTES,
        openapi_url=None,  # ours are offline, and declare their access as all routes do
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
    pages.install(app)
    check_routes(app)
    documentation.install(app)
    monitoring.install(app, service.database)  # outermost of all, so that it sees what the others answer
    return app


@cache
def _paths() -> Paths:
    return Paths(iter_route_contexts(_ROUTES))


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
