from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.steps.folders import StepFolders
from dcp.steps.notes import Deleting, Notes, Verified, encode_notes
from dcp.steps.states import StepState
from dcp.storage.commit_names import NOTES_NAME
from dcp.storage.errors import CheckpointNotFoundError, CorruptCheckpointError
from dcp.storage.stores import PosixStore
from dcp.storage.stores.base import Store
from dcp.storage.stores.faults import FaultInjectingStore
from dcp.storage.stores.folders import open_parent_folder
from tests.support.versions import stock_save_version

ROOT = Path(__file__).parents[3]


def save(folders: StepFolders, step: int, value: float = 0.0, **user: Any) -> str:
    """A small checkpoint with user metadata; returns its save id."""
    url = folders.checkpoint_id(step)
    dcp.save(
        {"w": torch.full((5,), value)}, checkpoint_id=url, no_dist=True, user_metadata={"step": step, **user}
    )
    return folders.facts(step).save_id


def grow_old(folder: str) -> None:
    """Set the times of all files back, so that what is read of them is kept."""
    for path in Path(folder).iterdir():
        os.utime(path, (time.time() - 60, path.stat().st_mtime - 60))


@pytest.fixture
def folders(tmp_path: Path) -> StepFolders:
    """The steps below a root that is not there yet."""
    return StepFolders(tmp_path / "run")


# -- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "step", "name"),
    [
        ("step-{step:08d}", 12, "step-00000012"),
        ("step-{step:08d}", 1_234_567_890, "step-1234567890"),
        ("{step}", 0, "0"),
        ("run2.{step:04d}.ckpt", 2, "run2.0002.ckpt"),
        (lambda step: f"epoch-{step // 100}-step-{step}", 305, "epoch-3-step-305"),
    ],
)
def test_names_and_steps(tmp_path: Path, form: str | Callable[[int], str], step: int, name: str) -> None:
    """Each step has a name, from which the step is read again."""
    folders = StepFolders(tmp_path, form)
    assert folders.name(step) == name
    assert folders.step_of(name) == step
    assert folders.checkpoint_id(step) == str(tmp_path / name)


@pytest.mark.parametrize(
    "name",
    [
        "step-12",
        "step-000000012",
        "step-0000001x",
        "xstep-00000001",
        "step-00000001.old",
        "latest",
        "٣",
        "9" * 99,
    ],
)
def test_other_folders_are_no_steps(tmp_path: Path, name: str) -> None:
    """Only the very name that the format gives counts."""
    assert StepFolders(tmp_path).step_of(name) is None


@pytest.mark.parametrize(
    "form", ["step", "step-{}", "{other}", "a/{step}", "{step:x}", "{step:,}", lambda step: "x"]
)
def test_formats_that_do_not_tell_steps_apart(tmp_path: Path, form: Any) -> None:
    """They are refused when they are given, by the name of the argument."""
    with pytest.raises(ValueError, match=r"^name: "):
        StepFolders(tmp_path, form)


@pytest.mark.parametrize("step", [-1, 1.0, True, None])
def test_steps_are_whole_numbers(folders: StepFolders, step: Any) -> None:
    """Anything else is a mistake that is told."""
    with pytest.raises(ValueError, match=r"^step: "):
        folders.name(step)


# -- which there are -----------------------------------------------------------------------------------------


def test_committed_steps_in_order(folders: StepFolders) -> None:
    """Ours and stock's count; data without a commit, other folders and files do not."""
    assert folders.all_steps() == []
    assert folders.latest() is None
    for step in (30, 4, 200):
        save(folders, step)
    stock_save_version(Path(folders.checkpoint_id(7)), 1)
    unfinished = Path(folders.checkpoint_id(500))
    unfinished.mkdir()
    (unfinished / "__0_0.0a1b2c3d.distcp").write_bytes(b"x")
    (unfinished.parent / "notes.txt").write_bytes(b"x")
    shutil.copytree(folders.checkpoint_id(30), unfinished.parent / "best")
    assert folders.all_steps() == [4, 7, 30, 200]
    assert folders.latest() == 200
    assert list(folders.folders()) == [4, 7, 30, 200, 500]


def test_no_manifest_is_opened_for_the_list(tmp_path: Path) -> None:
    """Listing reads nothing, and new notes only once they have come to rest."""
    stores: list[FaultInjectingStore] = []

    def watched(url: str | os.PathLike[str]) -> Store:
        stores.append(FaultInjectingStore(PosixStore(url)))
        return stores[-1]

    folders = StepFolders(open_parent_folder(tmp_path, open_store=watched))
    for step in (1, 2):
        save(folders, step)
    folders.update_notes(2, lambda notes: replace(notes, pinned=True))
    grow_old(folders.checkpoint_id(2))
    for reads in (["notes.msgpack"], []):
        stores.clear()
        assert folders.all_steps() == [1, 2]
        log = [operation for store in stores for operation in store.log]
        assert [operation.name for operation in log if operation.op != "stat"] == reads


def test_a_step_whose_deletion_has_begun_does_not_count(folders: StepFolders) -> None:
    """Until another save takes its place: the tombstone is about one commit."""
    for step in (1, 2):
        save(folders, step)
    grave = Deleting(folders.facts(2).save_id, 1.0, (), 1.0)
    folders.update_notes(2, lambda notes: replace(notes, deleting=grave))
    assert folders.all_steps() == [1]
    assert [state.step for state in folders.survey()] == [1]
    save(folders, 2)
    assert folders.all_steps() == [1, 2]


