"""``/search``, ``/checkpoints/facets`` and ``/checkpoints/lookup``: to what one looks for.

Included before the routes of ``/checkpoints/{checkpoint_id}``, which these names are none of.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Response

from dcp.server.catalog.queries.facets import checkpoint_facets
from dcp.server.catalog.queries.filters import Sort
from dcp.server.catalog.queries.known import check_filter
from dcp.server.catalog.queries.lookup import CheckpointName, find_checkpoint
from dcp.server.catalog.queries.search import search
from dcp.server.http.dependencies import Caller, Db, ServiceDep, requires
from dcp.server.http.routers import api_router
from dcp.server.problems import UnprocessableError
from dcp.server.scanning.registering import place_of
from dcp.server.schemas.checkpoints import CheckpointDetailAnswer
from dcp.server.schemas.common import problems
from dcp.server.schemas.queries import FacetQuery, LookupQuery, SearchQuery
from dcp.server.schemas.search import FacetsAnswer, SearchAnswer

__all__ = ["router"]

router = api_router(dependencies=[requires("read")])


@router.get("/search", name="search", tags=["search"])
def search_names(query: Annotated[SearchQuery, Query()], database: Db, caller: Caller) -> SearchAnswer:
    """Runs, checkpoints, aliases, tags and tensors that have `q` in their names, the best first. Large and
    small letters are the same. A number is a step, too; `run/name` is a path."""
    with database.read() as connection:
        found = search(connection, query.q, caller.roots, kinds=query.kind, limit=query.limit)
    return SearchAnswer.of(found)


@router.get("/checkpoints/facets", tags=["checkpoints"])
def get_checkpoint_facets(
    query: Annotated[FacetQuery, Query()], database: Db, caller: Caller
) -> FacetsAnswer:
    """How many checkpoints the list would have with each value of its filters, all others applied."""
    with database.read() as connection:
        check_filter(connection, query.wanted, Sort(), caller.roots)
        found = checkpoint_facets(connection, query.wanted, caller.roots, limit=query.values)
    return FacetsAnswer.of(found)


@router.get("/checkpoints/lookup", tags=["checkpoints"], responses=problems(404))
def lookup_checkpoint(
    query: Annotated[LookupQuery, Query()], service: ServiceDep, caller: Caller, response: Response
) -> CheckpointDetailAnswer:
    """The checkpoint that is called so. Of several, as in other roots and formats, a committed one, and the
    newest."""
    given = query.model_dump(exclude={"uri"})
    if query.uri is not None:
        if any(value is not None for value in given.values()):
            raise UnprocessableError("a uri needs nothing beside it", field="uri")
        given["root"], given["key"] = place_of(service.roots, query.uri, caller.roots)
    name = CheckpointName(**given)
    with service.database.read() as connection:
        detail = find_checkpoint(connection, name, caller.roots)
    response.headers["ETag"] = detail.etag
    return CheckpointDetailAnswer.of(detail)
