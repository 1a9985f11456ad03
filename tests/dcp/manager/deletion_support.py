"""A run whose storage can be made to fail, for tests of deletions."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dcp
from dcp.manager.cleanup.deletion import Deleter, DeletionEvent
from dcp.steps.folders import StepFolders
from dcp.steps.notes import Notes
from dcp.storage.errors import StorageError
from dcp.storage.stores import PosixStore
from dcp.storage.stores.faults import Fault, FaultInjectingStore, Operation
from dcp.storage.stores.folders import open_parent_folder
from tests.support.versions import save_version, stock_save_version, version_state

__all__ = ["KINDS", "Gate", "Run", "deleting_threads", "pin", "stock_over_ours"]


class Run:
    """A root whose stores are shared and watched, a deleter of it, and what the deleter told."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.stores: dict[str, FaultInjectingStore] = {}
        self.root = open_parent_folder(root, open_store=self.open)
        self.folders = StepFolders(self.root, "{step}")
        self.events: list[DeletionEvent] = []
        options = {"pause_seconds": 0.001, "on_event": self.events.append, **options}
        self.deleter = Deleter(self.folders, **options)

    def open(self, url: str | os.PathLike[str]) -> FaultInjectingStore:
        """One store object a folder."""
        return self.stores.setdefault(os.fspath(url), FaultInjectingStore(PosixStore(url)))

    def store(self, step: int) -> FaultInjectingStore:
        """The watched store of a step."""
        return self.open(self.folders.checkpoint_id(step))

    def path(self, step: int) -> Path:
        """The folder of a step."""
        return Path(self.folders.checkpoint_id(step))

    def delete(self, step: int) -> DeletionEvent:
        """Delete a step, and the last event of it."""
        self.deleter.delete(step)
        assert self.deleter.wait(240)
        return self.events[-1]


def deleting_threads() -> list[threading.Thread]:
    """Those of all deleters."""
    return [thread for thread in threading.enumerate() if thread.name == "dcp-delete"]


def pin(notes: Notes) -> Notes:
    """The same, pinned."""
    return replace(notes, pinned=True)


def save_alone(folder: Path, version: int) -> None:
    """What one rank saves without the others."""
    dcp.save(version_state(version), checkpoint_id=folder, no_dist=True, use_collectives=False)


def stock_over_ours(folder: Path, version: int) -> None:
    """Ours, and then stock torch's in the same folder."""
    save_version(folder, 77)
    stock_save_version(folder, version)


def half_published(folder: Path, version: int) -> None:
    """A save over another that ended between the manifest and `.metadata`, which is still the old one."""
    save_version(folder, 77)
    fail = Fault("publish", name=".metadata", error=OSError(errno.EIO, "injected"))
    writer = dcp.FileSystemWriter(folder, open_store=lambda url: FaultInjectingStore(PosixStore(url), fail))
    with pytest.raises(StorageError, match="committed"):
        dcp.save(version_state(version), storage_writer=writer, no_dist=True)


KINDS: dict[str, Callable[[Path, int], None]] = {
    "ours": save_version,
    "bare": partial(save_version, torch_compatible=False),
    "file per tensor": partial(save_version, single_file_per_rank=False),
    "stock": stock_save_version,
    "stock over ours": stock_over_ours,
    "half published": half_published,
    "one rank's": save_alone,
}


class Gate:
    """Holds an operation of a store up until it is opened."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, _: Operation) -> None:
        """The hook of a fault."""
        self.reached.set()
        assert self.open.wait(240)
