"""Start training jobs as torchrun does, forked from one process that has imported torch for all of them."""

from __future__ import annotations

import multiprocessing
import os
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

__all__ = ["KILL_VARIABLE", "Launch", "rank_note", "start", "start_ticks"]

KILL_VARIABLE = "DCP_DEMO_KILL_AT"
"""``STEP:N``: in the save of training step STEP, every rank dies before its Nth write to its data file (on an
object store before the Nth part of it is sent).
``STEP:staged``: every rank dies once all have handed the state of STEP over to their writer processes."""

_PRELOADED = ["torch.distributed.launcher.api", "dcp.demo.training.train"]
_STATE, _START_TICKS = 0, 19
"""Fields of ``/proc/PID/stat`` behind the command's name."""


@dataclass(frozen=True)
class Launch:
    """One job: ``arguments`` of `dcp.demo.training.train`, and where its processes log to."""

    ranks: int
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path
    log_folder: Path


def start(launch: Launch) -> BaseProcess:
    """Start the launcher of a job, which starts the ranks and ends with status 0 if they all do."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    process = context.Process(target=_launch, args=(launch,))
    process.start()
    return process


def rank_note(results: Path, rank: int) -> Path:
    """The file in which a rank notes its process number and `start_ticks`."""
    return results / f"rank-{rank}.pid"


def start_ticks(pid: int) -> int | None:
    """The clock tick at which a process started, which tells it from a later one of its number; None if it
    has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[_STATE] in ("Z", "X") else int(fields[_START_TICKS])


def _launch(launch: Launch) -> None:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from dcp.demo.training.train import main

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
