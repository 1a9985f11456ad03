"""Deletion of checkpoints: whole or not at all after any failure, no foreign files, no harm to saves."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.errors import StorageError
from tests.support.command import run as command
from tests.support.manager_runs import (
    Fault,
    Gate,
    Recorder,
    WatchedRoot,
    loaded_step,
    manager_of,
    state_at,
    until,
)
from tests.support.versions import save_version, seen_by_dcp, seen_by_stock, stock_save_version, version_state

NOTES = "notes.msgpack"
BROKEN = OSError(errno.EIO, "injected")
DAY = 86_400.0


def save_alone(folder: Path, version: int) -> None:
    """Save by one rank without collectives."""
    dcp.save(version_state(version), checkpoint_id=folder, no_dist=True, use_collectives=False)


def stock_over_dcp(folder: Path, version: int) -> None:
    """Save by dcp, and then by stock torch in the same folder."""
    save_version(folder, 77)
    stock_save_version(folder, version)


def half_published(folder: Path, version: int) -> None:
    """Replace a checkpoint, and fail between the manifest and `.metadata`, which stays the old one."""
    root = WatchedRoot(folder.parent)
    save_version(folder, 77)
    root.store(int(folder.name[-8:])).add(Fault("publish", name=".metadata", error=BROKEN))
    with pytest.raises(StorageError, match="committed"):
        dcp.save(version_state(version), checkpoint_id=f"{root.url}/{folder.name}", no_dist=True)


KINDS: dict[str, Callable[[Path, int], None]] = {
    "dcp": save_version,
    "without .metadata": partial(save_version, torch_compatible=False),
    "file per tensor": partial(save_version, single_file_per_rank=False),
    "stock": stock_save_version,
    "stock over dcp": stock_over_dcp,
    "half published": half_published,
    "one rank's": save_alone,
}


def delete(root: WatchedRoot, *steps: int) -> Recorder:
    """Delete steps by a manager that is then closed; return its events."""
    seen = Recorder()
    with manager_of(root.url, on_event=seen, handle_sigterm=False) as manager:
        for step in steps:
            manager.delete(step)
    return seen


def save_more(root: WatchedRoot, step: int, **options: Any) -> Recorder:
    """Save a step by a new manager that is then closed; return its events."""
    seen = Recorder()
    with manager_of(root.url, on_event=seen, handle_sigterm=False, **options) as manager:
        manager.save(step, state_at(step))
    return seen


# -- deleted files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_deleted_with_its_folder(tmp_path: Path, kind: str) -> None:
    """A checkpoint of any kind is deleted with its folder; the event has the freed bytes."""
    root = WatchedRoot(tmp_path)
    for step in (1, 2):
        KINDS[kind](root.path(step), step)
    size_bytes = sum(path.stat().st_size for path in root.path(1).glob("*.distcp"))
    event = delete(root, 1).one("deleted")
    assert (event.step, event.size_bytes, event.data["what"]) == (1, size_bytes, "checkpoint")
    assert not root.path(1).exists()
    assert seen_by_dcp(root.path(2)) == 2


def test_data_is_deleted_after_references(tmp_path: Path) -> None:
    """Deletion order: notes with the intent, `.metadata`, manifest, data, notes, folder. If the `.metadata`
    of stock torch is the newer commit, the manifest precedes it, and parts of ranks precede both."""
    root = WatchedRoot(tmp_path)
    save_version(root.path(1), 1, single_file_per_rank=False)
    stock_over_dcp(root.path(2), 5)
    for name in ("__3.metadata", "__12.manifest.msgpack"):
        (root.path(2) / name).write_bytes(b"of an older save")
    delete(root, 1, 2)
    done = [(op.op, op.name) for op in root.store(1).log if op.op in ("publish", "delete", "remove_root")]
    names = [name for _, name in done]
    assert done[0] == ("publish", NOTES) and done[-2:] == [("delete", NOTES), ("remove_root", "")]
    assert names[1:3] == [".metadata", "manifest.msgpack"]
    assert len(names) > 8 and all(name.endswith(".distcp") for name in names[3:-2])
    deleted = [op.name for op in root.store(2).log if op.op == "delete"]
    assert deleted[:4] == ["__12.manifest.msgpack", "__3.metadata", "manifest.msgpack", ".metadata"]


def test_only_files_of_the_checkpoint_are_deleted(tmp_path: Path) -> None:
    """Files of the checkpoint and of killed saves are deleted; a user's files and newer files stay."""
    root = WatchedRoot(tmp_path)
    save_version(folder := root.path(1), 1)
    strays = ["__0_0.0a1b2c3d.distcp", "__1_0.distcp", ".tmp-" + "a" * 32, ".metadata.tmp"]
    users = ["README.md", "model.safetensors", "__init__.py", "__0_0.backup.distcp", ".tmp-mine"]
    for name in [*strays, *users]:
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (1, 1))
    (folder / "plots").mkdir()
    new = "__0_0.ffffffff.distcp"
    (folder / new).write_bytes(b"x")
    os.utime(folder / new, (time.time() + 60,) * 2)
    assert delete(root, 1).steps("deleted") == [1]
    assert {path.name for path in folder.iterdir()} == {*users, new, "plots"}
    assert dcp.CheckpointManager(root.url).all_steps() == []


