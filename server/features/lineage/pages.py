"""Where a checkpoint comes from and what was made of it, as a graph."""

from __future__ import annotations

from collections import defaultdict

from fastapi import Request, Response

from dcp.server.core.answers import IdPath
from dcp.server.core.http.dependencies import Caller, Db
from dcp.server.core.pages.queries import READ, pages_router
from dcp.server.core.pages.rendering import page
from dcp.server.features.checkpoints import api as checkpoints_api
from dcp.server.features.lineage import api
from dcp.server.features.lineage.graphs import graph_of

__all__ = ["router"]

router = pages_router()


@router.get("/checkpoints/{checkpoint_id}/lineage", dependencies=READ)
def lineage_page(checkpoint_id: IdPath, request: Request, database: Db, caller: Caller) -> Response:
    """All of its ancestors and descendants that the key may see, the first of them drawn."""
    found = checkpoints_api.get_checkpoint(checkpoint_id, database, caller, Response())
    lineage = api.get_lineage(checkpoint_id, database, caller)
    origins = defaultdict(list)
    for edge in lineage.edges:
        origins[edge.child_id].append(edge)
    return page(
        request,
        "lineage.html",
        twin=f"/api/v1/checkpoints/{checkpoint_id}/lineage",
        found=found,
        nodes=sorted(lineage.nodes, key=lambda node: (node.distance, node.id)),
        names={node.id: node.key.rpartition("/")[2] for node in lineage.nodes},
        origins=origins,
        kinds=sorted({edge.kind for edge in lineage.edges}),
        graph=graph_of(lineage.nodes, lineage.edges),
        is_cut=lineage.is_cut,
    )
