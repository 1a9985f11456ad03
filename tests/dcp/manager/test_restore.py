"""Resuming from the newest step that can be read: what leads to an older one, and what must not."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME
from dcp.storage.errors import (
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
from dcp.storage.formats.plain import decode_plain, encode_plain
from dcp.storage.stores import PosixStore
from dcp.storage.stores.base import Store
from dcp.storage.stores.faults import Fault, FaultInjectingStore
from tests.support.restoring import (
    Heard,
    break_payload,
    data_file,
    flip,
    folder_of,
    resume,
    save_steps,
    truncate,
)
from tests.support.versions import version_of, version_state

DAMAGE: dict[str, Callable[[Path], object]] = {
    "a flipped bit": break_payload,
    "a truncated data file": lambda folder: truncate(data_file(folder)),
    "a missing data file": lambda folder: data_file(folder).unlink(),
    "a truncated manifest": lambda folder: truncate(folder / MANIFEST_NAME),
    "a flipped bit in the manifest": lambda folder: flip(folder / MANIFEST_NAME, 99),
    "an empty manifest": lambda folder: (folder / MANIFEST_NAME).write_bytes(b""),
}


# -- what is restored ----------------------------------------------------------------------------------------


def test_the_newest_step_with_what_was_stored_beside_it(tmp_path: Path) -> None:
    """Metrics, user metadata and the number of ranks that saved come with it."""
    for step in (9, 10):
        user = {"step": step, "metrics": {"loss": step / 2, "odd": "x"}, "run": "r"}
        state = {"w": torch.full((2,), float(step))}
        dcp.save(state, checkpoint_id=folder_of(tmp_path, step), user_metadata=user)
    state = {"w": torch.zeros(2)}
    restored = resume(tmp_path, state)
    assert restored is not None
    assert (restored.step, restored.skipped, restored.world_size) == (10, (), 1)
    assert restored.metrics == {"loss": 5.0}
    assert restored.user_metadata == user
    assert restored.checkpoint_id == str(folder_of(tmp_path, 10))
    assert restored.report.bytes_needed == 8
    assert state["w"].tolist() == [10, 10]


def test_nothing_committed_is_a_fresh_start(tmp_path: Path) -> None:
    """No root, an empty one, or folders of saves that never ended."""
    assert resume(tmp_path / "none", version_state(0)) is None
    assert resume(tmp_path, version_state(0)) is None
    save_steps(tmp_path, 1)
    for name in (MANIFEST_NAME, METADATA_NAME):
        (folder_of(tmp_path, 1) / name).unlink()
    assert resume(tmp_path, version_state(0)) is None


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_step_is_passed_over(tmp_path: Path, how: str) -> None:
    """The older one is loaded whole; the damaged one is told, with the reason."""
    save_steps(tmp_path, 1, 2)
    DAMAGE[how](folder_of(tmp_path, 2))
    state, heard = version_state(0), Heard()
    restored = resume(tmp_path, state, on_damage=heard)
    assert restored is not None
    assert restored.step == version_of(state) == 1
    ((step, reason),) = restored.skipped
    assert step == 2
    assert str(folder_of(tmp_path, 2)) in reason
    assert heard.steps == [2]


def test_two_damaged_steps(tmp_path: Path) -> None:
    """Each for its own reason; what one load filled, the next one fills again."""
    save_steps(tmp_path, 1, 2, 3)
    DAMAGE["a missing data file"](folder_of(tmp_path, 2))
    break_payload(folder_of(tmp_path, 3))
    state, heard = version_state(0), Heard()
    restored = resume(tmp_path, state, on_damage=heard)
    assert restored is not None
    assert restored.step == version_of(state) == 1
    assert [step for step, _ in restored.skipped] == heard.steps == [3, 2]
    assert "is missing" in restored.skipped[1][1]


def test_steps_that_are_all_damaged_are_no_fresh_start(tmp_path: Path) -> None:
    """The error lists each of them with its reason."""
    save_steps(tmp_path, 1, 2)
    break_payload(folder_of(tmp_path, 1))
    DAMAGE["a missing data file"](folder_of(tmp_path, 2))
    with pytest.raises(CorruptCheckpointError, match="none of the 2 committed steps") as caught:
        resume(tmp_path, version_state(0))
    assert caught.value.steps == [2, 1]
    assert "is missing" in caught.value.reasons[0]
    assert "step 1: " in str(caught.value)


def test_no_flip_of_a_bit_gives_another_state(tmp_path: Path) -> None:
    """Wherever it is: the newest step in every bit, or the older one."""
    save_steps(tmp_path, 1, 2)
    seen = set()
    for name in (data_file(folder_of(tmp_path, 2)).name, MANIFEST_NAME):
        path = folder_of(tmp_path, 2) / name
        whole = path.read_bytes()
        for position in range(0, len(whole), 61):
            flip(path, position)
            state = version_state(0)
            restored = resume(tmp_path, state)
            assert restored is not None
            assert restored.step == version_of(state), (name, position)
            seen.add(restored.step)
            path.write_bytes(whole)
    assert seen == {1, 2}


# -- steps that come and go ----------------------------------------------------------------------------------


def test_a_step_that_vanished_is_passed_over(tmp_path: Path) -> None:
    """Deleted since it was listed: not damage, so nobody is told to note any."""
    save_steps(tmp_path, 1, 2)
    shutil.rmtree(folder_of(tmp_path, 2))
    heard = Heard()
    restored = resume(tmp_path, version_state(0), list_steps=lambda: [2, 1], on_damage=heard)
    assert restored is not None
    assert restored.step == 1
    assert restored.skipped == ((2, "it is not there any more"),)
    assert heard.steps == []
    with pytest.raises(CorruptCheckpointError, match="it is not there any more"):
        resume(tmp_path, version_state(0), list_steps=lambda: [2])


def test_a_step_that_vanishes_under_the_reader(tmp_path: Path) -> None:
    """Its files go while they are read, as a writer's process that outlived the last job cleans up."""
    save_steps(tmp_path, 1)
    listings = iter([[1], [2]])
    state, heard = version_state(0), Heard()

    def make_reader(name: str) -> dcp.FileSystemReader:
        def overtake(_: object) -> None:
            if folder_of(tmp_path, 1).exists():
                save_steps(tmp_path, 2)
                shutil.rmtree(folder_of(tmp_path, 1))

        return faulty(name, Fault("open_read", name="*.distcp", hook=overtake))

    options: dict[str, Any] = {"list_steps": lambda: next(listings), "reader": make_reader}
    restored = resume(tmp_path, state, on_damage=heard, **options)
    assert restored is not None
    assert restored.step == version_of(state) == 2
    assert heard.steps == []


