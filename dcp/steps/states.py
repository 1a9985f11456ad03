"""What those who choose among steps have to know of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Health", "StepState"]

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
