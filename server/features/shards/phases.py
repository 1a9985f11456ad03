"""How a save went: seconds by rank and phase, as the ranks noted them in the index."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from dcp.inspection.checkpoints import figures_by_rank
from dcp.server.catalog.values import clean_text
from dcp.server.records.drawings import PhaseRow, SavePhase, SavePhases

__all__ = ["save_phases"]

_WITHIN: Final[Mapping[str, str]] = {
    "staging": "blocked",
    "local_plan": "plan",
    "digests": "plan",
    "global_plan": "plan",
}
_MAX_PHASES: Final = 64
_BLOCKED: Final = "blocked"
"""What an asynchronous save notes: all else is done while training goes on."""

_Seconds = Mapping[str, float]


def save_phases(
    provenance: Mapping[str, Any], *, rows: int = 256, wanted: range = range(sys.maxsize)
) -> SavePhases:
    """The ``wanted`` ranks in at most ``rows`` rows of about as many neighbours; all else is over all."""
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