def test_a_pin_prevents_every_deletion(tmp_path: Path) -> None:
    """A pin stops deletion by the manager, by ``dcp rm``, and by a queued deletion, until it is removed."""
    root = WatchedRoot(tmp_path)
    gate = Gate()
    with manager_of(root.url) as manager, manager_of(root.url) as other:
        for step in (1, 2):
            manager.save(step, state_at(step))
        assert manager.wait(240)
        root.store(2).add(Fault("delete", name="*.distcp", hook=gate))
        manager.delete(2)
        gate.wait_until_reached()
        manager.delete(1)  # queued behind the deletion of step 2
        other.pin(1)
        gate.open()
        assert manager.wait(240)
        assert manager.all_steps() == manager.pinned() == [1]
        with pytest.raises(dcp.CheckpointError, match="step 1 is pinned"):
            manager.delete(1)
        refused = command("rm", root.path(1), "--yes")
        assert refused.status != 0 and "pinned" in refused.err + refused.out
        manager.unpin(1)
        assert command("rm", root.path(1), "--yes").status == 0
        assert manager.all_steps() == []


# -- failing storage -----------------------------------------------------------------------------------------


def test_a_failed_deletion_is_retried(tmp_path: Path) -> None:
    """A failed deletion is retried from where it failed. After the last attempt an event gives the reason,
    the step is no longer listed, and the next manager deletes it."""
    root = WatchedRoot(tmp_path)
    for step in (1, 2):
        save_version(root.path(step), step)
    root.store(1).add(Fault("delete", error=BROKEN), Fault("delete", name="*.distcp", error=BROKEN))
    root.store(2).add(Fault("delete", onwards=True, error=OSError(errno.EACCES, "injected")))
    seen = Recorder()
    with manager_of(root.url, on_event=seen) as manager:
        manager.delete(1)
        until(lambda: not root.path(1).exists(), "the third attempt")
        manager.delete(2)
    assert seen.kinds() == [("deleted", 1), ("delete_failed", 2)]
    assert "injected" in str(seen.one("delete_failed").error)
    assert seen_by_dcp(root.path(2)) == 2 and dcp.CheckpointManager(root.url).all_steps() == []
    root.store(2).clear()
    assert save_more(root, 3).steps("deleted") == [2]
    assert not root.path(2).exists()


