"""A single commit: replaced files, removal of leftovers, and storage failures before, during and after it."""

from __future__ import annotations

import errno
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock

import dcp
from dcp.errors import CheckpointConflictError, CheckpointNotFoundError, StorageError
from dcp.storage.stores import PosixStore, Store
from tests.support.bad_mount import bad_mount
from tests.support.faulty_store import Fault, FaultInjectingStore, StoreCall
from tests.support.lockless import ObjectModel

MANIFEST, METADATA = "manifest.msgpack", ".metadata"


def _save(place: Any, value: int) -> None:
    writer = dcp.FileSystemWriter("x", open_store=lambda _: place) if isinstance(place, Store) else None
    state = {"w": torch.full((64,), value)}
    dcp.save(state, checkpoint_id=None if writer else place, storage_writer=writer, no_dist=True)


def _value(place: Any) -> int:
    reader = dcp.FileSystemReader("x", open_store=lambda _: place) if isinstance(place, Store) else None
    state = {"w": torch.zeros(64, dtype=torch.int64)}
    dcp.load(state, checkpoint_id=None if reader else place, storage_reader=reader, no_dist=True)
    return int(state["w"][0])


def _model(name: str) -> ObjectModel:
    model = ObjectModel(f"tests/commit-{name}")
    model.clear()
    return model


def test_the_old_checkpoint_stays_until_the_new_commits(tmp_path: Path) -> None:
    """Old files stay until the new manifest is published; then exactly the old files are removed."""
    inner = PosixStore(tmp_path)
    _save(inner, 1)
    old, seen = {info.name for info in inner.list()}, list[tuple[int, bool]]()

    def look(operation: StoreCall) -> None:
        seen.append((_value(inner), old <= {info.name for info in inner.list()}))

    _save(FaultInjectingStore(inner, Fault("publish", name=MANIFEST, hook=look)), 2)
    assert seen == [(1, True)]
    assert _value(inner) == 2
    assert not {name for name in old if name.endswith(".distcp")} & {info.name for info in inner.list()}
    assert len(inner.list()) == 3


def test_stock_torch_reads_nothing_before_the_commit(tmp_path: Path) -> None:
    """`.metadata` is published after the manifest, also where no checkpoint existed."""
    steps = FaultInjectingStore(PosixStore(tmp_path))
    _save(steps, 1)
    assert [step.name for step in steps.log if step.op == "publish"] == [MANIFEST, METADATA]


def test_a_commit_aborts_older_uploads() -> None:
    """A commit ends uploads of killed and overtaken saves, but neither later uploads nor foreign files."""
    model = _model("uploads")
    for name in ("__0_0.0a1b2c3d.distcp", "__7_1.0a1b2c3e.distcp", "a user's own"):
        model.create(name, durable=False)

    def begin(operation: StoreCall) -> None:
        model.create("__0_0.0a1b2c3f.distcp", durable=False)

    _save(FaultInjectingStore(model, Fault("publish", name=MANIFEST, hook=begin)), 1)
    assert sorted(model.uploads.values()) == ["__0_0.0a1b2c3f.distcp", "a user's own"]


@pytest.mark.parametrize("kind", ["dcp", "stock"])
def test_a_hostile_old_checkpoint_deletes_no_user_files(tmp_path: Path, kind: str) -> None:
    """A predecessor may list any file as its data; only files with names of checkpoint data are removed."""
    if kind == "dcp":
        _save(tmp_path, 1)
    else:
        stock.save({"w": torch.zeros(64)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / METADATA).read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "thesis.tex"
    (tmp_path / METADATA).write_bytes(pickle.dumps(metadata))
    (tmp_path / MANIFEST).unlink(missing_ok=True)
    (tmp_path / "thesis.tex").write_text("years of work")
    _save(tmp_path, 2)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    assert _value(tmp_path) == 2


def test_files_of_a_concurrent_stock_save_stay(tmp_path: Path) -> None:
    """Stock torch uses the same file names in each save, so the replaced files may belong to a newer save."""

    def stock_save(value: int) -> None:
        stock.save({"w": torch.full((64,), value)}, checkpoint_id=tmp_path, no_dist=True)

    stock_save(100)
    inner = PosixStore(tmp_path)
    again = Fault("read", name=METADATA, at=2, hook=lambda _: stock_save(101))
    _save(FaultInjectingStore(inner, again), 1)
    assert _value(tmp_path) == 101
    _save(tmp_path, 2)
    assert _value(tmp_path) == 2 and len(list(tmp_path.iterdir())) == 3


def test_a_commit_requires_its_data_files(tmp_path: Path) -> None:
    """If data files were deleted before the commit, nothing is committed and the error lists them."""
    inner = PosixStore(tmp_path)

    def clean_up(operation: StoreCall) -> None:
        for info in inner.list():
            inner.delete(info.name)

    with pytest.raises(CheckpointConflictError, match="are missing"):
        _save(FaultInjectingStore(inner, Fault("lock", hook=clean_up)), 1)
    with pytest.raises(CheckpointNotFoundError):
        _value(tmp_path)


def _eio() -> OSError:
    return OSError(errno.EIO, "Input/output error")


def test_replaced_files_stay_until_the_manifest_is_durable(tmp_path: Path) -> None:
    """If the folder's fsync fails after the manifest's rename, the error says that the save is committed. A
    power cut that undoes the rename leaves the old checkpoint whole; the next save removes it."""
    folder = tmp_path / "x"
    _save(folder, 1)
    old = {name: (folder / name).read_bytes() for name in (METADATA, MANIFEST)}

    def folder_fails(call: str, path: Path) -> int:
        is_new = call == "fsync" and path.is_dir() and (folder / MANIFEST).read_bytes() != old[MANIFEST]
        return errno.EIO if is_new else 0

    with bad_mount(tmp_path, folder_fails), pytest.raises(StorageError, match="may not survive") as raised:
        _save(folder, 2)
    assert raised.value.committed and _value(folder) == 2
    new = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name, data in old.items():
        (folder / name).write_bytes(data)
    assert _value(folder) == 1
    for name, data in new.items():
        (folder / name).write_bytes(data)
    _save(folder, 3)
    assert _value(folder) == 3 and len([*folder.iterdir()]) == 3


@pytest.mark.parametrize(
    ("faults", "is_left", "message"),
    [
        ((), False, "was removed"),
        ((Fault("delete", name=METADATA, error=_eio()),), True, "stock torch loads the previous one"),
    ],
)
def test_a_failed_metadata_write_removes_the_old_metadata(
    tmp_path: Path, faults: tuple[Any, ...], is_left: bool, message: str
) -> None:
    """Stock torch would load an old `.metadata`, so it is removed, or the error warns; the commit loads."""
    inner = PosixStore(tmp_path)
    _save(inner, 1)
    stale = inner.read(METADATA, limit_bytes=1 << 20)
    away = Fault("publish", name=METADATA, error=StorageError("the storage is away"))
    with pytest.raises(StorageError, match="the storage is away") as raised:
        _save(FaultInjectingStore(inner, away, *faults), 2)
    assert raised.value.committed and message in str(raised.value)
    assert (inner.stat(METADATA) is not None) == is_left
    assert not is_left or inner.read(METADATA, limit_bytes=1 << 20) == stale
    assert _value(inner) == 2
