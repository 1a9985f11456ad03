"""`CheckpointManager.restore`: the newest readable step, and errors that must not lead to an older step."""

from __future__ import annotations

import errno
import logging
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MissingKeyError,
    PlanError,
    ShapeMismatchError,
    StorageError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from tests.support.manager_runs import (
    MODES,
    Fault,
    Recorder,
    WatchedRoot,
    damage,
    data_files,
    flip,
    loaded_step,
    manager_of,
    state_at,
    truncate,
)
from tests.support.versions import save_version, stock_save_version, version_of, version_state

MANIFEST = "manifest.msgpack"
DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit": damage,
    "a missing data file": lambda folder: data_files(folder)[0].unlink(),
    "a truncated manifest": lambda folder: truncate(folder / MANIFEST),
}


def folder_of(root: Path, step: int) -> Path:
    """Return the folder of a step."""
    return root / f"step-{step:08d}"


def save_steps(root: Path, *steps: int) -> None:
    """Save steps whose values show the step."""
    for step in steps:
        save_version(folder_of(root, step), step)


def resume(
    root: Path | str,
    state: dict[str, Any],
    step: int | None = None,
    seen: Recorder | None = None,
    **options: Any,
) -> dcp.Restored | None:
    """Restore by a new manager, and return the result."""
    with manager_of(root, mode="sync", handle_sigterm=False, on_event=seen) as manager:
        restored = manager.restore(state, step, **options)
        assert manager.wait(240)
        return restored


# -- restored steps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_at_the_last_step(tmp_path: Path, mode: Any) -> None:
    """`restore` loads the newest or the requested step with `PerRank` values, and returns None without
    one."""
    with manager_of(tmp_path, mode=mode) as manager:
        assert manager.restore(state_at(-1)) is None
        for step in (5, 7):
            manager.save(step, state_at(step), metrics={"loss": step / 2}, user_metadata={"tag": "x"})
    seen = Recorder()
    with manager_of(tmp_path, mode=mode, on_event=seen) as manager:
        state = state_at(-1)
        restored = manager.restore(state)
        assert restored is not None
        assert (restored.step, restored.skipped, restored.metrics) == (7, (), {"loss": 3.5})
        assert (restored.user_metadata["tag"], restored.world_size) == ("x", 1)
        assert restored.checkpoint_id == str(folder_of(tmp_path, 7)) and restored.report.bytes_needed > 256
        assert state["own"].value == {"rank": 0, "step": 7}
        assert state["model"]["weight"].tolist() == [7.0] * 64
        back = manager.restore(state, 5)
        assert back is not None and back.step == state["step"] == 5
        manager.save(7, state_at(107))
    assert seen.steps("restored") == [7, 5]
    assert loaded_step(manager.checkpoint_id(7)) == 107


def test_checkpoints_of_other_tools_are_steps(tmp_path: Path) -> None:
    """Checkpoints of stock torch and of `dcp.save` are restored, with any metrics in their metadata."""
    stock_save_version(folder_of(tmp_path, 7), 7)
    restored = resume(tmp_path, state := version_state(0))
    assert restored is not None and (restored.step, restored.metrics, version_of(state)) == (7, {}, 7)
    user = {"step": 10, "metrics": {"loss": 5, "odd": "x"}, "run": "r"}
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder_of(tmp_path, 10), user_metadata=user)
    restored = resume(tmp_path, {"w": torch.zeros(2)})
    assert restored is not None and (restored.metrics, restored.user_metadata) == ({"loss": 5.0}, user)


def test_a_root_without_commit_is_a_fresh_start(tmp_path: Path) -> None:
    """A missing root, an empty root, and folders of incomplete saves are a fresh start."""
    assert resume(tmp_path / "none", version_state(0)) is None
    assert resume(tmp_path, version_state(0)) is None
    save_steps(tmp_path, 1)
    for name in (MANIFEST, ".metadata"):
        (folder_of(tmp_path, 1) / name).unlink()
    assert resume(tmp_path, version_state(0)) is None


# -- damage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_step_is_skipped(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """The older step is loaded whole; the damaged one causes an event with the reason, and one warning."""
    save_steps(tmp_path, 1, 2)
    DAMAGE[how](folder_of(tmp_path, 2))
    state, seen = version_state(0), Recorder()
    restored = resume(tmp_path, state, seen=seen)
    assert restored is not None and restored.step == version_of(state) == 1
    ((step, reason),) = restored.skipped
    assert step == 2 and str(folder_of(tmp_path, 2)) in reason
    assert seen.steps("skipped_damaged") == seen.steps("verify_failed") == [2]
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [getattr(record, "dcp_event", record.message) for record in warned] == ["skipped_damaged"]