# -- concurrent saves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("before_the_cut", [True, False])
def test_a_save_committed_during_a_deletion_wins(tmp_path: Path, before_the_cut: bool) -> None:
    """A save that commits during a deletion keeps its notes and files, whether the commit precedes the
    removal of the old commit or only the removal of the old data."""
    root = WatchedRoot(tmp_path)
    save_version(root.path(1), 1)
    seen = Recorder()
    with manager_of(root.url, on_event=seen) as manager, manager_of(root.url) as other:

        def overtake(_: object) -> None:
            save_version(root.path(1), 2)
            other.pin(1)

        fault: dict[str, Any] = {"op": "lock"} if before_the_cut else {"op": "delete", "name": "*.distcp"}
        root.store(1).add(Fault(**fault, hook=overtake))
        manager.delete(1)
        assert manager.wait(240)
        assert manager.all_steps() == manager.pinned() == [1]
    assert command("verify", root.path(1)).status == 0
    assert seen_by_dcp(root.path(1)) == seen_by_stock(root.path(1)) == 2
    assert seen.steps("deleted") == ([] if before_the_cut else [1])


def test_a_save_removes_its_step_from_the_queue(tmp_path: Path) -> None:
    """A save of a step takes the step out of the deletion queue, or waits for its running deletion."""
    root, gate = WatchedRoot(tmp_path), Gate()
    for step in (1, 2):
        save_version(root.path(step), step)
    root.store(1).add(Fault("delete", name="*.distcp", hook=gate))
    with manager_of(root.url, mode="sync") as manager:
        manager.delete(1)
        gate.wait_until_reached()
        manager.delete(2)
        assert manager.all_steps() == []
        gate.open()
        for step in (2, 1):
            assert dcp.CheckpointManager(root.url).all_steps() in ([2], [1, 2])
            manager.save(step, state_at(step + 10), force=True)
        assert manager.wait(240) and manager.all_steps() == [1, 2]
    assert [loaded_step(root.path(step)) for step in (1, 2)] == [11, 12]


# -- leftovers of saves --------------------------------------------------------------------------------------


def uncommitted(root: WatchedRoot, step: int, age_seconds: float, *names: str) -> None:
    """Create a folder of uncommitted data, whose newest file has the given age."""
    root.path(step).mkdir(parents=True)
    for number, name in enumerate(names):
        (root.path(step) / name).write_bytes(b"x")
        os.utime(root.path(step) / name, (time.time() - age_seconds - 10_000 * number,) * 2)


def test_abandoned_saves_are_removed(tmp_path: Path) -> None:
    """The next run's first save removes data files of uncommitted saves older than a day, and no others."""
    root = WatchedRoot(tmp_path)
    save_version(root.path(1), 1)
    for path in root.path(1).iterdir():
        os.utime(path, (1, 1))
    uncommitted(root, 2, DAY + 60, "__0_0.0a.distcp", "__1_0.0a.distcp", ".tmp-" + "0" * 32, NOTES)
    uncommitted(root, 3, DAY - 60, "__0_0.0a.distcp", "__1_0.0a.distcp")
    uncommitted(root, 4, DAY + 60, "__0_0.0a.distcp", "mine.txt")
    uncommitted(root, 5, DAY + 60, "mine.txt")
    seen = save_more(root, 6)
    deleted = [(event.data["what"], event.step) for event in seen.events if event.kind == "deleted"]
    assert deleted == [("abandoned", 2), ("abandoned", 4)]
    assert [root.path(step).exists() for step in range(1, 7)] == [True, False, *[True] * 4]
    assert [path.name for path in root.path(4).iterdir()] == ["mine.txt"]
    assert seen_by_dcp(root.path(1)) == 1


def test_a_late_save_keeps_its_files(tmp_path: Path) -> None:
    """A save that commits between the search for abandoned saves and their removal is kept."""
    root = WatchedRoot(tmp_path)
    uncommitted(root, 1, 1e6, "__0_0.0a.distcp")
    root.store(1).add(Fault("lock", hook=lambda _: save_version(root.path(1), 2)))
    assert save_more(root, 2).steps("deleted") == []
    assert seen_by_dcp(root.path(1)) == 2
