"""State that differs by rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

_RANK_KEY: Final = re.compile(r"\.rank-(\d{1,9})(?=\.|$)")


@dataclass(slots=True)
class PerRank:
    """Wrapper for a ``value`` that belongs to this rank, such as a data loader position or a random
    generator state.

    Replicated values must be equal on all ranks; a value in `PerRank` is stored once per rank, below the
    key ``rank-<n>``, as a nested dict for stock torch. On load, ``PerRank(template)`` takes the entry of
    the loading rank and replaces ``value``.

    Examples:
        state = {"model": model, "rng": dcp.PerRank(torch.get_rng_state())}
        dcp.save(state, checkpoint_id="checkpoints/step-100")
    """

    value: Any


def rank_key(rank: int) -> str:
    """Return the path component of a rank's value."""
    return f"rank-{rank}"


def rank_holder(fqn: str) -> str | None:
    """Return the flat key before the first component that looks like a rank; None without one."""

    found = _RANK_KEY.search(fqn)
    return fqn[: found.start()] if found is not None else None


def rank_number(fqn: str) -> int:
    """Return the rank in the component found by `rank_holder`; -1 without one."""

    found = _RANK_KEY.search(fqn)
    return int(found[1]) if found is not None else -1


def current_rank() -> int:
    """Return the rank in the default process group; 0 without a group."""
    import torch.distributed as dist  # here, because this module is also used without torch

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
