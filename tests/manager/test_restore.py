"""Resuming from the newest step that can be read: what leads to an older one, and what must not."""

from __future__ import annotations

import errno
import os
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
    Event,
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
    "a truncated data file": lambda folder: truncate(data_files(folder)[0]),
    "a missing data file": lambda folder: data_files(folder)[0].unlink(),
    "a truncated manifest": lambda folder: truncate(folder / MANIFEST),
    "a flipped bit in the manifest": lambda folder: flip(folder / MANIFEST, 99),
    "an empty manifest": lambda folder: (folder / MANIFEST).write_bytes(b""),
}


def folder_of(root: Path, step: int) -> Path:
    """The folder of a step."""
    return root / f"step-{step:08d}"


def save_steps(root: Path, *steps: int) -> None:
    """Steps whose every byte tells which one it is."""
    for step in steps:
        save_version(folder_of(root, step), step)


def resume(
    root: Path | str,
    state: dict[str, Any],
    step: int | None = None,
    seen: Recorder | None = None,
    **options: Any,
) -> dcp.Restored | None:
    """What a run that begins in ``root`` restores."""
    with manager_of(root, mode="sync", handle_sigterm=False, on_event=seen) as manager:
        restored = manager.restore(state, step, **options)
        assert manager.wait(240)
        return restored


# -- what is restored ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_where_the_one_before_ended(tmp_path: Path, mode: Any) -> None:
    """Nothing there: None. Else the newest values, per rank ones too, or those of the step asked for."""
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
    """Stock torch's and those of `dcp.save` are restored, with what metrics they have."""
    stock_save_version(folder_of(tmp_path, 7), 7)
    restored = resume(tmp_path, state := version_state(0))
    assert restored is not None and (restored.step, restored.metrics, version_of(state)) == (7, {}, 7)
    user = {"step": 10, "metrics": {"loss": 5, "odd": "x"}, "run": "r"}
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder_of(tmp_path, 10), user_metadata=user)
    restored = resume(tmp_path, {"w": torch.zeros(2)})
    assert restored is not None and (restored.metrics, restored.user_metadata) == ({"loss": 5.0}, user)


def test_nothing_committed_is_a_fresh_start(tmp_path: Path) -> None:
    """No root, an empty one, or folders of saves that never ended."""
    assert resume(tmp_path / "none", version_state(0)) is None
    assert resume(tmp_path, version_state(0)) is None
    save_steps(tmp_path, 1)
    for name in (MANIFEST, ".metadata"):
        (folder_of(tmp_path, 1) / name).unlink()
    assert resume(tmp_path, version_state(0)) is None


def test_a_part_of_the_state_under_other_names(tmp_path: Path) -> None:
    """What `dcp.load` can leave out and rename, the manager can."""
    with manager_of(tmp_path) as manager:
        manager.save(3, state_at(3))
        state: dict[str, Any] = {"net": {"weight": torch.zeros(64), "bias": torch.zeros(4)}, "step": -1}
        assert manager.restore(state, only="net", exclude="net.bias", rename={"^net": "model"}) is not None
    assert (state["step"], state["net"]["bias"].tolist()) == (-1, [0.0] * 4)
    assert state["net"]["weight"].tolist() == [3.0] * 64


# -- damage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_step_is_passed_over(tmp_path: Path, how: str) -> None:
    """The older one is loaded whole; the damaged one is an event, with the reason."""
    save_steps(tmp_path, 1, 2)
    DAMAGE[how](folder_of(tmp_path, 2))
    state, seen = version_state(0), Recorder()
    restored = resume(tmp_path, state, seen=seen)
    assert restored is not None and restored.step == version_of(state) == 1
    ((step, reason),) = restored.skipped
    assert step == 2 and str(folder_of(tmp_path, 2)) in reason
    assert seen.steps("skipped_damaged") == seen.steps("verify_failed") == [2]


def test_steps_that_are_all_damaged_are_no_fresh_start(tmp_path: Path) -> None:
    """Each newer one is passed over for its own reason; where none is left the error lists them all."""
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


def test_no_flip_of_a_bit_gives_another_state(tmp_path: Path) -> None:
    """Wherever it is: the newest step in every bit, or the older one."""
    save_steps(tmp_path, 1, 2)
    seen = set()
    with manager_of(tmp_path, mode="sync", verify_saved="off") as manager:
        for path in (*data_files(folder_of(tmp_path, 2)), folder_of(tmp_path, 2) / MANIFEST):
            whole = path.read_bytes()
            for position in range(0, len(whole), 151):
                flip(path, position)
                state = version_state(0)
                restored = manager.restore(state)
                assert restored is not None and restored.step == version_of(state), (path.name, position)
                seen.add(restored.step)
                path.write_bytes(whole)
    assert seen == {1, 2}


