"""Ranks of a training job: forks of one process, with the variables and the store that torchrun gives."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from dcp.demo.train import TIMEOUT_SECONDS, TrainingJob, train
from dcp.watching.cursor import start_ticks

__all__ = ["TrainingJob", "launch"]

torch.compiler.reset()
"""So that the compiler is imported here, once: FSDP2 does it in each rank, for seconds."""


def launch(job: TrainingJob, ranks: int, environment: Mapping[str, str], log: Path) -> None:
    """Run a job to its end; this process ends with status 1 if a rank fails, and the other ranks with it."""
    os.environ.clear()
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.close(output)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ.update(
        MASTER_ADDR=store.host,
        MASTER_PORT=str(store.port),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        TORCHELASTIC_USE_AGENT_STORE="True",  # rank 0 serves none
        TORCHELASTIC_RESTART_COUNT="0",
    )
    try:
        start_processes(_rank, (job,), ranks, start_method="fork")  # type: ignore[no-untyped-call]
    except ProcessException as error:
        sys.exit(f"{error}")


def _rank(rank: int, job: TrainingJob) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    note = job.results / f"rank-{rank}.pid"
    note.with_suffix(".part").write_text(f"{os.getpid()} {start_ticks(os.getpid())}")
    note.with_suffix(".part").rename(note)  # whoever reads it must not find half of a number
    # torch's advice on views between FSDP modules; nothing here writes into one
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    try:
        train(job)
    finally:
        dist.destroy_process_group()
