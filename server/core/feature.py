"""Features: what the service does beside its core, each declared as one value.

A feature is a module or a folder with a `Feature` named ``feature``. Its decorators declare routes of the
API, pages and forms; its job kinds are in ``kinds``. Those of the service stand in
`dcp.server.features.FEATURES`; those of other packages come by the entry point group
``dcphub.service_features``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    from fastapi import APIRouter

    from dcp.server.core.jobs.kind import Kind
    from dcp.server.core.security.principal import Scope

__all__ = ["Feature", "Link", "Page", "Route"]

F = TypeVar("F", bound=Callable[..., Any])
LinkedFrom = Literal["run"]


@dataclass(frozen=True, slots=True)
class Route:
    """An operation of the API below ``/api/v1``. ``handle`` returns a record or an answer.
    ``responses`` are other ones, as FastAPI describes them."""

    method: str
    path: str
    handle: Callable[..., Any]
    scope: Scope
    tag: str
    status: int
    errors: Sequence[int]
    responses: dict[int | str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Page:
    """A page, or without a ``template`` the target of a form.

    ``handle`` of a page returns the values of its template, or a record, which is the template's ``found``
    and the answer of the API at the same path; that of a form returns the path to show next.
    """

    method: Literal["GET", "POST"]
    path: str
    handle: Callable[..., Any]
    scope: Scope
    template: str
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """A link to ``path`` on the page of each run; ``{id}`` in it is the run's id."""

    on: LinkedFrom
    label: str
    path: str


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

    @property
    def folder(self) -> Path:
        """The folder of the module, with ``templates`` and ``static``."""
        return Path(str(importlib.import_module(self.module).__file__)).parent

    def load(self) -> list[APIRouter]:
        """Import what declares routes and pages. Returns the routers of FastAPI that modules of ``web`` have
        as ``router``, for what declarations cannot say."""
        modules = [importlib.import_module(f"{self.module}.{name}") for name in self.web]
        return [module.router for module in modules if hasattr(module, "router")]

    def get(
        self,
        path: str,
        *,
        tag: str,
        scope: Scope = "read",
        errors: Sequence[int] = (404,),
        responses: dict[int | str, dict[str, Any]] | None = None,
    ) -> Callable[[F], F]:
        """Declare that GET of ``path`` below ``/api/v1`` is answered by the function."""
        return self._route("GET", path, scope, tag, 200, errors, responses)

    def post(
        self, path: str, *, tag: str, scope: Scope, status: int = 200, errors: Sequence[int] = (404,)
    ) -> Callable[[F], F]:
        """Declare that POST to ``path`` below ``/api/v1`` is answered by the function."""
        return self._route("POST", path, scope, tag, status, errors)

    def _route(
        self,
        method: str,
        path: str,
        scope: Scope,
        tag: str,
        status: int,
        errors: Sequence[int],
        responses: dict[int | str, dict[str, Any]] | None = None,
    ) -> Callable[[F], F]:
        def declare(handle: F) -> F:
            self.routes.append(Route(method, path, handle, scope, tag, status, errors, responses or {}))
            return handle

        return declare

    def page(self, path: str, template: str, *, scope: Scope = "read", tag: str = "") -> Callable[[F], F]:
        """Declare a page: ``template`` of this feature, filled with the values that the function returns.

        A function that returns a record answers the API at the same path as well, below ``tag`` of its
        documentation. Each page links to the JSON at its path, where the feature has such a route, else to
        the value ``twin``.
        """

        def declare(handle: F) -> F:
            self.pages.append(Page("GET", path, handle, scope, template, tag))
            if tag:
                self.routes.append(Route("GET", path, handle, scope, tag, 200, (404,)))
            return handle

        return declare

    def form(self, path: str, *, scope: Scope) -> Callable[[F], F]:
        """Declare the target of a form. Its token is checked; the function returns the path to show next."""

        def declare(handle: F) -> F:
            self.pages.append(Page("POST", path, handle, scope, ""))
            return handle

        return declare
