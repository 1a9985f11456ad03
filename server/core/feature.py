"""Features: what the service does beside its core, each declared as one value.

A feature is a module or a folder with a `Feature` named ``feature``. Its decorators declare routes of the
API, pages, forms, and panels on the pages of checkpoints and runs; its job kinds are in ``kinds``. Those of
the service stand in `dcp.server.features.FEATURES`; those of other packages come by the entry point group
``dcphub.service_features``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack

from dcp.server.records.administration import Scope

if TYPE_CHECKING:
    from fastapi import APIRouter
    from pydantic import BaseModel

    from dcp.server.core.jobs.kind import Kind

__all__ = ["Access", "Feature", "Link", "Page", "Panel", "PanelPlace", "Route"]

F = TypeVar("F", bound=Callable[..., Any])
Access = Scope | Literal["public"]
"""The scope that a key needs; "public": no key at all."""
LinkedFrom = Literal["run", "checkpoint"]
PanelPlace = Literal["checkpoint", "checkpoint.notices", "checkpoint.actions", "run"]
"""Beside the content of a checkpoint's page, above it, in its box of actions; below the list of a run."""


class RouteOptions(TypedDict, total=False):
    """Options of a route. ``errors``: statuses that it documents; ``responses``: as FastAPI has them.
    ``all_roots``: not for keys of some roots."""

    scope: Access
    status: int
    errors: Sequence[int]
    responses: dict[int | str, dict[str, Any]]
    all_roots: bool


@dataclass(frozen=True, slots=True)
class Route:
    """An operation of the API below ``/api/v1``. ``handle`` returns a record or an answer."""

    method: str
    path: str
    handle: Callable[..., Any]
    tag: str
    scope: Access = "read"
    status: int = 200
    errors: Sequence[int] = (404,)
    responses: dict[int | str, dict[str, Any]] = field(default_factory=dict)
    all_roots: bool = False


@dataclass(frozen=True, slots=True)
class Page:
    """A page, or without a ``template`` the target of a form.

    ``handle`` of a page returns the values of its template, or a record, which is the template's ``found``
    and the answer of the API at the same path; that of a form returns the path to show next.
    """

    method: Literal["GET", "POST"]
    path: str
    handle: Callable[..., Any]
    scope: Access
    template: str
    tag: str = ""
    all_roots: bool = False
    panels: Literal["checkpoint", "run", ""] = ""


@dataclass(frozen=True, slots=True)
class Link:
    """A link to ``path`` on the page of each run or checkpoint; ``{id}`` in it is its id."""

    on: LinkedFrom
    label: str
    path: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A section on another feature's page: `Feature.panel`."""

    on: PanelPlace
    template: str
    fill: Callable[..., Mapping[str, Any] | None]
    order: int
    query: type[BaseModel] | None


@dataclass(slots=True)
class Feature:
    """One feature. ``name`` is also the folder of its templates: those beside the module ``module``.

    ``web``: the modules below ``module`` that declare its routes and pages, imported by processes that serve
    HTTP alone; not needed where the module of the feature declares them.
    """

    name: str
    module: str
    kinds: Sequence[Kind[Any]] = ()
    web: Sequence[str] = ()
    links: Sequence[Link] = ()
    routes: list[Route] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """The folder of the module, with ``templates`` and ``static``."""
        return Path(str(importlib.import_module(self.module).__file__)).parent

    def load(self) -> list[APIRouter]:
        """Import the modules that declare routes and pages. Returns the routers of FastAPI that they have as
        ``router``, for routes that declarations cannot say."""
        names = [self.module, *(f"{self.module}.{name}" for name in self.web)]
        modules = [importlib.import_module(name) for name in names]
        return [module.router for module in modules if hasattr(module, "router")]

    def get(self, path: str, *, tag: str, **options: Unpack[RouteOptions]) -> Callable[[F], F]:
        """Declare that GET of ``path`` below ``/api/v1`` is answered by the function."""
        return self._route("GET", path, tag, options)

    def post(self, path: str, *, tag: str, **options: Unpack[RouteOptions]) -> Callable[[F], F]:
        """As `get`, of POST."""
        return self._route("POST", path, tag, options)

    def put(self, path: str, *, tag: str, **options: Unpack[RouteOptions]) -> Callable[[F], F]:
        """As `get`, of PUT."""
        return self._route("PUT", path, tag, options)

    def patch(self, path: str, *, tag: str, **options: Unpack[RouteOptions]) -> Callable[[F], F]:
        """As `get`, of PATCH."""
        return self._route("PATCH", path, tag, options)

    def delete(self, path: str, *, tag: str, **options: Unpack[RouteOptions]) -> Callable[[F], F]:
        """As `get`, of DELETE."""
        return self._route("DELETE", path, tag, options)

    def _route(self, method: str, path: str, tag: str, options: RouteOptions) -> Callable[[F], F]:
        def declare(handle: F) -> F:
            self.routes.append(Route(method, path, handle, tag, **options))
            return handle

        return declare

    def page(
        self,
        path: str,
        template: str,
        *,
        scope: Access = "read",
        tag: str = "",
        errors: Sequence[int] = (404,),
        all_roots: bool = False,
        panels: Literal["checkpoint", "run", ""] = "",
    ) -> Callable[[F], F]:
        """Declare a page: ``template`` of this feature, filled with the values that the function returns.

        A function that returns a record answers the API at the same path as well, below ``tag`` of its
        documentation. Each page links to the JSON at its path, where the feature has such a route, else to
        the value ``twin``. A page with ``panels`` shows those of all features, of its value ``found``; its
        function has the query of the page as ``view``.
        """

        def declare(handle: F) -> F:
            self.pages.append(Page("GET", path, handle, scope, template, tag, all_roots, panels))
            if tag:
                route = Route("GET", path, handle, tag, scope, errors=errors, all_roots=all_roots)
                self.routes.append(route)
            return handle

        return declare

    def form(self, path: str, *, scope: Access, all_roots: bool = False) -> Callable[[F], F]:
        """Declare the target of a form. Its token is checked; the function returns the path to show next."""

        def declare(handle: F) -> F:
            self.pages.append(Page("POST", path, handle, scope, "", all_roots=all_roots))
            return handle

        return declare

    def panel(
        self, on: PanelPlace, template: str, *, order: int, query: type[BaseModel] | None = None
    ) -> Callable[[F], F]:
        """Declare a section on the page of a checkpoint or a run: ``template`` of this feature.

        The function gets the `Ask` and the record that the page shows, and returns the values that the
        template has as ``panel``, or None to show nothing. ``query``: what the address of the page may say
        for it beside the page's own. Panels of a place stand in their ``order``.
        """

        def declare(fill: F) -> F:
            self.panels.append(Panel(on, f"{self.name}/{template}", fill, order, query))
            return fill

        return declare