def test_a_damaged_step_is_noted_and_may_be_saved_anew(tmp_path: Path) -> None:
    """Retention does not count it, so that the good one stays that is older; saved again it is good."""
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


def test_what_one_host_alone_cannot_read_is_not_noted_as_damaged(tmp_path: Path) -> None:
    """All bytes are read again first: a mount that is broken somewhere must not cost what is good."""
    root, seen = WatchedRoot(tmp_path), Recorder()
    save_steps(tmp_path, 1, 2)
    root.store(2).add(Fault("preadv", name="*.distcp", flip_byte=40))
    restored = resume(root.url, state := version_state(0), seen=seen)
    assert restored is not None and restored.step == version_of(state) == 1
    found = seen.kinds("skipped_damaged", "verified", "verify_failed")
    assert sorted(found) == [("skipped_damaged", 2), ("verified", 2)]
    assert (again := resume(root.url, version_state(0))) is not None and again.step == 2


def test_damage_that_cannot_be_noted_is_passed_over_all_the_same(tmp_path: Path) -> None:
    """As on storage that may only be read."""
    root = WatchedRoot(tmp_path)
    save_steps(tmp_path, 1, 2)
    damage(folder_of(tmp_path, 2))
    read_only = OSError(errno.EROFS, "read-only")
    root.store(2).add(Fault("publish", name="notes.msgpack", onwards=True, error=read_only))
    restored = resume(root.url, state := version_state(0))
    assert restored is not None and restored.step == version_of(state) == 1
    assert not (folder_of(tmp_path, 2) / "notes.msgpack").exists()


def test_objects_get_their_state_once_and_from_the_good_step(tmp_path: Path) -> None:
    """What is not selected stays as it was, though the load that failed came far."""

    class Counted:
        def __init__(self) -> None:
            self.state: dict[str, Any] = {"w": torch.zeros(64), "n": 0}
            self.given = 0

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state, self.given = state, self.given + 1

    for step in (1, 2):
        part = {"w": torch.full((64,), float(step)), "n": step}
        dcp.save({"model": part, "opt": dict(part)}, checkpoint_id=folder_of(tmp_path, step))
    damage(folder_of(tmp_path, 2))
    state = {"model": Counted(), "opt": Counted()}
    restored = resume(tmp_path, state, only="model")
    assert restored is not None and restored.step == 1
    assert (state["model"].given, state["opt"].given) == (1, 0)
    assert state["model"].state["w"].eq(1).all() and state["model"].state["n"] == 1
    assert not state["opt"].state["w"].any()


# -- what a failed load has filled ---------------------------------------------------------------------------


class Opaque:
    """A value that is stored as a pickled blob, and read after the tensors."""

    def __init__(self, number: int) -> None:
        self.number = number


def save_own(folder: Path, step: int, **more: Any) -> None:
    """A step with values of its rank's own."""
    own = {"gen": torch.full((4,), step), "pos": step}
    state = {"w": torch.full((4,), float(step)), "loader": dcp.PerRank(own), "o": Opaque(step), **more}
    dcp.save(state, checkpoint_id=folder)


