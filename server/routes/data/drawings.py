"""``/checkpoints/{id}``: what is drawn of one: phases of a save, the map of shards, cells of a tensor."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated, Any, get_args

from fastapi import Query, Request, Response

from dcp.server.data.access import DataDep
from dcp.server.data.opening import OpenCheckpoint, OpenChunks
from dcp.server.data.sending.responses import is_unchanged, not_modified
from dcp.server.data.slices import parse_slices
from dcp.server.http.dependencies import Caller, requires
from dcp.server.http.routers import api_router
from dcp.server.routes.data.tensors import Fqn
from dcp.server.schemas.common import IdPath, problems
from dcp.server.schemas.contents.drawings import (
    GridAnswer,
    GridValue,
    PhasesAnswer,
    ShardMapAnswer,
    ShardMapQuery,
    TensorStatisticsAnswer,
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
    from dcp.server.data.drawings.phases import save_phases  # only here, as all that reads checkpoints

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
    from dcp.server.data.drawings.shard_map import shard_map

    query.check()
    found = data.chunks(checkpoint_id, caller)
    etag = _tagged(response, found, "map", query)
    if is_unchanged(request.headers, etag):
        return not_modified(etag)
    return ShardMapAnswer.of(shard_map(found.columns, **query.model_dump()))


@router.get("/tensors/grid", response_model=GridAnswer, responses=_RESPONSES)
def get_tensor_grid(
    checkpoint_id: IdPath,
    fqn: Fqn,
    request: Request,
    response: Response,
    data: DataDep,
    caller: Caller,
    taken: Annotated[
        str | None,
        Query(alias="slice", max_length=512, description="What leaves two dimensions.", examples=["0,:,:"]),
    ] = None,
    rows: _Side = 128,
    columns: _Side = 128,
    value: Annotated[list[GridValue] | None, Query(max_length=5, description="All, if not given.")] = None,
) -> Any:
    """A tensor, or a slice of it, in cells with the mean, the least and the greatest of what each covers.

    Only what this needs is read; of more than some ten million elements a part of each cell.
    """
    from dcp.server.data.drawings.grids import tensor_grid

    slices = parse_slices(taken)
    found = data.open(checkpoint_id, caller)
    etag = _tagged(response, found.opened, "grid", fqn, slices, rows, columns, value)
    if is_unchanged(request.headers, etag):
        return not_modified(etag)
    with found.problems():
        grid = tensor_grid(found.opened, fqn, slices, rows=rows, columns=columns)
    left_out = () if value is None else set(get_args(GridValue)) - set(value)
    emptied: dict[str, Any] = dict.fromkeys(left_out, ())
    return GridAnswer.of(replace(grid, **emptied))


@router.get("/tensors/statistics", responses=_PROBLEMS)
def get_tensor_statistics(
    checkpoint_id: IdPath, fqn: Fqn, data: DataDep, caller: Caller
) -> TensorStatisticsAnswer:
    """Statistics of one tensor: as a job has computed them; else, if it is not large, it is read now."""
    from dcp.server.data.drawings.grids import tensor_statistics

    kept = data.kept_statistics(checkpoint_id, fqn, caller)
    if kept is not None:
        return TensorStatisticsAnswer.of(kept)
    found = data.open(checkpoint_id, caller)
    with found.problems():
        return TensorStatisticsAnswer.of(tensor_statistics(found.opened, fqn))


def _tagged(response: Response, found: OpenCheckpoint | OpenChunks, *facts: object) -> str:
    etag = found.etag(*facts)
    response.headers["ETag"] = etag
    response.headers["Cache-Control"] = "private, no-cache"
    return etag
