"""FSDP2 and tensor parallelism on a two-dimensional mesh, with writer processes that survive the trainer.

    torchrun --standalone --nproc-per-node 4 examples/fsdp2_tensor_parallel.py --checkpoints /tmp/fsdp2-tp
    torchrun --standalone --nproc-per-node 2 examples/fsdp2_tensor_parallel.py --checkpoints /tmp/fsdp2-tp

The second command resumes the first run on a mesh of another shape.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import command_line
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dcp
from dcp.state_dict import get_state_dict, set_state_dict

WIDTH = 32
BATCH_SIZE = 16
"""Samples per step over all ranks."""


class Block(nn.Module):
    """A residual block of two layers, as in the feed-forward part of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map shape [samples, WIDTH] to [samples, WIDTH]."""
        added: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + added


def build_model(mesh: DeviceMesh) -> nn.Module:
    """Build blocks with the first layer sharded by columns and the second by rows over "tp"; shard all
    over "dp"."""
    torch.manual_seed(0)  # same initial weights on all ranks
    blocks = [Block().to(mesh.device_type) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 1, device=mesh.device_type))
    for block in blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


class Training:
    """Model, optimizer and scheduler; a `Stateful`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.model = build_model(mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=1000)
        self.data = mesh["dp"]

    def state_dict(self) -> dict[str, Any]:
        """Return DTensors under names that do not depend on the mesh."""
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

    def loss(self, step: int, noise: torch.Generator | None = None) -> torch.Tensor:
        """Return the loss on this rank's part of the batch; ranks of one "tp" group share their samples.

        The samples depend on the step only, so no position needs to be saved.
        """
        samples = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
        own = samples.chunk(self.data.size())[self.data.get_local_rank()]
        targets = own.sin().sum(1, keepdim=True)
        if noise is not None:
            own = own + 0.05 * torch.randn(own.shape, generator=noise)
        device = self.data.device_type
        return F.mse_loss(self.model(own.to(device)), targets.to(device))

    def step(self, step: int, noise: torch.Generator) -> float:
        """Train on the batch of the step; return the mean loss over all ranks."""
        loss = self.loss(step, noise)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return self.mean(loss)

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean validation loss over all ranks."""
        return self.mean(self.loss(step=0))

    def mean(self, loss: torch.Tensor) -> float:
        """Average over the ranks with different samples."""
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.data.get_group())
        return total.item() / self.data.size()


class Noise:
    """A random generator with one stream per "dp" rank, shared within its "tp" group; a `Stateful`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.stream = mesh["dp"].get_local_rank()
        self.generator = torch.Generator()
        self.begin(1000)

    def begin(self, seed: int) -> None:
        """Seed the generator with a separate stream for each "dp" rank."""
        self.generator.manual_seed(seed + self.stream)

    def state_dict(self) -> dict[str, Any]:
        """Return the rank's generator state; "keep" leaves the generator unchanged on another number of
        ranks."""
        return {"generator": dcp.Rescale(self.generator.get_state(), "keep")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the generator state."""
        self.generator.set_state(state_dict["generator"].value)


def train(arguments: argparse.Namespace) -> None:
    """Train up to ``--steps``, starting from the newest good checkpoint of any mesh."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    shape = [dist.get_world_size() // arguments.tp, arguments.tp]
    mesh = init_device_mesh(device_type, tuple(shape), mesh_dim_names=("dp", "tp"))
    training, noise = Training(mesh), Noise(mesh)
    state: dict[str, Any] = {"training": training, "noise": noise, "mesh": shape}
    with dcp.CheckpointManager(
        arguments.checkpoints, mode=arguments.mode, every_steps=arguments.every, keep=dcp.Retention(last=3)
    ) as manager:
        restored = manager.restore(state)
        if restored and state["mesh"] != shape:
            # "dp" streams are assigned to other ranks on a mesh of another shape
            noise.begin(1000 * restored.step)
            state["mesh"] = shape
        first = restored.step + 1 if restored else 1
        note(arguments.losses, step=first - 1, validation=training.validate())
        for step in range(first, arguments.steps + 1):
            loss = training.step(step, noise.generator)
            note(arguments.losses, step=step, loss=loss, validation=training.validate())
            manager.save(step, state, metrics={"loss": loss}, last=step == arguments.steps)
            if manager.stop_requested:  # SIGTERM on any rank: this step is saved
                break


def note(path: Path, **line: float) -> None:
    """Append a JSON line, once for all ranks."""
    if dist.get_rank() == 0:
        with path.open("a") as log:
            log.write(json.dumps(line) + "\n")


def parser() -> argparse.ArgumentParser:
    """Return the command line options."""
    options = command_line.parser(__doc__)
    options.add_argument("--tp", type=int, default=2, help="ranks that share a layer")
    options.add_argument("--mode", choices=("process", "thread", "sync"), default="process")
    return options


def main() -> None:
    """Run a rank of torchrun."""
    arguments = parser().parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    try:
        train(arguments)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
