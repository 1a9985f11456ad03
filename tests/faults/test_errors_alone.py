"""An error in place of every single operation that a save of one process makes on its store."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.inspection.verification import verify
from dcp.storage.errors import StorageError, StorageFullError
from dcp.storage.stores import PosixStore, Version
from dcp.storage.stores.base import ANY, Expected
from dcp.storage.stores.faults import Fault, FaultInjectingStore, Operation
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


def raising(error: BaseException) -> Callable[[Operation], None]:
    """A fault's hook that raises anything."""

    def hook(operation: Operation) -> None:
        raise error

    return hook


ERRORS: dict[str, tuple[BaseException, type[BaseException]]] = {
    "input/output error": (StorageError("injected", errno=errno.EIO), StorageError),
    "disk full": (StorageFullError("injected", errno=errno.ENOSPC), StorageFullError),
    "a bug of the store": (MemoryError("injected"), dcp.CheckpointError),
    "interrupt": (KeyboardInterrupt("injected"), KeyboardInterrupt),
}

BEFORE: dict[str, Callable[[Path], None] | None] = {
    "first": None,
    "overwrite": lambda folder: save_version(folder, OLD),
    "over stock": lambda folder: stock_save_version(folder, OLD),
}


@dataclass
class Attempt:
    """One save with one fault: what was raised, if anything, and the operation that failed."""

    error: BaseException | None
    operation: Operation | None

    @property
    def committed(self) -> bool:
        """Whether the error says that the checkpoint stands."""
        return isinstance(self.error, dcp.CheckpointError) and bool(self.error.facts.get("committed"))


def attempt(folder: Path, *faults: Fault, **options: Any) -> Attempt:
    """Save version NEW through a faulty store."""
    store = FaultInjectingStore(PosixStore(folder), *faults)
    writer = dcp.FileSystemWriter(folder, open_store=lambda path: store, **options)
    error = None
    try:
        dcp.save(version_state(NEW), storage_writer=writer, no_dist=True)
    except (dcp.CheckpointError, KeyboardInterrupt) as caught:
        error = caught
    at = faults[0].at
    return Attempt(error, store.log[at - 1] if len(store.log) >= at else None)


def operations(folder: Path) -> int:
    """How many operations a save over what is in ``folder`` takes."""
    store = FaultInjectingStore(PosixStore(folder))
    writer = dcp.FileSystemWriter(folder, open_store=lambda path: store)
    dcp.save(version_state(NEW), storage_writer=writer, no_dist=True)
    return len(store.log)


def attempts(root: Path, before: str, fault: Callable[[int], Fault]) -> list[tuple[Path, Attempt]]:
    """A folder and what happened in it for each operation of the save, in order."""
    prepare = BEFORE[before]
    if prepare is not None:
        prepare(root / "before")
    copy_folder(root / "before", root / "count")
    made = []
    for number in range(1, operations(root / "count") + 1):
        folder = root / str(number)
        copy_folder(root / "before", folder)
        made.append((folder, attempt(folder, fault(number))))
    return made


@pytest.mark.parametrize(
    ("before", "kind"),
    [
        *(("first", kind) for kind in ERRORS),
        *(("overwrite", kind) for kind in ("disk full", "interrupt")),
        ("over stock", "input/output error"),
        *(
            pytest.param("overwrite", kind, marks=pytest.mark.exhaustive)
            for kind in ("input/output error", "a bug of the store")
        ),
        *(
            pytest.param("over stock", kind, marks=pytest.mark.exhaustive)
            for kind in ("disk full", "a bug of the store", "interrupt")
        ),
    ],
)
def test_an_error_at_any_operation_is_raised_typed_and_undoes_the_save(
    tmp_path: Path, before: str, kind: str
) -> None:
    """The old checkpoint stands and no new file remains, or the error says that the new one is committed."""
    injected, expected = ERRORS[kind]
    old: int | str = ABSENT if before == "first" else OLD
    seen_errors = 0
    for folder, made in attempts(tmp_path, before, lambda number: Fault(at=number, hook=raising(injected))):
        where = f"{before}, {kind}, at {made.operation}: {made.error!r}"
        seen = seen_by_dcp(folder)
        if made.error is None:
            assert made.operation is not None
            # Only after the commit, or where there is another way to know, may an error be passed over; and
            # what killed saves left on an object service need not be known.
            assert made.operation.op in ("delete", "publish", "read", "version", "abort_uploads"), where
            assert seen == NEW, where
        else:
            seen_errors += 1
            assert isinstance(made.error, expected), where
            if made.committed or (kind == "interrupt" and seen == NEW):
                assert seen == NEW, where
            else:
                assert seen == old, where
                assert listing(folder) == listing(tmp_path / "before"), where
        if seen != ABSENT:
            kinds = {finding.kind for finding in verify(folder).findings}
            assert kinds <= {"stray-file", "metadata"}, where
            # a `.metadata` that could not be written leaves none beside a newer manifest
            assert seen_by_stock(folder) in ((ABSENT, NEW) if made.committed else (old, NEW)), where
    assert seen_errors >= 8


