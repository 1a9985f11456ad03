"""``/search``: runs, checkpoints, aliases, tags and tensors by their names."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query

from dcp.server.catalog.search import search
from dcp.server.core.http.dependencies import Caller, Db, requires
from dcp.server.core.http.routers import api_router
from dcp.server.features.checkpoints.queries import SearchQuery
from dcp.server.features.search.answers import SearchAnswer

__all__ = ["router"]

router = api_router(dependencies=[requires("read")])


@router.get("/search", name="search", tags=["search"])
def search_names(query: Annotated[SearchQuery, Query()], database: Db, caller: Caller) -> SearchAnswer:
    """Runs, checkpoints, aliases, tags and tensors that have `q` in their names, the best first. Large and
    small letters are the same. A number is a step, too; `run/name` is a path."""
    with database.read() as connection:
        found = search(connection, query.q, caller.roots, kinds=query.kind, limit=query.limit)
    return SearchAnswer.of(found)