def faulty(name: str, *faults: Fault) -> dcp.FileSystemReader:
    """A reader of a store with faults."""

    def open_store(path: str | os.PathLike[str]) -> Store:
        return FaultInjectingStore(PosixStore(path), *faults)

    return dcp.FileSystemReader(name, open_store=open_store)


# -- errors that must not lead to an older step --------------------------------------------------------------


def test_a_given_step_is_loaded_or_nothing(tmp_path: Path) -> None:
    """No other in its place, whatever is wrong with it."""
    save_steps(tmp_path, 1, 2, 3)
    state, heard = version_state(0), Heard()
    restored = resume(tmp_path, state, step=1)
    assert restored is not None
    assert restored.step == version_of(state) == 1
    break_payload(folder_of(tmp_path, 2))
    with pytest.raises(CorruptCheckpointError, match="step-00000002"):
        resume(tmp_path, version_state(0), step=2, on_damage=heard)
    assert heard.steps == [2]
    with pytest.raises(CheckpointNotFoundError):
        resume(tmp_path, version_state(0), step=7, on_damage=heard)
    assert heard.steps == [2]


def test_a_state_that_does_not_fit_the_newest_is_told(tmp_path: Path) -> None:
    """An older step that would take it was saved by another model."""
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder_of(tmp_path, 1))
    dcp.save({"w": torch.ones(3), "v": torch.ones(1)}, checkpoint_id=folder_of(tmp_path, 2))
    cases: list[tuple[type[CheckpointError], dict[str, Any], dict[str, Any]]] = [
        (ShapeMismatchError, {"w": torch.zeros(2)}, {}),
        (MissingKeyError, {"w": torch.zeros(3), "more": 1}, {}),
        (PlanError, {"w": torch.zeros(2)}, {"only": "x"}),
    ]
    for expected, state, options in cases:
        heard = Heard()
        with pytest.raises(expected):
            resume(tmp_path, state, on_damage=heard, **options)
        assert heard.steps == []


