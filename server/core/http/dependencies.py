"""Dependencies of routes: access, preconditions and paging.

Every route declares its access: ``dependencies=[requires("read")]`` or ``dependencies=[public]``.
`create_app` refuses undeclared routes. Below ``/api/`` a valid key is always needed
(`dcp.server.core.http.admission`); `public` is for other paths.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
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

# Coroutines, because FastAPI runs other functions in a thread.


async def _caller(request: Request) -> Principal:
    principal = getattr(request.state, "principal", None)
    if not isinstance(principal, Principal):
        raise UnauthorizedError("send a key: Authorization: Bearer dcp_...")
    return principal


_Caller = Annotated[Principal, Depends(_caller)]


@dataclass(frozen=True, slots=True)
class Requires:
    """The dependency behind `requires`, found by the check of all routes."""

    scope: Scope | None
    all_roots: bool = False

    async def __call__(self, caller: _Caller, request: Request) -> None:
        """Restrict the caller to the roots with the scope.

        Raises `ForbiddenError`, and `UnprocessableError` for unknown or repeated query parameters.
        """
        _check_query(request)
        if self.scope is None:
            return
        if not (caller.may_everywhere(self.scope) if self.all_roots else caller.may(self.scope)):
            where = _ALL_ROOTS if self.all_roots else await _place_of(request)
            raise ForbiddenError(_needed(caller, self.scope, where), scope=self.scope)
        request.state.principal = caller.having(self.scope)


def _needed(caller: Principal, scope: Scope, where: str) -> str:
    if caller.account_id is None:
        return f"a key with the scope {scope!r}{where} is required"
    needed = f"{caller.account} needs a role with the scope {scope!r}{where}"
    if caller.key_id is not None:
        rights = "; ".join(f"{', '.join(held)} in {root}" for root, held in caller.scopes_by_root.items())
        needed += f", and a key with this scope; this key has {rights or 'no rights'}"
    place = f"on the page /people/{caller.account_id} or by POST /api/v1/grants"
    return f"{needed}. An admin of {'all roots' if where == _ALL_ROOTS else 'the root'} grants roles {place}"


_ALL_ROOTS: Final = " for all roots"


async def _place_of(request: Request) -> str:
    """Return the end of a sentence with the root that the request names; "" without one."""
    root: object = request.path_params.get("root") or request.query_params.get("root")
    if root is None and request.scope["route"].body_field is not None:
        with suppress(ValueError):
            body = await request.json()
            root = body.get("root") if isinstance(body, dict) else None
    return f" in root {root[:100]!r}" if isinstance(root, str) and root else ""


@dataclass(frozen=True, slots=True)
class Public:
    """The dependency behind `public`."""

    async def __call__(self, request: Request) -> None:
        """Check the query. Raises `UnprocessableError` for unknown or repeated parameters."""
        _check_query(request)


def _check_query(request: Request) -> None:
    """Refuse unknown parameters of the API and repeated parameters except lists. Pages check their own."""
    counts = Counter(name for name, _ in request.query_params.multi_items())
    if not counts:
        return
    is_list = _parameters_of(request.scope["route"])
    is_api = request.url.path.startswith("/api/")
    wrong = {name: "unknown parameter" for name in counts if is_api and name not in is_list}
    several = (name for name, count in counts.items() if count > 1 and not is_list.get(name))
    wrong = dict.fromkeys(several, "must be given only once") | wrong
    if wrong:
        found = [{"location": ["query", name], "message": why} for name, why in list(wrong.items())[:20]]
        name, why = next(iter(wrong.items()))
        raise UnprocessableError(f"query.{name}: {why}"[:500], errors=found)


def _parameters_of(route: APIRoute) -> dict[str, bool]:
    """Return the query parameters of a route, and the repeatable ones."""
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
    """Return a dependency for keys with this scope (or "admin"); None admits every valid key.

    ``all_roots`` refuses keys limited to some roots, since the operation affects all.
    """
    return Depends(Requires(scope, all_roots))


public: Final[Any] = Depends(Public())
"""Dependency of routes without keys."""


def check_visible(caller: Principal, root: str) -> None:
    """Raise `NotFoundError` if the key does not include this root; other roots, even their names, stay
    hidden."""
    if not caller.may_see(root):
        raise NotFoundError(f"root {root!r} not found")


@dataclass(frozen=True, slots=True)
class Precondition:
    """The ``If-Match`` of a request: None without the header, ``*`` for any version."""

    header: str | None

    @property
    def is_given(self) -> bool:
        """Return True if the request has the header."""
        return self.header is not None

    def version(self, prefix: str) -> int | None:
        """Return the expected version of the resource with tags ``"{prefix}-{version}"``; None accepts any.

        Raises `PreconditionFailedError` if no tag can belong to the resource.
        """
        if self.header is None or self.header.strip() == "*":
            return None
        for tag in self.header.split(","):
            match = re.fullmatch(rf'"{re.escape(prefix)}-([0-9]{{1,9}})"', tag.strip(" \t"))
            if match is not None:
                return int(match[1])
        raise PreconditionFailedError("If-Match is not an ETag of this resource; read the resource again")

    def nothing(self, detail: str) -> None:
        """Raise `PreconditionFailedError` for any tag, since the resource does not exist."""
        if self.is_given:
            raise PreconditionFailedError(detail)

    def required(self) -> None:
        """Raise `PreconditionRequiredError` without ``If-Match``."""
        if not self.is_given:
            raise PreconditionRequiredError("the request needs If-Match with the ETag of the object, or *")


async def _precondition(
    if_match: Annotated[
        str | None,
        Header(max_length=1024, description='An ETag such as "c12-3", or *; 412 after a change.'),
    ] = None,
) -> Precondition:
    return Precondition(if_match)


IfMatch = Annotated[Precondition, Depends(_precondition)]


@dataclass(frozen=True, slots=True)
class PageParams:
    """``limit`` rows after ``cursor``, the ``next_cursor`` of the previous page."""

    limit: int
    cursor: str | None


async def _page(
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE, description="Maximum rows of a page.")] = 50,
    cursor: Annotated[
        str | None,
        Query(min_length=1, max_length=2048, description="The next_cursor of the previous page."),
    ] = None,
) -> PageParams:
    return PageParams(limit, cursor)


PageQuery = Annotated[PageParams, Depends(_page)]
