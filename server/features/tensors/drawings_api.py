"""``/checkpoints/{id}/tensors``: pictures and statistics of one."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, get_args

from fastapi import Query, Request, Response

from dcp.server.core.answers import IdPath, problems
from dcp.server.core.data.access import DataDep
from dcp.server.core.data.opening import OpenCheckpoint, OpenChunks
from dcp.server.core.data.sending.responses import is_unchanged, not_modified
from dcp.server.core.http.dependencies import Caller, requires
from dcp.server.core.http.routers import api_router
from dcp.server.features.statistics.kept import kept_statistics
from dcp.server.features.tensors.api import Fqn
from dcp.server.features.tensors.drawing_answers import (
    GridAnswer,
    GridValue,
    TensorStatisticsAnswer,
)
from dcp.server.features.tensors.slices import parse_slices

__all__ = ["router"]

router = api_router("/checkpoints/{checkpoint_id}", tags=["data"], dependencies=[requires("read")])

_PROBLEMS = problems(400, 401, 403, 404, 409, 410, 412, 421, 422, 429, 503)
_RESPONSES: dict[int | str, dict[str, Any]] = {
    304: {"description": "Nothing has changed (If-None-Match)."},
    **_PROBLEMS,
}
_Rank = Annotated[int, Query(ge=0, lt=1 << 31, description="Of the rows; phases are over all ranks.")]
_Side = Annotated[int, Query(ge=1, le=256, description="As many cells at most.")]


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
    from dcp.server.features.tensors.grids import tensor_grid

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
    from dcp.server.features.tensors.grids import tensor_statistics

    kept = kept_statistics(data.service, checkpoint_id, fqn, caller)
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
