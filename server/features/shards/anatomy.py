"""How a checkpoint was saved: seconds by rank and phase, and what the save was waiting for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Final
from urllib.parse import urlencode

from fastapi import Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from dcp.server.core.answers import IdPath
from dcp.server.core.data.access import DataDep
from dcp.server.core.http.dependencies import Caller, Db
from dcp.server.core.pages.queries import READ, pages_router
from dcp.server.core.pages.rendering import page
from dcp.server.features.checkpoints import api as checkpoints_api
from dcp.server.features.shards.pages import is_late
from dcp.server.features.shards.sentences import SOON_SECONDS, is_straggler, waiting_of
from dcp.server.records.drawings import PhaseRow, SavePhase, SavePhases

__all__ = ["router"]

router = pages_router()

_ROWS: Final = 64
_HEIGHT: Final = 400
_SHADES: Final = 6
"""Of a cell, from none for the median to the last for `_DARKEST` times as long."""
_DARKEST: Final = 2.5

_Rank = Annotated[int, Field(ge=0, lt=1 << 31)]


class AnatomyView(BaseModel):
    """Which ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    first_rank: _Rank | None = None
    last_rank: _Rank | None = None
    wait: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """A phase of neighbouring ranks: ``shade`` is by how much longer it took than it did for half of them."""

    seconds: float | None
    shade: int
    is_straggler: bool


@router.get("/checkpoints/{checkpoint_id}/anatomy", dependencies=READ)
def anatomy_page(
    checkpoint_id: IdPath,
    view: Annotated[AnatomyView, Query()],
    request: Request,
    database: Db,
    data: DataDep,
    caller: Caller,
) -> Response:
    """Totals by phase, and a heat map of ranks and phases, which is a table."""
    from dcp.server.features.shards.phases import save_phases  # only here, as all that reads checkpoints

    found = checkpoints_api.get_checkpoint(checkpoint_id, database, caller, Response())
    waits = is_late(found, request, data, caller, waits=view.wait)
    last = 1 << 31 if view.last_rank is None else view.last_rank + 1
    provenance = {} if waits else data.chunks(checkpoint_id, caller).provenance
    phases = _in_order(save_phases(provenance, rows=_ROWS, wanted=range(view.first_rank or 0, last)))
    part = urlencode(view.model_dump(exclude={"wait"}, exclude_none=True))
    path = f"/api/v1/checkpoints/{checkpoint_id}/phases"
    return page(
        request,
        "anatomy.html",
        twin=f"{path}?{part}" if part else path,
        found=found,
        view=view,
        is_late=waits,
        phases=phases,
        said=waiting_of(phases),
        rows=[(row, _cells(row, phases)) for row in phases.rows],
        row_height=max(5, min(22, _HEIGHT // max(1, len(phases.rows)))),
        longest_seconds=max((phase.max_seconds for phase in phases.phases), default=0.0),
        is_straggler=is_straggler,
    )


def _in_order(found: SavePhases) -> SavePhases:
    """Each phase before its parts."""
    names = [phase.name for phase in found.phases]
    order = sorted(
        range(len(names)),
        key=lambda at: (
            names.index(within) if (within := found.phases[at].within) else at,
            within is not None,
        ),
    )
    rows = (replace(row, seconds=tuple(row.seconds[at] for at in order)) for row in found.rows)
    return replace(found, phases=tuple(found.phases[at] for at in order), rows=tuple(rows))


def _cells(row: PhaseRow, found: SavePhases) -> list[Cell]:
    pairs = zip(row.seconds, found.phases, strict=True)
    return [Cell(seconds, _shade(seconds, phase), is_straggler(seconds, phase)) for seconds, phase in pairs]


def _shade(seconds: float | None, phase: SavePhase) -> int:
    if seconds is None or not phase.median_seconds or seconds < phase.median_seconds + SOON_SECONDS:
        return 0
    above = (seconds / phase.median_seconds - 1) / (_DARKEST - 1)
    return round(_SHADES * min(1.0, max(0.0, above)))
