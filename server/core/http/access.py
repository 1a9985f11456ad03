"""The walk over all routes, and who may use each: what deny by default rests on."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import FastAPI
from fastapi.routing import RouteContext, iter_route_contexts

from dcp.server.core.http.dependencies import Public, Requires

__all__ = ["access_of", "check_routes", "walk_routes"]


def walk_routes(app: FastAPI) -> Iterator[RouteContext]:
    """All routes there are, those of routers in routers included."""
    yield from iter_route_contexts(app.routes)


def access_of(route: RouteContext) -> Requires | Public | None:
    """Who may use it; None if it does not say, or says two things."""
    dependant = getattr(route, "dependant", None)
    found = [
        dependency.call
        for dependency in getattr(dependant, "dependencies", ())
        if isinstance(dependency.call, Requires | Public)
    ]
    return found[0] if len(found) == 1 else None


def check_routes(app: FastAPI) -> None:
    """Raises ValueError for a route that does not say who may use it, or whose name is another one's, too."""
    names: set[str] = set()
    for route in walk_routes(app):
        if access_of(route) is None:
            raise ValueError(
                f'{route.path}: dependencies=[requires("read")], another scope or [public] is missing'
            )
        name = str(getattr(route, "name", ""))
        if name in names:
            raise ValueError(f"{route.path}: another route is called {name}, and that is its operation id")
        names.add(name)
