"""Dependencies of routes: their access, preconditions and pages.

Every route declares its access: ``dependencies=[requires("read")]``, or ``dependencies=[public]``.
`create_app` refuses an application with a route that does not. Below ``/api/`` a valid key is needed in any
case (`dcp.server.core.http.admission`), so that `public` is for other paths.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from fastapi import Depends, Header, Query, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic import BaseModel

from dcp.server.catalog.inputs import MAX_PAGE
from dcp.server.core.problems import (
    ForbiddenError,
    NotFoundError,
    PreconditionFailedError,
    PreconditionRequiredError,
    UnauthorizedError,
    UnprocessableError,
)
from dcp.server.core.security.principal import Principal, Scope

# All are coroutines, because FastAPI sends other functions to a thread, each by itself.


async def _caller(request: Request) -> Principal:
    principal = getattr(request.state, "principal", None)
    if not isinstance(principal, Principal):
        raise UnauthorizedError("send a key: Authorization: Bearer dcp_...")
    return principal


_Caller = Annotated[Principal, Depends(_caller)]


@dataclass(frozen=True, slots=True)
class Requires:
    """The dependency behind `requires`; the walk over all routes looks for it."""

    scope: Scope | None
    all_roots: bool = False

    async def __call__(self, caller: _Caller, request: Request) -> None:
        """Let the caller be one of the roots where it has the scope. Raises `ForbiddenError`, and
        `UnprocessableError` for a query that is unknown or twice there."""
        _check_query(request)
        if self.scope is None:
            return
        if not caller.may(self.scope):
            raise ForbiddenError(_needed(caller, self.scope), scope=self.scope)
        if self.all_roots and not caller.may_everywhere(self.scope):
            raise ForbiddenError(_needed(caller, self.scope, " for all roots"), scope=self.scope)
        request.state.principal = caller.having(self.scope)


def _needed(caller: Principal, scope: Scope, where: str = "") -> str:
    if caller.account_id is not None:
        needed = f"this needs a role with the scope {scope!r}{where}"
        if caller.key_id is None:
            return needed
        rights = "; ".join(f"{', '.join(held)} in {root}" for root, held in caller.scopes_by_root.items())
        return f"{needed}, and a key with it; this key has {rights or 'no rights'}"
    return f"this needs a key{where or f' with the scope {scope!r}'}"


@dataclass(frozen=True, slots=True)
class Public:
    """The dependency behind `public`."""

    async def __call__(self, request: Request) -> None:
        """Check the query. Raises `UnprocessableError` for a parameter that is unknown or given twice."""
        _check_query(request)


def _check_query(request: Request) -> None:
    """Refuse a parameter that is given twice, unless it is a list, and one that the API does not know. Pages
    check theirs themselves."""
    counts = Counter(name for name, _ in request.query_params.multi_items())
    if not counts:
        return
    is_list = _parameters_of(request.scope["route"])
    is_api = request.url.path.startswith("/api/")
    wrong = {name: "there is no such parameter" for name in counts if is_api and name not in is_list}
    several = (name for name, count in counts.items() if count > 1 and not is_list.get(name))
    wrong = dict.fromkeys(several, "given more than once") | wrong
    if wrong:
        found = [{"location": ["query", name], "message": why} for name, why in list(wrong.items())[:20]]
        name, why = next(iter(wrong.items()))
        raise UnprocessableError(f"query.{name}: {why}"[:500], errors=found)


def _parameters_of(route: APIRoute) -> dict[str, bool]:
    """Return the query parameters of a route, and which of them may be given several times."""
    found: dict[str, bool] = {}
    for field in _query_fields(route.dependant):
        model = field.field_info.annotation
        if isinstance(model, type) and issubclass(model, BaseModel):
            fields = model.model_fields.items()
            found |= {own.alias or name: _is_list(own.annotation) for name, own in fields}
        else:
            found[field.alias] = _is_list(model)
    return found


def _query_fields(dependant: Dependant) -> Iterator[Any]:
    yield from dependant.query_params
    for inner in dependant.dependencies:
        yield from _query_fields(inner)


def _is_list(annotation: Any) -> bool:
    kind = get_origin(annotation) or annotation
    if kind in (Union, UnionType, Annotated):
        return any(_is_list(part) for part in get_args(annotation))
    return isinstance(kind, type) and issubclass(kind, list | tuple | set | frozenset)


def requires(scope: Scope | None, *, all_roots: bool = False) -> Any:
    """In a route's ``dependencies``: only for keys with this scope (or "admin"); None: for each valid one.

    ``all_roots``: not for a key that is restricted to some, since what it does concerns all of them.
    """
    return Depends(Requires(scope, all_roots))


public: Final[Any] = Depends(Public())
"""In a route's ``dependencies``: no key is needed."""


def check_visible(caller: Principal, root: str) -> None:
    """Raises `NotFoundError` if the key is not for this root: it learns nothing of other roots, not even
    names."""
    if not caller.may_see(root):
        raise NotFoundError(f"there is no root {root!r}")


@dataclass(frozen=True, slots=True)
class Precondition:
    """The ``If-Match`` of a request: None without the header, ``*`` for whatever is there."""

    header: str | None

    @property
    def is_given(self) -> bool:
        """Return whether the request has the header."""
        return self.header is not None

    def version(self, prefix: str) -> int | None:
        """Return the version that is expected of the resource whose tags are ``"{prefix}-{version}"``.

        None: any will do. Raises `PreconditionFailedError` if none of the tags can be one of the resource.
        """
        if self.header is None or self.header.strip() == "*":
            return None
        for tag in self.header.split(","):
            match = re.fullmatch(rf'"{re.escape(prefix)}-([0-9]{{1,9}})"', tag.strip(" \t"))
            if match is not None:
                return int(match[1])
        raise PreconditionFailedError("If-Match names no state of this resource; read it again")

    def nothing(self, detail: str) -> None:
        """Refuse any tag, since the resource does not exist. Raises `PreconditionFailedError`."""
        if self.is_given:
            raise PreconditionFailedError(detail)

    def required(self) -> None:
        """Raises `PreconditionRequiredError` if the request has no ``If-Match``."""
        if not self.is_given:
            raise PreconditionRequiredError("send If-Match with the ETag of what you have read, or *")


async def _precondition(
    if_match: Annotated[
        str | None,
        Header(max_length=1024, description='An ETag such as "c12-3", or *; 412 if it changed since.'),
    ] = None,
) -> Precondition:
    return Precondition(if_match)


IfMatch = Annotated[Precondition, Depends(_precondition)]


@dataclass(frozen=True, slots=True)
class PageParams:
    """``limit`` rows after ``cursor``, which is the ``next_cursor`` of the page before."""

    limit: int
    cursor: str | None


async def _page(
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Rows of a page at most.")] = 50,
    cursor: Annotated[
        str | None,
        Query(min_length=1, max_length=2048, description="The next_cursor of the page before."),
    ] = None,
) -> PageParams:
    return PageParams(limit, cursor)


PageQuery = Annotated[PageParams, Depends(_page)]
