"""The look at what a save replaces: what it finds, what it costs, and what comes in between."""

import errno
import fcntl
import os
import stat
from pathlib import Path

import pytest
import torch

import dcp
from dcp.inspection.verification import verify
from dcp.manager.cleanup.leftovers import find_leftovers, remove_leftovers
from dcp.storage.commit import Names, commit, discard, previous_state
from dcp.storage.commit_names import MANIFEST_NAME, METADATA_NAME
from dcp.storage.errors import CheckpointConflictError, CheckpointNotFoundError, StorageError
from dcp.storage.formats.opening.folder import open_index
from dcp.storage.stores import PosixStore
from dcp.storage.stores.faults import Fault, FaultInjectingStore, Operation
from tests.storage.formats.test_open import large_index
from tests.storage.test_commit_interleavings import save, stock_save
from tests.support.lockless import ObjectModel
from tests.support.versions import save_version


def test_a_look_that_another_commit_overtakes_is_repeated(tmp_path: Path) -> None:
    """`.metadata` may vanish between being listed and being read: another writer has replaced the save."""
    save_version(tmp_path / "x", 1)
    inner = PosixStore(tmp_path / "x")
    gone = Fault("read", name=METADATA_NAME, hook=lambda operation: inner.delete(METADATA_NAME))
    state = previous_state(FaultInjectingStore(inner, gone), Names())
    assert state.manifest is not None
    assert state.metadata is None


def test_a_look_that_never_ends_is_a_conflict(tmp_path: Path) -> None:
    """Writers that replace each other without pause do not hold a save up for ever."""
    save_version(tmp_path / "x", 1)
    gone = Fault("read", name=METADATA_NAME, onwards=True, error=CheckpointNotFoundError("gone again"))
    with pytest.raises(CheckpointConflictError, match="another writer"):
        previous_state(FaultInjectingStore(PosixStore(tmp_path / "x"), gone), Names())


def test_what_a_look_costs() -> None:
    """At a new id two requests; over a checkpoint of ours four more."""
    model = ObjectModel("tests/commit-look")
    model.clear()
    store = FaultInjectingStore(model)
    assert not previous_state(store, Names()).exists
    assert [step.op for step in store.log] == ["abort_uploads", "list"]
    save(1, model)
    store = FaultInjectingStore(model)
    assert previous_state(store, Names()).exists
    assert [step.op for step in store.log] == ["abort_uploads", "list", "version", "version", "read", "read"]


def test_a_large_metadata_is_not_read_to_be_replaced() -> None:
    """Its checksum is in the manifest, which its first bytes say that it belongs to."""
    model = ObjectModel("tests/commit-large")
    model.clear()
    index = large_index()
    model.publish(index.files[0], b"x", durable=False)
    published = commit(
        model,
        index,
        previous_state(model, Names()),
        names=Names(),
        save_id="3f9c2a1b",
        durable=False,
        torch_compatible=True,
    )
    store = FaultInjectingStore(model)
    state = previous_state(store, Names())
    assert state.metadata_crc == published.torch_metadata_crc
    assert state.files == tuple(index.files)
    assert [step.name for step in store.log if step.op == "read"] == [MANIFEST_NAME]


def test_uploads_that_were_there_are_ended_by_the_commit() -> None:
    """Those of killed saves, and of a save that has been beaten; not those that begin meanwhile, nor what is
    no data of a checkpoint."""
    model = ObjectModel("tests/commit-uploads")
    model.clear()
    for name in ("__0_0.0a1b2c3d.distcp", "__7_1.0a1b2c3e.distcp", "a user's own"):
        model.create(name, durable=False)

    def begin(operation: Operation) -> None:
        model.create("__0_0.0a1b2c3f.distcp", durable=False)

    save(1, FaultInjectingStore(model, Fault("publish", name=MANIFEST_NAME, hook=begin)))
    assert sorted(model.uploads.values()) == ["__0_0.0a1b2c3f.distcp", "a user's own"]


def test_a_save_that_fails_ends_its_uploads() -> None:
    """Those of all ranks, which have its id in their names, and nobody else's. That uploads may not be listed
    is no obstacle."""
    model = ObjectModel("tests/commit-discard")
    model.clear()
    for name in ("__0_0.0a1b2c3d.distcp", "__1_0.0a1b2c3d.distcp", "__0_0.0a1b2c3e.distcp"):
        model.create(name, durable=False)
    denied = Fault("abort_uploads", error=StorageError("AccessDenied"))
    discard(FaultInjectingStore(model, denied), "0a1b2c3d", Names())
    assert len(model.uploads) == 3
    discard(model, "0a1b2c3d", Names())
    assert list(model.uploads.values()) == ["__0_0.0a1b2c3e.distcp"]


