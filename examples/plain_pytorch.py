"""Plain PyTorch: a training loop that resumes bit for bit after a crash.

    python examples/plain_pytorch.py --checkpoints /tmp/plain
    torchrun --standalone --nproc-per-node 2 examples/plain_pytorch.py --checkpoints /tmp/plain

Stop the script in any way (SIGTERM, kill -9) and start it again. The run also resumes on another number of
ranks; losses then differ, because the random generators of the ranks are seeded again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from command_line import parser
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler

import dcp
from dcp.integrations.random_state import RandomState
from dcp.state_dict import get_state_dict, set_state_dict

BATCH_SIZE = 4
"""Samples per rank and step."""


class Curves(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Curves with their sums as targets, shifted at random by Python's generator and numpy's."""

    def __init__(self) -> None:
        self.inputs = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
        self.targets = self.inputs.sin().sum(1, keepdim=True)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a curve of shape [16] and a target of shape [1]."""
        shift = float(np.random.normal(0.0, 0.01)) if random.random() < 0.5 else 0.0
        return self.inputs[index] + shift, self.targets[index]


class Position(Sampler[int]):
    """Samples of this rank and its position in the epoch; a `Stateful`.

    The order of an epoch depends on its number only. ``taken`` counts the samples that the loop has trained
    on, because loader workers run ahead. ``begin`` counts the samples of the epoch that were used on another
    number of ranks.
    """

    def __init__(self, size: int, rank: int, world_size: int) -> None:
        self.size, self.rank, self.world_size = size, rank, world_size
        self.epoch = self.begin = self.taken = 0

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        own = order[self.begin + self.rank :: self.world_size]
        return iter(own[self.taken : self.taken + len(self)])

    def __len__(self) -> int:
        return (self.size - self.begin) // self.world_size - self.taken

    def state_dict(self) -> dict[str, Any]:
        """Return the rank's own position, with the rule for another number of ranks."""
        position = {"epoch": self.epoch, "begin": self.begin, "taken": self.taken}
        return {"position": dcp.Rescale(position, what_is_left)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position."""
        position = state_dict["position"].value
        self.epoch, self.begin, self.taken = position["epoch"], position["begin"], position["taken"]

    def next_epoch(self) -> None:
        """Start the next epoch with all samples in another order."""
        self.epoch, self.begin, self.taken = self.epoch + 1, 0, 0


def what_is_left(positions: list[dict[str, int]], rank: int, world_size: int) -> dict[str, int]:
    """Return the position on another number of ranks, which share the rest of the epoch."""
    taken = sum(position["taken"] for position in positions)
    return positions[0] | {"begin": positions[0]["begin"] + taken, "taken": 0}


class Training:
    """Model, optimizer and scheduler; a `Stateful`."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)  # same initial weights on all ranks
        self.device = device
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1)).to(device)
        self.model: nn.Module = DistributedDataParallel(model) if dist.is_initialized() else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=1000)

    def state_dict(self) -> dict[str, Any]:
        """Return the state under the model's own names, with or without DDP."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Apply the restored state dict."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.scheduler.load_state_dict(state_dict["scheduler"])

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Train on a batch; return the mean loss over all ranks."""
        loss = F.mse_loss(self.model(inputs.to(self.device)), targets.to(self.device))
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        mean = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(mean, dist.ReduceOp.SUM)
            mean /= dist.get_world_size()
        return mean


def batches(loader: DataLoader[Any], position: Position) -> Iterator[list[torch.Tensor]]:
    """Yield batches of all epochs. A batch counts as taken when it is yielded, so save after its step."""
    while True:
        for batch in loader:
            position.taken += BATCH_SIZE
            yield batch
        position.next_epoch()


def train(arguments: argparse.Namespace) -> None:
    """Train up to ``--steps``, starting from the newest good checkpoint."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    data = Curves()
    cuda = torch.cuda.is_available()
    training = Training(torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"))
    position = Position(len(data), rank, world_size)
    # Without its own generator, a loader draws from the global generator for each iterator and resume.
    loader = DataLoader(
        data, BATCH_SIZE, sampler=position, drop_last=True, generator=torch.Generator().manual_seed(0)
    )
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(1000 + rank)
    state = {"training": training, "position": position, "random": RandomState()}
    with dcp.CheckpointManager(
        arguments.checkpoints, every_steps=arguments.every, keep=dcp.Retention(last=3)
    ) as manager:
        restored = manager.restore(state)
        first = restored.step + 1 if restored else 1
        print(f"rank {rank} starts at step {first}", flush=True)
        for step, batch in zip(range(first, arguments.steps + 1), batches(loader, position), strict=False):
            loss = training.step(*batch).item()
            if rank == 0:
                with arguments.losses.open("a") as log:
                    log.write(json.dumps({"step": step, "loss": loss}) + "\n")
            manager.save(step, state, metrics={"loss": loss}, last=step == arguments.steps)
            if manager.stop_requested:  # SIGTERM on any rank: this step is saved
                break


def main() -> None:
    """Run alone, or as a rank of torchrun."""
    arguments = parser(__doc__).parse_args()
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group()
    try:
        train(arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
