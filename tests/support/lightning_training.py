"""A small training by Lightning's Trainer, which records each loss and may be killed in a save."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from dcp.integrations.lightning import DcpCheckpointIO, DcpModelParallelStrategy, RankStates
from tests.support.batches import Batches
from tests.support.dying import die_in_commit

__all__ = ["Net", "trainer_of", "training"]

SAVE_EVERY = 3


class Net(pl.LightningModule):
    """Two layers with dropout; records the loss of each step, bit for bit."""

    def __init__(self, folder: Path, width: int = 16, sharded: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters("width")
        self.folder, self.sharded = folder, sharded
        self.layers = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 8))

    def configure_model(self) -> None:
        """Shard the model, if the strategy requires it of the module."""
        if self.sharded:
            from torch.distributed.fsdp import fully_shard

            mesh = self.device_mesh
            assert mesh is not None
            fully_shard(self.layers[0], mesh=mesh["data_parallel"])
            fully_shard(self.layers, mesh=mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Learn to reproduce the input."""
        loss: torch.Tensor = (self.layers(batch) - batch).square().mean()
        line = {"step": self.global_step, "loss": float(loss.item()).hex()}
        with (self.folder / f"losses-{self.global_rank}.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Return AdamW with a rate that decreases every four steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> Any:
        """Return the batches of this rank."""
        return Batches(self.global_rank)


def trainer_of(
    folder: Path, ranks: int, strategy: str, weights_only: bool = False, **options: Any
) -> pl.Trainer:
    """Return a Trainer that saves every three steps, always also as ``last``."""
    chosen: dict[str, Any] = {"strategy": "auto", "plugins": [DcpCheckpointIO()]}
    if strategy == "fsdp2":
        parallel = DcpModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
        chosen = {"strategy": parallel}
    elif ranks > 1:
        chosen["strategy"] = "ddp"
    kept = ModelCheckpoint(
        dirpath=folder / "checkpoints",
        every_n_train_steps=SAVE_EVERY,
        save_last=True,
        save_weights_only=weights_only,
        save_top_k=2,
        monitor="loss",
    )
    return pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=[RankStates(), kept],
        **chosen,
        **options,
    )


def training(rank: int, ranks: int, folder: Path, options: Mapping[str, Any]) -> int:
    """Train 14 steps, from the last checkpoint if one exists; return the last step.

    Options: the ``strategy``; ``weights_only`` saves no optimizer; with ``die_at`` rank 0 is killed
    immediately before the commit of save number ``die_at``.
    """
    strategy, die_at = options["strategy"], options.get("die_at")
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    module = Net(folder, sharded=strategy == "fsdp2")
    weights_only = options.get("weights_only", False)
    trainer = trainer_of(folder, ranks, strategy, weights_only, max_steps=14, max_epochs=-1)
    torch.manual_seed(100 + rank)
    if die_at is not None and rank == 0:
        die_in_commit(die_at)
    trainer.fit(module, ckpt_path="last")
    return int(trainer.global_step)
