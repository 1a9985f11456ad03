"""The look at what a save replaces: what it finds, what it costs, and what comes in between."""

from pathlib import Path

import pytest

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
