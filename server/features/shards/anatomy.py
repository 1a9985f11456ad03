"""Anatomy of a save: seconds by rank and phase, as the ranks noted them in the index."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Annotated, Any, Final
from urllib.parse import urlencode

from fastapi import Query

from dcp.server.catalog.details import get_checkpoint
from dcp.server.catalog.inputs import Query as QueryModel
from dcp.server.catalog.inputs import clean_text
from dcp.server.core.answers import IdPath
from dcp.server.core.ask import Ask
from dcp.server.core.data.responses import NOT_MODIFIED
from dcp.server.core.pages.formatting import seconds_text, times_text
from dcp.server.features.shards import KeptChunks, PhaseRow, Rank, SavePhase, SavePhases, feature, is_late

_WITHIN: Final[Mapping[str, str]] = {
    "staging": "blocked",
    "local_plan": "plan",
    "digests": "plan",
    "global_plan": "plan",
}
_MAX_PHASES: Final = 64
_BLOCKED: Final = "blocked"
"""Noted by asynchronous saves: all other phases run while training continues."""
_STRAGGLER: Final = 1.5
"""Multiple of the median from which a rank is a straggler."""
_SOON_SECONDS: Final = 0.05
"""A difference too small to matter."""
_ROWS: Final = 64
_HEIGHT: Final = 400
_SHADES: Final = 6
"""Shades of a cell: none for the median, the last for `_DARKEST` times the median."""
_DARKEST: Final = 2.5

_Seconds = Mapping[str, float]


@feature.get(
    "/checkpoints/{checkpoint_id}/phases",
    tag="data",
    errors=(400, 401, 403, 404, 409, 410, 412, 421, 422, 429, 503),
    responses=NOT_MODIFIED,
)
def get_phases(
    checkpoint_id: IdPath,
    ask: Ask,
    rows: Annotated[int, Query(ge=1, le=2048, description="As many rows of ranks at most.")] = 256,
    first_rank: Annotated[Rank | None, Query(description="Of the rows; phases are over all ranks.")] = None,
    last_rank: Annotated[Rank | None, Query(description="Of the rows; phases are over all ranks.")] = None,
) -> SavePhases:
    """Return the recorded seconds of each phase of the save by rank."""
    found = ask.service.own(KeptChunks).get(ask, checkpoint_id)
    ask.tag(found.etag("phases", rows, first_rank, last_rank))
    return _save_phases(found.provenance, rows, first_rank, last_rank)


def _save_phases(
    provenance: Mapping[str, Any], rows: int, first_rank: int | None, last_rank: int | None
) -> SavePhases:
    """Return the ranks from ``first_rank`` to ``last_rank`` in at most ``rows`` rows of equally many ranks;
    other values cover all ranks."""
    from dcp.inspection.checkpoints import figures_by_rank  # imports numpy

    wanted = range(first_rank or 0, sys.maxsize if last_rank is None else last_rank + 1)
    ranks = figures_by_rank(provenance.get("rank_seconds"))
    names = list(dict.fromkeys(name for seconds in ranks for name in seconds))[:_MAX_PHASES]
    phases = tuple(_phase(name, names, ranks) for name in names)
    whole = [phase for phase in phases if phase.within is None]
    assemble = provenance.get("assemble_seconds")
    return SavePhases(
        rank_count=len(ranks),
        phases=phases,
        rows=tuple(_rows(ranks, names, [phase.name for phase in whole], rows, wanted)),
        blocking_seconds=sum(phase.max_seconds for phase in whole if phase.is_blocking),
        background_seconds=sum(phase.max_seconds for phase in whole if not phase.is_blocking),
        assemble_seconds=float(assemble) if isinstance(assemble, float) else None,
    )


def _phase(name: str, names: Sequence[str], ranks: Sequence[_Seconds]) -> SavePhase:
    noted = {rank: seconds[name] for rank, seconds in enumerate(ranks) if name in seconds}
    within = _WITHIN.get(name)
    within = within if within in names else None
    is_blocking = _BLOCKED not in names or _BLOCKED in (name, within)
    slowest = max(noted, key=noted.__getitem__)
    return SavePhase(
        clean_text(name),
        within,
        is_blocking,
        len(noted),
        min(noted.values()),
        median(noted.values()),
        noted[slowest],
        slowest,
    )


def _rows(
    ranks: Sequence[_Seconds], names: Sequence[str], whole: Sequence[str], rows: int, wanted: range
) -> list[PhaseRow]:
    chosen = range(len(ranks))[wanted.start : wanted.stop]
    count = min(rows, len(chosen))
    totals = [sum(seconds.get(name, 0.0) for name in whole) for seconds in ranks]
    found = []
    for row in range(count):
        own = chosen[row * len(chosen) // count : (row + 1) * len(chosen) // count]
        slowest = max(own, key=totals.__getitem__)
        seconds = tuple(
            max((ranks[rank][name] for rank in own if name in ranks[rank]), default=None) for name in names
        )
        found.append(PhaseRow(own[0], own[-1], slowest, totals[slowest], seconds))
    return found


# -- the page ------------------------------------------------------------------------------------------------


class AnatomyView(QueryModel):
    """Displayed ranks."""

    first_rank: Rank | None = None
    last_rank: Rank | None = None
    wait: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """Phase of adjacent ranks; ``shade``: the excess over the median duration."""

    seconds: float | None
    shade: int
    is_straggler: bool


@feature.page("/checkpoints/{checkpoint_id}/anatomy", "anatomy.html")
def anatomy_page(checkpoint_id: IdPath, view: Annotated[AnatomyView, Query()], ask: Ask) -> dict[str, Any]:
    """Show totals by phase, and a heat map of ranks and phases as a table."""
    found = ask.find(get_checkpoint, checkpoint_id, ask.visible)
    waits = is_late(ask, found, waits=view.wait)
    provenance = {} if waits else ask.service.own(KeptChunks).get(ask, checkpoint_id).provenance
    phases = _in_order(_save_phases(provenance, _ROWS, view.first_rank, view.last_rank))
    part = urlencode(view.model_dump(exclude={"wait"}, exclude_none=True))
    return {
        "twin": f"/api/v1/checkpoints/{checkpoint_id}/phases" + (f"?{part}" if part else ""),
        "found": found,
        "view": view,
        "is_late": waits,
        "phases": phases,
        "sentences": _sentences(phases),
        "rows": [(row, _cells(row, phases)) for row in phases.rows],
        "row_height": max(5, min(22, _HEIGHT // max(1, len(phases.rows)))),
        "longest_seconds": max((phase.max_seconds for phase in phases.phases), default=0.0),
        "is_straggler": _is_straggler,
    }


def _in_order(found: SavePhases) -> SavePhases:
    """Put each phase before its parts."""
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
    return [Cell(seconds, _shade(seconds, phase), _is_straggler(seconds, phase)) for seconds, phase in pairs]


def _shade(seconds: float | None, phase: SavePhase) -> int:
    if seconds is None or not phase.median_seconds or seconds < phase.median_seconds + _SOON_SECONDS:
        return 0
    above = (seconds / phase.median_seconds - 1) / (_DARKEST - 1)
    return round(_SHADES * min(1.0, max(0.0, above)))


def _is_straggler(seconds: float | None, phase: SavePhase) -> bool:
    """Return True if a rank took so long that other ranks waited."""
    longest_seconds = max(_STRAGGLER * phase.median_seconds, phase.median_seconds + _SOON_SECONDS)
    # with a median of 0, only the coordinator works in the phase
    return seconds is not None and phase.median_seconds > 0 and seconds > longest_seconds


def _sentences(found: SavePhases) -> list[str]:
    """Describe the longest phases of a save, and the rank that others waited for."""
    whole = [phase for phase in found.phases if phase.within is None]
    if not whole:
        return []
    longest = max(whole, key=lambda phase: phase.max_seconds)
    blocking, behind = seconds_text(found.blocking_seconds), seconds_text(found.background_seconds)
    if all(phase.is_blocking for phase in whole):
        sentences = [f"The save took {blocking}, and training waited the whole time."]
    else:
        sentences = [f"Training waited {blocking}; {behind} ran in the background."]
    sentences.append(f"The longest phase was {_readable(longest.name)}: {_took(longest)}.")
    held_up = [phase for phase in whole if phase is not longest and phase.is_blocking]
    return sentences + [
        f"{_readable(phase.name).capitalize()}: {_took(phase)}."
        for phase in held_up
        if _is_straggler(phase.max_seconds, phase)
    ]


def _readable(name: str) -> str:
    return name.replace("_", " ")


def _took(phase: SavePhase) -> str:
    seconds = seconds_text(phase.max_seconds)
    if phase.ranks == 1:
        return seconds
    if not phase.median_seconds:
        return f"{seconds} on rank {phase.slowest_rank}"
    if not _is_straggler(phase.max_seconds, phase):
        return f"{seconds}, about the same on all ranks"
    times = times_text(phase.max_seconds / phase.median_seconds)
    return (
        f"it waited for rank {phase.slowest_rank}, which took {seconds}, {times} times the median of "
        f"{seconds_text(phase.median_seconds)}"
    )
