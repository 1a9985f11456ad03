"""Start training jobs as torchrun does, forked from one process that has imported torch for all of them.

That is a process of its own; or this one, if it runs in a program that has imported all that already.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = ["Launch", "start", "start_stock"]

_RANKS = "dcp.demo.training.ranks"


@dataclass(frozen=True)
class Launch:
    """One job: ``arguments`` of `dcp.demo.training.train`, and where its processes log to."""

    ranks: int
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


def start(launch: Launch) -> BaseProcess:
    """Start the launcher of a job, which starts the ranks and ends with status 0 if they all do."""
    return _start(_launch, launch)


def start_stock(folders: Sequence[str], environment: Mapping[str, str], log: Path) -> BaseProcess:
    """Start a process that loads checkpoints as `dcp.demo.training.stock` does, and writes what it says to
    ``log``."""
    return _start(_load_with_stock_torch, folders, environment, log)


def _start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    process: BaseProcess
    if _RANKS in sys.modules:
        process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_RANKS])
        process = context.Process(target=target, args=arguments)
    process.start()
    return process


def _launch(launch: Launch) -> None:
    importlib.import_module(_RANKS).run(launch)  # it imports torch, which the demo itself does not


def _load_with_stock_torch(folders: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    with log.open("w") as said, contextlib.redirect_stdout(said):
        try:
            importlib.import_module("dcp.demo.training.stock").main(folders)
        except Exception:  # noqa: BLE001 - the demo tells of it, from the log
            traceback.print_exc(file=said)
            raise SystemExit(1) from None
