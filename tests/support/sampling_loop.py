"""A job on a data set that is dealt out over its ranks: prints what each saw, and goes on after a stop.

torchrun ... -m tests.support.sampling_loop ROOT STEPS: so many steps, or with 0 to the end of the epoch.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import dcp
from dcp.integrations.torchdata import RescalableDataLoader

SAMPLES = 61


def main(root: str, steps: int) -> None:
    """Train, save at each step, and tell."""
    dist.init_process_group("gloo")
    loader = RescalableDataLoader(TensorDataset(torch.arange(SAMPLES)), 3, shuffle=True, num_workers=2)
    state = {"loader": loader}
    seen: list[int] = []
    with dcp.CheckpointManager(root, keep=dcp.Retention(last=2)) as manager:
        restored = manager.restore(state)
        first = restored.step + 1 if restored else 1
        for step, (batch,) in enumerate(loader, first):
            seen += batch.tolist()
            manager.save(step, state)
            if step + 1 - first == steps:
                break
    print("SEEN", json.dumps(seen), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
