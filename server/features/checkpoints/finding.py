"""``/checkpoints/facets`` and ``/checkpoints/lookup``.

Before the routes of ``/checkpoints/{checkpoint_id}``, which these names are none of.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Response

from dcp.server.catalog.details import CheckpointName, find_checkpoint
from dcp.server.catalog.facets import checkpoint_facets
from dcp.server.catalog.filter_checks import check_filter
from dcp.server.catalog.filters import Sort
from dcp.server.core.answers import problems
from dcp.server.core.http.dependencies import Caller, Db, ServiceDep, requires
from dcp.server.core.http.routers import api_router
from dcp.server.core.problems import UnprocessableError
from dcp.server.features.checkpoints.answers import CheckpointDetailAnswer, FacetsAnswer
from dcp.server.features.checkpoints.queries import FacetQuery, LookupQuery
from dcp.server.features.scan.registering import place_of

__all__ = ["router"]

router = api_router(dependencies=[requires("read")])


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
