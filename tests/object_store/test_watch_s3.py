"""On a real S3 server: saves that are cancelled or meet a deadline, and consumers that follow a run there."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import CheckpointConflictError
from tests.support.crashes import Child, in_lab
from tests.support.fault_plan import Fault, Kind
from tests.support.fault_proxy import FaultProxy
from tests.support.faulty_saves import PART_BYTES
from tests.support.s3 import RawS3, S3Server, raw_s3

SLOW = Fault(Kind.DELAY, seconds=20.0)
"""Longer than a cancelled save may take, which must not wait for it."""


def _manager_of(root: str, server: S3Server | FaultProxy, **options: Any) -> dcp.CheckpointManager:
    storage_options = server.storage_options | {"part_bytes": PART_BYTES}
    return dcp.CheckpointManager(root, storage_options=storage_options, no_dist=True, **options)


def _state_of(version: int) -> dict[str, Any]:
    return {"model": torch.full((1000,), version), "optimizer": torch.full((4, 1 << 20), float(version))}


def _version_restored(manager: dcp.CheckpointManager) -> tuple[int, int]:
    state = _state_of(0)
    restored = manager.restore(state)
    assert restored is not None
    assert float(state["optimizer"].min()) == float(state["model"].max())
    return restored.step, int(state["model"][0])


def _becomes(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def _left_of(raw: RawS3, root: str, step: int) -> list[str]:
    folder = f"{root}/step-{step:08d}/"
    return [*raw.list(folder), *raw.uploads(folder).values()]


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_a_cancelled_upload_is_ended(
    s3_server: S3Server, s3_proxy: FaultProxy, s3_root: str, mode: Any
) -> None:
    """In the middle of its parts: neither an object nor an upload is left, and the step before loads."""
    with _manager_of(s3_root, s3_proxy, mode=mode) as manager, raw_s3(s3_server) as raw:
        manager.save(1, _state_of(1))
        assert manager.wait(120)
        s3_proxy.spoil(SLOW, operation="UploadPart", times=None)
        manager.save(2, _state_of(2))
        assert _becomes(lambda: raw.uploads(f"{s3_root}/step-00000002"))
        assert manager.cancel()
        assert _left_of(raw, s3_root, 2) == []
        s3_proxy.heal()
        assert _version_restored(manager) == (1, 1)


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
    """Its cursor is in the bucket: killed with a step in hand, that one is given again, and no other; what is
    repeated comes again, what retention deleted does not; two of one name do not work side by side."""
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
                with pytest.raises(CheckpointConflictError, match="one at a time"):
                    next(second)
                working.join()
            assert got == [3]
        for step in (4, 5, 6, 3):
            manager.save(step, small, force=True)
        assert manager.wait(120)
        there = manager.all_steps()
    assert _given(s3_root, s3_server) == [step for step in there if step != 2]
    assert _given(s3_root, s3_server) == []
    assert _given(s3_root, s3_server, consumer="late", cursor=tmp_path) == there
