"""`CheckpointManager` on a real S3 server: retention, deletion, pins and resuming."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import dcp
from tests.support.fault_doors import MANIFEST_NAME, METADATA_NAME, NOTES_NAME
from tests.support.fault_plan import INTERNAL_ERROR
from tests.support.fault_proxy import FaultProxy
from tests.support.s3 import RawS3, S3Server, raw_s3
from tests.support.versions import version_of, version_state


def _steps_of(events: list[Any], kind: str) -> list[int]:
    return sorted(event.step for event in events if event.kind == kind)


CHECKPOINT = [METADATA_NAME, "data", MANIFEST_NAME, NOTES_NAME]


def _manager_of(root: str, server: S3Server | FaultProxy, **options: Any) -> dcp.CheckpointManager:
    settings: dict[str, Any] = {"no_dist": True, "on_failure": "raise", "mode": "sync"}
    return dcp.CheckpointManager(root, storage_options=server.storage_options, **(settings | options))


def below(raw: RawS3, root: str) -> dict[str, list[str]]:
    """Return the names of all objects below ``root`` by folder; data files as "data"."""
    found: dict[str, list[str]] = {}
    for key in raw.list(f"{root}/"):
        folder, _, name = key.rpartition("/")
        found.setdefault(folder, []).append("data" if name.endswith(".distcp") else name)
    return {folder: sorted(names) for folder, names in found.items()}


# -- a run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_retention_of_a_run_on_s3(s3_server: S3Server, s3_root: str, mode: Any) -> None:
    """Steps are saved asynchronously and verified. All but the last two, the best and the pinned are deleted
    without leftovers. The next run restores the newest."""
    recorder: list[Any] = []
    keep = dcp.Retention(last=2, best=dcp.Best("loss"))
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: 3.0, 5: 2.0, 6: 2.5}
    with _manager_of(s3_root, s3_server, mode=mode, keep=keep, on_event=recorder.append) as manager:
        assert manager.restore(version_state(0)) is None
        for step, loss in losses.items():
            manager.save(step, version_state(step), metrics={"loss": loss})
            if step == 3:
                assert manager.wait(120)
                manager.pin(3)
        assert manager.wait(120)
        assert manager.all_steps() == [2, 3, 5, 6]
        assert (manager.pinned(), manager.latest(), manager.failures) == ([3], 6, 0)
    assert _steps_of(recorder, "verified") == [1, 2, 3, 4, 5, 6]
    assert _steps_of(recorder, "deleted") == [1, 4]
    with raw_s3(s3_server) as raw:
        assert below(raw, s3_root) == {f"step-{step:08d}": CHECKPOINT for step in (2, 3, 5, 6)}
    with _manager_of(s3_root, s3_server) as manager:
        state = version_state(0)
        restored = manager.restore(state)
        assert restored is not None
        assert (restored.step, version_of(state), restored.metrics) == (6, 6, {"loss": 2.5})
        assert restored.checkpoint_id == f"{s3_root}/step-00000006"


# -- notes and deletions -------------------------------------------------------------------------------------


def test_notes_of_many_writers_are_all_kept(s3_server: S3Server, s3_root: str) -> None:
    """Concurrent pins of several managers are all kept, by conditional writes with retries."""
    with _manager_of(s3_root, s3_server) as manager:
        manager.save(1, {"n": 1})
        managers = [_manager_of(s3_root, s3_server) for _ in range(4)]
        with ThreadPoolExecutor(4) as threads:
            list(
                threads.map(lambda one: [act(1) for _ in range(3) for act in (one.pin, one.unpin)], managers)
            )
            list(threads.map(lambda one: one.pin(1), managers))
        for one in managers:
            one.close()
        assert manager.pinned() == [1]


def test_interrupted_deletions_are_completed(s3_server: S3Server, s3_proxy: FaultProxy, s3_root: str) -> None:
    """The next run completes interrupted deletions, and can save to a step under deletion."""
    with _manager_of(s3_root, s3_server) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, version_state(step))
    for operation in ("DeleteObject", "DeleteObjects"):
        s3_proxy.spoil(INTERNAL_ERROR, operation=operation, times=None)
    options = s3_proxy.storage_options | {"retry_seconds": 0, "conditional_writes": "trust"}
    with dcp.CheckpointManager(s3_root, storage_options=options, no_dist=True) as cut_off:
        for step in (1, 2, 3):
            cut_off.delete(step)
    with raw_s3(s3_server) as raw:
        assert f"step-00000001/{MANIFEST_NAME}" in raw.list(f"{s3_root}/")
        with _manager_of(s3_root, s3_server) as manager:
            assert manager.all_steps() == [4]
            manager.save(3, version_state(33))
            assert manager.wait(60)
            assert manager.all_steps() == [3, 4]
            state = version_state(0)
            assert manager.restore(state, step=3) is not None and version_of(state) == 33
        assert below(raw, s3_root) == {f"step-{step:08d}": CHECKPOINT for step in (3, 4)}