def test_a_run_of_damaged_steps_is_an_error(tmp_path: Path) -> None:
    """Each damaged step is skipped with its own reason; if no step is left, the error lists all of them."""
    save_steps(tmp_path, 1, 2, 3)
    damage(folder_of(tmp_path, 3))
    data_files(folder_of(tmp_path, 2))[0].unlink()
    state = version_state(0)
    restored = resume(tmp_path, state)
    assert restored is not None and restored.step == version_of(state) == 1
    assert [step for step, _ in restored.skipped] == [3, 2] and "is missing" in restored.skipped[1][1]
    damage(folder_of(tmp_path, 1))
    with pytest.raises(CorruptCheckpointError, match="none of the 3 committed steps") as caught:
        resume(tmp_path, version_state(0))
    assert caught.value.steps == [3, 2, 1]
    assert "is missing" in caught.value.reasons[1] and "step 1: " in str(caught.value)


def test_a_damaged_step_is_noted_and_can_be_saved_again(tmp_path: Path) -> None:
    """Retention does not count a damaged step, so the older good step stays; saved again it is good."""
    with manager_of(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, state_at(step))
    damage(folder_of(tmp_path, 3))
    with manager_of(tmp_path, keep=dcp.Retention(last=1)) as manager:
        state = state_at(-1)
        assert manager.restore(state) is not None and state["step"] == 2
        assert manager.wait(240)
        with pytest.raises(CorruptCheckpointError):
            manager.restore(state, 3)
        with pytest.raises(CheckpointNotFoundError):
            manager.restore(state, 7)
        assert manager.wait(240) and manager.all_steps() == [1, 2, 3]
        manager.save(3, state_at(30), force=True)
        assert manager.wait(240) and manager.all_steps() == [3]
        manager.save(4, state_at(4), force=True)
    assert manager.all_steps() == [4]


# -- tensors filled by a failed load -------------------------------------------------------------------------


class Opaque:
    """A value that is stored as a pickle, and is read after the tensors."""

    def __init__(self, number: int) -> None:
        self.number = number


