"""Test processes forked from a process with all imports done, since importing torch costs seconds.

Uses the fork server of `multiprocessing`: one for each test process, started at the first use. It ends with
the thread that started it, even if that thread is killed, and so do the processes that it has forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import signal
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Final

__all__ = ["PRELOADED", "end_with_parent", "ensure_fork_server", "forkserver_context"]

_ROOT: Final = Path(__file__).parents[2]
_PR_SET_PDEATHSIG: Final = 1

PRELOADED: Final = [
    "pytest",
    "hypothesis",
    "numpy.ma",  # imported by the first `numpy.unique` of a process
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch._dynamo",  # imported by the first optimizer of a process
    "s3fs",
    "dcp.cli.app",
    "dcp.conversion.run",
    "dcp.demo.story",
    "dcp.demo.train",
    "dcp.filesystem",
    "dcp.manager.manager",
    "dcp.server.client",
    "dcp.server.core.jobs.worker",
    "dcp.server.serving",
    "tests.support.crashes",
    "tests.support.programs",
    "tests.support.ranks",
]
"""Modules imported by the fork server for all of its processes."""

_context: Final = multiprocessing.get_context("forkserver")


def ensure_fork_server() -> None:
    """Start the fork server in the checkout, where it finds the modules; tests may have another folder."""
    _context.set_forkserver_preload(["tests.support.fork_server"])
    with contextlib.chdir(_ROOT):
        forkserver.ensure_running()


def forkserver_context() -> ForkServerContext:
    """Return the context whose processes are forked from the fork server."""
    ensure_fork_server()
    return _context


def end_with_parent(number: signal.Signals) -> None:
    """Have this process receive the signal ``number`` when its parent process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
