"""A training loop with a manager, for workers of torchrun's agent: one is killed in its first life."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dcp

__all__ = ["main"]


class Trainer:
    """A weight that follows a random walk, of which each rank draws its part."""

    def __init__(self, rank: int) -> None:
        self.weight = torch.zeros(16)
        self.random = torch.Generator().manual_seed(rank)
        self.position = dcp.PerRank({"random": self.random.get_state(), "drawn": 0})

    def state(self) -> dict[str, Any]:
        """What is saved and restored."""
        return {"weight": self.weight, "position": self.position}

    def step(self) -> None:
        """Draw, and add what all ranks have drawn."""
        drawn = torch.rand(16, generator=self.random)
        dist.all_reduce(drawn)
        self.weight += drawn
        own = self.position.value
        self.position.value = {"random": self.random.get_state(), "drawn": own["drawn"] + 1}

    def resumed(self) -> None:
        """After a restore: the generator goes on from what was restored."""
        self.random.set_state(self.position.value["random"])


def train(root: Path, steps: int, kill_step: int, life: int) -> dict[str, Any]:
    """Train; in its first life the last rank is killed at ``kill_step``, and the others find out.

    Says from which step this life went on, and what it ended with.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    trainer = Trainer(rank)
    with dcp.CheckpointManager(root / "ckpt", every_steps=2, timeout_seconds=240.0) as manager:
        state = trainer.state()
        restored = manager.restore(state)
        if restored is not None:
            trainer.resumed()
        first = restored.step + 1 if restored else 1
        for step in range(first, steps + 1):
            if life == 0 and rank == world_size - 1 and step == kill_step:
                manager.wait(240)  # so that it is known what is committed
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.step()
            manager.save(step, trainer.state(), last=step == steps)
    drawn = trainer.position.value["drawn"]
    return {"life": life, "first": first, "drawn": drawn, "weight": trainer.weight.tolist()}


def main(root: Path, steps: int, kill_step: int) -> dict[str, Any]:
    """A worker of torchrun's agent: what its last life ended with."""
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    try:
        return train(root, steps, kill_step, life)
    finally:
        dist.destroy_process_group()
