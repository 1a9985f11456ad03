from __future__ import annotations

import errno
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

import dcp
from dcp.inspection.verification import verify
from dcp.manager.cleanup.deletion import Deleter, DeletionEvent
from dcp.manager.cleanup.removal import finish_removal
from dcp.steps.folders import StepFolders
from dcp.steps.notes import Notes, Verified
from dcp.storage.commit_names import NOTES_NAME
from dcp.storage.stores import MemoryStore, open_store
from dcp.storage.stores.faults import Fault, Operation
from dcp.storage.stores.folders import open_parent_folder
from tests.dcp.manager.deletion_support import KINDS, Run, pin, stock_over_ours
from tests.support.versions import (
    ABSENT,
    save_version,
    seen_by_dcp,
    seen_by_stock,
    stock_save_version,
    version_state,
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run without checkpoints."""
    return Run(tmp_path)


# -- one deletion --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_deleted(run: Run, kind: str) -> None:
    """Every kind goes, with its folder, and no other step."""
    for step in (1, 2):
        KINDS[kind](run.path(step), step)
    size_bytes = sum(path.stat().st_size for path in run.path(1).glob("*.distcp"))
    event = run.delete(1)
    assert (event.kind, event.step, event.what, event.left) == ("deleted", 1, "checkpoint", ())
    assert event.size_bytes == size_bytes
    assert not run.path(1).exists()
    assert run.folders.all_steps() == [2]
    assert seen_by_dcp(run.path(2)) == 2


def test_the_order_of_a_deletion(run: Run) -> None:
    """Tombstone, what is not the truth, the truth, and only then data, notes and folder."""
    save_version(run.path(1), 1, single_file_per_rank=False)
    run.delete(1)
    done = [(op.op, op.name) for op in run.store(1).log if op.op in ("publish", "delete", "remove_root")]
    names = [name for _, name in done]
    assert done[0] == ("publish", NOTES_NAME)
    assert names[1:3] == [".metadata", "manifest.msgpack"]
    assert all(name.endswith(".distcp") for name in names[3:-2])
    assert len(names) > 8
    assert done[-2:] == [("delete", NOTES_NAME), ("remove_root", "")]


def test_where_stock_is_the_truth_its_metadata_goes_last(run: Run) -> None:
    """The older checkpoint of the manifest must not come back; parts of ranks go before what hides them."""
    stock_over_ours(run.path(1), 5)
    (run.path(1) / "__3.metadata").write_bytes(b"of an older save")
    (run.path(1) / "__12.manifest.msgpack").write_bytes(b"of an older save")
    run.delete(1)
    deleted = [op.name for op in run.store(1).log if op.op == "delete"]
    assert deleted[:4] == ["__12.manifest.msgpack", "__3.metadata", "manifest.msgpack", ".metadata"]


def test_only_what_can_be_data_of_it_is_deleted(run: Run) -> None:
    """A user's files keep their folder; what killed saves left goes; what began since stays."""
    save_version(run.path(1), 1)
    folder = run.path(1)
    strays = ["__0_0.0a1b2c3d.distcp", "__1_0.distcp", ".tmp-" + "a" * 32, ".metadata.tmp"]
    users = ["README.md", "model.safetensors", "__init__.py", "__0_0.backup.distcp", ".tmp-mine"]
    for name in [*strays, *users]:
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (1, 1))
    (folder / "plots").mkdir()
    new = "__0_0.ffffffff.distcp"
    (folder / new).write_bytes(b"x")
    os.utime(folder / new, (time.time() + 60, time.time() + 60))
    event = run.delete(1)
    assert set(event.left) == {*users, new}
    assert {path.name for path in folder.iterdir()} == {*users, new, "plots"}
    assert run.folders.all_steps() == []


def test_a_copied_checkpoint_is_deleted_whatever_its_times(run: Run) -> None:
    """Copying may make data newer than the manifest; names tell what belongs to it."""
    for step, save in ((1, save_version), (2, stock_save_version)):
        save(run.path(step), step)
        names = sorted(path.name for path in run.path(step).iterdir())
        for number, name in enumerate(names):
            os.utime(run.path(step) / name, (1000 - number, 1000 - 100 * ("m" in name)))
        assert run.delete(step).left == ()
        assert not run.path(step).exists()


@pytest.mark.parametrize("damage", ["manifest.msgpack", ".metadata"])
def test_a_damaged_checkpoint_is_deleted(run: Run, damage: str) -> None:
    """An index that cannot be read is no obstacle."""
    save_version(run.path(1), 1)
    path = run.path(1) / damage
    path.write_bytes(path.read_bytes()[:-9])
    for file in run.path(1).iterdir():  # as an object store shows a quick save: all within one second
        os.utime(file, (1000, 1000))
    run.delete(1)
    assert not run.path(1).exists()


def test_a_pin_keeps_it(run: Run) -> None:
    """Also one that came after the plan; unpinned it goes."""
    save_version(run.path(1), 1)
    run.folders.update_notes(1, pin)
    event = run.delete(1)
    assert (event.kind, event.reason) == ("kept", "pinned")
    assert run.folders.all_steps() == [1]
    assert verify(run.path(1)).ok
    run.folders.update_notes(1, lambda notes: replace(notes, pinned=False))
    assert run.delete(1).kind == "deleted"


def test_notes_that_cannot_be_read_keep_it(run: Run) -> None:
    """They may have held a pin."""
    save_version(run.path(1), 1)
    (run.path(1) / NOTES_NAME).write_bytes(b"damaged")
    assert run.delete(1).reason == "pinned"
    assert seen_by_dcp(run.path(1)) == 1


