"""Accelerate: save and resume with `accelerator.save_state()` and `load_state()` through dcp.

    python examples/accelerate_loop.py --checkpoints /tmp/accelerate
    torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --checkpoints /tmp/accelerate

Stop the script in any way and start it again. docs/how-to/use-a-trainer.md lists the saved state.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from command_line import parser
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dcp
import dcp.integrations.accelerate


class Progress:
    """Position of the loop."""

    def __init__(self) -> None:
        self.step = self.epoch = self.batch = 0

    def state_dict(self) -> dict[str, Any]:
        """Return step, epoch and batch."""
        return dict(vars(self))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore step, epoch and batch."""
        vars(self).update(state_dict)


def train(arguments: argparse.Namespace) -> None:
    """Train up to ``--steps``, starting from the newest good checkpoint."""
    # The order of an epoch then depends on its number only, so that skipped batches are the same.
    loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    project = ProjectConfiguration(
        str(arguments.checkpoints), automatic_checkpoint_naming=True, total_limit=3
    )
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(), dataloader_config=loading, project_config=project
    )
    dcp.integrations.accelerate.use(accelerator)

    torch.manual_seed(0)  # same initial weights on all ranks
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    inputs = torch.randn(40, 16)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    # Without its own generator, a loader draws from the global generator for each iterator and resume.
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    torch.manual_seed(1000 + accelerator.process_index)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    with suppress(dcp.CheckpointNotFoundError):  # the first run has no checkpoint
        accelerator.load_state()
    while progress.step < arguments.steps:
        loader.set_epoch(progress.epoch)
        for inputs, targets in accelerator.skip_first_batches(loader, progress.batch):
            loss = F.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            progress.step, progress.batch = progress.step + 1, progress.batch + 1
            note(accelerator, arguments.losses, step=progress.step, loss=loss)
            if progress.step % arguments.every == 0:
                accelerator.save_state()
            if progress.step == arguments.steps:
                break
        else:
            progress.epoch, progress.batch = progress.epoch + 1, 0
    accelerator.end_training()


def note(accelerator: Accelerator, path: Path, *, step: int, loss: torch.Tensor) -> None:
    """Append the mean loss of all ranks as a JSON line."""
    mean = accelerator.reduce(loss.detach(), "mean").item()
    if accelerator.is_main_process:
        with path.open("a") as log:
            log.write(json.dumps({"step": step, "loss": mean}) + "\n")


def main() -> None:
    """Run alone, or as a rank of torchrun."""
    train(parser(__doc__).parse_args())


if __name__ == "__main__":
    main()
