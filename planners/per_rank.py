"""State that differs by rank on purpose."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

_RANK_KEY: Final = re.compile(r"\.rank-(\d{1,9})(?=\.|$)")


@dataclass(slots=True)
class PerRank:
    """Marks ``value`` as this rank's own: a data loader position, a random generator's state.

    Replicated values must be equal on all ranks; a value under `PerRank` is stored once a rank, below the key
    ``rank-<n>`` where it stood, so that stock torch sees a nested dict. On load, ``PerRank(template)`` takes
    the entry of the loading rank, and ``value`` is replaced by what was loaded.
    """

    value: Any


def rank_key(rank: int) -> str:
    """Return the path component under which a rank's own value is stored."""
    return f"rank-{rank}"


def rank_holder(fqn: str) -> str | None:
    """Return what is before the first component of a flat key that looks like a rank's; None if there is
    none."""

    found = _RANK_KEY.search(fqn)
    return fqn[: found.start()] if found is not None else None


def rank_number(fqn: str) -> int:
    """Return the rank that the component found by `rank_holder` names; -1 if there is none."""

    found = _RANK_KEY.search(fqn)
    return int(found[1]) if found is not None else -1


def current_rank() -> int:
    """This process's number in the default process group, 0 where there is none."""
    import torch.distributed as dist  # this module is imported where torch is not

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
