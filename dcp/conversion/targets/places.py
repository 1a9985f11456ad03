"""Places of targets: a file or a folder, on this machine or behind a store; and whether it exists."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dcp.storage import commit
from dcp.storage.errors import CheckpointConflictError, OptionError, PlanError
from dcp.storage.formats.registry import file_names, target_named
from dcp.storage.stores import OpenStore
from dcp.storage.stores.base import TEMPORARY_PREFIX, Store, check_name, place_text
from dcp.storage.stores.opening import OpenWith
from dcp.storage.stores.posix.files import step, storage_error
from dcp.storage.stores.posix.store import PosixStore

__all__ = ["TargetPlace", "is_written_under", "place_of"]


_WORK_PREFIX: Final = f"{TEMPORARY_PREFIX}convert-"


@dataclass(frozen=True)
class TargetPlace:
    """A target. ``store`` is of the folder that its files are in; ``file_name`` is the file's, where the
    target is just one. ``path`` is the target itself where it is local, else None.

    ``attempt`` tells attempts apart that may be under way at the same time: each has its own work folder.
    """

    url: str
    store: Store
    file_name: str | None
    path: Path | None
    attempt: str = ""
    open_store: OpenStore = PosixStore

    def holder(self, path: str) -> tuple[Store, str]:
        """Return the folder that a file of the target is in, itself or one directly below, and the file's
        name."""
        folder, slash, name = path.partition("/")
        return (self.open_store(f"{self.store.url}/{folder}"), name) if slash else (self.store, path)

    @property
    def work_folder(self) -> Path:
        """The folder in which a local target is built: beside it, so that it gets its name by a rename."""
        if self.path is None:
            raise PlanError(f"{self.url} is not local")
        return self.path.parent / _work_name(self.path.name + (f"/{self.attempt}" if self.attempt else ""))

    @property
    def ledger_name(self) -> str:
        """Name of the ledger's object, for a target that is not local."""
        return _ledger_name(self.file_name)

    @property
    def is_begun(self) -> bool:
        """Return whether a conversion has left something to resume."""
        if self.path is not None:
            return os.path.lexists(self.work_folder)
        return self.store.stat(self.ledger_name) is not None

    def ledger_of(self, batch: int) -> str:
        """Return the name of the ledger of a batch, of which an attempt has one for each."""
        return _work_name(f"{self.attempt}/{batch}")

    def end_uploads(self) -> None:
        """End the unfinished uploads of this target's files, once it is made, or given up: they are of
        attempts that were killed, or that have been beaten."""
        ledgers = {self.ledger_name}
        commit.abort_uploads(self.store, lambda name: is_written_under(ledgers, name))

    def exists(self, is_leftover: Callable[[str], bool] | None = None) -> bool:
        """Return whether anything is at the target: a file, or a folder that is not empty. Of objects in a
        folder ledgers do not count, nor those whose names ``is_leftover`` takes."""
        if self.path is not None:
            with step(None, "stat", self.path):
                is_empty = self.path.is_dir() and not self.path.is_symlink() and not any(self.path.iterdir())
                return os.path.lexists(self.path) and (self.file_name is not None or not is_empty)
        if self.file_name is not None:
            return self.store.stat(self.file_name) is not None
        names = (info.name for info in self.store.list() if not info.name.startswith(_WORK_PREFIX))
        return any(is_leftover is None or not is_leftover(name) for name in names)

    def refuse_existing(self, is_leftover: Callable[[str], bool] | None = None) -> None:
        """Raise CheckpointConflictError if something is there, as `exists` says."""
        if self.exists(is_leftover):
            raise CheckpointConflictError(
                f"{self.url} exists; give another target",
                alternative="replace it",
                argument="overwrite=True",
                path=self.url,
            )


def is_written_under(ledgers: Collection[str], name: str) -> bool:
    """Return whether a conversion to a store, of one of these names of ledgers, writes a file of that
    ``name``.

    Those of a ``dcp`` target are a save's.
    """
    is_shard = file_names().mark_folders.fullmatch(name) is not None and _ledger_name(None) in ledgers
    return is_shard or _ledger_name(name) in ledgers


def _ledger_name(file_name: str | None) -> str:
    return _work_name(file_name or "")


def _work_name(what: str) -> str:
    digest = hashlib.sha256(what.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return f"{_WORK_PREFIX}{digest}"


def place_of(target: str | os.PathLike[str], to: str, open_store: OpenWith) -> TargetPlace:
    """Return the place of a target in the format that ``to`` names: one file, or a folder, as that has it."""
    text = place_text(target)
    one, written = target_named(to)
    is_named = one.has_suffix(text.rstrip("/"))
    is_file = written.as_file == "always" or (written.as_file == "by name" and is_named)
    store = open_store(text)
    if not store.capabilities.is_writable:
        raise OptionError(
            f"a {type(store).__name__} can only be read: give a target elsewhere", path=store.url
        )
    if store.capabilities.is_local:
        try:
            return _local_place(text, Path(store.url), store, is_file=is_file)
        except OSError as error:  # of a name that is too long, or a folder that is not ours
            raise storage_error(error, "stat", store.url) from error
    if not is_file:
        return TargetPlace(store.url, store, None, None, open_store=open_store)
    parent, _, name = store.url.rpartition("/")
    if not name or parent.endswith("/") or "://" not in parent:
        raise OptionError(f"{text!r} names no file below a bucket or folder")
    return TargetPlace(store.url, open_store(parent), check_name(name), None)


def _local_place(text: str, path: Path, store: Store, *, is_file: bool) -> TargetPlace:
    if not path.name:
        raise OptionError(f"{text!r} names no file or folder that could be made")
    if is_file:
        if path.is_dir():
            raise OptionError(f"{path} is a folder; give the name of the file to write", path=str(path))
        if path.exists() and not path.is_file():
            raise OptionError(f"{path} is no regular file, which alone can be replaced", path=str(path))
        return TargetPlace(str(path), PosixStore(path.parent), check_name(path.name), path)
    if path.exists() and not path.is_dir():
        raise OptionError(f"{path} is a file; give the name of a folder to write", path=str(path))
    return TargetPlace(str(path), store, None, path)
