"""Processes of tests: forked from one that has imported all that they need, for torch alone costs seconds.

A process has one such server, which imports what was asked for last; so one list has all that tests need.
The workers of a run share one, of the process that has started them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import select
import signal
import uuid
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Final

from tests.support.processes import children

__all__ = [
    "ADDRESS",
    "PRELOADED",
    "end_with_run",
    "ensure_fork_server",
    "forkserver_context",
    "set_preload",
    "share_fork_server",
]

ADDRESS: Final = "TESTS_WARM_WRITERS"
"""The variable that names the socket of `tests.support.warm_writers`, for all that use one server."""

_SHARED: Final = "TESTS_FORK_SERVER"
"""The variable that names the socket of the fork server, where one is shared."""

_ROOT: Final = Path(__file__).parents[2]

PRELOADED: Final = [
    "pytest",
    "hypothesis",
    "numpy.ma",
    "playwright.sync_api",
    "requests",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.utils.serialization.config",
    "torch._dynamo",  # imported by the first optimizer of a process
    "dcp.background.process.serving",  # what a writer imports
    "dcp.cli.app",
    "dcp.conversion.run",
    "dcp.conversion.targets.dcp",
    "dcp.conversion.targets.safetensors",
    "dcp.conversion.targets.torch_save",
    "dcp.errors",
    "dcp.filesystem",
    "dcp.manager.manager",
    "dcp.state_dict_loader",
    "dcp.state_dict_saver",
    "dcp.inspection.verification",
    "dcp.demo.story",
    "dcp.demo.training.train",
    "dcp.server.client",
    "dcp.conversion.driver",
    "dcp.manager.cleanup.removal",
    "dcp.server.jobs.executors.subprocess_main",
    "dcp.server.jobs.kinds.stats",
    "dcp.server.jobs.worker",
    "dcp.server.process.serving",
    "s3fs",
    "torch.distributed.run",
    "tests.support.crashes",
    "tests.support.crashing",
    "tests.support.job_workers",
    "tests.support.programs",
    "tests.support.ranks",
    "tests.support.small_parts_worker",
    "tests.support.versions",
    "tests.support.warm_writers_server",
]
"""It has no threads after them, so its forks are safe."""

_context = multiprocessing.get_context("forkserver")
_server: Final = multiprocessing.forkserver._forkserver
_ensure_running: Final = _server.ensure_running


def set_preload() -> None:
    """Once all test modules are imported: the benchmarks, which some try, ask for modules of their own."""
    _context.set_forkserver_preload(PRELOADED)
    _server.ensure_running = ensure_fork_server  # type: ignore[method-assign]


def share_fork_server() -> bool:
    """Before workers are started: one for all of them. Whether this version of Python lets it be shared."""
    if hasattr(_server, "_forkserver_authkey"):  # then it takes none but the process that has started it
        return False
    set_preload()
    os.environ[ADDRESS] = f"tests-{uuid.uuid4().hex}"
    ensure_fork_server()
    os.environ[_SHARED] = _server._forkserver_address  # type: ignore[attr-defined]
    return True


def ensure_fork_server() -> None:
    """It is started in the checkout, wherever a test is: it finds ours there, and is silent where it does
    not."""
    if (shared := os.environ.get(_SHARED)) is not None:
        if _server._forkserver_address is None:  # type: ignore[attr-defined]
            _server._forkserver_address = shared  # type: ignore[attr-defined]
            # what lives as long as somebody may ask for processes, which is asked of the run here
            _server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)  # type: ignore[attr-defined]
        resource_tracker.ensure_running()
        return
    is_there = _server._forkserver_pid is not None  # type: ignore[attr-defined]
    with contextlib.nullcontext() if is_there else contextlib.chdir(_ROOT):
        _ensure_running()


def forkserver_context() -> ForkServerContext:
    """The context whose processes are forked from a warm server."""
    return _context


def end_with_run() -> None:
    """In the fork server: it and what it has forked are killed once the process is gone that has started it.

    It ends by itself only with the last of what it has forked. That may hang, or be stopped, and nobody is
    left to end it where the tests were killed.
    """
    server, run = os.getpid(), os.getppid()
    if os.fork() != 0:
        return
    try:
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        of_run, of_server = os.pidfd_open(run), os.pidfd_open(server)
        ended, _, _ = select.select([of_run, of_server], [], [])
        if of_run in ended:
            for pid in {server, *children(server)} - {os.getpid()}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    finally:
        os._exit(0)
