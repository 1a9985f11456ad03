"""Saves that fail, and checkpoints that are damaged as soon as they are committed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.steps.notes import read_notes
from dcp.storage.stores.posix.store import PosixStore
from tests.dcp.manager.manager_support import (
    MODES,
    Failing,
    Recorder,
    data_files,
    loaded_step,
    manager_of,
    state_at,
    writer_with,
)
from tests.support.faulty_saves import without_metadata


@pytest.mark.parametrize(("check", "found"), [("sizes", True), ("full", True), ("off", False)])
def test_damage_at_the_commit_is_found_noted_and_not_counted(tmp_path: Path, check: Any, found: bool) -> None:
    """The storage loses half of a file: told, noted, counted as a failure, and retention keeps the older."""

    def truncate(operation: Any) -> None:
        if (tmp_path / "step-00000002").exists():
            (file,) = data_files(tmp_path / "step-00000002")
            with file.open("r+b") as opened:
                opened.truncate(file.stat().st_size // 2)

    seen = Recorder()
    keep = dcp.Retention(last=1)
    writer = writer_with(truncate)
    with manager_of(tmp_path, writer=writer, verify_saved=check, keep=keep, on_event=seen) as manager:
        manager.save(1, state_at(1))
        manager.save(2, state_at(2))
        assert manager.wait(240)
        assert manager.failures == int(found)
        assert manager.all_steps() == ([1, 2] if found else [2])
    if found:
        event = seen.one("verify_failed")
        assert (event.step, event.data["damaged"]) == (2, True)
        assert event.error is not None
        assert "__0_0." in event.error
        noted = read_notes(PosixStore(tmp_path / "step-00000002")).verified
        assert noted is not None
        assert not noted.ok


def test_full_verification_reads_the_bytes(tmp_path: Path) -> None:
    """A flipped byte leaves all sizes as they are: only "full" sees it."""

    def flip(operation: Any) -> None:
        for file in data_files(tmp_path / "full" / "step-00000001") + data_files(
            tmp_path / "sizes" / "step-00000001"
        ):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 0xFF
            file.write_bytes(data)

    failures = {}
    for check in ("sizes", "full"):
        writer = writer_with(flip)
        state = {"w": torch.arange(4096)}
        with manager_of(tmp_path / check, writer=writer, verify_saved=check) as manager:
            manager.save(1, state)
            assert manager.wait(240)
            failures[check] = manager.failures
    assert failures == {"sizes": 0, "full": 1}


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_save_is_retried(tmp_path: Path, mode: Any) -> None:
    """The storage is away twice: the third attempt commits, and that is told."""
    seen, failing = Recorder(), Failing(times=2)
    with manager_of(tmp_path, mode=mode, writer=writer_with(failing), on_event=seen) as manager:
        manager.save(1, state_at(1))
        assert manager.wait(240)
        assert (manager.failures, manager.all_steps()) == (0, [1])
    assert seen.one("save_retried").data["attempts"] == 3
    assert seen.steps("saved") == [1]
    assert loaded_step(manager.checkpoint_id(1)) == 1
    assert len(data_files(tmp_path / "step-00000001")) == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_failed_save_does_not_end_training(tmp_path: Path, mode: Any) -> None:
    """With on_failure="warn" the loop goes on; the failure is told and counted, the next save works."""
    seen, failing = Recorder(), Failing(times=2)
    with manager_of(tmp_path, mode=mode, writer=writer_with(failing), on_event=seen, retries=1) as manager:
        futures = [manager.save(step, state_at(step)) for step in (1, 2, 3)]
        assert manager.wait(240)
        assert (manager.failures, manager.all_steps()) == (1, [2, 3])
    assert isinstance(futures[0], dcp.state_dict_saver.SaveFuture)
    assert isinstance(futures[0].exception(), dcp.errors.StorageError)
    event = seen.one("save_failed")
    assert event.step == 1
    assert "the storage is away" in str(event.error)
    assert data_files(tmp_path / "step-00000001") == []


def _writer_without_metadata(checkpoint_id: str) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(checkpoint_id, sync_files=False, open_store=without_metadata)


@pytest.mark.parametrize("mode", ["thread", "process", "sync"])
def test_a_save_that_fails_behind_its_commit_is_committed(tmp_path: Path, mode: Any) -> None:
    """`.metadata` cannot be written: the same error in every mode says so, and the step counts as saved, and
    as sound, however it is verified."""
    seen = Recorder()
    options: dict[str, Any] = {"mode": mode, "on_event": seen, "verify_saved": "full"}
    with manager_of(tmp_path, writer=_writer_without_metadata, **options) as manager:
        future = manager.save(1, state_at(1))
        assert manager.wait(240)
        assert (manager.failures, manager.all_steps()) == (0, [1])
    assert isinstance(future, dcp.state_dict_saver.SaveFuture)
    error = future.exception()
    assert isinstance(error, dcp.errors.StorageError) and error.committed
    assert "is committed and loads with dcp, but .metadata" in str(error)
    assert seen.kinds("saved", "save_failed", "verified") == [("saved", 1), ("verified", 1)]
    assert "the storage is away" in str(seen.one("saved").error)
    assert loaded_step(manager.checkpoint_id(1)) == 1


def test_a_failure_is_raised_at_the_next_call(tmp_path: Path) -> None:
    """With on_failure="raise": once, by whatever is called next; then the manager goes on."""
    failing = Failing()
    options: dict[str, Any] = {"on_failure": "raise", "retries": 0, "every_steps": 1}
    with manager_of(tmp_path, writer=writer_with(failing), **options) as manager:
        future = manager.save(1, state_at(1))
        assert future is not None
        assert isinstance(future.exception(240), dcp.errors.StorageError)
        with pytest.raises(dcp.errors.StorageError, match="the storage is away"):
            manager.save(2, state_at(2))
        assert manager.should_save(2)
        manager.save(2, state_at(2))
        with pytest.raises(dcp.errors.StorageError, match="the storage is away"):
            manager.wait(240)
        failing.times = 0
        manager.save(3, state_at(3))
    assert manager.failures == 2
    assert manager.all_steps() == [3]
    other = manager_of(tmp_path, writer=writer_with(Failing()), **options)
    other.save(4, state_at(4))
    with pytest.raises(dcp.errors.StorageError, match="the storage is away"):
        other.close()
    other.close()


def test_a_run_that_saved_nothing_does_not_end_well(tmp_path: Path) -> None:
    """With on_failure="warn", too: `close` raises where all saves failed, once; not after a commit."""
    failing = Failing()
    manager = manager_of(tmp_path, writer=writer_with(failing), retries=0)
    for step in (1, 2):
        manager.save(step, state_at(step))
    with pytest.raises(dcp.CheckpointError, match=r"nothing was saved: .* 2 failed, .*the storage is away"):
        manager.close()
    manager.close()
    with (
        pytest.raises(ZeroDivisionError),
        manager_of(tmp_path, writer=writer_with(failing), retries=0) as other,
    ):
        other.save(3, state_at(3))
        1 / 0  # noqa: B018
    with manager_of(tmp_path, writer=writer_with(Failing(times=1)), retries=0) as other:
        for step in (4, 5):
            other.save(step, state_at(step))
    assert (other.failures, other.all_steps()) == (1, [5])


def test_sync_failures_are_raised_at_once(tmp_path: Path) -> None:
    """Nothing is under way, so there is no next call to wait for."""
    options: dict[str, Any] = {"on_failure": "raise", "retries": 0, "mode": "sync"}
    with manager_of(tmp_path, writer=writer_with(Failing()), **options) as manager:
        with pytest.raises(dcp.errors.StorageError, match="the storage is away"):
            manager.save(1, state_at(1))
        assert manager.failures == 1


def test_damage_is_raised_too(tmp_path: Path) -> None:
    """A checkpoint found damaged after its commit is a failure of its save."""

    def truncate(operation: Any) -> None:
        (file,) = data_files(tmp_path / "step-00000001")
        file.write_bytes(b"")

    with manager_of(tmp_path, writer=writer_with(truncate), on_failure="raise") as manager:
        manager.save(1, state_at(1))
        with pytest.raises(dcp.CorruptCheckpointError, match=r"step-00000001 is damaged, right after"):
            manager.wait(240)
