"""Where routes are, and what the description calls them.

A router is made with its whole prefix, and `dcp.server.app` takes its routes as they are: FastAPI's
``include_router`` would make each a second time, and look through all routers twice for every request.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Final

from fastapi import APIRouter
from fastapi.routing import APIRoute

from dcp.server.core.http.large_bodies import LargeBodyRoute

__all__ = ["API", "api_router", "operation_id"]

API: Final = "/api/v1"


def operation_id(route: APIRoute) -> str:
    """Its function's name, which is no other route's (`dcp.server.core.http.access.check_routes`)."""
    return route.name


def api_router(
    prefix: str = "", *, tags: Sequence[str | Enum] = (), dependencies: Sequence[Any] = ()
) -> APIRouter:
    """For routes below `API` and ``prefix``."""
    return APIRouter(
        prefix=API + prefix,
        tags=[*tags],
        dependencies=dependencies,
        generate_unique_id_function=operation_id,
        route_class=LargeBodyRoute,
    )
