"""A data loader with a state, which resumes within an epoch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["EPOCH", "Batches", "losses"]

EPOCH = 8
"""Batches of a rank in an epoch."""


def losses(folder: Path, rank: int = 0) -> dict[int, str]:
    """Read the logged losses by step; of a repeated step, the later loss."""
    lines = (folder / f"losses-{rank}.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}


class Batches:
    """A data loader with a state: a rank's batches, in a new random order for each epoch."""

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(rank)
        self._order: list[int] = []
        self._position = 0
        self._resumed = False

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Iterator[torch.Tensor]:
        if not self._resumed:
            self._order = torch.randperm(EPOCH, generator=self._generator).tolist()
            self._position = 0
        self._resumed = False
        while self._position < EPOCH:
            self._position += 1
            number = self._order[self._position - 1]
            yield torch.arange(16, dtype=torch.float32).reshape(2, 8).add(number).sin()

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        state = self._generator.get_state()
        return {"order": list(self._order), "position": self._position, "generator": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at the position of ``state``."""
        self._order, self._position = state["order"], state["position"]
        self._generator.set_state(state["generator"])
        self._resumed = self._position < EPOCH
