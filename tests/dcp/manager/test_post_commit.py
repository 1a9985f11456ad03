"""What follows a commit, while training goes on: saves, deletions, the end of the manager."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

import dcp
from dcp.manager.cleanup.post_commit import PostCommitWorker
from dcp.manager.events import Events
from dcp.steps.folders import StepFolders
from dcp.steps.states import StepState
from dcp.storage.stores import PosixStore
from dcp.storage.stores.faults import Fault, FaultInjectingStore, Operation
from tests.dcp.manager.deletion_support import Gate
from tests.dcp.manager.manager_support import Recorder
from tests.support.versions import save_version, seen_by_dcp


class Folders(StepFolders):
    """Step folders whose stores have ``faults``, and between whose survey and its use something happens."""

    def __init__(self, root: Path, *faults: Fault) -> None:
        def open_store(url: str | os.PathLike[str]) -> FaultInjectingStore:
            return FaultInjectingStore(PosixStore(url), *faults)

        super().__init__(root, "{step}", open_store=open_store)
        self.after_survey: Callable[[], object] = lambda: None

    def survey(self, pending: Collection[int] = ()) -> list[StepState]:
        """What is there, before that happens."""
        states = super().survey(pending)
        self.after_survey()
        return states


def worker_of(folders: Folders, seen: Recorder, keep: dcp.Retention | None = None) -> PostCommitWorker:
    """A worker that tells ``seen`` what happens."""
    events = Events(folders.root.url, 0, seen)
    return PostCommitWorker(folders, keep, "sizes", events, on_damage=lambda error: None)


def save(worker: PostCommitWorker, root: Path, step: int, version: int) -> None:
    """A save as a manager makes it."""
    worker.saving(step)
    save_version(root / str(step), version)
    worker.committed(step)


def test_a_checkpoint_that_is_saved_again_while_it_is_verified_is_not_damaged(tmp_path: Path) -> None:
    """Its files are gone then, but so is it: nothing is told about it, and the new one is verified."""
    replaced: list[Operation] = []

    def replace(operation: Operation) -> None:
        if not replaced and (tmp_path / "1").exists():
            replaced.append(operation)
            save_version(tmp_path / "1", 2)

    seen = Recorder()
    # The second listing is that for the sizes, when the commit has been read.
    worker = worker_of(Folders(tmp_path, Fault("list", at=2, hook=replace)), seen)
    worker.saving(1)
    save_version(tmp_path / "1", 1)
    worker.committed(1)
    assert worker.wait(120)
    assert replaced
    assert seen.kinds() == []
    worker.saving(1)
    worker.committed(1)
    assert worker.close(120)
    assert seen.kinds() == [("verified", 1)]


def test_retention_leaves_alone_what_has_begun_to_be_saved_since_it_looked(tmp_path: Path) -> None:
    """A run that went back saves an old step again, which retention has just found to be one too many."""
    seen = Recorder()
    folders = Folders(tmp_path)
    worker = worker_of(folders, seen, dcp.Retention(last=1))
    save(worker, tmp_path, 1, 1)
    assert worker.wait(120)
    folders.after_survey = lambda: worker.saving(1)
    save(worker, tmp_path, 2, 2)
    assert worker.wait(120)
    folders.after_survey = lambda: None
    assert seen.steps("deleted") == []
    save_version(tmp_path / "1", 3)
    worker.committed(1)
    assert worker.close(120)
    assert seen_by_dcp(tmp_path / "1") == 3
    assert folders.all_steps() == [1, 2]


def test_post_commit_work_that_is_cut_off_by_the_end_tells_no_failure(tmp_path: Path) -> None:
    """Storage that hangs until the time to close is over: what was to be deleted is left to the next one."""
    gate, seen = Gate(), Recorder()
    folders = Folders(tmp_path)
    worker = worker_of(folders, seen, dcp.Retention(last=1))
    save(worker, tmp_path, 1, 1)
    assert worker.wait(120)
    folders.after_survey = lambda: gate(Operation(1, "list", "", 0))
    save(worker, tmp_path, 2, 2)
    assert gate.reached.wait(120)
    assert not worker.close(0.05)
    gate.open.set()
    thread = worker._thread
    assert thread is not None
    thread.join(120)
    assert not thread.is_alive()
    assert seen.kinds() == [("verified", 1), ("verified", 2)]
    assert folders.all_steps() == [1, 2]
