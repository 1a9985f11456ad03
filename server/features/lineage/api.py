"""``/checkpoints/{id}/lineage``."""

from __future__ import annotations

from dcp.server.catalog.lineage import lineage_of
from dcp.server.core.answers import IdPath, problems
from dcp.server.core.http.dependencies import Caller, Db, requires
from dcp.server.core.http.routers import api_router
from dcp.server.features.lineage.answers import LineageAnswer

__all__ = ["router"]

router = api_router("/checkpoints/{checkpoint_id}", tags=["checkpoints"])


@router.get("/lineage", dependencies=[requires("read")], responses=problems(404))
def get_lineage(checkpoint_id: IdPath, database: Db, caller: Caller) -> LineageAnswer:
    """What the checkpoint was made of, and what was made of it."""
    with database.read() as connection:
        return LineageAnswer.of(lineage_of(connection, checkpoint_id, caller.roots))
