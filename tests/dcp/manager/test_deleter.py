from __future__ import annotations

import errno
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dcp.inspection.verification import verify
from dcp.steps.notes import Deleting, Notes
from dcp.storage.commit_names import NOTES_NAME
from dcp.storage.errors import StorageError
from dcp.storage.stores.faults import Fault
from tests.dcp.manager.deletion_support import Gate, Run, deleting_threads
from tests.support.versions import (
    listing,
    save_version,
    seen_by_dcp,
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run without checkpoints, when the deleters of earlier tests have ended."""
    for thread in deleting_threads():
        thread.join(240)
    return Run(tmp_path)


# -- a save that wants the place -----------------------------------------------------------------------------


def test_a_queued_deletion_can_be_forgotten(run: Run) -> None:
    """As long as it has not begun; one that has cannot, and is waited for."""
    for step in (1, 2):
        save_version(run.path(step), step)
    gate = Gate()
    run.store(1).add(Fault("delete", name="*.distcp", hook=gate))
    run.deleter.delete(1)
    assert gate.reached.wait(240)
    run.deleter.delete(2)
    run.deleter.delete(2)
    assert run.deleter.pending() == [1, 2]
    assert run.deleter.forget(2)
    assert run.deleter.forget(7)
    assert not run.deleter.forget(1)
    with pytest.raises(StorageError, match="is being deleted"):
        run.deleter.make_way(1, timeout_seconds=0.05)
    gate.open.set()
    run.deleter.make_way(1)
    assert not run.path(1).exists()
    assert run.folders.all_steps() == [2]
    save_version(run.path(1), 3)
    assert run.folders.all_steps() == [1, 2]
    assert verify(run.path(1)).ok


def test_make_way_keeps_what_is_whole(tmp_path: Path) -> None:
    """A checkpoint that is queued, or failed to be deleted, stays until the save replaces it."""
    run = Run(tmp_path, pause_seconds=1000.0)
    save_version(run.path(1), 1)
    run.store(1).add(Fault("delete", name=".metadata", error=OSError(errno.EIO, "injected")))
    run.deleter.delete(1)
    while not run.events:
        time.sleep(0.001)
    run.deleter.make_way(1)
    assert run.deleter.pending() == []
    assert seen_by_dcp(run.path(1)) == 1
    save_version(run.path(1), 2)
    assert run.folders.all_steps() == [1]
    assert run.deleter.resume() == [1]
    assert run.deleter.close()
    assert (run.events[-1].kind, run.events[-1].reason) == ("kept", "replaced")
    assert seen_by_dcp(run.path(1)) == 2
    assert run.folders.notes(1) == Notes()


def test_what_an_earlier_process_left_is_finished(run: Run) -> None:
    """make_way clears the rest of a deletion; resume does one that had only been noted."""
    for step in (1, 2, 3):
        save_version(run.path(step), step)
        notes = Deleting(run.folders.facts(step).save_id, 1.0, (run.folders.facts(step).save_id,), 0.0)
        run.folders.update_notes(step, lambda old, grave=notes: replace(old, deleting=grave))  # type: ignore[misc]
    for step in (1, 2):
        for name in (".metadata", "manifest.msgpack"):
            (run.path(step) / name).unlink()
    run.deleter.make_way(1)
    run.deleter.make_way(2)
    run.deleter.make_way(4)
    assert run.deleter.resume() == [3]
    assert run.deleter.wait(240)
    assert [run.path(step).exists() for step in (1, 2, 3, 4)] == [False] * 4
    assert run.deleter.resume() == []


# -- abandoned saves -----------------------------------------------------------------------------------------


def uncommitted(run: Run, step: int, age_seconds: float, *names: str) -> None:
    """A folder of data that no save committed, its newest file of that age."""
    run.path(step).mkdir(parents=True)
    for number, name in enumerate(names):
        path = run.path(step) / name
        path.write_bytes(b"x")
        then = time.time() - age_seconds - 10_000 * number
        os.utime(path, (then, then))


def test_abandoned_saves_are_removed(run: Run) -> None:
    """Only what is old, uncommitted and data; others' files stay; the default age is a day."""
    save_version(run.path(1), 1)
    for path in run.path(1).iterdir():
        os.utime(path, (1, 1))
    day = 86_400.0
    uncommitted(run, 2, day + 60, "__0_0.0a.distcp", "__1_0.0a.distcp", ".tmp-" + "0" * 32, NOTES_NAME)
    uncommitted(run, 3, day - 60, "__0_0.0a.distcp", "__1_0.0a.distcp")
    uncommitted(run, 4, day + 60, "__0_0.0a.distcp", "mine.txt")
    uncommitted(run, 5, day + 60, "mine.txt")
    uncommitted(run, 6, day + 60)
    assert run.deleter.abandoned() == [2, 4]
    assert run.deleter.close()
    assert [(event.kind, event.what, event.step, event.left) for event in run.events] == [
        ("deleted", "abandoned", 2, ()),
        ("deleted", "abandoned", 4, ("mine.txt",)),
    ]
    assert [run.path(step).exists() for step in range(1, 7)] == [True, False, True, True, True, True]
    assert listing(run.path(3)) == {"data": 2}
    assert seen_by_dcp(run.path(1)) == 1


def test_a_late_save_saves_its_files(run: Run) -> None:
    """What commits between the look and the removal is not abandoned any more."""
    uncommitted(run, 1, 1e6, "__0_0.0a.distcp")
    run.store(1).add(Fault("lock", hook=lambda _: save_version(run.path(1), 2)))
    assert run.deleter.abandoned() == [1]
    assert run.deleter.wait(240)
    assert run.events == []
    assert seen_by_dcp(run.path(1)) == 2


# -- the end -------------------------------------------------------------------------------------------------


def test_close_finishes_what_is_queued(tmp_path: Path, run: Run) -> None:
    """Without pauses, and each at most once more; afterwards nothing can be queued; twice is fine."""
    run = Run(tmp_path, pause_seconds=1000.0)
    for step in (1, 2):
        save_version(run.path(step), step)
    run.store(1).add(Fault("delete", error=OSError(errno.EIO, "injected")))
    run.deleter.delete(1)
    run.deleter.delete(2)
    while not run.events:
        time.sleep(0.001)
    assert run.deleter.close()
    assert run.deleter.close()
    assert run.folders.folders() == {}
    with pytest.raises(RuntimeError, match="closed"):
        run.deleter.delete(3)
    assert not deleting_threads()


def test_close_does_not_wait_for_ever(run: Run) -> None:
    """Storage that hangs holds the end up for the time given, and what was not begun is whole."""
    for step in (1, 2):
        save_version(run.path(step), step)
    gate = Gate()
    run.store(1).add(Fault("delete", hook=gate))
    run.deleter.delete(1)
    assert gate.reached.wait(240)
    run.deleter.delete(2)
    assert not run.deleter.close(timeout_seconds=0.05)
    gate.open.set()
    for thread in deleting_threads():
        thread.join(240)
    assert run.folders.all_steps() == [2]
    assert seen_by_dcp(run.path(2)) == 2


def test_the_thread_lives_while_something_is_deleted(run: Run) -> None:
    """A deleter with nothing to do has none, and starts one again when it has."""
    for step in (1, 2):
        save_version(run.path(step), step)
        assert run.delete(step).kind == "deleted"
        for thread in deleting_threads():
            thread.join(240)
    assert run.deleter.close()


def test_a_deleter_that_deletes_nothing_has_no_thread(run: Run) -> None:
    """And close has nothing to wait for."""
    save_version(run.path(1), 1)
    assert run.deleter.resume() == []
    assert run.deleter.abandoned() == []
    assert run.deleter.wait(0)
    assert run.deleter.close()
    assert not deleting_threads()