def break_object(folder: Path, fqn: str) -> None:
    """Flip a bit in the pickle of a value, so that a load fails after all tensors are filled."""
    index = dcp.open_index(folder)
    objects, row = index.objects, index.objects.position[fqn]
    middle = int(objects.offsets[row] + objects.lengths[row] // 2)
    flip(folder / index.files[int(objects.files[row])], middle)


def test_a_partial_load_does_not_mix_two_steps(tmp_path: Path) -> None:
    """If the damaged step filled a tensor that the older step lacks, `restore` raises."""
    dcp.save({"w": torch.ones(2), "o": 1}, checkpoint_id=folder_of(tmp_path, 1))
    state = {"w": torch.ones(2), "head": torch.ones(2), "o": Opaque(2)}
    dcp.save(state, checkpoint_id=folder_of(tmp_path, 2))
    break_object(folder_of(tmp_path, 2), "o")
    options: dict[str, Any] = {"allow_partial_load": True, "weights_only": False}
    empty: dict[str, Any] = {"w": torch.zeros(2), "head": torch.zeros(2), "o": None}
    with pytest.raises(PlanError, match=r"'head'.*two checkpoints"):
        resume(tmp_path, empty, **options)
    new: dict[str, Any] = {"w": torch.zeros(2), "head": torch.zeros(2), "o": None}
    restored = resume(tmp_path, new, 1, **options)
    assert restored is not None and restored.report.missing == ["head"]
    assert (new["w"].tolist(), new["head"].tolist(), new["o"]) == ([1, 1], [0, 0], 1)


# -- errors without an older step ----------------------------------------------------------------------------


def test_a_state_that_does_not_fit_the_newest_step(tmp_path: Path) -> None:
    """If the state does not fit the newest step, no older step of another model is restored."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder_of(tmp_path, 1))
    dcp.save({"w": torch.ones(3), "v": torch.ones(1)}, checkpoint_id=folder_of(tmp_path, 2))
    cases: list[tuple[type[CheckpointError], dict[str, Any], dict[str, Any]]] = [
        (ShapeMismatchError, {"w": torch.zeros(2)}, {}),
        (MissingKeyError, {"w": torch.zeros(3), "more": 1}, {}),
        (PlanError, {"w": torch.zeros(2)}, {"only": "x"}),
    ]
    for expected, state, options in cases:
        seen = Recorder()
        with pytest.raises(expected):
            resume(tmp_path, state, seen=seen, **options)
        assert seen.events == []


def test_an_unsafe_pickle_is_not_damage(tmp_path: Path) -> None:
    """A pickled class outside the allow-list raises UnsafeObjectError; no older step is restored."""
    dcp.save({"o": 1}, checkpoint_id=folder_of(tmp_path, 1))
    dcp.save({"o": Opaque(2)}, checkpoint_id=folder_of(tmp_path, 2))
    state: dict[str, Any] = {"o": None}
    with pytest.raises(UnsafeObjectError):
        resume(tmp_path, state)
    assert resume(tmp_path, state, weights_only=False) is not None and isinstance(state["o"], Opaque)


def test_a_manifest_of_a_newer_version_is_not_damage(tmp_path: Path) -> None:
    """A newer format version raises UnsupportedFormatError; no older step is restored, no damage recorded."""
    save_steps(tmp_path, 1, 2)
    manifest = folder_of(tmp_path, 2) / MANIFEST
    changed = manifest.read_bytes()[:-4].replace(b"\xa7version\x92\x01", b"\xa7version\x92\x09", 1)
    manifest.write_bytes(changed + zlib.crc32(changed).to_bytes(4, "big"))
    seen = Recorder()
    with pytest.raises(UnsupportedFormatError):
        resume(tmp_path, version_state(0), seen=seen)
    assert seen.kinds("damaged", "skipped_damaged") == []


def test_a_temporary_storage_error_is_retried(tmp_path: Path) -> None:
    """A temporary storage error is retried: the newest step is restored, and no damage is recorded."""
    root, seen = WatchedRoot(tmp_path), Recorder()
    save_steps(tmp_path, 1, 2)
    root.store(2).add(Fault("preadv", error=StorageError("injected", errno=errno.EIO)))
    restored = resume(root.url, state := version_state(0), seen=seen)
    assert restored is not None and (restored.step, restored.skipped) == (2, ())
    assert version_of(state) == 2 and seen.kinds() == [("restored", 2)]


def test_an_outage_restores_no_older_step(tmp_path: Path) -> None:
    """A lasting storage error is raised after some tries, and says how to restore an older step."""
    root, seen = WatchedRoot(tmp_path), Recorder()
    save_steps(tmp_path, 1, 2)
    error = StorageError("injected", errno=errno.ETIMEDOUT)
    root.store(2).add(Fault("preadv", onwards=True, error=error))
    with pytest.raises(StorageError) as caught:
        resume(root.url, version_state(0), seen=seen)
    assert "failed 4 times" in caught.value.__notes__[-1]
    assert "pass its step" in caught.value.__notes__[-1]
    assert seen.events == []


def test_a_step_deleted_during_the_read_is_not_damage(tmp_path: Path) -> None:
    """If a step is deleted during the read, as by an old job's writer, the newest present step is
    restored."""
    root, seen = WatchedRoot(tmp_path), Recorder()
    save_steps(tmp_path, 1)

    def overtake(_: object) -> None:
        if root.path(1).exists():
            save_steps(tmp_path, 2)
            shutil.rmtree(root.path(1))

    root.store(1).add(Fault("open_read", name="*.distcp", hook=overtake))
    restored = resume(root.url, state := version_state(0), seen=seen)
    assert restored is not None and restored.step == version_of(state) == 2
    assert restored.skipped == ((1, "it was deleted"),)
    assert seen.steps("verify_failed") == []


def test_a_new_optimizer_continues_from_the_saved_state(tmp_path: Path) -> None:
    """A new optimizer without state is restored; the next step equals that of the saved run bit for bit."""

    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 3)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1 * seed)}

    def step(state: dict[str, Any]) -> None:
        state["optimizer"].zero_grad()
        state["model"](torch.ones(2, 4)).square().sum().backward()
        state["optimizer"].step()

    whole, fresh = build(1), build(2)
    step(whole)
    with manager_of(tmp_path) as manager:
        manager.save(1, whole)
        restored = manager.restore(fresh)
    assert restored is not None and fresh["optimizer"].param_groups[0]["lr"] == 0.1
    for state in (whole, fresh):
        step(state)
    assert fresh["model"].weight.equal(whole["model"].weight)
