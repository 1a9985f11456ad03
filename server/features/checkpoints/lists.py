"""Lists of checkpoints with counts beside their filters: of all runs, and as a part of a run's page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Query, Request, Response

from dcp.server.core.http.dependencies import Caller, Db
from dcp.server.core.pages.formatting import metrics_of
from dcp.server.core.pages.queries import READ, pages_router, query_of
from dcp.server.core.pages.rendering import page
from dcp.server.features.checkpoints import api, finding
from dcp.server.features.checkpoints.queries import CheckpointQuery, FacetQuery
from dcp.server.features.checkpoints.views import CheckpointsView, ListView

__all__ = ["listed", "loss_of", "router"]

router = pages_router()

_ROWS: Final = 50
_OF_ALL: Final = ("root", "run")


@router.get("/checkpoints", dependencies=READ)
def checkpoints_page(
    view: Annotated[CheckpointsView, Query()], request: Request, database: Db, caller: Caller
) -> Response:
    """Those of all runs, the newest first."""
    found = listed(view, database, caller)
    names = {name for one in found["checkpoints"] for name in metrics_of(one)}
    metric = view.metric or loss_of(sorted(names))
    query = urlencode({**view.filters, "sort": view.sort}, doseq=True)
    return page(request, "checkpoints.html", twin=f"/api/v1/checkpoints?{query}", metric=metric, **found)


def listed(view: ListView, database: Db, caller: Caller, run_id: int | None = None) -> dict[str, Any]:
    """What `checkpoint_list.html` shows; of one run, or of all."""
    filters = view.filters | ({} if run_id is None else {"run_id": run_id})
    query = query_of(CheckpointQuery, **filters, sort=view.sort, cursor=view.cursor, limit=_ROWS)
    found = api.list_checkpoints(query, database, caller)
    facets = finding.get_checkpoint_facets(query_of(FacetQuery, **filters, values=12), database, caller)
    return {
        "view": view,
        "run_id": run_id,
        "checkpoints": found.items,
        "next_cursor": found.next_cursor,
        "notes": found.notes,
        "count": facets.count,
        "facets": [one for one in facets.facets if run_id is None or one.name not in _OF_ALL],
        "is_filtered": bool(view.filters),
    }


def loss_of(names: Iterable[str]) -> str | None:
    """The metric that is shown first: one that is called a loss, or the first by name."""
    ordered = sorted(names)
    return next((name for name in ordered if "loss" in name.lower()), ordered[0] if ordered else None)
