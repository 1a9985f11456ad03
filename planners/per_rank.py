"""State that differs by rank on purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["PerRank", "rank_key"]


@dataclass(slots=True)
class PerRank:
    """Marks ``value`` as this rank's own: a data loader position, a random generator's state.

    Replicated values must be equal on all ranks; a value under `PerRank` is stored once a rank, below the key
    ``rank-<n>`` where it stood, so that stock torch sees a nested dict. On load, ``PerRank(template)`` takes
    the entry of the loading rank, and ``value`` is replaced by what was loaded.
    """

    value: Any


def rank_key(rank: int) -> str:
    """The path component under which a rank's own value is stored."""
    return f"rank-{rank}"
