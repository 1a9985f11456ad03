"""To what somebody looks for: by words, and by the root and key that jobs and logs name."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlencode

from fastapi import Query, Request, Response
from fastapi.responses import RedirectResponse

from dcp.server.core.http.dependencies import Caller, Db, ServiceDep
from dcp.server.core.pages.queries import READ, pages_router, query_of
from dcp.server.core.pages.rendering import page
from dcp.server.features.checkpoints import finding
from dcp.server.features.checkpoints.queries import LookupQuery, SearchQuery
from dcp.server.features.search import api
from dcp.server.features.search.answers import SearchHitAnswer

__all__ = ["router"]

router = pages_router()


@router.get("/search", dependencies=READ)
def search_page(
    request: Request, database: Db, caller: Caller, q: Annotated[str | None, Query(max_length=256)] = None
) -> Response:
    """Runs, checkpoints, aliases, tags and tensors; the best first."""
    query = None if q is None or not q.strip() else query_of(SearchQuery, q=q.strip())
    hits = [] if query is None else api.search_names(query, database, caller).items
    twin = None if query is None else f"/api/v1/search?{urlencode({'q': query.q})}"
    return page(request, "search.html", twin=twin, q=q or "", hits=[(hit, _link(hit)) for hit in hits])


@router.get("/lookup", dependencies=READ)
def lookup_page(view: Annotated[LookupQuery, Query()], service: ServiceDep, caller: Caller) -> Response:
    """The page of the checkpoint that is called so."""
    found = finding.lookup_checkpoint(view, service, caller, Response())
    return RedirectResponse(f"/checkpoints/{found.id}", 303)


def _link(hit: SearchHitAnswer) -> str:
    """The page that shows it: of a tag all that have it."""
    if hit.kind == "run":
        return f"/runs/{hit.run_id}"
    if hit.kind == "tag":
        return f"/checkpoints?{urlencode({'tag': hit.text})}"
    if hit.kind == "tensor":
        return (
            f"/checkpoints/{hit.checkpoint_id}?{urlencode({'view': 'list', 'glob': hit.text[:200]})}#tensors"
        )
    return f"/checkpoints/{hit.checkpoint_id}"