def break_object(folder: Path, fqn: str) -> None:
    """Flip a bit in the blob of a value, so that a load fails when all tensors have been filled."""
    index = dcp.open_index(folder)
    objects, row = index.objects, index.objects.position[fqn]
    middle = int(objects.offsets[row] + objects.lengths[row] // 2)
    flip(folder / index.files[int(objects.files[row])], middle)


def test_values_of_a_rank_are_those_of_the_step_restored(tmp_path: Path) -> None:
    """Not of the damaged one, which had been loaded but for its last value."""
    for step in (1, 2):
        save_own(folder_of(tmp_path, step), step)
    break_object(folder_of(tmp_path, 2), "o")
    own: dict[str, Any] = {"gen": torch.full((4,), -1), "pos": -1}
    state: dict[str, Any] = {"w": torch.zeros(4), "loader": dcp.PerRank(own), "o": None}
    assert resume(tmp_path, state, per_rank="keep", weights_only=False) is not None
    assert (own["gen"].tolist(), own["pos"], state["o"].number) == ([1] * 4, 1, 1)


def test_a_partial_load_does_not_mix_two_steps(tmp_path: Path) -> None:
    """The damaged step had filled a head that the older one lacks: an error, and nothing is mixed."""
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


# -- what must not lead to an older step ---------------------------------------------------------------------


def test_a_state_that_does_not_fit_the_newest_is_an_error(tmp_path: Path) -> None:
    """An older step that would take it was saved by another model."""
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


def test_what_is_refused_for_safety_is_no_damage(tmp_path: Path) -> None:
    """Objects beyond the allow-list need the user's word, and no older step is taken instead."""
    dcp.save({"o": 1}, checkpoint_id=folder_of(tmp_path, 1))
    dcp.save({"o": Opaque(2)}, checkpoint_id=folder_of(tmp_path, 2))
    state: dict[str, Any] = {"o": None}
    with pytest.raises(UnsafeObjectError):
        resume(tmp_path, state)
    assert resume(tmp_path, state, weights_only=False) is not None and isinstance(state["o"], Opaque)


def test_a_manifest_of_a_newer_version_is_no_damage(tmp_path: Path) -> None:
    """An error asks for a newer dcp, no older step is taken, and nothing is noted."""
    save_steps(tmp_path, 1, 2)
    manifest = folder_of(tmp_path, 2) / MANIFEST
    changed = manifest.read_bytes()[:-4].replace(b"\xa7version\x92\x01", b"\xa7version\x92\x09", 1)
    manifest.write_bytes(changed + zlib.crc32(changed).to_bytes(4, "big"))
    seen = Recorder()
    with pytest.raises(UnsupportedFormatError):
        resume(tmp_path, version_state(0), seen=seen)
    assert seen.kinds("damaged", "skipped_damaged") == []


@pytest.mark.parametrize("op", ["read", "preadv"])
def test_a_storage_that_fails_for_a_while_is_asked_again(tmp_path: Path, op: str) -> None:
    """The newest step is restored, and nothing is noted against it."""
    root, seen = WatchedRoot(tmp_path), Recorder()
    save_steps(tmp_path, 1, 2)
    root.store(2).add(Fault(op, error=StorageError("injected", errno=errno.EIO)))
    restored = resume(root.url, state := version_state(0), seen=seen)
    assert restored is not None and (restored.step, restored.skipped) == (2, ())
    assert version_of(state) == 2 and seen.kinds() == [("restored", 2)]


def test_an_outage_does_not_set_training_back(tmp_path: Path) -> None:
    """After some tries the error is raised, with the way to an older step, and nothing is noted."""
    root, seen = WatchedRoot(tmp_path), Recorder()
    save_steps(tmp_path, 1, 2)
    error = StorageError("injected", errno=errno.ETIMEDOUT)
    root.store(2).add(Fault("preadv", onwards=True, error=error))
    with pytest.raises(StorageError) as caught:
        resume(root.url, version_state(0), seen=seen)
    assert "was tried 4 times" in caught.value.__notes__[-1]
    assert "name its step" in caught.value.__notes__[-1]
    assert seen.events == []


def test_a_step_that_vanishes_under_the_reader_is_no_damage(tmp_path: Path) -> None:
    """Its files are deleted while they are read, as a writer that outlived the last job does; the newest
    that is there by then is taken."""
    root, seen = WatchedRoot(tmp_path), Recorder()
    save_steps(tmp_path, 1)

    def overtake(_: object) -> None:
        if root.path(1).exists():
            save_steps(tmp_path, 2)
            shutil.rmtree(root.path(1))

    root.store(1).add(Fault("open_read", name="*.distcp", hook=overtake))
    restored = resume(root.url, state := version_state(0), seen=seen)
    assert restored is not None and restored.step == version_of(state) == 2
    assert restored.skipped == ((1, "it is not there any more"),)
    assert seen.steps("verify_failed") == []


# -- what is read --------------------------------------------------------------------------------------------


def test_listing_reads_no_checkpoint(tmp_path: Path) -> None:
    """Names and notes tell which steps there are; notes that have come to rest are read once."""
    root = WatchedRoot(tmp_path)
    with manager_of(root.url, mode="sync", verify_saved="off") as manager:
        for step in (1, 2):
            manager.save(step, state_at(step))
        manager.pin(2)
        for path in root.path(2).iterdir():
            os.utime(path, (path.stat().st_mtime - 60,) * 2)
        for reads in (["notes.msgpack"], []):
            root.forget_log()
            assert manager.all_steps() == [1, 2]
            assert [done.name for done in root.log() if done.op != "stat"] == reads


@pytest.mark.parametrize("mode", MODES)
def test_a_callback_that_would_wait_for_itself_is_refused(tmp_path: Path, mode: Any) -> None:
    """Rather than hang; it may list and pin. One that wants to end the program does not end the writer."""
    refused: list[str] = []

    def callback(event: Event) -> None:
        if event.kind not in ("saved", "verified"):
            return
        assert event.step in manager.all_steps()
        manager.pin(event.step)
        for call in (manager.wait, manager.close, lambda: manager.save(9, {}), lambda: manager.restore({})):
            with pytest.raises(dcp.CheckpointError, match="would wait for itself"):
                call()
            refused.append(event.kind)
        raise SystemExit(3)

    with manager_of(tmp_path, mode=mode, on_event=callback) as manager:
        for step in (1, 2):
            manager.save(step, state_at(step))
        assert manager.wait(240)
    assert (manager.pinned(), len(refused)) == ([1, 2], 16)
