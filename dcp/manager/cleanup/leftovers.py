"""Leftovers of killed saves in and below a folder, and their removal without questions.

Folders in which nothing was ever committed; files beside a checkpoint that it does not refer to, named as
only saves name theirs; removals that were interrupted; the work folders of conversions that were not resumed;
and unfinished uploads. What is younger than
a given age may be of a save that still runs, and stays. So do uploads, of which no age is known, unless they
are of a save that left files which are old enough. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from dcp.conversion.local import LEDGER_NAME, LocalLedger, only_copies, refusal_to_put_back
from dcp.conversion.targets.job import is_written_under
from dcp.manager.cleanup.dropping import finish_drop
from dcp.manager.cleanup.removal import (
    Removed,
    emptied,
    files_to_remove,
    finish_removal,
    is_abandoned,
    is_left_by_a_save,
    remove_abandoned,
    remove_strays,
)
from dcp.steps.notes import read_notes
from dcp.storage.commit import abort_uploads, unfinished_uploads
from dcp.storage.commit_names import is_commit_object
from dcp.storage.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    StorageError,
)
from dcp.storage.formats.opening import open_index
from dcp.storage.stores import OpenStore, open_store
from dcp.storage.stores.base import TEMPORARY_PREFIX, FileInfo, Store
from dcp.storage.stores.opening import open_parent_folder
from dcp.storage.stores.posix.store import PosixStore

__all__ = ["OLD_SECONDS", "Leftovers", "find_leftovers", "leftovers_of", "remove_leftovers"]

OLD_SECONDS: Final = 86_400.0
"""No save takes a day from its first file to its commit."""

_LOCK_TIMEOUT_SECONDS: Final = 60.0

LeftoverKind = Literal["abandoned", "removal", "strays", "conversion", "replacement", "uploads"]


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Leftovers in one folder.

    ``kind``: "abandoned" (nothing was committed, or a lock file alone is left), "removal" (one was
    interrupted), "strays" (files beside a checkpoint), "conversion" (one that was killed), "replacement" (a
    conversion that was killed while it replaced its target, which is put back), "uploads" (nothing else).
    ``files`` can go. ``uploads`` are names of unfinished ones, of saves and conversions that may be running.
    ``problem`` says why the folder was not looked into any further.
    """

    url: str
    kind: LeftoverKind
    files: tuple[FileInfo, ...] = ()
    uploads: tuple[str, ...] = ()
    problem: str | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the files that can go."""
        return sum(info.size_bytes for info in self.files)


def find_leftovers(
    root: str | os.PathLike[str],
    now_seconds: float,
    *,
    older_than_seconds: float = OLD_SECONDS,
    open_store: OpenStore = open_store,
) -> list[tuple[Store, Leftovers]]:
    """Return what is left in ``root`` and in the folders directly below it; nothing is changed.

    Raises `CheckpointNotFoundError` if there is no such folder.
    """
    found = []
    for store in _folders(root, open_store):
        try:
            left = leftovers_of(store, now_seconds, older_than_seconds=older_than_seconds)
        except CheckpointError as error:
            if isinstance(error, StorageError):
                raise
            left = Leftovers(store.url, "strays", problem=str(error))
        if left is not None:
            found.append((store, left))
    place = open_parent_folder(root, open_store=open_store)
    if place.local_path is not None:
        for folder in ("", *place.names()):
            found += _conversions(place.local_path / folder, now_seconds - older_than_seconds)
    return found


def _conversions(root: Path, before_seconds: float) -> Iterator[tuple[Store, Leftovers]]:
    """Find folders in which conversions to something in ``root`` were at work, and have written nothing
    since."""
    for folder in sorted(root.glob(f"{TEMPORARY_PREFIX}convert-*")):
        paths = [path for path in folder.rglob("*") if path.is_file()]
        stats = {path: path.stat() for path in paths}
        if folder / LEDGER_NAME not in stats or max(one.st_mtime for one in stats.values()) >= before_seconds:
            continue
        kept = [old for old, _ in only_copies(folder)]
        files = tuple(
            FileInfo(str(path.relative_to(folder)), stat.st_size, stat.st_mtime)
            for path, stat in sorted(stats.items())
            if not any(path.is_relative_to(old) for old in kept)
        )
        kind: LeftoverKind = "replacement" if kept else "conversion"
        problem = refusal_to_put_back(folder)
        yield PosixStore(folder), Leftovers(str(folder), kind, files, problem=problem)


def _remove_conversion(left: Leftovers) -> Removed:
    """Remove it under the ledger's own lock: one at work stays. What was to be replaced is put back."""
    with closing(LocalLedger(Path(left.url))) as ledger:
        try:
            ledger.open("")
        except CheckpointConflictError:
            return Removed("replaced")
        ledger.remove()
    return Removed("deleted", len(left.files), left.size_bytes)


