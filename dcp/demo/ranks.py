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
from dcp.watching import start_ticks

__all__ = ["TrainingJob", "launch"]

_PORT_BYTES = 5

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
    receive, send = os.pipe()
    context = start_processes(  # type: ignore[no-untyped-call]
        _rank, (job, ranks, receive, send), ranks, join=False, start_method="fork"
    )
    # only now, because a fork of a process with threads may hang
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(send, f"{store.port:{_PORT_BYTES}}".encode() * ranks)
    try:
        while not context.join():
            pass
    except ProcessException as error:
        sys.exit(f"{error}")


def _rank(rank: int, job: TrainingJob, ranks: int, receive: int, send: int) -> None:
    os.close(send)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=os.read(receive, _PORT_BYTES).decode().strip(),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        TORCHELASTIC_USE_AGENT_STORE="True",  # rank 0 serves none
        TORCHELASTIC_RESTART_COUNT="0",
    )
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
