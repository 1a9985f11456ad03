"""Features: the parts of the service beside its core, each declared as one value.

A feature is a module or a folder with a `Feature` named ``feature``. Its decorators declare routes of the
API, pages, forms, panels on the pages of checkpoints and runs, periodic work and consumers of events; its job
kinds are in ``kinds``. Those of the service stand in `dcp.server.features.FEATURES`; those of other packages
come by the entry point group ``dcphub.service_features``. Work of a worker beside jobs is one function each::

    @feature.consumer("notes", kinds=["checkpoint.committed"])
    def note(connection, events, context):
        "Called with batches of events, oldest first, in the transaction that keeps the consumer's position."

    @feature.schedule("notes", 600.0)
    def forget_notes(context):
        "Called every ten minutes in one of the workers; ``context`` has settings, database and time."
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
"""The scope that a key needs; "any": each key or session that is valid, "public": none at all."""
LinkedFrom = Literal["run", "checkpoint", "menu", "administration"]
PanelPlace = Literal["checkpoint", "checkpoint.notices", "checkpoint.actions", "run", "run.notices", "root"]
"""Beside the content of a checkpoint's page, above it, in its box of actions; below the list of a run, above
it; in the card of a root."""


_EVENT: Final = re.compile(r"[a-z][a-z0-9_]{0,30}\.[a-z][a-z0-9_]{0,30}")


class FeatureError(CheckpointError):
    """A feature cannot be used: the message names it, and the mistake in its declaration."""


def _check_scope(scope: str, what: str) -> None:
    known = (*get_args(Scope), "any", "public")
    if scope not in known:
        raise FeatureError(f"{what}: scope must be one of {', '.join(known)}, not {scope!r}")


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
    """An operation of the API below ``/api/v1``. ``handle`` returns a record or an answer.

    ``responses`` are other ones, as FastAPI describes them. ``all_roots``: not for keys that are restricted
    to some roots.
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
    """A page, or without a ``template`` the target of a form. One with a ``tag`` is an operation as well.

    ``handle`` of a page returns the values of its template, or a record, which is the template's ``found``
    and the answer of the API at the same path; that of a form returns the path to show next.
    """

    template: str = ""
    panels: Literal["checkpoint", "run", "root", ""] = ""
    only_browsers: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """A link to ``path`` on the page of each run or checkpoint, where ``{id}`` in it is its id; in the "menu"
    of all pages; or in its part for admins of all roots, "administration"."""

    on: LinkedFrom
    label: str
    path: str

    def __post_init__(self) -> None:
        if self.on not in get_args(LinkedFrom) or re.findall(r"{.*?}", self.path) not in ([], ["{id}"]):
            raise FeatureError(
                f"{self}: on is one of {get_args(LinkedFrom)}, and of fields the path may have {{id}}"
            )


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
    """One feature, declared in ``module``.

    A package has its templates in the folder ``templates``, scripts and styles in ``static``; a feature of
    one file has the texts of its templates in the field ``templates`` by name, or in such a folder beside it.

    ``web``: the modules below ``module`` that declare its routes and pages, imported by processes that serve
    HTTP alone; not needed where the module of the feature declares them. ``work``: those that declare
    consumers and periodic work, imported by workers alone. ``schedules`` are functions of the settings that
    return periodic work; `schedule` adds one.

    ``settings``: a pydantic model of what an operator may set for it, below ``[features.NAME]`` of the file
    or ``DCP_SERVER_FEATURES__NAME__``; `options` reads it. ``roles``: the rights of people and groups that
    follow from the settings. A feature that keeps data declares tables of
    ``dcp.server.database.tables.metadata`` in ``module``; they are created where they are missing.

    ``allowances``: a subclass of `dcp.server.core.allowances.Allowances`, which says how much an account, a
    key or a root may use; one feature may have it.
    ``events``: kinds of events that it emits, such as "note.created", for consumers and webhooks.
    ``package`` is set where it comes from an entry point: the distribution, for errors.
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
                raise FeatureError(f"{self.label}: event {kind!r} is not like note.created")

    @property
    def label(self) -> str:
        """The name of the feature in errors, with its package unless that is ours."""
        return f"feature {self.name!r}" + (f" of the package {self.package}" if self.package else "")

    @property
    def folder(self) -> Path:
        """The folder of the package, or of the one file, which may share it with others."""
        return Path(str(importlib.import_module(self.module).__file__)).parent

    @property
    def is_package(self) -> bool:
        """True if the folder is the feature's own."""
        return hasattr(importlib.import_module(self.module), "__path__")

    def options(self, settings: Settings) -> Any:
        """Return the feature's own settings, an object of its model ``settings``. Raises FeatureError."""
        if self.settings is None:
            raise FeatureError(f"{self.label} declares no settings")
        try:
            return self.settings.model_validate(settings.features.get(self.name, {}))
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)  # which may be secrets
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
        """Import the modules that declare routes and pages. Returns the routers of FastAPI that they have as
        ``router``, for routes that declarations cannot say."""
        modules = [importlib.import_module(self.module), *self._import(self.web)]
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
        _check_scope(options.get("scope", "read"), path)

        def declare(handle: F) -> F:
            if "return" not in handle.__annotations__:
                raise FeatureError(
                    f"{method} {path}: the function does not declare the record that it returns"
                )
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
        """Declare a page: ``template`` of this feature, filled with the values that the function returns.

        A function that returns a record answers the API at the same path as well, below ``tag`` of its
        documentation. Each page links to the JSON at its path, where the feature has such a route, else to
        the value ``twin``. A page with ``panels`` shows those of all features, of its value ``found`` or of
        each item of that; its function has the query of the page as ``view``, where panels have queries.
        ``only_browsers``: programs find another route at the path.
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
        """Declare the target of a form. Its token is checked; the function returns the path to show next."""
        _check_scope(scope, path)

        def declare(handle: F) -> F:
            self.pages.append(PageRoute("POST", path, handle, "", scope, all_roots=all_roots))
            return handle

        return declare

    def consumer(self, name: str, *, kinds: Iterable[str] | None = None, **options: Any) -> Callable[[C], C]:
        """Declare that workers call the function with all events, or those of ``kinds``, in order.

        It gets ``(connection, events, context)``, and writes by the connection: once, in the transaction that
        notes the events as consumed. That transaction must be short: on SQLite nothing else is written
        meanwhile. For what takes longer, such as a request to another service, ``is_slow=True``: the
        connection is None, and the events are noted afterwards, so that they come again after a crash.
        ``options``: those of a `Consumer`.
        """
        wanted = None if kinds is None else frozenset(kinds)

        def declare(consume: C) -> C:
            self.consumers.append(Consumer(name, wanted, consume, **options))
            return consume

        return declare

    def samples(self, read: S) -> S:
        """Declare metrics: the function gets a connection that reads and the `Service`, and yields those of
        prometheus_client. Called when ``/metrics`` is asked for, at most every five seconds."""
        self.sampled.append(read)
        return read

    def schedule(
        self,
        name: str,
        seconds: float | None = None,
        *,
        is_needed: Callable[[Connection, ScheduleContext], bool] | None = None,
    ) -> Callable[[W], W]:
        """Declare that one worker at a time calls the function with a `ScheduleContext` every ``seconds``, or
        as often as workers look for jobs. ``is_needed``: as for `PeriodicWork`."""

        def declare(act: W) -> W:
            self.schedules.append(
                lambda settings: [PeriodicWork(name, seconds or settings.poll_seconds, act, is_needed)]
            )
            return act

        return declare

    def alias_guard(self, guard: A) -> A:
        """Declare a function that says why an alias is not to be set or removed by hand, or returns None.

        It gets the connection of the change, the settings, the run's id and the name of the alias. The
        feature itself sets the alias by `dcp.server.catalog.labels`.
        """
        self.alias_guards.append(guard)
        return guard

    def finder(self, kind: str) -> Callable[[G], G]:
        """Declare that the search of the service finds things of this ``kind`` by the function.

        It gets the connection, the text, the names of the roots that may be seen (None for all) and the
        number of hits at most, and returns each as a `SearchHit` with its page as ``href``, the best first.
        """

        def declare(find: G) -> G:
            self.finders[kind] = find
            return find

        return declare

    def periodic_work(self, settings: Settings) -> list[PeriodicWork]:
        """Import the modules of ``work``, and return all periodic work, that of consumers first."""
        self._import(self.work)
        consuming = [consumer.work(settings) for consumer in self.consumers]
        return consuming + [work for schedules in self.schedules for work in schedules(settings)]

    def panel(
        self, on: PanelPlace, template: str, *, order: int, query: type[BaseModel] | None = None
    ) -> Callable[[F], F]:
        """Declare a section on the page of a checkpoint or a run: ``template`` of this feature.

        The function gets the `Ask` and the record that the page shows, and returns the values that the
        template has as ``panel``, or None to show nothing. ``query``: what the address of the page may say
        for it beside the page's own. Panels of a place stand in their ``order``. A panel that raises is
        logged, and not shown.
        """
        if on not in get_args(PanelPlace):
            raise FeatureError(f"panel {template}: on must be one of {get_args(PanelPlace)}, not {on!r}")

        def declare(fill: F) -> F:
            self.panels.append(Panel(on, f"{self.name}/{template}", fill, order, query))
            return fill

        return declare