@pytest.mark.parametrize("before", BEFORE)
def test_a_store_that_dies_for_good_leaves_the_old_or_the_new(tmp_path: Path, before: str) -> None:
    """When cleaning up fails as well, the first error is raised, and the next save removes what remained."""
    old: int | str = ABSENT if before == "first" else OLD
    for folder, made in attempts(
        tmp_path, before, lambda number: Fault(at=number, onwards=True, error=StorageError("dead"))
    ):
        seen = seen_by_dcp(folder)
        if made.error is None:
            assert made.operation is not None
            assert made.operation.op in ("delete", "read", "version")
        else:
            assert isinstance(made.error, StorageError)
            assert "dead" in str(made.error)
        assert seen in (old, NEW)
        assert (seen == NEW) == (made.error is None or made.committed), made
        save_version(folder, NEXT)
        assert (seen_by_dcp(folder), seen_by_stock(folder)) == (NEXT, NEXT)
        # A data file of stock's that was not deleted has no unique name, and may be of a save that runs now.
        if before != "over stock":
            assert listing(folder) == CLEAN


class FailsAfterwards(FaultInjectingStore):
    """Publishing one name happens, and is reported as failed: a lost answer, or a failed fsync behind it."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(PosixStore(folder))
        self.name = name

    def publish(self, name: str, data: bytes, *, durable: bool, expected: Expected = ANY) -> Version:
        """As the base class, and then an error."""
        version = super().publish(name, data, durable=durable, expected=expected)
        if name == self.name:
            raise StorageError("the answer was lost")
        return version


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", ["manifest.msgpack", ".metadata"])
def test_a_publish_that_happened_but_reported_an_error(tmp_path: Path, before: str, name: str) -> None:
    """The checkpoint stands with all its files: the save succeeds, or its error says committed."""
    folder = tmp_path / "x"
    prepare = BEFORE[before]
    if prepare is not None:
        prepare(folder)
    writer = dcp.FileSystemWriter(folder, open_store=lambda path: FailsAfterwards(folder, name))
    if name == ".metadata":
        with pytest.raises(StorageError) as caught:
            dcp.save(version_state(NEW), storage_writer=writer, no_dist=True)
        assert caught.value.committed
    else:
        dcp.save(version_state(NEW), storage_writer=writer, no_dist=True)
    assert (seen_by_dcp(folder), seen_by_stock(folder)) == (NEW, NEW)
    assert {finding.kind for finding in verify(folder).findings} <= {"stray-file"}


def test_a_write_torn_anywhere_leaves_nothing(tmp_path: Path) -> None:
    """A write of which only the first bytes reached the file fails the save, and the file is gone."""
    save_version(tmp_path / "before", OLD)
    sizes = [operation.size_bytes for operation in logged(tmp_path) if operation.op == "write"]
    assert sizes
    for at, size in enumerate(sizes, start=1):
        for torn_bytes in {1, size // 2, max(1, size - 1)}:
            folder = tmp_path / f"{at}-{torn_bytes}"
            copy_folder(tmp_path / "before", folder)
            fault = Fault("write", at=at, torn_bytes=torn_bytes, error=StorageError("torn"))
            made = attempt(folder, fault)
            assert isinstance(made.error, StorageError)
            assert "torn" in str(made.error)
            assert (seen_by_dcp(folder), seen_by_stock(folder)) == (OLD, OLD)
            assert listing(folder) == CLEAN


def logged(root: Path) -> list[Operation]:
    """The operations of an undisturbed save."""
    store = FaultInjectingStore(PosixStore(root / "logged"))
    writer = dcp.FileSystemWriter(root / "logged", open_store=lambda path: store)
    dcp.save(version_state(NEW), storage_writer=writer, no_dist=True)
    return store.log


def test_a_save_is_durable_in_the_right_order(tmp_path: Path) -> None:
    """Nothing is published before what it refers to is synced, nothing deleted before its replacement is.

    So a power loss after any step finds the old checkpoint or the new one.
    """
    save_version(tmp_path, OLD)
    steps: list[tuple[str, str]] = []
    store = PosixStore(tmp_path, lambda op, name: steps.append((op, name)))
    writer = dcp.FileSystemWriter(tmp_path, open_store=lambda path: store, thread_count=2)
    dcp.save(version_state(NEW), storage_writer=writer, no_dist=True)
    published = steps.index(("rename", "manifest.msgpack"))
    replaced = steps.index(("rename", ".metadata"))
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
    deletions = [row for row, (op, _) in enumerate(steps) if op == "unlink"]
    assert deletions
    assert published < replaced < min(deletions)
    assert any(published < row < replaced for row in folder_syncs)
    assert any(replaced < row < min(deletions) for row in folder_syncs)
