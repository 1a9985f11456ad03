"""The application: middleware, routes, errors, documentation. Nothing happens at import time.

Of an owner of further routes this needs one line: the module in `_ROUTERS`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Final

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, compile_path
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from dcp.server import monitoring
from dcp.server.http import documentation
from dcp.server.http.access import check_routes
from dcp.server.http.context import Service
from dcp.server.http.handlers import install_handlers
from dcp.server.http.lifespan import lifespan
from dcp.server.http.middleware.authentication import AuthenticationMiddleware
from dcp.server.http.middleware.hosts import HostMiddleware
from dcp.server.http.middleware.idempotency import IdempotencyMiddleware
from dcp.server.http.middleware.limits import LimitMiddleware
from dcp.server.http.middleware.requests import RequestMiddleware
from dcp.server.http.readiness import Readiness
from dcp.server.routes.administration import audit, health, keys, metrics, retention, rules, webhooks
from dcp.server.routes.catalog import checkpoints, deletion, labels, lineage, roots, runs
from dcp.server.routes.data import diffs, downloads, shards, stats, tensors
from dcp.server.routes.jobs import jobs, verification
from dcp.server.settings import Settings
from dcp.version import __version__

__all__ = ["API", "create_app"]

API: Final = "/api/v1"

_OUTSIDE: Final[tuple[APIRouter, ...]] = (health.router, metrics.router, documentation.router)
"""Not below `API`."""

_ROUTERS: Final[tuple[APIRouter, ...]] = (
    audit.router,
    checkpoints.router,
    deletion.router,
    diffs.router,
    downloads.router,
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
)
"""Below `API`."""


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
        openapi_url=None,  # ours are offline, and declare their access as all routes do
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=_middleware(service),
    )
    app.state.service = service
    app.state.readiness = Readiness(service)
    install_handlers(app)
    app.router.routes.extend(_placed(route, "") for router in _OUTSIDE for route in router.routes)
    app.router.routes.extend(_placed(route, API) for router in _ROUTERS for route in router.routes)
    check_routes(app)
    documentation.install(app)
    monitoring.install(app, service.database)  # outermost of all, so that it sees what the others answer
    return app


def _middleware(service: Service) -> list[Middleware]:
    settings = service.settings
    stack = [
        Middleware(RequestMiddleware),
        Middleware(HostMiddleware, allowed=settings.allowed_hosts, is_keyless=settings.auth == "off"),
        Middleware(AuthenticationMiddleware, service=service),
        Middleware(LimitMiddleware, max_body_bytes=settings.max_body_bytes, seconds=settings.request_seconds),
        Middleware(IdempotencyMiddleware, service=service),
    ]
    if settings.trusted_proxies:
        proxies = list(settings.trusted_proxies)
        stack.insert(0, Middleware(ProxyHeadersMiddleware, trusted_hosts=proxies))
    return stack


def _placed(route: BaseRoute, prefix: str) -> APIRoute:
    """The route below ``prefix``, called by its name in the description.

    As `FastAPI.include_router`, which would make each of them anew, a sixth of a second for all.
    """
    if not isinstance(route, APIRoute):
        raise ValueError(f"{route!r} does not describe itself")
    placed = copy.copy(route)
    placed.path = prefix + route.path
    placed.path_regex, placed.path_format, placed.param_convertors = compile_path(placed.path)
    placed.unique_id = route.operation_id or route.name
    return placed