def _folders(root: str | os.PathLike[str], open_store: OpenStore) -> Iterator[Store]:
    place = open_parent_folder(root, open_store=open_store)
    if not place.exists():
        raise CheckpointNotFoundError(f"{place.url}: no such folder", path=place.url)
    yield open_store(root)
    for name in place.names():
        yield place.store(name)


def leftovers_of(
    store: Store, now_seconds: float, *, older_than_seconds: float = OLD_SECONDS
) -> Leftovers | None:
    """Return what is left in one folder; None if nothing. Raises what a damaged manifest or notes raise: then
    it is not known which files are in use."""
    files = store.list()
    if not any(is_commit_object(info.name) for info in files):
        if files and read_notes(store).deleting is not None:
            return Leftovers(store.url, "removal", tuple(files_to_remove(store, now_seconds)))
        locks = () if files else emptied(store, now_seconds - older_than_seconds)
        if locks:  # without one, a folder may be anybody's
            return Leftovers(store.url, "abandoned", tuple(locks))
        if files and is_abandoned(store, files, older_than_seconds, now_seconds):
            gone = tuple(info for info in files if is_left_by_a_save(info.name))
            return Leftovers(store.url, "abandoned", gone, _uploads(store, files))
        strays: tuple[FileInfo, ...] = ()
    else:
        strays = tuple(_strays(store, files, now_seconds - older_than_seconds))
    uploads = _uploads(store, files)
    if not strays and not uploads:
        return None
    return Leftovers(store.url, "strays" if strays else "uploads", strays, uploads)


def _uploads(store: Store, files: list[FileInfo]) -> tuple[str, ...]:
    """Name unfinished ones of saves, and of conversions whose ledgers are among ``files``."""
    ledgers = {info.name for info in files if info.name.startswith(TEMPORARY_PREFIX)}
    return unfinished_uploads(store, lambda name: is_written_under(ledgers, name))


def _strays(store: Store, files: list[FileInfo], before_seconds: float) -> Iterator[FileInfo]:
    """Find files of saves that nothing refers to, and whose save has written nothing since."""
    old = [info for info in files if is_left_by_a_save(info.name) and info.modified_seconds < before_seconds]
    if not old:
        return
    used = frozenset(open_index(store).files)
    young = {_save_of(info.name) for info in files if info.modified_seconds >= before_seconds}
    for info in old:
        if info.name not in used and _save_of(info.name) not in young:
            yield info


def _save_of(name: str) -> str:
    """Return what files of one save have in common; stock's have nothing, and count each for itself."""
    parts = name.split(".")
    return parts[1] if len(parts) == 3 and name.startswith("__") else name


def remove_leftovers(
    store: Store,
    left: Leftovers,
    now_seconds: float,
    *,
    older_than_seconds: float = OLD_SECONDS,
    uploads: bool = False,
) -> tuple[int, int]:
    """Remove what was found, as far as it still is what it was; returns (files, bytes) that are gone.

    With ``uploads`` all unfinished uploads end, and the saves that are at work on one fail.
    """
    if left.kind == "removal":
        removed = finish_removal(store, now_seconds)
    elif left.kind in ("conversion", "replacement"):
        removed = _remove_conversion(left)
    elif left.kind == "abandoned":
        removed = remove_abandoned(store, older_than_seconds, now_seconds)
    else:
        # Before files go that a `.metadata` from before a drop may refer to.
        finished, finished_bytes = finish_drop(store)
        with store.lock(timeout_seconds=_LOCK_TIMEOUT_SECONDS):  # no save commits between look and deletion
            store.sync()  # the commit that made them strays may not have been durable
            now = leftovers_of(store, now_seconds, older_than_seconds=older_than_seconds)
            still = {*left.files}.intersection(now.files if now is not None and now.kind == "strays" else ())
            removed = remove_strays(store, still.__contains__)
        removed = replace(
            removed, files=removed.files + len(finished), size_bytes=removed.size_bytes + finished_bytes
        )
    if uploads and left.uploads:
        names_of_uploads = frozenset(left.uploads)
        abort_uploads(store, lambda name: name in names_of_uploads)
    return removed.files, removed.size_bytes