class Custom:
    """A class that no allow-list knows."""


def test_what_we_refuse_to_read_is_not_damage(tmp_path: Path) -> None:
    """Objects beyond the allow-list, and the format of a newer version, need the user."""
    dcp.save({"o": 1}, checkpoint_id=folder_of(tmp_path, 1))
    dcp.save({"o": Custom()}, checkpoint_id=folder_of(tmp_path, 2))
    with pytest.raises(UnsafeObjectError):
        resume(tmp_path, {"o": None})
    state: dict[str, Any] = {"o": None}
    restored = resume(tmp_path, state, weights_only=False)
    assert restored is not None
    assert isinstance(state["o"], Custom)
    newer(folder_of(tmp_path, 2))
    with pytest.raises(UnsupportedFormatError):
        resume(tmp_path, {"o": None}, weights_only=False)


def newer(folder: Path) -> None:
    """Make the manifest one of version 9."""
    from dcp.storage.formats.checksums import crc32

    path = folder / MANIFEST_NAME
    fields = decode_plain(path.read_bytes(), limit_bytes=1 << 20)
    fields["version"] = [9, 0]
    data = encode_plain(fields, limit_bytes=1 << 20)
    assert data is not None
    path.write_bytes(data[:-4] + crc32(data[:-4]).to_bytes(4, "big"))


@pytest.mark.parametrize("op", ["read", "open_read", "preadv", "list"])
def test_a_storage_that_fails_for_a_while_is_asked_again(tmp_path: Path, op: str) -> None:
    """The newest step is restored, and nothing is noted against it."""
    save_steps(tmp_path, 1, 2)
    faults = [Fault(op, error=StorageError("injected", errno=errno.EIO))]
    heard = Heard()

    def make_reader(name: str) -> dcp.FileSystemReader:
        return faulty(name, *([faults.pop()] if faults else []))

    state = version_state(0)
    restored = resume(tmp_path, state, reader=make_reader, on_damage=heard)
    assert restored is not None
    assert (restored.step, restored.skipped, heard.steps) == (2, (), [])
    assert version_of(state) == 2


def test_an_outage_does_not_set_training_back(tmp_path: Path) -> None:
    """After the retries the error is raised, with the way to an older step."""
    save_steps(tmp_path, 1, 2)
    made, heard = [], Heard()

    def make_reader(name: str) -> dcp.FileSystemReader:
        made.append(name)
        return faulty(
            name, Fault("preadv", onwards=True, error=StorageError("injected", errno=errno.ETIMEDOUT))
        )

    with pytest.raises(StorageError) as caught:
        resume(tmp_path, version_state(0), reader=make_reader, retries=2, on_damage=heard)
    assert made == [str(folder_of(tmp_path, 2))] * 3
    assert "name its step" in caught.value.__notes__[-1]
    assert heard.steps == []


def test_a_listing_that_fails_is_asked_again(tmp_path: Path) -> None:
    """And is an error in the end, not an empty root."""
    save_steps(tmp_path, 1)
    failures = [StorageError("injected"), StorageError("injected")]

    def list_steps() -> Iterable[int]:
        if failures:
            raise failures.pop()
        return [1]

    restored = resume(tmp_path, version_state(0), list_steps=list_steps)
    assert restored is not None
    assert restored.step == 1
    failures += [StorageError("injected")] * 9
    with pytest.raises(StorageError, match="injected"):
        resume(tmp_path, version_state(0), list_steps=list_steps)
