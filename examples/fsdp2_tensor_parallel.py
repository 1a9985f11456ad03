"""FSDP2 and tensor parallelism on a mesh of two dimensions, written by processes that outlive the training.

    torchrun --standalone --nproc-per-node 4 examples/fsdp2_tensor_parallel.py --checkpoints /tmp/fsdp2-tp
    torchrun --standalone --nproc-per-node 2 examples/fsdp2_tensor_parallel.py --checkpoints /tmp/fsdp2-tp

The second goes on where the first was stopped, on a mesh of another shape.
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
"""Samples of a step over all ranks."""


class Block(nn.Module):
    """A residual block of two layers, as in a transformer's feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape [samples, WIDTH], in and out."""
        added: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + added


def build_model(mesh: DeviceMesh) -> nn.Module:
    """Each block's first layer is cut by columns and its second by rows over "tp"; then all over "dp"."""
    torch.manual_seed(0)  # all ranks begin with the same weights
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
        """DTensors, under names that do not depend on the mesh."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what a restore has filled."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.scheduler.load_state_dict(state_dict["scheduler"])

    def loss(self, step: int, noise: torch.Generator | None = None) -> torch.Tensor:
        """Of this rank's part of the step's batch, which ranks of one "tp" group share.

        The samples follow from the step alone, so there is no position to save.
        """
        samples = torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(step))
        own = samples.chunk(self.data.size())[self.data.get_local_rank()]
        targets = own.sin().sum(1, keepdim=True)
        if noise is not None:
            own = own + 0.05 * torch.randn(own.shape, generator=noise)
        device = self.data.device_type
        return F.mse_loss(self.model(own.to(device)), targets.to(device))

    def step(self, step: int, noise: torch.Generator) -> float:
        """Learn from the step's batch; the mean loss over all ranks."""
        loss = self.loss(step, noise)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return self.mean(loss)

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss over all ranks on samples of no step."""
        return self.mean(self.loss(step=0))

    def mean(self, loss: torch.Tensor) -> float:
        """Over the ranks that have different samples."""
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.data.get_group())
        return total.item() / self.data.size()


class Noise:
    """A generator with one stream a "dp" rank, shared by the ranks of its "tp" group; a `Stateful`."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.stream = mesh["dp"].get_local_rank()
        self.generator = torch.Generator()
        self.begin(1000)

    def begin(self, seed: int) -> None:
        """Begin anew, another stream each "dp" rank."""
        self.generator.manual_seed(seed + self.stream)

    def state_dict(self) -> dict[str, Any]:
        """A rank's own; on another number of ranks it stays as it is."""
        return {"generator": dcp.Rescale(self.generator.get_state(), "keep")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on there."""
        self.generator.set_state(state_dict["generator"].value)


def train(arguments: argparse.Namespace) -> None:
    """Train up to ``--steps``, from the newest good checkpoint on, of whatever mesh."""
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
            # rank 1 may have shared rank 0's stream, and now have one of its own, or the other way round
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
    """The command line."""
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
