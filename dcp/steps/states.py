"""Facts of a step that retention, restores and merges go by, and parts of a state, which may be dropped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

__all__ = ["OPTIMIZER", "PARTIAL", "Health", "StepState", "partial_of", "patterns_of_part"]

PARTIAL: Final = "partial"
"""The name in the user metadata under which a partial checkpoint says which entries it has."""

Health = Literal["good", "pending", "damaged", "partial"]
"""Of a committed step: to be counted on; being verified or replaced; known not to load as committed; saved
before a deadline, and not the whole state."""


@dataclass(frozen=True, slots=True)
class StepState:
    """Facts of a committed step for retention; ``committed_seconds`` counts from the epoch,
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


OPTIMIZER: Final = ("optim*.state.*", "*.optim*.state.*", "optim*.param_groups*", "*.optim*.param_groups*")
"""Names of what an optimizer keeps, as trainers call it: what is below ``state`` and ``param_groups`` under a
key that begins with ``optim``. A weight that is called so has neither above it."""


def patterns_of_part(name: str) -> tuple[str, ...]:
    """Globs on the names of its entries; ``name`` is "optimizer", or such a glob itself."""
    return OPTIMIZER if name == "optimizer" else (name,)
