"""The pool of processes that convert. Internal: no conversion can be told when a worker of it dies."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest

from dcp.conversion.copying.executors import LocalProcesses
from dcp.errors import CheckpointError
from tests.support.crashes import Child, in_lab


def test_workers_import_no_torch() -> None:
    """Nor the program of the caller: they start as modules of their own."""
    pool = LocalProcesses(1)
    try:
        found = pool.submit(eval, "list(__import__('sys').modules)").result(60)
    finally:
        pool.shutdown()
    assert "dcp.conversion.copying.worker" in found
    assert not {"torch", "pytest"} & set(found)


def test_a_worker_that_dies_is_an_error_and_is_replaced() -> None:
    """Its task fails with what happened; the next one gets a new process."""
    pool = LocalProcesses(1)
    try:
        with pytest.raises(CheckpointError, match="ended with exit code 7"):
            pool.submit(os._exit, 7).result(60)
        assert pool.submit(len, "abc").result(60) == 3
    finally:
        pool.shutdown()


def _shut_down_beside_a_fork() -> int:
    pool = LocalProcesses(1)
    found: int = pool.submit(len, "abc").result(60)
    with contextlib.ExitStack() as stack:
        fork = Child(time.sleep, 600)
        stack.callback(fork.wait)
        stack.callback(os.kill, fork.pid, signal.SIGKILL)
        ended = threading.Thread(target=pool.shutdown, daemon=True)
        ended.start()
        ended.join(60)
        assert not ended.is_alive()
    return found


def test_a_pool_ends_though_a_fork_holds_its_pipes() -> None:
    """Such as a data loader's worker, begun meanwhile, which lives for an epoch."""
    assert in_lab(_shut_down_beside_a_fork) == 3
