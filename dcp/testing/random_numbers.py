"""Random numbers that differ by rank while a model is built: one seed would make any two tensors alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

__all__ = ["random_by_rank"]

_APART: Final = 1_000_003
_MAX_SEED: Final = 1 << 63


@contextmanager
def random_by_rank(rank: int) -> Iterator[None]:
    """Let torch's random numbers differ by rank within this block, also after ``torch.manual_seed()``."""
    seed = torch.manual_seed

    def seed_by_rank(number: int) -> torch.Generator:
        return seed((int(number) + rank * _APART) % _MAX_SEED)

    holders = (torch, torch.random)
    for holder in holders:
        setattr(holder, "manual_seed", seed_by_rank)  # noqa: B010 - a function, which mypy lets nobody assign
    try:
        seed_by_rank(torch.initial_seed())
        yield
    finally:
        for holder in holders:
            setattr(holder, "manual_seed", seed)  # noqa: B010
