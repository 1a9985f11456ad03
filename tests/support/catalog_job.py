"""One rank of the training job of the end-to-end tests, started by torchrun.

Trains a small model in FSDP2 shards. A `dcp.CheckpointManager` saves asynchronously and registers the
checkpoints. The whole model at each saved step is written to another folder, for comparison.
"""

from __future__ import annotations

import argparse
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import dcp

_TIMEOUT_SECONDS = 300.0


def build_model() -> nn.Module:
    """Build a model with two dtypes, shapes that two ranks share unevenly, and layers sharded separately."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(17, 256), nn.Tanh(), nn.Linear(256, 131), nn.LayerNorm(131))
    model[2] = model[2].to(torch.bfloat16)
    for layer in (model[0], model[2], model[3]):
        fully_shard(layer)
    return model


def train(options: argparse.Namespace) -> None:
    """Train ``--steps`` steps and save at each even step."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    catalog = dcp.CatalogRegistration(
        options.catalog,
        root=options.catalog_root,
        folder=options.catalog_folder,
        spool=options.results / "spool",
    )
    with dcp.CheckpointManager(
        options.checkpoints,
        mode=options.mode,
        every_steps=2,
        on_failure="raise",
        timeout_seconds=_TIMEOUT_SECONDS,
        catalog=catalog,
    ) as manager:
        for step in range(1, options.steps + 1):
            inputs = torch.randn(8, 17, generator=torch.Generator().manual_seed(step))
            hidden = model[1](model[0](inputs)).to(torch.bfloat16)  # type: ignore[index]
            loss = model[3](model[2](hidden).float()).square().mean()  # type: ignore[index]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if manager.should_save(step):
                note_whole_model(model, options.results / f"model-{step}.pt")
            manager.save(
                step, {"model": get_model_state_dict(model), "step": step}, metrics={"loss": loss.item()}
            )


def note_whole_model(model: nn.Module, path: Path) -> None:
    """Write the unsharded parameters, on rank 0."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(whole, path)


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", required=True, help="a path or a URL")
    parser.add_argument("--catalog", required=True, help="the URL of the service")
    parser.add_argument("--catalog-root", help="the name there of the root that holds the checkpoints")
    parser.add_argument("--catalog-folder", default="", help="the run's folder in that root")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--mode", choices=("thread", "process"), default="thread")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_SECONDS))
    try:
        train(options)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
