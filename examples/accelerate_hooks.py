"""Accelerate: `accelerator.save_state()` and `load_state()` go through the manager, by hooks.

    python examples/accelerate_hooks.py --checkpoints /tmp/accelerate
    torchrun --standalone --nproc-per-node 2 examples/accelerate_hooks.py --checkpoints /tmp/accelerate

Stop it in any way (SIGTERM, kill -9), start it again. docs/recipes.md says what the hooks cannot reach.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DistributedType
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dcp
from dcp.integrations.random_state import RandomState
from dcp.state_dict import get_state_dict, set_state_dict


class Training:
    """What ``accelerator.prepare`` gave, and how far the loop is; a `Stateful`."""

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        self.accelerator = accelerator
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.step = self.epoch = self.batch = 0

    def state_dict(self) -> dict[str, Any]:
        """Under the model's own names, with or without DDP around it."""
        model, optimizer = get_state_dict(self.model, self.optimizer.optimizer)
        progress = {"step": self.step, "epoch": self.epoch, "batch": self.batch}
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "progress": progress,
            "accumulation": self.accelerator.step,  # where in a row of batches that are added up
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what a restore has filled."""
        set_state_dict(
            self.model,
            self.optimizer.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )
        self.scheduler.load_state_dict(state_dict["scheduler"])
        progress = state_dict["progress"]
        self.step, self.epoch, self.batch = progress["step"], progress["epoch"], progress["batch"]
        self.accelerator.step = state_dict["accumulation"]


class ManagerHooks:
    """Sends what `save_state` and `load_state` would write and read through a manager instead.

    Alone and under DDP. With FSDP or DeepSpeed Accelerate has written models and optimizers before it calls a
    hook, and a gradient scaler (fp16) it writes after: there, give ``state`` to ``manager.save`` yourself.
    """

    def __init__(self, accelerator: Accelerator, manager: dcp.CheckpointManager, training: Training) -> None:
        if accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED):
            raise ValueError(
                "with FSDP and DeepSpeed save_state cannot be redirected; call manager.save itself"
            )
        if accelerator.scaler is not None:
            raise ValueError("save_state writes the gradient scaler of fp16 beside the checkpoint; use bf16")
        self.accelerator, self.manager, self.training = accelerator, manager, training
        self.state = {"training": training, "random": RandomState()}
        self.restored: dcp.Restored | None = None
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def _save(self, models: list[nn.Module], weights: list[dict[str, Any]], output_dir: str) -> None:
        weights.clear()
        self._withhold_optimizers()
        self.manager.save(self.training.step, self.state, force=True)

    def _load(self, models: list[nn.Module], input_dir: str) -> None:
        models.clear()
        self._withhold_optimizers()
        # Accelerate would set the generators from this file once we are done, of whatever step it is.
        (Path(input_dir) / f"random_states_{self.accelerator.process_index}.pkl").unlink(missing_ok=True)
        self.restored = self.manager.restore(self.state, per_rank="keep")

    def _withhold_optimizers(self) -> None:
        """Hooks are given the models only. Accelerate has taken these lists before: empty what it holds."""
        for name in ("_optimizers", "_schedulers"):
            taken = getattr(self.accelerator, name)
            setattr(self.accelerator, name, list(taken))
            taken.clear()


def train(arguments: argparse.Namespace) -> None:
    """Train up to ``--steps``, from the newest good checkpoint on."""
    # Each epoch's order then follows from its number, so that skipping batches finds the same ones.
    loading = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=loading)
    torch.manual_seed(0)  # all ranks begin with the same weights
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    inputs = torch.randn(40, 16)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    # A loader without a generator of its own draws from the global one for each iterator, so for each resume.
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    torch.manual_seed(1000 + accelerator.process_index)
    training = Training(accelerator, model, optimizer, scheduler)
    folder = arguments.checkpoints / "accelerate"  # what Accelerate writes all the same: its random states
    folder.mkdir(parents=True, exist_ok=True)
    with dcp.CheckpointManager(
        arguments.checkpoints, every_steps=arguments.every, keep=dcp.Retention(last=3)
    ) as manager:
        ManagerHooks(accelerator, manager, training)
        accelerator.load_state(folder)  # without a checkpoint: nothing
        while training.step < arguments.steps and not manager.stop_requested:
            loader.set_epoch(training.epoch)
            for batch in accelerator.skip_first_batches(loader, training.batch):
                loss = train_step(accelerator, training, *batch)
                note(accelerator, arguments.losses, step=training.step, loss=loss)
                if manager.should_save(training.step, last=training.step == arguments.steps):
                    accelerator.save_state(folder)
                if training.step == arguments.steps or manager.stop_requested:
                    break
            else:
                training.epoch, training.batch = training.epoch + 1, 0
    accelerator.end_training()


def train_step(
    accelerator: Accelerator, training: Training, inputs: torch.Tensor, targets: torch.Tensor
) -> float:
    """Learn from a batch; the mean loss over all ranks."""
    loss = F.mse_loss(training.model(inputs), targets)
    accelerator.backward(loss)
    training.optimizer.step()
    training.scheduler.step()
    training.optimizer.zero_grad()
    training.step, training.batch = training.step + 1, training.batch + 1
    mean: float = accelerator.reduce(loss.detach(), "mean").item()
    return mean


def note(accelerator: Accelerator, path: Path, **line: float) -> None:
    """Append a JSON line, once for all ranks."""
    if accelerator.is_main_process:
        with path.open("a") as log:
            log.write(json.dumps(line) + "\n")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--checkpoints", type=Path, required=True)
    options.add_argument("--losses", type=Path, default=Path(os.devnull), help="append a JSON line a step")
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--every", type=int, default=100, help="save every so many steps")
    return options


def main() -> None:
    """Run alone, or as a rank of torchrun."""
    train(parser().parse_args())


if __name__ == "__main__":
    main()
