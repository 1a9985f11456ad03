"""``/checkpoints/{id}``: phases of its save, and the map of its shards."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from fastapi import Query, Request, Response

from dcp.server.core.answers import IdPath, problems
from dcp.server.core.data.access import DataDep
from dcp.server.core.data.opening import OpenCheckpoint, OpenChunks
from dcp.server.core.data.sending.responses import is_unchanged, not_modified
from dcp.server.core.http.dependencies import Caller, requires
from dcp.server.core.http.routers import api_router
from dcp.server.features.shards.answers import (
    PhasesAnswer,
    ShardMapAnswer,
    ShardMapQuery,
)

__all__ = ["router"]

router = api_router("/checkpoints/{checkpoint_id}", tags=["data"], dependencies=[requires("read")])

_PROBLEMS = problems(400, 401, 403, 404, 409, 410, 412, 421, 422, 429, 503)
_RESPONSES: dict[int | str, dict[str, Any]] = {
    304: {"description": "Nothing has changed (If-None-Match)."},
    **_PROBLEMS,
}
_Rank = Annotated[int, Query(ge=0, lt=1 << 31, description="Of the rows; phases are over all ranks.")]
_Side = Annotated[int, Query(ge=1, le=256, description="As many cells at most.")]


@router.get("/phases", response_model=PhasesAnswer, responses=_RESPONSES)
def get_phases(
    checkpoint_id: IdPath,
    request: Request,
    response: Response,
    data: DataDep,
    caller: Caller,
    rows: Annotated[int, Query(ge=1, le=2048, description="As many rows of ranks at most.")] = 256,
    first_rank: _Rank | None = None,
    last_rank: _Rank | None = None,
) -> Any:
    """How long the phases of its save took, by rank, as far as the save noted it."""
    from dcp.server.features.shards.phases import save_phases  # only here, as all that reads checkpoints

    found = data.chunks(checkpoint_id, caller)
    etag = _tagged(response, found, "phases", rows, first_rank, last_rank)
    if is_unchanged(request.headers, etag):
        return not_modified(etag)
    wanted = range(first_rank or 0, sys.maxsize if last_rank is None else last_rank + 1)
    return PhasesAnswer.of(save_phases(found.provenance, rows=rows, wanted=wanted))


@router.get("/shards/map", response_model=ShardMapAnswer, responses=_RESPONSES)
def get_shard_map(
    checkpoint_id: IdPath,
    query: Annotated[ShardMapQuery, Query()],
    request: Request,
    response: Response,
    data: DataDep,
    caller: Caller,
) -> Any:
    """Which rank holds what, and where: rows of files by rank, bins of bytes, the largest tensor in each."""
    from dcp.server.features.shards.shard_map import shard_map

    query.check()
    found = data.chunks(checkpoint_id, caller)
    etag = _tagged(response, found, "map", query)
    if is_unchanged(request.headers, etag):
        return not_modified(etag)
    return ShardMapAnswer.of(shard_map(found.columns, **query.model_dump()))


def _tagged(response: Response, found: OpenCheckpoint | OpenChunks, *facts: object) -> str:
    etag = found.etag(*facts)
    response.headers["ETag"] = etag
    response.headers["Cache-Control"] = "private, no-cache"
    return etag
