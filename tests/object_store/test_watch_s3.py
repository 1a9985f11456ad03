"""Consumers that watch a run on a real S3 server."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import CheckpointConflictError
from tests.support.crashes import Child, in_lab
from tests.support.fault_proxy import FaultProxy
from tests.support.faulty_saves import PART_BYTES
from tests.support.s3 import S3Server


def _manager_of(root: str, server: S3Server | FaultProxy, **options: Any) -> dcp.CheckpointManager:
    storage_options = server.storage_options | {"part_bytes": PART_BYTES}
    return dcp.CheckpointManager(root, storage_options=storage_options, no_dist=True, **options)


def _given(root: str, server: S3Server, **options: Any) -> list[int]:
    with dcp.watch(root, once=True, storage_options=server.storage_options, **options) as steps:
        return [step.step for step in steps]


def _killed_within_a_step(root: str, options: dict[str, Any]) -> None:
    for step in dcp.watch(root, storage_options=options):
        if step.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)


def _kill_a_consumer(root: str, options: dict[str, Any]) -> None:
    Child(_killed_within_a_step, root, options).wait()


def test_a_consumer_follows_a_run(s3_server: S3Server, s3_root: str, tmp_path: Path) -> None:
    """The cursor is in the bucket. After a kill the current step is returned again, and no other. Steps saved
    again are returned again, deleted steps are not. A second consumer of the same name is refused."""
    options = s3_server.storage_options
    assert _given(s3_root, s3_server) == []
    small = {"model": torch.ones(3)}
    with _manager_of(s3_root, s3_server, mode="sync", keep=dcp.Retention(last=3)) as manager:
        for step in (1, 2, 3):
            manager.save(step, small)
        assert manager.wait(120)
        in_lab(_kill_a_consumer, s3_root, options)
        with dcp.watch(s3_root, storage_options=options) as steps:
            assert next(steps).step == 2
            with dcp.watch(s3_root, once=True, storage_options=options) as second:
                got: list[int] = []
                working = threading.Timer(0.2, lambda: got.append(next(steps).step))
                working.start()
                with pytest.raises(CheckpointConflictError, match="only one process can use"):
                    next(second)
                working.join()
            assert got == [3]
        for step in (4, 5, 6, 3):
            manager.save(step, small, force=True)
        assert manager.wait(120)
        saved = manager.all_steps()
    assert _given(s3_root, s3_server) == [step for step in saved if step != 2]
    assert _given(s3_root, s3_server) == []
    assert _given(s3_root, s3_server, consumer="late", cursor=tmp_path) == saved
