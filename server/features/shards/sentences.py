"""What pictures show, in words: whether ranks wrote as much as each other, what a save was waiting for."""

from __future__ import annotations

from typing import Final

from dcp.server.core.pages.formatting import bytes_text, count_text, seconds_text, times_text
from dcp.server.records.drawings import SavePhase, SavePhases, ShardMap

__all__ = ["SOON_SECONDS", "balance_of", "is_straggler", "phase_name", "waiting_of"]

_SAME: Final = 1.005
_EVEN: Final = 1.05
"""Of the mean: what is below is no imbalance."""
_STRAGGLER: Final = 1.5
"""Of the median."""
SOON_SECONDS: Final = 0.05
"""A difference that nobody waits for."""


def balance_of(found: ShardMap, world_size: int | None, *, is_whole: bool = True) -> list[str]:
    """Sentences on how much the ranks of a map wrote; of ranks that wrote nothing only where it is whole."""
    if found.largest_rank is None or not found.mean_rank_bytes:
        return ["The names of its files do not tell which rank wrote them."] if found.rows else []
    said = [_share(found)]
    silent = (world_size or 0) - found.rank_count
    if is_whole and silent > 0:
        said.append(f"{count_text(silent)} of {count_text(world_size)} ranks wrote nothing.")
    again = sum(row.replicated_bytes for row in found.rows)
    if again:
        said.append(f"{bytes_text(again)} are of tensors that are stored more than once: replicas.")
    return said


def _share(found: ShardMap) -> str:
    mean, ratio = bytes_text(found.mean_rank_bytes), found.largest_rank_bytes / found.mean_rank_bytes
    if found.rank_count == 1:
        return f"Rank {found.largest_rank} wrote all of it, {bytes_text(found.largest_rank_bytes)}."
    if ratio < _SAME:
        return f"All {count_text(found.rank_count)} ranks wrote as much as each other: {mean}."
    if ratio < _EVEN:
        return f"All wrote about as much: {mean} each, no rank above {times_text(ratio)} times that."
    return (
        f"Rank {found.largest_rank} wrote {times_text(ratio)} times the mean: "
        f"{bytes_text(found.largest_rank_bytes)}, where it is {mean}."
    )


def phase_name(name: str) -> str:
    """As it is read."""
    return name.replace("_", " ")


def is_straggler(seconds: float | None, phase: SavePhase) -> bool:
    """Whether a rank took so much longer than most that the others had to wait for it."""
    longest_seconds = max(_STRAGGLER * phase.median_seconds, phase.median_seconds + SOON_SECONDS)
    # what most ranks do not do at all is the coordinator's
    return seconds is not None and phase.median_seconds > 0 and seconds > longest_seconds


def waiting_of(found: SavePhases) -> list[str]:
    """Sentences on what took the time of a save, and for which rank the others waited."""
    whole = [phase for phase in found.phases if phase.within is None]
    if not whole:
        return []
    longest = max(whole, key=lambda phase: phase.max_seconds)
    blocking, behind = seconds_text(found.blocking_seconds), seconds_text(found.background_seconds)
    if all(phase.is_blocking for phase in whole):
        said = [f"The save took {blocking}, and training waited for all of it."]
    else:
        said = [f"Training waited {blocking}; {behind} went on behind it."]
    said.append(f"Most of that was {phase_name(longest.name)}: {_took(longest)}.")
    held_up = [phase for phase in whole if phase is not longest and phase.is_blocking]
    said += [
        f"{phase_name(phase.name).capitalize()}: {_took(phase)}."
        for phase in held_up
        if is_straggler(phase.max_seconds, phase)
    ]
    return said


def _took(phase: SavePhase) -> str:
    seconds = seconds_text(phase.max_seconds)
    if phase.ranks == 1:
        return seconds
    if not phase.median_seconds:
        return f"{seconds} on rank {phase.slowest_rank}"
    if not is_straggler(phase.max_seconds, phase):
        return f"{seconds}, about as long on all ranks"
    median = seconds_text(phase.median_seconds)
    times = times_text(phase.max_seconds / phase.median_seconds)
    return (
        f"it waited for rank {phase.slowest_rank}, which took {seconds}, {times} times the median of {median}"
    )
