"""The layers of a checkpoint: which are dead, which explode, how large they are."""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal

from fastapi import Query, Request, Response

from dcp.server.catalog.names import in_order
from dcp.server.catalog.verifications import get_statistics, statistics_tensors
from dcp.server.core.answers import IdPath
from dcp.server.core.data.access import DataAccess, DataDep
from dcp.server.core.http.dependencies import Caller, Db
from dcp.server.core.pages.marks import LARGE
from dcp.server.core.pages.queries import READ, pages_router
from dcp.server.core.pages.rendering import page
from dcp.server.core.security.principal import Principal
from dcp.server.features.checkpoints import api
from dcp.server.features.tensors.layer_drawing import Layer, layers_of
from dcp.server.features.tensors.pages import statistics_jobs

__all__ = ["router"]

router = pages_router()

_ROWS: Final = 200
_Order = Literal["name", "norm", "largest", "zeros", "gradient"]


def _falling(value: float | None) -> float:
    """NaN comes before all numbers, and what is not known after them."""
    return 1.0 if value is None else -math.inf if math.isnan(value) else -value


_KEYS: Final[dict[str, Any]] = {
    "name": lambda layer: in_order(layer.name),
    "norm": lambda layer: _falling(layer.norm),
    "largest": lambda layer: _falling(layer.largest),
    "zeros": lambda layer: -layer.zeros / max(1, layer.elements),
    "gradient": lambda layer: _falling(layer.gradient_rms),
}


@router.get("/checkpoints/{checkpoint_id}/layers", dependencies=READ)
def layers_page(
    checkpoint_id: IdPath,
    request: Request,
    database: Db,
    data: DataDep,
    caller: Caller,
    mark: Literal["any", "dead", "exploding"] | None = None,
    sort: _Order = "name",
    cursor: Annotated[int, Query(ge=0, le=10**7)] = 0,
) -> Response:
    """By layer, what the statistics of its tensors say; those that are marked by themselves."""
    found = api.get_checkpoint(checkpoint_id, database, caller, Response())
    layers = _layers(checkpoint_id, database, data, caller)
    shown = [
        layer
        for layer in layers or ()
        if mark is None or (layer.marks if mark == "any" else layer.marks[mark])
    ]
    shown.sort(key=_KEYS[sort])
    return page(
        request,
        "layers.html",
        twin=f"/api/v1/checkpoints/{checkpoint_id}" + ("" if layers is None else "/statistics"),
        found=found,
        is_known=layers is not None,
        layers=shown[cursor : cursor + _ROWS],
        count=len(layers or ()),
        next_cursor=cursor + _ROWS if len(shown) > cursor + _ROWS else None,
        is_first=cursor == 0,
        totals={kind: sum(layer.marks[kind] for layer in layers or ()) for kind in ("exploding", "dead")},
        jobs=statistics_jobs(checkpoint_id, database, caller),
        mark=mark,
        sort=sort,
        large=LARGE,
    )


def _layers(checkpoint_id: int, database: Db, data: DataAccess, caller: Principal) -> list[Layer] | None:
    """None where no job has computed statistics of what the checkpoint is now."""
    from dcp.server.features.tensors.optimizer_states import (
        OptimizerStates,  # only here, as all that reads checkpoints
    )

    with database.read() as connection:
        kept = get_statistics(connection, checkpoint_id, caller.roots)
        if kept is None or kept.is_stale:
            return None
        tensors = statistics_tensors(connection, checkpoint_id, 0, kept.tensor_count)
    readable = data.open(checkpoint_id, caller)
    with readable.problems():
        states = OptimizerStates(readable.opened.whole_index)
    weights = {
        name: kept.weights[0] for kept in states if len(kept.weights) == 1 for name in kept.states.values()
    }
    return layers_of(tensors, weights, states.is_state)
