"""What retention, restores and merges have to know of each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

__all__ = ["PARTIAL", "Health", "StepState", "partial_of"]

PARTIAL: Final = "partial"
"""The name in the user metadata under which a partial checkpoint says which entries it has."""

Health = Literal["good", "pending", "damaged", "partial"]
"""Of a committed step: to be counted on; being verified or replaced; known not to load as committed; saved
before a deadline, and not the whole state."""


@dataclass(frozen=True, slots=True)
class StepState:
    """What retention has to know of a committed step; ``committed_seconds`` counts from the epoch,
    ``dropped`` are the globs of what was dropped from it."""

    step: int
    committed_seconds: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    health: Health = "good"
    pinned: bool = False
    dropped: frozenset[str] = frozenset()


def partial_of(user: Mapping[str, Any]) -> tuple[str, ...]:
    """The entries of a partial checkpoint, by its user metadata; () of one that is the whole state."""
    names = user.get(PARTIAL)
    return tuple(map(str, names)) if isinstance(names, list | tuple) else ()
