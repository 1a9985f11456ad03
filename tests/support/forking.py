"""Processes of tests: forked from one that has imported all that they need, for torch alone costs seconds.

A process has one such server, which imports what was asked for last; so one list has all that tests need.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext
from typing import Final

__all__ = ["PRELOADED", "forkserver_context", "set_preload"]

PRELOADED: Final = [
    "pytest",
    "hypothesis",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "dcp.manager",
    "dcp.state_dict_loader",
    "dcp.state_dict_saver",
    "dcp.inspection.verification",
    "tests.support.crashes",
    "tests.support.crashing",
    "tests.support.job_workers",
    "tests.support.ranks",
    "tests.support.small_parts_worker",
    "tests.support.versions",
]
"""It has no threads after them, so its forks are safe."""

_context = multiprocessing.get_context("forkserver")


def set_preload() -> None:
    """Once all test modules are imported: the benchmarks, which some try, ask for modules of their own."""
    _context.set_forkserver_preload(PRELOADED)


def forkserver_context() -> ForkServerContext:
    """The context whose processes are forked from a warm server."""
    return _context