def test_nothing_there(run: Run) -> None:
    """A step that does not exist is no event and leaves no folder."""
    run.deleter.delete(9)
    assert run.deleter.wait(240)
    assert run.events == []
    assert not run.path(9).exists()


def test_a_save_that_commits_meanwhile_wins(run: Run) -> None:
    """Between tombstone and cut another save commits: its checkpoint stays, with its notes."""
    save_version(run.path(1), 1)
    saved = Verified("x", 1.0, True, "sizes")

    def overtake(_: Operation) -> None:
        save_version(run.path(1), 2)
        run.folders.update_notes(1, lambda notes: replace(notes, verified=saved))

    run.store(1).add(Fault("lock", hook=overtake))
    event = run.delete(1)
    assert (event.kind, event.reason) == ("kept", "replaced")
    assert seen_by_dcp(run.path(1)) == 2
    assert run.folders.notes(1) == Notes(verified=saved)
    assert run.folders.all_steps() == [1]


def test_a_save_that_commits_after_the_cut_keeps_its_files(run: Run) -> None:
    """Its data was there before the old one's is deleted, and is told from it by its name."""
    save_version(run.path(1), 1)
    run.store(1).add(Fault("delete", name="*.distcp", hook=lambda _: save_version(run.path(1), 2)))
    run.delete(1)
    assert seen_by_dcp(run.path(1)) == 2
    assert verify(run.path(1)).ok
    assert run.folders.all_steps() == [1]
    assert run.folders.notes(1) == Notes()


def test_checkpoints_in_memory() -> None:
    """Any kind of root."""
    root = open_parent_folder("memory://deletion")
    folders = StepFolders(root)
    url = folders.checkpoint_id(1)
    dcp.save(version_state(1), checkpoint_id=url, no_dist=True)
    assert folders.all_steps() == [1]
    deleter = Deleter(folders)
    deleter.delete(1)
    assert deleter.close()
    assert open_store(url).list() == []
    assert isinstance(folders.store(1), MemoryStore)
    assert root.names() == []


# -- failures ------------------------------------------------------------------------------------------------


def test_a_failure_is_repeated_after_a_pause(run: Run) -> None:
    """Each attempt goes on where the one before failed, and each is told."""
    save_version(run.path(1), 1)
    broken = OSError(errno.EIO, "injected")
    run.store(1).add(Fault("delete", at=1, error=broken), Fault("delete", name="*.distcp", error=broken))
    assert run.delete(1).kind == "deleted"
    assert [(event.kind, event.attempt) for event in run.events] == [
        ("retry", 1),
        ("retry", 2),
        ("deleted", 3),
    ]
    assert run.events[0].error is broken
    assert not run.path(1).exists()


def test_after_enough_attempts_the_next_start_goes_on(tmp_path: Path) -> None:
    """The failure is told; meanwhile the step does not count; a new deleter finds it and finishes."""
    run = Run(tmp_path, attempts=3)
    for step in (1, 2):
        save_version(run.path(step), step)
    run.store(1).add(Fault("delete", onwards=True, error=OSError(errno.EACCES, "injected")))
    assert run.delete(1).kind == "failed"
    assert [event.attempt for event in run.events] == [1, 2, 3]
    assert run.deleter.pending() == []
    assert run.folders.all_steps() == [2]
    assert run.delete(2).kind == "deleted"
    again = Run(tmp_path)
    assert again.deleter.resume() == [1]
    assert again.deleter.close()
    assert [(event.kind, event.what) for event in again.events] == [("deleted", "rest")]
    assert not run.path(1).exists()


def fault_at(number: int) -> Fault:
    """Every operation from the given one on fails: the storage is gone."""
    return Fault(at=number, onwards=True, error=OSError(errno.EIO, "injected"))


@pytest.mark.parametrize("kind", KINDS)
def test_storage_lost_at_any_operation_leaves_all_or_nothing(tmp_path: Path, kind: str) -> None:
    """Whichever operation fails first: dcp and stock see it whole or not at all, and later it is finished."""
    template = tmp_path / "template"
    KINDS[kind](template, 5)
    stock_sees = seen_by_stock(template)
    seen = []
    for number in range(1, 100):
        run = Run(tmp_path / f"run{number}", attempts=1)
        shutil.copytree(template, run.path(1))
        run.store(1).add(fault_at(number))
        kind_of_end = run.delete(1).kind
        run.store(1).clear()
        stands = seen_by_dcp(run.path(1))
        assert seen_by_stock(run.path(1)) in (stock_sees, ABSENT)
        seen.append(stands)
        begun = run.folders.all_steps() == []
        half_done = [1] if (run.path(1) / NOTES_NAME).exists() else []
        assert run.deleter.resume() == half_done
        if kind_of_end == "deleted":
            break
        if not begun:
            assert stands == 5
            run.deleter.delete(1)
        assert run.deleter.wait(240)
        finish_removal(run.folders.store(1), time.time())
        assert not run.path(1).exists()
    cut = seen.index(ABSENT)
    assert seen == [5] * cut + [ABSENT] * (len(seen) - cut)
    assert 5 < cut < len(seen) - 3
    assert not run.path(1).exists()


def test_a_callback_that_fails_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the next checkpoint is deleted as well."""

    def fail(event: DeletionEvent) -> None:
        raise ZeroDivisionError

    run = Run(tmp_path, on_event=fail)
    for step in (1, 2):
        save_version(run.path(step), step)
        run.deleter.delete(step)
    assert run.deleter.close()
    assert run.folders.all_steps() == []
    logger = "dcp.manager.cleanup.deletion"
    told = [record for record in caplog.records if record.name == logger and record.exc_info]
    assert [record.message[:18] for record in told] == ["a callback failed "] * 2