def test_files_of_stock_stay_if_stock_saves_meanwhile() -> None:
    """They have the names of the replaced ones: after the commit they may already be those of a new save."""
    model = ObjectModel("tests/commit-stock")
    model.clear()
    stock_save(100, model)

    def again(operation: Operation) -> None:
        stock_save(101, model)

    save(1, FaultInjectingStore(model, Fault("read", name=METADATA_NAME, at=2, hook=again)))
    index = open_index(model)
    assert index.format == "torch_dcp"
    assert {*index.files} <= {info.name for info in model.list()}
    save(2, model)
    assert len(model.list()) == 3


# -- file systems that fail behind the commit ----------------------------------------------------------------


def _save(path: Path, value: int) -> None:
    dcp.save({"w": torch.full((64,), value)}, checkpoint_id=path, no_dist=True)


def _value(path: Path) -> int:
    state = {"w": torch.zeros(64, dtype=torch.int64)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return int(state["w"][0])


def _eio() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_lock_that_cannot_be_released_costs_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither unlocking nor closing works: the save has ended well, and the next one does not wait."""
    flock, close, locked = fcntl.flock, os.close, set[int]()

    def failing_flock(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_UN:
            raise _eio()
        flock(descriptor, operation)
        locked.add(descriptor)

    def failing_close(descriptor: int) -> None:
        close(descriptor)
        if descriptor in locked:
            locked.discard(descriptor)
            raise _eio()

    monkeypatch.setattr(fcntl, "flock", failing_flock)
    monkeypatch.setattr(os, "close", failing_close)
    for value in (1, 2, 3):
        _save(tmp_path / "x", value)
        assert _value(tmp_path / "x") == value
    assert not locked
    assert len([*(tmp_path / "x").iterdir()]) == 3


def test_what_was_replaced_stays_until_the_manifest_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's fsync fails after the manifest's rename: the error says that it is committed, and a power
    cut that takes the rename back finds the old checkpoint whole. The next save removes it, or ``dcp gc``."""
    folder = tmp_path / "x"
    _save(folder, 1)
    metadata = (folder / METADATA_NAME).read_bytes()
    manifest = (folder / MANIFEST_NAME).read_bytes()
    fsync, failed = os.fsync, list[int]()

    def failing(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        if is_folder and not failed and (folder / MANIFEST_NAME).read_bytes() != manifest:
            failed.append(descriptor)
            raise _eio()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageError, match="may not outlast a power cut") as raised:
        _save(folder, 2)
    assert failed and raised.value.committed
    assert _value(folder) == 2
    assert verify(folder).ok
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / MANIFEST_NAME).write_bytes(manifest)
    (folder / METADATA_NAME).write_bytes(metadata)
    assert _value(folder) == 1
    for name, data in files.items():
        (folder / name).write_bytes(data)
    ((store, left),) = find_leftovers(tmp_path, 0.0, older_than_seconds=-1e18)
    assert len(left.files) == 1
    remove_leftovers(store, left, 0.0, older_than_seconds=-1e18)
    assert _value(folder) == 2
    _save(folder, 3)
    assert len([*folder.iterdir()]) == 3


def test_a_metadata_that_cannot_be_written_leaves_none_of_the_checkpoint_before(tmp_path: Path) -> None:
    """Stock torch would load that; what is committed loads, also where nothing can be removed."""
    cases: list[tuple[str, tuple[Fault, ...], bool, str]] = [
        ("x", (), False, "was removed"),
        ("y", (Fault("delete", name=METADATA_NAME, error=_eio()),), True, "which stock torch loads"),
    ]
    for place, faults, is_left, said in cases:
        inner = PosixStore(tmp_path / place)
        inner.make_root()
        save(1, inner)
        stale = inner.read(METADATA_NAME, limit_bytes=1 << 20)
        full = Fault("publish", name=METADATA_NAME, error=StorageError("the storage is away"))
        with pytest.raises(StorageError, match="the storage is away") as raised:
            save(2, FaultInjectingStore(inner, full, *faults))
        assert raised.value.committed and said in str(raised.value)
        assert (inner.stat(METADATA_NAME) is not None) == is_left
        assert not is_left or inner.read(METADATA_NAME, limit_bytes=1 << 20) == stale
        assert open_index(inner).provenance["save_id"] == f"{2:08x}"
