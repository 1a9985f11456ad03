"""`CheckpointManager` on a real S3 server: retention, deletion, pins, resuming, and what all that costs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import CheckpointError, CheckpointNotFoundError, CorruptCheckpointError, StorageError
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
    """Names of all objects by the folder below ``root`` that they are in; data files as "data"."""
    found: dict[str, list[str]] = {}
    for key in raw.list(f"{root}/"):
        folder, _, name = key.rpartition("/")
        found.setdefault(folder, []).append("data" if name.endswith(".distcp") else name)
    return {folder: sorted(names) for folder, names in found.items()}


def _one_data_file(raw: RawS3, folder: str) -> str:
    (name,) = [name for name in raw.list(f"{folder}/") if name.endswith(".distcp")]
    return f"{folder}/{name}"


# -- a run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.exhaustive)])
def test_a_run_keeps_what_it_is_told_to(s3_server: S3Server, s3_root: str, mode: Any) -> None:
    """Saved behind the loop, verified, and all but the last two, the best and the pinned deleted to the last
    object; the next run goes on from the newest."""
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


def test_writers_of_ones_own_get_the_options(s3_server: S3Server, s3_root: str) -> None:
    """Those that have none; with wrong ones of its own a writer fails, whatever the manager has."""
    makes = (
        partial(dcp.FileSystemWriter, torch_compatible=False),
        partial(dcp.FsspecWriter, torch_compatible=False),
        partial(dcp.FsspecWriter, torch_compatible=False, **s3_server.storage_options),
    )
    for step, make in enumerate(makes, start=1):
        with _manager_of(s3_root, s3_server, writer=make) as manager:
            manager.save(step, {"n": step})
    with raw_s3(s3_server) as raw:
        wanted = [name for name in CHECKPOINT if name != METADATA_NAME]
        assert below(raw, s3_root) == {f"step-{step:08d}": wanted for step in (1, 2, 3)}
    wrong = partial(dcp.FsspecWriter, **(s3_server.storage_options | {"secret": "wrong"}))
    with (
        pytest.raises(StorageError, match="SignatureDoesNotMatch"),
        _manager_of(s3_root, s3_server, writer=wrong, retries=0) as manager,
    ):
        manager.save(4, {"n": 4})


# -- damage --------------------------------------------------------------------------------------------------


def _flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def test_a_restore_falls_back_and_notes_the_damage(s3_server: S3Server, s3_root: str) -> None:
    """Past a flipped bit, a cut file, one that is gone, and a damaged manifest; what was found is noted, and
    such steps no longer count for retention."""
    recorder: list[Any] = []
    with _manager_of(s3_root, s3_server) as manager:
        for step in range(1, 7):
            manager.save(step, {"w": torch.full((4096,), float(step)), "step": step})
    state: dict[str, Any] = {"w": torch.zeros(4096), "step": 0}
    keep = dcp.Retention(last=2)
    with (
        raw_s3(s3_server) as raw,
        _manager_of(s3_root, s3_server, keep=keep, on_event=recorder.append) as manager,
    ):
        data = {step: _one_data_file(raw, manager.checkpoint_id(step)) for step in range(3, 6)}
        raw.write(data[5], _flip(raw.read(data[5])))
        raw.write(data[4], raw.read(data[4])[:-1000])
        raw.delete(data[3])
        manifest = f"{manager.checkpoint_id(6)}/{MANIFEST_NAME}"
        raw.write(manifest, _flip(raw.read(manifest)))
        restored = manager.restore(state)
        assert restored is not None
        assert (restored.step, state["step"], state["w"].unique().tolist()) == (2, 2, [2.0])
        reasons = dict(restored.skipped)
        assert list(reasons) == [6, 5, 4, 3]
        assert "'w'" in reasons[5]
        assert all(str(step) in reason for step, reason in reasons.items())
        with pytest.raises(CorruptCheckpointError):
            manager.restore(state, step=5)
        assert manager.wait(60)
        manager.save(7, state)
        assert manager.wait(60)
        assert manager.all_steps() == [2, 3, 4, 5, 6, 7]  # one good one is not enough to let damaged ones go
        manager.save(8, state)
        assert manager.wait(60)
        assert manager.all_steps() == [7, 8]
        assert below(raw, s3_root) == {f"step-{step:08d}": CHECKPOINT for step in (7, 8)}
    assert _steps_of(recorder, "skipped_damaged") == [3, 4, 5, 6]


@pytest.mark.parametrize("check", ["sizes", "full"])
def test_a_verification_costs_no_request_a_file(s3_proxy: FaultProxy, s3_root: str, check: Any) -> None:
    """Compares sizes by listings; a full one reads the data, with the store's own options."""
    told: list[Any] = []
    make = partial(dcp.FsspecWriter, single_file_per_rank=False)
    with _manager_of(s3_root, s3_proxy, writer=make, verify_saved=check, on_event=told.append) as manager:
        manager.save(1, {f"w{i}": torch.full((100,), i) for i in range(20)})
        assert manager.wait(60)
    assert _steps_of(told, "verified") == [1]
    of_data = {request.operation for request in s3_proxy.requests(key="distcp$")}
    assert of_data <= {"PutObject", *(["GetObject"] if check == "full" else [])}


# -- notes and deletions -------------------------------------------------------------------------------------


def test_pins_and_deletions(s3_server: S3Server, s3_root: str) -> None:
    """A pin holds against retention and deletion, until it is taken away by whichever manager."""
    with _manager_of(s3_root, s3_server) as manager, _manager_of(s3_root, s3_server) as other:
        for step in (1, 2, 3):
            manager.save(step, {"n": step})
        assert manager.wait(60)
        other.pin(2)
        assert manager.pinned() == [2]
        with pytest.raises(CheckpointError, match="pinned"):
            manager.delete(2)
        for step in (4, 10**9):
            with pytest.raises(CheckpointNotFoundError):
                manager.delete(step)
            with pytest.raises(CheckpointNotFoundError):
                manager.pin(step)
        manager.unpin(2)
        manager.delete(2)
        assert manager.all_steps() == [1, 3]
        assert manager.wait(60)
        assert (other.all_steps(), other.pinned()) == ([1, 3], [])
    with raw_s3(s3_server) as raw:
        assert below(raw, s3_root) == {f"step-{step:08d}": CHECKPOINT for step in (1, 3)}


def test_notes_of_many_writers_are_all_kept(s3_server: S3Server, s3_root: str) -> None:
    """Pins and metrics that managers of several processes note at once: conditional writes, tried again."""
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


def test_what_an_earlier_run_left_is_finished(
    s3_server: S3Server, s3_proxy: FaultProxy, s3_root: str
) -> None:
    """Ends deletions that were cut off, and makes way for a save to such a step."""
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


# -- what it costs -------------------------------------------------------------------------------------------
