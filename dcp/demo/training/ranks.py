"""The ranks of a training job: forks of one process, with the variables and the store that torchrun gives."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch
from torch.distributed import TCPStore
from torch.multiprocessing.spawn import ProcessException, start_processes

from dcp.demo.training.launch import Launch
from dcp.demo.training.train import main

__all__ = ["run"]

torch.compiler.reset()
"""So that the compiler is imported here, once: FSDP2 does it in each rank, for seconds."""


def run(launch: Launch) -> None:
    """Run a job to its end; this process ends with status 1 if a rank fails, and the other ranks with it."""
    os.environ.clear()
    os.environ.update(launch.environment)
    log = os.open(launch.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.close(log)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(
        MASTER_ADDR=store.host,
        MASTER_PORT=str(store.port),
        WORLD_SIZE=str(launch.ranks),
        LOCAL_WORLD_SIZE=str(launch.ranks),
        TORCHELASTIC_USE_AGENT_STORE="True",  # rank 0 serves none
        TORCHELASTIC_RESTART_COUNT="0",
    )
    try:
        start_processes(_rank, (launch.arguments,), launch.ranks, start_method="fork")  # type: ignore[no-untyped-call]
    except ProcessException as error:
        sys.exit(f"{error}")


def _rank(rank: int, arguments: Sequence[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    main(arguments)