# -- facts ---------------------------------------------------------------------------------------------------


def test_facts_of_a_checkpoint(folders: StepFolders) -> None:
    """Step, metrics, run, size and the rest come from the manifest."""
    before = time.time()
    save(folders, 3, metrics={"loss": 0.5, "n": 2, "nan": math.nan, "name": "x", 5: 1.0}, run="r1", tag="t")
    facts = folders.facts(3)
    index = dcp.open_index(folders.checkpoint_id(3))
    assert (facts.step, facts.run, facts.world_size) == (3, "r1", 1)
    assert facts.save_id == index.provenance["save_id"]
    assert facts.metrics.keys() == {"loss", "n", "nan"}
    assert (facts.metrics["loss"], facts.metrics["n"]) == (0.5, 2.0)
    assert math.isnan(facts.metrics["nan"])
    assert facts.user["tag"] == "t"
    assert facts.bytes == sum(index.file_sizes.tolist()) > 0
    assert facts.committed_seconds is not None
    assert before <= facts.committed_seconds <= time.time()


@pytest.mark.parametrize("user", [{"metrics": [1], "run": 7}, {"metrics": {"loss": 10**400}}, {}])
def test_user_metadata_of_other_shapes(folders: StepFolders, user: dict[str, Any]) -> None:
    """What is not as the manager writes it is no metric and no run."""
    save(folders, 1, **user)
    assert (folders.facts(1).metrics, folders.facts(1).run) == ({}, None)


def test_stock_checkpoints_are_committed_without_metrics(folders: StepFolders) -> None:
    """The time is that of `.metadata`, and the size that of its files."""
    folder = Path(folders.checkpoint_id(8))
    stock_save_version(folder, 1)
    facts = folders.facts(8)
    assert (facts.metrics, facts.run, facts.user) == ({}, None, {})
    assert facts.save_id
    assert facts.bytes == (folder / "__0_0.distcp").stat().st_size
    assert facts.committed_seconds == (folder / ".metadata").stat().st_mtime


def test_facts_are_read_once_and_again_after_a_change(tmp_path: Path) -> None:
    """As long as the commit objects are the same nothing is read; right after a save always."""
    stores: list[FaultInjectingStore] = []

    def watched(url: str | os.PathLike[str]) -> Store:
        stores.append(FaultInjectingStore(PosixStore(url)))
        return stores[-1]

    folders = StepFolders(open_parent_folder(tmp_path, open_store=watched))
    first = save(folders, 1, metrics={"loss": 1.0})
    grow_old(folders.checkpoint_id(1))
    assert folders.facts(1).save_id == first
    stores.clear()
    assert folders.facts(1).metrics == {"loss": 1.0}
    assert sum(store.counts["read"] for store in stores) == 0
    second = save(folders, 1, metrics={"loss": 2.0})
    assert second != first
    assert folders.facts(1).metrics == {"loss": 2.0}
    shutil.rmtree(folders.checkpoint_id(1))
    with pytest.raises(CheckpointNotFoundError):
        folders.facts(1)


# -- what retention goes by ----------------------------------------------------------------------------------


def damage(folder: str, name: str = "manifest.msgpack") -> None:
    """Flip a byte."""
    path = Path(folder) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_survey(folders: StepFolders) -> None:
    """Health, pin, time and metrics of each step, by its index, its notes and what the manager knows."""
    ids = {step: save(folders, step, metrics={"loss": float(step)}) for step in range(1, 8)}
    damage(folders.checkpoint_id(2))

    def verified(save_id: str, ok: bool) -> Callable[[Notes], Notes]:
        return lambda notes: replace(notes, verified=Verified(save_id, 1.0, ok, "sizes"))

    folders.update_notes(3, verified(ids[3], True))
    folders.update_notes(4, verified(ids[4], False))
    folders.update_notes(5, verified("of the save before", False))
    folders.update_notes(6, lambda notes: replace(notes, pinned=True))
    states = {state.step: state for state in folders.survey(pending=[4, 7])}
    health = {step: state.health for step, state in states.items()}
    assert health == dict(
        zip(range(1, 8), ["good", "damaged", "good", "pending", "good", "good", "pending"], strict=True)
    )
    assert folders.survey()[3].health == "damaged"
    assert [step for step, state in states.items() if state.pinned] == [6]
    assert states[3] == StepState(3, folders.facts(3).committed_seconds, {"loss": 3.0}, "good", False)
    assert folders.unverified() == [1, 2, 5, 6, 7]
    with pytest.raises(CorruptCheckpointError):
        folders.facts(2)


def test_notes_that_cannot_be_read_keep_the_checkpoint(
    folders: StepFolders, caplog: pytest.LogCaptureFixture
) -> None:
    """They may have held a pin, so they count as one, with a warning."""
    save(folders, 1)
    (Path(folders.checkpoint_id(1)) / NOTES_NAME).write_bytes(encode_notes(Notes())[:-2])
    (state,) = folders.survey()
    assert (state.health, state.pinned) == ("good", True)
    assert folders.notes(1).pinned
    assert "as if it were pinned" in caplog.text
    assert folders.notes(2) == Notes()


# -- imports -------------------------------------------------------------------------------------------------


def test_none_of_it_imports_torch() -> None:
    """A tool that lists, pins or deletes does not need torch."""
    program = "import sys\n"
    for name in (
        "steps.folders",
        "manager.cleanup.retention",
        "manager.cleanup.removal",
        "manager.cleanup.deletion",
    ):
        program += f"import dcp.{name}\n"
    program += "assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
