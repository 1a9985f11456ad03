"""A training function of Ray Train, in a program of its own.

    python -m tests.support.ray_loop FOLDER WORKERS STEPS [crash | preempt] [URL]

The run's storage is the folder, or the URL. Prints a line RESULT with the metrics known to Ray at the end,
and the weights of the last worker.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer


def preemption() -> Any:
    """Return Ray's notice of a node's preemption."""
    return SimpleNamespace(preempted_node_ids=["node"])


def train(config: dict[str, Any]) -> None:
    """Add the step to the weights at each step; save every second step."""
    import dcp
    from dcp.integrations.ray import RayCheckpointManager

    rank, flag = ray.train.get_context().get_world_rank(), Path(config["flag"])
    state: dict[str, Any] = {"w": torch.zeros(4), "seen": dcp.Rescale(0, "sum")}
    with RayCheckpointManager(every_steps=2, handle_sigterm=False) as manager:
        restored = manager.restore(state)
        for step in range(restored.step + 1 if restored else 1, config["steps"] + 1):
            state["w"] += step
            state["seen"].value += 1
            if config["event"] == "preempt" and step == config["steps"] - 2:
                ray.train.get_preemption_info = preemption
            manager.save(step, state, metrics={"loss": 1.0 / step})
            if config["event"] == "crash" and step == 5 and not flag.exists() and rank == 0:
                flag.touch()
                os._exit(1)
        report = {"w": state["w"].tolist(), "seen": state["seen"].value, "from": restored and restored.step}
        Path(f"{config['flag']}.{rank}").write_text(json.dumps(report))


def main(folder: str, workers: int, steps: int, event: str = "", url: str = "") -> None:
    """Run the training."""
    flag = str(Path(folder) / "flag")
    ray.init(address="local", num_cpus=workers + 1, include_dashboard=False)  # a Ray head of its own
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": steps, "flag": flag, "event": event},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(
            name="run", storage_path=url or folder, failure_config=ray.train.FailureConfig(max_failures=1)
        ),
    )
    result: Any = trainer.fit()
    reported = [Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints]
    ranks = [json.loads(Path(f"{flag}.{rank}").read_text()) for rank in range(workers)]
    print("RESULT", json.dumps({"reported": sorted(reported), "metrics": result.metrics, "ranks": ranks}))
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
