"""Features: parts of the service beside the core, each declared as one value.

A feature is a module or folder with a `Feature` named ``feature``. Decorators declare routes, pages, forms,
panels, periodic work and event consumers; ``kinds`` has its kinds of jobs. `dcp.server.features.FEATURES`
lists the built-in features; packages add features with the entry point group ``dcphub.service_features``.
Consumers and periodic work are one function each::

    @feature.consumer("notes", kinds=["checkpoint.committed"])
    def note(connection, events, context):
        "Called with batches of events, oldest first, in the transaction that stores the position."

    @feature.schedule("notes", 600.0)
    def forget_notes(context):
        "Called every ten minutes in one worker; ``context`` has settings, database and time."
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, TypeVar, Unpack, get_args

from pydantic import ValidationError

from dcp.server.core.jobs.schedules import Consume, Consumer, PeriodicWork, ScheduleContext
from dcp.server.records.administration import Scope
from dcp.storage.errors import CheckpointError

if TYPE_CHECKING:
    from fastapi import APIRouter
    from prometheus_client.core import Metric
    from pydantic import BaseModel
    from sqlalchemy import Connection

    from dcp.server.catalog.search import SearchHit
    from dcp.server.core.allowances import Allowances
    from dcp.server.core.http.context import Service
    from dcp.server.core.jobs.kind import Kind
    from dcp.server.core.security.accounts import RoleSettings
    from dcp.server.core.settings import Settings

C = TypeVar("C", bound=Consume)
F = TypeVar("F", bound=Callable[..., Any])
AliasGuard = Callable[[Any, "Settings", int, str], "str | None"]
A = TypeVar("A", bound=AliasGuard)
Finder = Callable[[Any, str, "frozenset[str] | None", int], "Iterable[SearchHit]"]
G = TypeVar("G", bound=Finder)
S = TypeVar("S", bound="Callable[[Connection, Service], Iterable[Metric]]")
W = TypeVar("W", bound="Callable[[ScheduleContext], object]")
Access = Scope | Literal["any", "public"]
"""The required scope; "any": every valid key or session, "public": no key."""
LinkedFrom = Literal["run", "checkpoint", "menu", "administration"]
PanelPlace = Literal["checkpoint", "checkpoint.notices", "checkpoint.actions", "run", "run.notices", "root"]
"""Places of panels: on a checkpoint page beside the content, above it or among the actions; on a run page
below or above the list; in the card of a root."""


_EVENT: Final = re.compile(r"[a-z][a-z0-9_]{0,30}\.[a-z][a-z0-9_]{0,30}")


class FeatureError(CheckpointError):
    """A feature is unusable; the message names the feature and the error in its declaration."""


def _check_scope(scope: str, what: str) -> None:
    known = (*get_args(Scope), "any", "public")
    if scope not in known:
        raise FeatureError(f"{what}: scope must be one of {', '.join(known)}, not {scope!r}")


class RouteOptions(TypedDict, total=False):
    """Options of a route.

    ``errors``: documented error statuses. ``responses``: as in FastAPI. ``all_roots``: refuse keys limited
    to some roots.
    """

    scope: Access
    status: int
    errors: Sequence[int]
    responses: dict[int | str, dict[str, Any]]
    all_roots: bool


@dataclass(frozen=True, slots=True)
class Route:
    """An operation below ``/api/v1``. ``handle`` returns a record or an answer.

    ``responses`` describes other answers as in FastAPI. ``all_roots``: refuse keys limited to some roots.
    """

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
class PageRoute(Route):
    """A page, or the target of a form if ``template`` is missing. A page with a ``tag`` is also an
    operation.

    ``handle`` of a page returns the values of the template, or a record: the template value ``found``, and
    the JSON at the same path. ``handle`` of a form returns the path of the next page.
    """

    template: str = ""
    panels: Literal["checkpoint", "run", "root", ""] = ""
    only_browsers: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """A link to ``path`` on the page of each run or checkpoint, with ``{id}`` for the id.

    Other places are the "menu" of all pages, and "administration", the menu for admins of all roots.
    """

    on: LinkedFrom
    label: str
    path: str

    def __post_init__(self) -> None:
        if self.on not in get_args(LinkedFrom) or re.findall(r"{.*?}", self.path) not in ([], ["{id}"]):
            raise FeatureError(
                f"{self}: on must be one of {get_args(LinkedFrom)}; the only field of path is {{id}}"
            )


@dataclass(frozen=True, slots=True)
class Panel:
    """A section on a page of another feature; see `Feature.panel`."""

    on: PanelPlace
    template: str
    fill: Callable[..., Mapping[str, Any] | None]
    order: int
    query: type[BaseModel] | None


@dataclass(slots=True)
class Feature:
    """One feature, declared in ``module``.

    A package has the folders ``templates`` and ``static``; a feature of one file has its template texts in
    the field ``templates``, or in such a folder beside it.

    Args:
        web: Modules below ``module`` with routes and pages, imported by HTTP processes only.
        work: Modules with consumers and periodic work, imported by workers only.
        schedules: Functions of the settings that return periodic work; `schedule` adds one.
        settings: A pydantic model of the settings below ``[features.NAME]`` of the file or
            ``DCP_SERVER_FEATURES__NAME__``; read it with `options`.
        roles: The rights of people and groups derived from the settings.
        allowances: A subclass of `dcp.server.core.allowances.Allowances`; at most one feature has it.
        events: Kinds of events that the feature emits, such as "note.created".
        package: The distribution of a plug-in, for errors.

    A feature stores data in tables of ``dcp.server.database.tables.metadata`` declared in ``module``;
    missing tables are created.
    """

    name: str
    module: str
    kinds: Sequence[Kind[Any]] = ()
    web: Sequence[str] = ()
    work: Sequence[str] = ()
    links: Sequence[Link] = ()
    events: Sequence[str] = ()
    templates: Mapping[str, str] = field(default_factory=dict)
    settings: type[BaseModel] | None = None
    allowances: Callable[[Settings], Allowances] | None = None
    package: str = ""
    roles: Callable[[Settings], RoleSettings] | None = None
    routes: list[Route] = field(default_factory=list)
    pages: list[PageRoute] = field(default_factory=list)
    consumers: list[Consumer] = field(default_factory=list)
    schedules: list[Callable[[Settings], Iterable[PeriodicWork]]] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    sampled: list[Callable[[Connection, Service], Iterable[Metric]]] = field(default_factory=list)
    finders: dict[str, Finder] = field(default_factory=dict)
    alias_guards: list[AliasGuard] = field(default_factory=list)

    def __post_init__(self) -> None:
        for kind in self.events:
            if not _EVENT.fullmatch(kind):
                raise FeatureError(f"{self.label}: event {kind!r} must have the form note.created")

    @property
    def label(self) -> str:
        """The name of the feature in errors, with the package of a plug-in."""
        return f"feature {self.name!r}" + (f" of the package {self.package}" if self.package else "")

    @property
    def folder(self) -> Path:
        """The folder of the package, or the folder that contains the single file."""
        return Path(str(importlib.import_module(self.module).__file__)).parent

    @property
    def is_package(self) -> bool:
        """True if the folder belongs to the feature alone."""
        return hasattr(importlib.import_module(self.module), "__path__")

    def options(self, settings: Settings) -> Any:
        """Return the settings of the feature, an object of its ``settings`` model. Raises FeatureError."""
        if self.settings is None:
            raise FeatureError(f"{self.label} declares no settings")
        try:
            return self.settings.model_validate(settings.features.get(self.name, {}))
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)  # the input may be a secret
            shown = [": ".join((".".join(map(str, one["loc"])), one["msg"])).lstrip(": ") for one in found]
            raise FeatureError(f"settings features.{self.name}: {'; '.join(shown)}") from None

    def _import(self, names: Iterable[str]) -> list[Any]:
        found = []
        for name in names:
            try:
                found.append(importlib.import_module(f"{self.module}.{name}"))
            except Exception as error:
                raise FeatureError(
                    f"{self.label}: {self.module}.{name} cannot be imported: {error!r}"
                ) from error
        return found

    def load(self) -> list[APIRouter]:
        """Import modules with routes and pages; return FastAPI routers named ``router`` in them."""
        modules = [importlib.import_module(self.module), *self._import(self.web)]
        return [module.router for module in modules if hasattr(module, "router")]

    def get(self, path: str, *, tag: str, **options: Unpack[RouteOptions]) -> Callable[[F], F]:
        """Declare the function as handler of GET ``path`` below ``/api/v1``."""
        return self._route("GET", path, tag, options)

    def post(self, path: str, *, tag: str, **options: Unpack[RouteOptions]) -> Callable[[F], F]:
        """Declare a handler of POST, like `get`."""
        return self._route("POST", path, tag, options)

    def put(self, path: str, *, tag: str, **options: Unpack[RouteOptions]) -> Callable[[F], F]:
        """Declare a handler of PUT, like `get`."""
        return self._route("PUT", path, tag, options)

    def patch(self, path: str, *, tag: str, **options: Unpack[RouteOptions]) -> Callable[[F], F]:
        """Declare a handler of PATCH, like `get`."""
        return self._route("PATCH", path, tag, options)

    def delete(self, path: str, *, tag: str, **options: Unpack[RouteOptions]) -> Callable[[F], F]:
        """Declare a handler of DELETE, like `get`."""
        return self._route("DELETE", path, tag, options)

    def _route(self, method: str, path: str, tag: str, options: RouteOptions) -> Callable[[F], F]:
        _check_scope(options.get("scope", "read"), path)

        def declare(handle: F) -> F:
            if "return" not in handle.__annotations__:
                raise FeatureError(f"{method} {path}: the function needs a return annotation with a record")
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
        panels: Literal["checkpoint", "run", "root", ""] = "",
        only_browsers: bool = False,
    ) -> Callable[[F], F]:
        """Declare a page: ``template`` of the feature, filled with the values returned by the function.

        A function that returns a record also answers the API at the same path, documented below ``tag``.
        Each page links to the JSON at its path, or to the value ``twin``. A page with ``panels`` shows the
        panels of all features for its value ``found`` or for each item of ``found``; with panel queries, the
        function receives the query as ``view``. ``only_browsers``: programs get another route at the path.
        """
        _check_scope(scope, path)

        def declare(handle: F) -> F:
            found = PageRoute(
                "GET",
                path,
                handle,
                tag,
                scope,
                errors=errors,
                all_roots=all_roots,
                template=template,
                panels=panels,
                only_browsers=only_browsers,
            )
            self.pages.append(found)
            if tag:
                self.routes.append(found)
            return handle

        return declare

    def form(self, path: str, *, scope: Access, all_roots: bool = False) -> Callable[[F], F]:
        """Declare the target of a form. The token is checked; the function returns the path of the next
        page."""
        _check_scope(scope, path)

        def declare(handle: F) -> F:
            self.pages.append(PageRoute("POST", path, handle, "", scope, all_roots=all_roots))
            return handle

        return declare

    def consumer(self, name: str, *, kinds: Iterable[str] | None = None, **options: Any) -> Callable[[C], C]:
        """Declare a function that workers call with all events, or with events of ``kinds``, in order.

        The function gets ``(connection, events, context)`` and writes with the connection, exactly once, in
        the transaction that stores the position. The transaction must be short: on SQLite all other writers
        wait. Use ``is_slow=True`` for slow work such as requests to other services: the connection is None,
        and the position is stored afterwards, so events repeat after a crash. ``options`` are those of a
        `Consumer`.
        """
        wanted = None if kinds is None else frozenset(kinds)

        def declare(consume: C) -> C:
            self.consumers.append(Consumer(name, wanted, consume, **options))
            return consume

        return declare

    def samples(self, read: S) -> S:
        """Declare metrics: the function gets a read connection and the `Service`, and yields metrics of
        prometheus_client.

        Called for ``/metrics``, at most every five seconds.
        """
        self.sampled.append(read)
        return read

    def schedule(
        self,
        name: str,
        seconds: float | None = None,
        *,
        is_needed: Callable[[Connection, ScheduleContext], bool] | None = None,
    ) -> Callable[[W], W]:
        """Declare a function that one worker at a time calls with a `ScheduleContext` every ``seconds``.

        Without ``seconds`` the function runs as often as workers poll for jobs. ``is_needed``: as in
        `PeriodicWork`.
        """

        def declare(act: W) -> W:
            self.schedules.append(
                lambda settings: [PeriodicWork(name, seconds or settings.poll_seconds, act, is_needed)]
            )
            return act

        return declare

    def alias_guard(self, guard: A) -> A:
        """Declare a function that returns the reason why an alias must not be changed by hand, or None.

        The function gets the connection of the change, the settings, the run id and the alias name. The
        feature itself sets the alias with `dcp.server.catalog.labels`.
        """
        self.alias_guards.append(guard)
        return guard

    def finder(self, kind: str) -> Callable[[G], G]:
        """Declare a function that finds objects of this ``kind`` for the search.

        The function gets the connection, the text, the visible roots (None for all) and the maximum number
        of hits. It returns `SearchHit` values with ``href``, best first.
        """

        def declare(find: G) -> G:
            self.finders[kind] = find
            return find

        return declare

    def periodic_work(self, settings: Settings) -> list[PeriodicWork]:
        """Import the modules of ``work`` and return all periodic work, consumers first."""
        self._import(self.work)
        consuming = [consumer.work(settings) for consumer in self.consumers]
        return consuming + [work for schedules in self.schedules for work in schedules(settings)]

    def panel(
        self, on: PanelPlace, template: str, *, order: int, query: type[BaseModel] | None = None
    ) -> Callable[[F], F]:
        """Declare a section on the page of a checkpoint or a run: ``template`` of the feature.

        The function gets the `Ask` and the record of the page, and returns the template value ``panel``, or
        None to show nothing. ``query`` declares additional query parameters of the page. Panels of one place
        are sorted by ``order``. Exceptions of a panel are logged, and the panel is omitted.
        """
        if on not in get_args(PanelPlace):
            raise FeatureError(f"panel {template}: on must be one of {get_args(PanelPlace)}, not {on!r}")

        def declare(fill: F) -> F:
            self.panels.append(Panel(on, f"{self.name}/{template}", fill, order, query))
            return fill

        return declare
