"""Start training jobs as torchrun does, forked from one process that has imported torch for all of them."""

from __future__ import annotations

import importlib
import multiprocessing
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

__all__ = ["Launch", "start"]

_LAUNCHER = "dcp.demo.training.elastic"


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
    context.set_forkserver_preload([_LAUNCHER])
    process = context.Process(target=_launch, args=(launch,))
    process.start()
    return process


def _launch(launch: Launch) -> None:
    importlib.import_module(_LAUNCHER).run(launch)  # it imports torch, which the demo itself does not
