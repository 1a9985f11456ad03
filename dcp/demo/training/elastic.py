"""The launcher of a training job: torch's elastic agent, as torchrun runs it, whose ranks are forks."""

from __future__ import annotations

import os
import sys
import uuid

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from dcp.demo.training.launch import Launch
from dcp.demo.training.train import main

__all__ = ["run"]

torch.compiler.reset()
"""So that the compiler is imported here, once: FSDP2 does it in each rank, for seconds."""


def run(launch: Launch) -> None:
    """Run a job to its end; this process ends with status 1 if a rank fails."""
    os.environ.clear()
    os.environ.update(launch.environment)
    log = os.open(launch.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.close(log)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=launch.ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        start_method="fork",
        # its default would stay behind in the folder for temporary files
        logs_specs=DefaultLogsSpecs(log_dir=str(launch.log_folder)),
    )
    try:
        elastic_launch(config, main)(launch.arguments)
    except ChildFailedError as error:
        sys.exit(f"{error}")
