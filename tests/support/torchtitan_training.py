"""A small training like torchtitan's trainer: FSDP2, its loop, its calls of the manager."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.batches import Batches
from tests.support.dying import die_in_commit
from tests.support.torchtitan_interface import install

__all__ = ["training"]

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class _Optimizers:
    """An optimizer whose state is a flat mapping by name."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state_dict, options=_FLAT)


class _Loader:
    """A loader whose state is under the rank's name, and fits no other number of ranks."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.name, self.ranks, self.batches = f"dp_rank_{rank}", ranks, Batches(rank)

    def state_dict(self) -> dict[str, Any]:
        return {self.name: pickle.dumps(self.batches.state_dict()), "world_size": self.ranks}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["world_size"] == self.ranks
        self.batches.load_state_dict(pickle.loads(state_dict[self.name]))


class _TrainState:
    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


def _managed(folder: Path, options: Mapping[str, Any], parts: dict[str, Any]) -> Any:
    """Return the manager, created like the trainer of this version."""
    interface = options["interface"]
    given: dict[str, Any] = {"enable": True, "interval": 3, "keep_latest_k": 2, "last_save_model_only": False}
    given |= options.get("config", {})
    if interface != "installed":
        config_class = install(interface)
    from dcp.integrations.torchtitan import DcpCheckpointManager

    if interface == "older":
        return DcpCheckpointManager(checkpoint_config=config_class(**given), base_folder=str(folder), **parts)
    return DcpCheckpointManager.Config(**given).build(base_folder=str(folder), **parts)


def training(rank: int, ranks: int, folder: Path, options: Mapping[str, Any]) -> tuple[int, float]:
    """Train ``steps``, from the newest checkpoint; return the last step, and a sum over the model.

    Options: ``interface``, ``config``; with ``die_at`` rank 0 is killed immediately before the commit of save
    number ``die_at``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizers, loader, state = _Optimizers(model), _Loader(rank, ranks), _TrainState()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers.optimizer, 4, 0.7)
    parts = {
        "model_parts": [model],
        "optimizers": optimizers,
        "dataloader": loader,
        "lr_schedulers": scheduler,
        "states": {"train_state": state},
        "sd_adapter": None,
    }
    manager = _managed(folder, options, parts)
    torch.manual_seed(100 + rank)
    if rank == 0 and options.get("die_at"):
        die_in_commit(options["die_at"])
    try:
        manager.load(step=-1)
        _loop(
            manager, model, optimizers.optimizer, scheduler, loader, state, folder, options.get("steps", 14)
        )
    finally:
        manager.close()
    total = sum(parameter.full_tensor().sum() for parameter in model.parameters())  # type: ignore[attr-defined]
    return state.step, float(total)


def _loop(
    manager: Any,
    model: nn.Module,
    optimizer: Any,
    scheduler: Any,
    loader: _Loader,
    state: _TrainState,
    folder: Path,
    steps: int,
) -> None:
    batches = iter(loader.batches)
    while state.step < steps:
        state.step += 1
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader.batches)
            batch = next(batches)
        loss = (model(batch) - batch).square().mean()
        with (folder / f"losses-{dist.get_rank()}.jsonl").open("a") as log:
            log.write(json.dumps({"step": state.step, "loss": float(loss.item()).hex()}) + "\n")
        loss.backward()
        manager.maybe_wait_for_staging()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        manager.save(state.step, last_step=state.step == steps)
