"""Errors injected at each storage operation of a save by one process."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.errors import StorageError, StorageFullError
from dcp.storage.stores import ANY, PosixStore, Version
from tests.support.fault_doors import (
    HARMLESS,
    MANIFEST_NAME,
    METADATA_NAME,
    Fault,
    FaultInjectingStore,
    OpenWithFaults,
    StoreCall,
    findings,
)
from tests.support.versions import (
    ABSENT,
    copy_folder,
    listing,
    save_version,
    seen_by_dcp,
    seen_by_stock,
    stock_save_version,
    version_state,
)

OLD, NEW, NEXT = 1, 2, 3
CLEAN = {"manifest": 1, "metadata": 1, "data": 1}

ERRORS: dict[str, tuple[BaseException, type[BaseException]]] = {
    "input/output error": (StorageError("injected", errno=errno.EIO), StorageError),
    "disk full": (StorageFullError("injected", errno=errno.ENOSPC), StorageFullError),
    "a bug of the store": (MemoryError("injected"), dcp.CheckpointError),
    "interrupt": (KeyboardInterrupt("injected"), KeyboardInterrupt),
}
BEFORE: dict[str, Callable[[Path], None]] = {
    "first": lambda folder: None,
    "overwrite": lambda folder: save_version(folder, OLD),
    "over stock": lambda folder: stock_save_version(folder, OLD),
}


@dataclass
class Attempt:
    """One save with one fault: the error raised, if any, and the operation that failed."""

    error: BaseException | None
    operation: StoreCall | None

    @property
    def committed(self) -> bool:
        """Return whether the error says that the checkpoint is committed."""
        return isinstance(self.error, dcp.CheckpointError) and bool(self.error.facts.get("committed"))

    @property
    def op(self) -> str:
        """Return the name of the operation that failed."""
        assert self.operation is not None
        return self.operation.op


def _attempt(folder: Path, fault: Fault) -> Attempt:
    opener, error = OpenWithFaults(fault), None
    writer = dcp.FileSystemWriter(folder, open_store=opener)
    try:
        dcp.save(version_state(NEW), storage_writer=writer, no_dist=True)
    except (dcp.CheckpointError, KeyboardInterrupt) as caught:
        error = caught
    at = fault.at
    return Attempt(error, opener.log[at - 1] if len(opener.log) >= at else None)


def _operations(folder: Path) -> list[StoreCall]:
    opener = OpenWithFaults()
    writer = dcp.FileSystemWriter(folder, open_store=opener)
    dcp.save(version_state(NEW), storage_writer=writer, no_dist=True)
    return opener.log


def _attempts(root: Path, before: str, fault: Callable[[int], Fault]) -> list[tuple[Path, Attempt]]:
    BEFORE[before](root / "before")
    copy_folder(root / "before", root / "count")
    made = []
    for number in range(1, len(_operations(root / "count")) + 1):
        folder = root / str(number)
        copy_folder(root / "before", folder)
        made.append((folder, _attempt(folder, fault(number))))
    return made


def check_attempt(folder: Path, made: Attempt, old: int | str, expected: type[BaseException]) -> None:
    """Assert that the old checkpoint remains without new files, or that the error reports a commit."""
    where, seen = f"at {made.operation}: {made.error!r}", seen_by_dcp(folder)
    if made.error is None:
        # An error may be ignored only after the commit, or if another operation gives the same answer. A save
        # on an object store need not find the leftovers of killed saves.
        assert made.op in ("delete", "publish", "read", "version", "abort_uploads"), where
        assert seen == NEW, where
    else:
        assert isinstance(made.error, expected), where
        if made.committed or (expected is KeyboardInterrupt and seen == NEW):
            assert seen == NEW, where
        else:
            assert seen == old, where
            assert listing(folder) == listing(folder.with_name("before")), where
    if seen != ABSENT:
        assert findings(folder) <= HARMLESS, where
        # a save that could not write its `.metadata` leaves no older one beside the newer manifest
        assert seen_by_stock(folder) in ((ABSENT, NEW) if made.committed else (old, NEW)), where


QUICK = [("first", "a bug of the store"), ("overwrite", "interrupt"), ("over stock", "input/output error")]


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.exhaustive)
        for pair in product(BEFORE, ERRORS)
    ],
)
def test_an_error_at_any_operation_undoes_the_save(tmp_path: Path, before: str, kind: str) -> None:
    """A failed save keeps the old checkpoint and no new file, or reports a commit."""
    injected, expected = ERRORS[kind]

    def hook(operation: StoreCall) -> None:
        raise injected

    made = _attempts(tmp_path, before, lambda number: Fault(at=number, hook=hook))
    for folder, one in made:
        check_attempt(folder, one, ABSENT if before == "first" else OLD, expected)
    assert sum(one.error is not None for _, one in made) >= 8


class FailsAfterwards(FaultInjectingStore):
    """Store that publishes one name and then reports a failure: a lost response, or a failed fsync after the
    rename. ``then`` runs between the two."""

    def __init__(
        self, folder: Path, name: str, then: Callable[[], None] = lambda: None, *, knows: bool = False
    ) -> None:
        super().__init__(PosixStore(folder))
        self.name, self.then, self.knows = name, then, knows

    def publish(self, name: str, data: bytes, *, durable: bool, expected: Any = ANY) -> Version:
        """Publish as the base class does, then raise an error."""
        version = super().publish(name, data, durable=durable, expected=expected)
        if name == self.name:
            self.then()
            error = StorageError("the answer was lost")
            error.published = self.knows
            raise error
        return version


def _save_by(store: FaultInjectingStore, folder: Path) -> None:
    writer = dcp.FileSystemWriter(folder, open_store=lambda path: store)
    dcp.save(version_state(NEW), storage_writer=writer, no_dist=True)


@pytest.mark.parametrize("how", ["damaged", "away", "away, and known to be published"])
def test_an_unconfirmed_commit_keeps_its_files(tmp_path: Path, how: str) -> None:
    """A save that cannot confirm its commit keeps the data of the manifest and no older `.metadata`."""
    folder = tmp_path / "x"
    save_version(folder, OLD)

    def then() -> None:
        if how == "damaged":
            (folder / MANIFEST_NAME).write_bytes(b"damaged")
        else:
            store.add(Fault("version", name=MANIFEST_NAME, error=StorageError("away")))

    store = FailsAfterwards(folder, MANIFEST_NAME, then, knows=how.endswith("published"))
    with pytest.raises(StorageError) as caught:
        _save_by(store, folder)
    assert listing(folder)["data"] == 2
    assert how == "damaged" or seen_by_dcp(folder) == NEW
    if how.endswith("published"):
        assert caught.value.committed and "the previous one was removed" in str(caught.value)
        assert not (folder / METADATA_NAME).exists()


def test_files_are_synced_before_references(tmp_path: Path) -> None:
    """A save syncs files before it publishes references to them, and deletes files after their
    replacement."""
    save_version(tmp_path, OLD)
    steps: list[tuple[str, str]] = []
    store = PosixStore(tmp_path, lambda op, name: steps.append((op, name)))
    writer = dcp.FileSystemWriter(tmp_path, open_store=lambda path: store, thread_count=2)
    dcp.save(version_state(NEW), storage_writer=writer, no_dist=True)
    published, replaced = (steps.index(("rename", name)) for name in (MANIFEST_NAME, METADATA_NAME))
    new_files = [name for op, name in steps if op == "create" and name.endswith(".distcp")]
    assert len(new_files) == 2
    folder_syncs = [row for row, (op, _) in enumerate(steps) if op == "fsync_folder"]
    for name in new_files:
        last_write = max(row for row, step in enumerate(steps) if step == ("pwrite", name))
        synced = steps.index(("fsync", name))
        assert last_write < synced < published
        assert any(synced < row < published for row in folder_syncs)
    for row in (published, replaced):
        temporary = [name for op, name in steps[:row] if op == "create"][-1]
        assert steps.index(("fsync", temporary)) < row
    deleted = min(row for row, (op, _) in enumerate(steps) if op == "unlink")
    assert any(published < row < replaced for row in folder_syncs)
    assert any(replaced < row < deleted for row in folder_syncs)
